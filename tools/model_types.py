"""Writes the table of docs/models.md: each causal language model type of the installed Transformers, built small, what
ran in one training step of it, and what stays stock.

    python tools/model_types.py [TYPE ...]    only these types' rows are made anew

Exit code 1 where a step differs from stock Transformers' by more than the rounding of float32."""

from __future__ import annotations

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
BEGIN, END = "<!-- written by tools/model_types.py -->\n", "<!-- end -->\n"
SECONDS = 90  # for one type

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.append(str(ROOT / "python"))  # where no package is installed


def row(model_type: str) -> tuple[str, bool | None]:
    """The type's row, and whether a step was the same; None where there was none."""
    from bastile.models.support import check, support

    found = support(model_type)
    stock = [
        where.removesuffix(".forward") for op, pieces in found.stock.items() if op != "recompute" for where in pieces
    ]
    stays = ", ".join(dict.fromkeys(f"`{name}`" for name in stock)) or "–"
    signal.alarm(SECONDS)
    try:
        done = check(model_type)
    except Exception as error:  # whatever a model of any kind may raise
        reason = re.sub(r"[|\n`]+", " ", str(error).strip())[:70].strip()
        places = ", ".join(found.places) or "–"
        why = f"not built small ({type(error).__name__}: {reason}); has places for: {places}"
        return f"| {model_type} | {why} | {stays} |", None
    finally:
        signal.alarm(0)
    ran = ", ".join(f"{operator} {count}" for operator, count in done.ran.items()) or "–"
    aside = "".join(f"; {operator}: {reason}" for operator, reason in done.aside.items() if operator != "recompute")
    return f"| {model_type} | {ran} | {stays}{aside} |", done.passed


def main() -> int:
    import torch
    import transformers

    from bastile.models.small import causal_types

    def late(*_: Any) -> None:
        raise TimeoutError(f"{SECONDS} s were too few")

    signal.signal(signal.SIGALRM, late)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    logging.getLogger("bastile").setLevel(logging.ERROR)
    made: dict[str, str] = {}
    same: dict[str, bool | None] = {}
    for model_type in sys.argv[1:] or causal_types():
        made[model_type], same[model_type] = row(model_type)
        print(made[model_type], "" if same[model_type] is not False else "DIFFERS", flush=True)
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    old, _, after = rest.partition(END)
    rows = {m[1]: line for line in old.splitlines() if (m := re.match(r"\| (\S+) \| ", line))}
    rows.update(made)
    rows = {model_type: rows[model_type] for model_type in causal_types() if model_type in rows}
    built = [line for line in rows.values() if "not built small" not in line]
    ran = Counter(name for line in built for name in re.findall(r"(\w+) \d+", line.split(" | ")[1]))
    counts = ", ".join(f"`{name}` in {count}" for name, count in ran.most_common())
    table = [
        f"Of the {len(rows)} causal language model types of Transformers {transformers.__version__}, {len(built)} were "
        f"built small and trained for a step, stock and patched, in float32: all with the same loss and gradients.",
        f"What ran: {counts}. The number is that of calls in two layers. Code that is not known stays stock.",
        "",
        "| type | ran | stays stock |",
        "|---|---|---|",
        *rows.values(),
    ]
    PAGE.write_text(before + BEGIN + "\n".join(table) + "\n" + END + after, encoding="utf-8")
    return 1 if False in same.values() else 0


if __name__ == "__main__":
    sys.exit(main())
