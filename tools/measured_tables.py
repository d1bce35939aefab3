"""Writes every measured figure in the documents from the saved run that it comes from. Nobody types one by hand.

    python tools/measured_tables.py            # all pages, from the files that their blocks name
    python tools/measured_tables.py --check    # exit code 1 where a page says something else than its files

A block stands between `<!-- measured: bench/results/FILE.json [word ...] -->` and `<!-- /measured -->`. What is written
depends on what wrote the file: `bastile bench` (words: the operators to show; none: all), `bastile sweep` (`floor`: its
column too), a sweep's loss curves, `bastile demo`, tools/loss_differences.py, tools/families.py, tools/lengths.py,
tools/several_gpus.py, tools/encoders.py with a part of the patches, tools/trl_lora.py, tools/trl_rl.py,
tools/trl_experts.py."""

import argparse
import json
import os
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

from bastile.cli.shown import GIB, MIB
from bastile.peers.models import IMPLEMENTATIONS
from bastile.peers.operators import PEERS
from bastile.sweep.results import Record, Results, loss_difference

ROOT = Path(__file__).resolve().parent.parent
#: What a trainer's steps are compared with.
TRAINED = ("stock", "compile", "liger", "unsloth")
#: The columns of a sweep's table.
MODELS = ("hf", "liger", "compile", "compile-graphs", "compile-layers", "bastile-compile", "bastile")
BLOCK = re.compile(r"(<!-- measured: (?P<file>\S+)(?P<words>[^>]*?) -->\n).*?(<!-- /measured -->)", re.DOTALL)


def three_digits(seconds: float) -> str:
    value, unit = (seconds * 1e6, "us") if seconds < 1e-3 else (seconds * 1e3, "ms")
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


def rows_of(lines: list[list[str]]) -> list[str]:
    """A Markdown table; the first line is its head."""
    head, *rest = ["|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|" for cells in lines]
    return [head, "|---" * len(lines[0]) + "|", *rest]


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.{1 if seconds < 0.02 else 0}f}"


def versions_of(versions: dict[str, str]) -> str:
    said = {"torch": "PyTorch", "transformers": "Transformers", "liger-kernel": "Liger-Kernel", "cuda": "CUDA"}
    return ", ".join(f"{name} {versions[key]}" for key, name in said.items() if versions.get(key))


def by_command(run: dict[str, Any], link: str) -> list[str]:
    """What stands above the table of a tool's run."""
    versions = run["versions"]
    trl = f"TRL {versions['trl']}, " if "trl" in versions else ""
    return [
        f"{run['device']}, {run['date']}; {trl}{versions_of(versions)}.",
        f"`{run['command']}`, [all figures]({link}).",
        "",
    ]


def made(where: str, run: dict[str, Any], versions: dict[str, str]) -> str:
    return f"{where}, {run['date'][:10]}; {versions_of(versions)}"


# ---- bastile bench --------------------------------------------------------------------------------------------------


def extra_memory(rows: dict[str, dict[str, Any]], names: list[str]) -> str:
    shown = [rows.get(name, {}).get("extra_bytes") for name in names]
    return " / ".join("–" if size is None else f"{size / MIB:.0f}" for size in shown) if any(shown) else "–"


def bench(run: dict[str, Any], operators: list[str], link: str) -> list[str]:
    results = [result for result in run["results"] if not operators or result["op"] in operators]
    missing = set(operators) - {result["op"] for result in results}
    if missing:
        raise SystemExit(f"{link} has no {', '.join(sorted(missing))}")
    timed = [{r["name"]: r for r in result["rows"] if "seconds" in r} for result in results]
    names = [name for name, peer in PEERS.items() if peer.title and any(name in rows for rows in timed)]
    usual = ["bastile", "hf", "liger"]
    sized = usual if any(name in rows for rows in timed for name in usual[1:]) else names
    lines = [["", "limit", *(PEERS[name].title for name in names), "extra memory"]]
    for result, rows in zip(results, timed, strict=True):
        limit = three_digits(result["floor"]["seconds"]) if result["floor"] else "–"
        cells = [three_digits(rows[name]["seconds"]) if name in rows else "–" for name in names]
        title = result["title"].replace(", bf16", "")
        if len({one["op"] for one in results}) == 1:
            title = title.removeprefix(result["op"] + " ")
        lines.append([title, limit, *cells, extra_memory(rows, sized)])
    clock = "GPU time without launch gaps" if run["device"] == "cuda" else "wall clock"
    return [
        f"{made(run['machine']['name'], run, run['versions'])}.",
        f"Medians, {clock}, by `bastile bench`. The limit is a copy of as many bytes, for products these",
        f"alone. Extra memory in MiB: {', '.join(PEERS[name].title.partition(' (')[0] for name in sized)}. "
        f"[All figures]({link}).",
        "",
        *rows_of(lines),
    ]


