"""What commands read and write. A command first checks that it may write somewhere, and makes a folder when it has
something to put into it: one that is refused leaves nothing behind. JSON is as its standard has it: NaN and infinities,
which Python would write and other readers refuse, become null."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from bastile.cli.errors import UsageError


def check_folder(option: str, path: Path) -> Path:
    """The path; an error that names the option where no folder is or can be made there, or none may be written to."""
    there = path.absolute()
    while not os.path.lexists(there):
        there = there.parent
    if not there.is_dir():
        reason = "File exists" if there == path.absolute() else "Not a directory"
        raise UsageError(f"{option} {path}: no folder can be made there ({reason}); give another")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"{option} {path}: may not be written to; give another folder")
    return path


def make_folder(option: str, path: Path) -> Path:
    """The folder, made where it is not there; an error that names the option where that fails."""
    check_folder(option, path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{option} {path}: no folder can be made there ({error.strerror}); give another") from error
    return path


def check_file(option: str, path: Path) -> None:
    """That the file can be written, before an hour's work is done for it."""
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise UsageError(f"{option} {path}: is a folder; give the name of a file")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise UsageError(f"{option} {path}: may not be written to; give another file")


def dumps(value: Any) -> str:
    return json.dumps(_plain(value), indent=1, allow_nan=False)


def write_json(path: Path, value: Any) -> None:
    """In one piece: a reader, or a run that is resumed, finds the old file or the new one."""
    part = path.with_name(path.name + ".part")
    part.write_text(dumps(value), encoding="utf-8")
    part.replace(path)


def read_results(path: Path, command: str, keys: set[str]) -> dict[str, Any]:
    """What a command has written, which has these keys; an error where the file holds something else."""
    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict) or not keys <= content.keys():
            raise ValueError("its keys are others")
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise UsageError(f"{path} is not a file that {command} has written ({error})") from error
    return content


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
