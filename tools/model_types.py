"""Writes the table of docs/models.md: each causal language model type of the installed Transformers, built small, what
ran in one training step of it, and what stays stock.

    python tools/model_types.py [TYPE ...]    only these types' rows are made anew

Some types need what is in requirements/models.txt, which `make test-models` puts into build/models: with
PYTHONPATH=build/models their rows are made too, and all others' alike.

Exit code 1 where a step differs from stock Transformers' by more than the rounding of float32."""

from __future__ import annotations

import importlib
import logging
import os
import re
import signal
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "models.md"
HEAD = "| type | ran | of ours | stays stock |"
BEGIN, END = "<!-- written by tools/model_types.py -->\n", "<!-- end -->\n"
SECONDS = 90  # for one type
#: Where Transformers' error says less than this.
NO_STEP = {
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"),
        "its forward takes no labels, and keys and values of the model that it drafts for",
    ),
    "diffusion_gemma": "its forward takes no labels: it is trained by diffusion",
}

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.append(str(ROOT / "python"))  # where no package is installed
sys.path.append(str(ROOT / "tests" / "py"))


def row(model_type: str) -> tuple[str, bool | None]:
    """The type's row, and whether a step was the same; None where there was none."""
    from bastile.models.support import check, support
    from bastile.models.table import OF_BACKBONES

    found = support(model_type)
    stock = [
        where.removesuffix(".forward")
        for operator, pieces in found.stock.items()
        if operator not in OF_BACKBONES
        for where in pieces
    ]
    stays = ", ".join(dict.fromkeys(f"`{name}`" for name in stock)) or "–"
    signal.alarm(SECONDS)
    try:
        done = check(model_type)
    except Exception as error:  # whatever a model of any kind may raise
        lines = [line.strip() for line in str(error).strip().splitlines()] or [""]
        said = lines[-1] if "Class validation error" in lines[0] else " ".join(lines)
        reason = (
            NO_STEP.get(model_type)
            or f"{type(error).__name__}: {re.sub(r'[|`]+', ' ', said).split('. ')[0][:120].strip()}"
        )
        places = ", ".join(found.places) or "–"
        why = f"not built small ({reason}); has places for: {places}"
        return f"| {model_type} | {why} | – | {stays} |", None
    finally:
        signal.alarm(0)
    ran = ", ".join(f"{operator} {count}" for operator, count in done.ran.items()) or "–"
    left = ", ".join(f"`{name}`" for name, is_served in done.pieces.items() if not is_served)
    of_ours = f"all but {left}" if left else "all" if done.pieces else "has none"
    aside = "".join(
        f"; {operator}: {reason}" for operator, reason in done.aside.items() if operator not in OF_BACKBONES
    )
    return f"| {model_type} | {ran} | {of_ours} | {stays}{aside} |", done.passed


def _summary(title: str, lines: list[str]) -> str:
    """What the rows of a table say, counted."""
    built = [line for line in lines if "not built small" not in line]
    ran = Counter(name for line in built for name in re.findall(r"(\w+) \d+", line.split(" | ")[1]))
    counts = ", ".join(f"`{name}` in {count}" for name, count in ran.most_common())
    have = [line for line in built if line.split(" | ")[2] != "has none"]
    served = sum(line.split(" | ")[2] == "all" for line in have)
    return (
        f"**Of {len(lines)} {title}, {len(built)} were built, all with the same loss, logits and gradients.** Of the "
        f"{len(have)} that have an RMS or layer norm, rotary embedding, a gated MLP or experts, {served} run Bastile's "
        f"for each that they have. What ran: {counts}."
    )


def main() -> int:
    import torch

    importlib.import_module("torchvision_on_cpu")  # before Transformers
    import transformers

    from bastile.models.small import causal_types, vision_types

    def late(*_: Any) -> None:
        raise TimeoutError(f"{SECONDS} s were too few")

    signal.signal(signal.SIGALRM, late)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    logging.getLogger("bastile").setLevel(logging.ERROR)
    made: dict[str, str] = {}
    same: dict[str, bool | None] = {}
    types = [*causal_types(), *vision_types()]
    for model_type in sys.argv[1:] or types:
        made[model_type], same[model_type] = row(model_type)
        print(made[model_type], "" if same[model_type] is not False else "DIFFERS", flush=True)
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    old, _, after = rest.partition(END)
    rows = {m[1]: line for line in old.splitlines() if (m := re.match(r"\| (\S+) \| ", line))}
    rows.update(made)
    table = [
        f"Every language model type of Transformers {transformers.__version__}, built small and trained for a step, "
        "stock and patched, in float32. The number behind an operator is that of its calls in two layers. *of ours* "
        "says which of the type's norms, rotary functions, gated MLPs and experts that ran are computed by Bastile "
        "alone; *stays stock* is code of its file, run or not, that looks as if an operator might serve it.",
        "",
    ]
    for title, kinds in (
        ("causal language model types", causal_types()),
        ("other types whose models read images and text, here given text alone where that will do", vision_types()),
    ):
        chosen = {model_type: rows[model_type] for model_type in kinds if model_type in rows}
        table += [_summary(title, list(chosen.values())), "", HEAD, "|---|---|---|---|", *chosen.values(), ""]
    PAGE.write_text(before + BEGIN + "\n".join(table) + END + after, encoding="utf-8")
    return 1 if False in same.values() else 0


if __name__ == "__main__":
    sys.exit(main())
