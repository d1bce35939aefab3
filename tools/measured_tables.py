"""Writes the tables of measured figures in docs/<operator>.md from a saved run of `bastile bench`.

    python tools/measured_tables.py bench/results/FILE.json [operator ...]

A page's table stands between `<!-- measured -->` and `<!-- /measured -->`. Nobody types a figure by hand."""

import argparse
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"fused_linear_cross_entropy": "linear_cross_entropy", "add_rms_norm": "rms_norm", "moe_experts": "moe"}
COLUMNS = {
    "bastile": "Bastile",
    "unfused": "Bastile, unfused",
    "torch": "torch",
    "hf": "Hugging Face code",
    "compile": "that, compiled",
    "liger": "Liger (Triton)",
    "cute": "Liger (CuTe)",
    "quack": "QuACK",
}
BLOCK = re.compile(r"(<!-- measured -->\n).*?(<!-- /measured -->)", re.DOTALL)


def three_digits(seconds: float) -> str:
    value, unit = (seconds * 1e6, "us") if seconds < 1e-3 else (seconds * 1e3, "ms")
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


def memory(rows: dict[str, dict[str, Any]]) -> str:
    shown = [rows.get(name, {}).get("extra_bytes") for name in ("bastile", "hf", "liger")]
    return " / ".join("–" if size is None else f"{size / 2**20:.0f}" for size in shown) if any(shown) else ""


def table(results: list[dict[str, Any]], versions: dict[str, str], date: str, device: str, file: str) -> str:
    timed = {result["title"]: {r["name"]: r for r in result["rows"] if "seconds" in r} for result in results}
    only = len({result["op"] for result in results}) == 1
    names = [name for name in COLUMNS if any(name in rows for rows in timed.values())]
    lines = [
        f"{device}, bf16, {date[:10]}; torch {versions['torch']}, CUDA {versions.get('cuda', '-')}, Liger-Kernel "
        f"{versions.get('liger-kernel', '-')}. Medians of GPU",
        "time without launch gaps, by `bastile bench`. The floor is a copy of as many bytes, for products these alone.",
        f"Extra memory in MiB: Bastile / Hugging Face code / Liger. [All figures](../bench/results/{file}).",
        "",
        "| | floor | " + " | ".join(COLUMNS[name] for name in names) + " | extra memory |",
        "|---" * (len(names) + 3) + "|",
    ]
    for result in results:
        rows = timed[result["title"]]
        floor = three_digits(result["floor"]["seconds"]) if result["floor"] else "–"
        cells = [three_digits(rows[name]["seconds"]) if name in rows else "–" for name in names]
        title = result["title"].replace(", bf16", "")
        if only:
            title = title.removeprefix(result["op"] + " ")
        lines.append(f"| {title} | {floor} | " + " | ".join(cells) + f" | {memory(rows) or '–'} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="what `bastile bench` wrote")
    parser.add_argument("operators", nargs="*", help="default: all that are in it")
    options = parser.parse_args()
    run = json.loads(options.results.read_text())
    operators = options.operators or list(dict.fromkeys(result["op"] for result in run["results"]))
    pages: dict[str, list[dict[str, Any]]] = {}
    for operator in operators:
        chosen = [result for result in run["results"] if result["op"] == operator]
        if not chosen:
            parser.error(f"{options.results} has no {operator}")
        pages.setdefault(PAGES.get(operator, operator), []).extend(chosen)
    for page, results in pages.items():
        path = ROOT / "docs" / f"{page}.md"
        text = table(results, run["versions"], run["date"], run["machine"]["name"], options.results.name)
        old = path.read_text()
        if not BLOCK.search(old):
            parser.error(f"{path} has no <!-- measured --> block")
        path.write_text(BLOCK.sub(rf"\g<1>{text}\g<2>", old))


if __name__ == "__main__":
    main()
