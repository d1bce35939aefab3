"""JSON as its standard has it: NaN and infinities, which Python would write and other readers refuse, become null."""

import json
import math
from pathlib import Path
from typing import Any


def dumps(value: Any) -> str:
    return json.dumps(_plain(value), indent=1, allow_nan=False)


def write(path: Path, value: Any) -> None:
    """In one piece: a reader, or a run that is resumed, finds the old file or the new one."""
    part = path.with_name(path.name + ".part")
    part.write_text(dumps(value), encoding="utf-8")
    part.replace(path)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