# ---- bastile sweep --------------------------------------------------------------------------------------------------


def command(settings: dict[str, Any], peers: list[str], lengths: list[int]) -> str:
    words = ["bastile sweep", f"--shape {settings['model']}"]
    words += [f"--fsdp --gpus {settings['gpus']}"] * (settings["gpus"] > 1)
    words += [f"--against {','.join(peers)}", f"--lengths {','.join(map(str, lengths))}"]
    words += {"step": ["--whole-step"], "none": ["--no-optimizer"]}.get(settings["optimizer"], [])
    words += [f"--{name.replace('_', '-')}" for name in ("profile_floor", "share_process") if settings[name]]
    return " ".join(words)


def loss_differences(results: Results, names: list[str]) -> str:
    """Of the first step's losses, from those of Transformers, where both ran."""
    told = []
    for name in names:
        pairs = [(results.find(name, length), results.find("hf", length)) for length in results.lengths()]
        ran = [(a, b) for a, b in pairs if a and b and a["status"] == b["status"] == "ok"]
        if ran:
            largest = max(loss_difference(ours, theirs, 1) for ours, theirs in ran)
            told.append(f"{IMPLEMENTATIONS[name].title.strip('*')} {largest:.1e}")
    return ", ".join(told)


def sweep(run: dict[str, Any], words: list[str], link: str) -> list[str]:
    results, settings = Results(Path(link), run), run["settings"]
    names, lengths = [name for name in MODELS if name in results.implementations()], results.lengths()

    def cell(name: str, record: Record | None) -> str:
        if record is None:
            return "–"
        if record["status"] != "ok":
            return record["status"]
        whole = f", {milliseconds(record['step_seconds'])}" if "step_seconds" in record else ""
        shown = f"{milliseconds(record['seconds'])}{whole} ({record['peak_bytes'] / GIB:.1f})"
        return f"**{shown}**" if name == "bastile" else shown

    table = [["tokens", *(IMPLEMENTATIONS[name].title for name in names)]]
    table += [[str(length), *(cell(name, results.find(name, length)) for name in names)] for length in lengths]
    if "floor" in words:
        table[0].append("Bastile / floor")
        for line, length in zip(table[1:], lengths, strict=True):
            record = results.find("bastile", length)
            line.append(f"{record['floor']['wall'] / record['floor']['seconds']:.2f}" if record else "–")
    several = settings["gpus"] > 1
    batch = f"batch {settings['batch']}{' a GPU' * several}"
    differences = loss_differences(results, [name for name in names if name != "hf"])
    where = f"{settings['gpus']} {run['machine']['name']}s" if several else run["machine"]["name"]
    return [
        *rows_of(table),
        "",
        f"{made(where, run, settings['versions'])}; {settings['dtype']}, {batch}.",
        *(
            [f"Largest difference of the first loss from Transformers', of its value: {differences}."]
            * bool(differences)
        ),
        f"`{command(settings, [name for name in names if name != 'bastile'], lengths)}`,",
        f"[all figures]({link}).",
    ]


def curve(run: dict[str, Any], _words: list[str], link: str) -> list[str]:
    settings = run["settings"]
    table = [["", "ms a step", "tokens/s", "peak GiB", "last loss"]]
    for record in sorted(run["records"], key=lambda record: MODELS.index(record["implementation"])):
        speed, memory = f"{record['tokens_per_second']:,.0f}", f"{record['peak_bytes'] / GIB:.1f}"
        said, time = IMPLEMENTATIONS[record["implementation"]].title, f"{record['seconds'] * 1e3:.0f}"
        table.append([said, time, speed, memory, f"{record['losses'][-1]:.3f}"])
    tokens = f"{settings['batch']} x {run['records'][0]['length']} tokens"
    return [
        f"{made(run['machine']['name'], run, settings['versions'])}; {settings['dtype']},",
        f"{settings['curve_steps']} steps of {tokens}, fused AdamW. [All figures]({link}).",
        "",
        *rows_of(table),
    ]


