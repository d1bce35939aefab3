"""Output folders."""

import os
from pathlib import Path

from bastile.cli.errors import UsageError


def make_folder(option: str, path: Path) -> Path:
    """The folder, made where it is not there; an error that names the option where it cannot be written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{option} {path}: no folder can be made there ({error.strerror}); give another") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"{option} {path}: may not be written to; give another folder")
    return path