# ---- bastile demo, tools/loss_differences.py ------------------------------------------------------------------------


def demo(run: dict[str, Any], _words: list[str], link: str) -> list[str]:
    plan, stock, ours = run["plan"], *run["runs"]
    table = [["", "tokens/s", "peak GiB"]]
    for one, said in ((stock, "Transformers"), (ours, "**Bastile**")):
        table.append([said, f"{one['tokens_per_second']:,.0f}", f"{one['peak_memory'] / GIB:.2f}"])
    setting = f"{plan['dtype']}, {plan['steps']} steps of {plan['batch']} x {plan['sequence']} tokens"
    return [
        f"{made(ours['device'], run, run['versions'])}; {ours['parameters'] / 1e6:.0f} million parameters,",
        *textwrap.wrap(f"{setting}, in turns of {plan['turn']}, with {', '.join(ours['patched'])}.", 120),
        f"The losses differ by at most {run['comparison']['largest_loss_difference']:.1e}.",
        f"`{re.sub(r' --out [^ ]+', '', run['command'])}`, [all figures]({link}).",
        "",
        *rows_of(table),
    ]


def losses(run: dict[str, Any], _words: list[str], link: str) -> list[str]:
    lines = [
        f"{made(run['machine'], run, run['versions'])}; bfloat16 against the same weights",
        f"in float32, mean over {len(run['batches'])} batches. [All figures]({link}).",
    ]
    for model, found in run["models"].items():
        routed = any(one["rerouted"] is not None for one in found.values())
        head = [model, "loss, relative", "last hidden states, relative"]
        table = [head + (["tokens with other experts, a layer"] if routed else [])]
        for name, one in found.items():
            line = [name, f"{one['loss']:.1e}", f"{one['hidden']:.3f}"]
            table.append(line + ([f"{100 * one['rerouted']:.0f} %"] if routed else []))
        lines += ["", *rows_of(table)]
    return lines


def trainers(run: dict[str, Any], words: list[str], link: str) -> list[str]:
    """Of tools/trl_lora.py and trl_rl.py: of each setting each implementation's latest run that nothing disturbed.
    words: the shapes to show; none: all."""
    versions = run["versions"]
    latest: dict[tuple[Any, ...], dict[str, Any]] = {}
    for step in sorted(run["steps"], key=lambda step: step.get("run", 1)):
        if "disturbed" in step or (words and step["shape"] not in words):  # by other work, as the file says
            continue
        setting = tuple(step[name] for name in ("shape", "batch", "length", "checkpointing"))
        setting = (
            step.get("trainer", ""),
            *setting,
            step.get("load_in_4bit", False),
            step.get("offload_checkpoints", False),
            step.get("attention_only", False),
            step.get("lora", False),
            step.get("generates", False),
        )
        latest.setdefault(setting, {})[step["implementation"]] = step
    memory = "reserved_gib" if any("reserved_gib" in step for step in run["steps"]) else "peak_gib"
    which = ", reserved" * (memory == "reserved_gib")
    peers = [name for name in TRAINED if any(name in steps for steps in latest.values())]
    titles = ["stock" if name == "stock" else IMPLEMENTATIONS[name].title for name in peers]
    table = [[f"milliseconds of a step, median and least (peak GiB{which})", *titles, "**Bastile**", "its kernels"]]
    apart = False
    for key in sorted(latest, key=str, reverse=True):
        trainer, shape, batch, length, checkpointing, in_4bit, offloads, attention, lora, generates = key
        steps = latest[key]
        more = ", gradient checkpointing" * checkpointing + ", NF4 base" * in_4bit
        more += ", inputs in the host's memory" * offloads + ", adapters on attention" * attention
        more += ", LoRA" * lora + ", completions by the model" * generates
        name = f"{'Trainer' if trainer == 'trainer' else trainer.upper()} {shape}, {batch} x {length}{more}".strip()
        cells = {
            one: f"{step['median_ms']:.0f}, {step['least_ms']:.0f}"
            + (f" ({step[memory]:.1f})" if memory in step else "")
            for one, step in steps.items()
        }
        runs = {one: step.get("run", 1) for one, step in steps.items()}
        apart |= len(set(runs.values())) > 1
        kernels = steps["bastile"].get("kernels_ms")
        of_kernels = "–" if kernels is None else f"{kernels:.0f}"
        theirs = [cells.get(one, "–") + " *" * (one in runs and runs[one] != runs["bastile"]) for one in peers]
        table.append([name, *theirs, f"**{cells['bastile']}**", of_kernels])
    return [
        f"{run['device']}, {run['date']}; TRL {versions['trl']}, Transformers {versions['transformers']}"
        + (f", Unsloth {versions['unsloth']}." if "unsloth" in peers else "."),
        f"`{run['command']}`, [all figures]({link}).",
        "",
        *rows_of(table),
        *(["", "\\* of an earlier run than Bastile's, on another machine of the kind."] if apart else []),
    ]


def ragged(run: dict[str, Any], _words: list[str], link: str) -> list[str]:
    """Of tools/trl_rl.py --ragged."""
    steps = {(step["trainer"], step["implementation"]): step for step in run["steps"]}
    table = [["milliseconds of a step (peak GiB, reserved)", "TRL", "**Bastile**", "faster"]]
    for trainer in dict.fromkeys(name for name, _ in steps):
        stock, ours = (steps[trainer, name] for name in ("stock", "bastile"))
        cells = [f"{s['queued_ms']:.0f} ({s['peak_gib']:.1f}, {s['reserved_gib']:.1f})" for s in (stock, ours)]
        name = "reward" if trainer == "reward" else trainer.upper()
        gain = f"{stock['queued_ms'] / ours['queued_ms']:.1f} x"
        table.append([f"{name} {ours['shape']}, {ours['batch']} x {ours['length']}", cells[0], f"**{cells[1]}**", gain])
    return [*by_command(run, link), *rows_of(table)]


def padded(run: dict[str, Any], _words: list[str], link: str) -> list[str]:
    """Of tools/trl_rl.py --ragged, with and without an operator, and stock's where it ran too."""
    rows: dict[str, dict[str, str]] = {}
    for step in run["padded"]:
        name = f"{step['trainer'].upper()} {step['shape']}, {step['batch']} x {step['length']}"
        name += ", side by side" if step["packing"] else ", padded"
        name += "" if step["lora"] else ", all weights"
        cell = f"{step['median_ms']:.0f}, {step['last_two_steps_kernels_ms']:.0f} ({step['peak_gib']:.1f})"
        kind = "without" if step["without"] else "with" if step["implementation"] == "bastile" else "stock"
        kind = "layers" if step.get("layers_alone") else kind
        rows.setdefault(name, {})[kind] = cell
    heads = {"stock": "stock", "without": "Bastile without it", "layers": "with it, of layers alone"}
    others = [kind for kind in heads if any(kind in cells for cells in rows.values())]
    table = [["milliseconds of a step, median, and of its kernels (peak GiB)", *map(heads.get, others), "**with it**"]]
    table += [[name, *[cells.get(o, "–") for o in others], f"**{cells['with']}**"] for name, cells in rows.items()]
    return [*by_command(run, link), *rows_of(table)]


def whole(run: dict[str, Any], _words: list[str], link: str) -> list[str]:
    """Of tools/trl_rl.py --whole: stock's, Bastile's first on a machine, and a later one."""
    rows: dict[str, dict[Any, str]] = {}
    for one in run["whole"]:
        name = f"{one['trainer'].upper()} {one['shape']}, {one['batch']} x {one['length']}"
        name += f"{', float32' * one['float32']}, {one['steps']} steps"
        shown = ", ".join(f"{one['seconds_of_ends'][step]:.0f}" for step in (0, 1, 10, -1))
        rows.setdefault(name, {})[one["kernels_on_disk"]] = shown
    table = [["seconds to: training, step 1, step 10, the end", "TRL", "Bastile, for the first time", "**Bastile**"]]
    table += [[name, *[cells.get(kind, "–") for kind in (None, False, True)]] for name, cells in rows.items()]
    return [*by_command(run, link), *rows_of(table)]


def families(run: dict[str, Any], words: list[str], link: str) -> list[str]:
    """Of tools/families.py. words: the types to show; none: all."""
    rows = [row for row in run["families"] if not words or row["type"] in words]

    def cell(row: dict[str, Any], name: str) -> str:
        found = row[name]
        if "error" in found:
            return "cannot run"
        return f"{milliseconds(found['seconds_per_step'])} ({found['peak_memory'] / GIB:.1f})"

    def gain(row: dict[str, Any]) -> str:
        times = [row[name].get("seconds_per_step") for name in ("stock", "bastile")]
        return "–" if None in times else f"{times[0] / times[1]:.2f} x"

    table = [["milliseconds of a step (peak GiB)", "Transformers", "**Bastile**", "faster"]]
    table += [[f"`{row['type']}`", cell(row, "stock"), f"**{cell(row, 'bastile')}**", gain(row)] for row in rows]
    return [*by_command(run, link), *rows_of(table)]


def lengths(run: dict[str, Any], _words: list[str], link: str) -> list[str]:
    """Of tools/lengths.py."""

    def cell(found: dict[str, Any]) -> str:
        return f"{milliseconds(found['queued_seconds'])} ({found['peak_reserved_bytes'] / GIB:.1f})"

    heads = {"without": ["Bastile without it", "**with it**"], "before": ["Bastile before", "**Bastile**"]}
    other = next((name for name in heads if name in run["lengths"][0]), "")  # without what the page is about
    bastile = heads.get(other, ["**Bastile**"])
    table = [["milliseconds of a step (GiB reserved)", "Transformers", *bastile, "faster"]]
    for row in run["lengths"]:
        stock, ours = row["stock"], row["bastile"]
        gain = f"{stock['queued_seconds'] / ours['queued_seconds']:.1f} x"
        before = [cell(row[other])] if other else []
        table.append([row["title"], cell(stock), *before, f"**{cell(ours)}**", gain])
    return [*by_command(run, link), *rows_of(table)]


def experts(run: dict[str, Any], _words: list[str], link: str) -> list[str]:
    """Of tools/trl_experts.py."""
    if "stock" not in run["experts"][0]:
        return _experts_before_and_now(run, link)

    def cell(found: dict[str, Any]) -> str:
        return f"{milliseconds(found['queued_seconds'])} ({found['peak_reserved_bytes'] / GIB:.1f})"

    table = [["milliseconds of a step (GiB reserved)", "TRL", "Bastile before", "**Bastile**", "faster than TRL"]]
    for row in run["experts"]:
        stock, ours = row["stock"], row["bastile"]
        gain = f"{stock['queued_seconds'] / ours['queued_seconds']:.1f} x"
        table.append([row["title"], cell(stock), cell(row["before"]), f"**{cell(ours)}**", gain])
    return [*by_command(run, link), *rows_of(table)]


def _experts_before_and_now(run: dict[str, Any], link: str) -> list[str]:
    def cells(row: dict[str, Any], what: str) -> list[str]:
        before, now = row["before"][what], row["bastile"][what]
        return [milliseconds(before), f"**{milliseconds(now)}**", f"{now / before:.2f} x"]

    kinds = {"kernel_seconds": "kernels", "median_seconds": "waited for"}
    table = [["milliseconds of a step", *[h for kind in kinds.values() for h in (f"{kind}, before", "**now**", "")]]]
    table += [[row["title"], *[cell for kind in kinds for cell in cells(row, kind)]] for row in run["experts"]]
    return [*by_command(run, link), *rows_of(table)]


_PASSES = ("forward", "backward")


def segments(run: dict[str, Any], _words: list[str], link: str) -> list[str]:
    """Of tools/segment_attention.py. Bastile's times are of the faster one of the others."""
    each = ["flash attention", "cuDNN", "**Bastile**", ""]
    table = [["microseconds", *[f"{what}, {each[0]}" if not i else each[i] for what in _PASSES for i in range(4)]]]
    for row in run["segments"]:
        times = row["seconds"]
        cells = [row["title"]]
        for what in _PASSES:
            flash, cudnn, ours = [times.get(f"{who}{what}") for who in ("flash ", "cudnn ", "")]
            others = [f"{1e6 * each:.0f}" if each else "–" for each in (flash, cudnn)]
            cells += [*others, f"**{1e6 * ours:.0f}**", f"{ours / min(flash, cudnn or flash):.2f} x"]
        table.append(cells)
    return [*by_command(run, link), *rows_of(table)]


def floors(run: dict[str, Any], _words: list[str], link: str) -> list[str]:
    """Of tools/trl_lora.py --floor."""
    head = ["milliseconds of a step (peak GiB)", "median", "one after the other", "products and attention alone"]
    table = [head]
    for step in run["floors"]:
        name = (
            f"{step['shape']}, {step['batch']} x {step['length']}" + ", gradient checkpointing" * step["checkpointing"]
        )
        floor = step["floor_seconds"]
        times = [
            f"{milliseconds(step[each])}, {step[each] / floor:.3f} x" for each in ("median_seconds", "queued_seconds")
        ]
        table.append([f"{name} ({step['peak_bytes'] / GIB:.1f})", *times, milliseconds(floor)])
    return [*by_command(run, link), *rows_of(table)]


def several(run: dict[str, Any], _words: list[str], link: str) -> list[str]:
    """Of tools/several_gpus.py."""

    def cell(found: dict[str, Any]) -> str:
        return f"{milliseconds(found['queued_seconds'])} ({found['peak_bytes'] / GIB:.1f})"

    table = [["milliseconds of a step (peak GiB)", "TRL", "**Bastile**", "faster", "on one GPU alone"]]
    for row in run["several"]:
        stock, ours, alone = row["stock"], row["bastile"], row.get("bastile_alone")
        gain = f"{stock['queued_seconds'] / ours['queued_seconds']:.2f} x"
        one = milliseconds(alone["queued_seconds"]) if alone else ""
        table.append([row["title"], cell(stock), f"**{cell(ours)}**", gain, one])
    return [*by_command(run, link), *rows_of(table)]


def autocast(run: dict[str, Any], _words: list[str], link: str) -> list[str]:
    """Of tools/encoders.py, with autocast_linear and without."""

    def kernels(found: dict[str, Any]) -> float:
        return sum(found["groups"].values())

    table = [["milliseconds of kernels", "`nn.Linear`", "**`autocast_linear`**", "of it", "GiB, each"]]
    for model in run["autocast"]:
        before, now = model["without"], model["with"]
        memory = ", ".join(f"{found['peak_memory'] / GIB:.1f}" for found in (before, now))
        times = [f"{1e3 * kernels(found):.1f}" for found in (before, now)]
        part = f"{kernels(now) / kernels(before):.2f}"
        table.append([model["title"], times[0], f"**{times[1]}**", part, memory])
    return [
        f"{made(run['device'], run, run['versions'])}.",
        f"[All figures]({link}).",
        "",
        *rows_of(table),
    ]


def text_of(path: Path, words: list[str], link: str) -> str:
    run = json.loads(path.read_text())
    if "results" in run:
        write = bench
    elif "runs" in run:
        write = demo
    elif "steps" in run:
        write = ragged if run["steps"][0].get("ragged") else trainers
    elif "padded" in run:
        write = padded
    elif "whole" in run:
        write = whole
    elif "lengths" in run:
        write = lengths
    elif "experts" in run:
        write = experts
    elif "several" in run:
        write = several
    elif "autocast" in run:
        write = autocast
    elif "segments" in run:
        write = segments
    elif "floors" in run:
        write = floors
    elif "families" in run:
        write = families
    elif "models" in run:
        write = losses
    else:
        write = curve if run["settings"]["kind"] == "curve" else sweep
    return "\n".join(write(run, words, link)) + "\n"


def written(page: Path) -> str:
    """The page's text with all its blocks as their files have them."""

    def fill(match: re.Match[str]) -> str:
        file = ROOT / match["file"]
        link = os.path.relpath(file, page.parent)
        return match[1] + text_of(file, match["words"].split(), link) + match[4]

    return BLOCK.sub(fill, page.read_text())


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "bench").glob("*.md"))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 for a stale page")
    options = parser.parse_args()
    stale = [page for page in pages() if written(page) != page.read_text()]
    for page in stale:
        print(f"{page.relative_to(ROOT)}: {'not as its files have it' if options.check else 'written'}")
        if not options.check:
            page.write_text(written(page))
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
