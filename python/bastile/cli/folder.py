"""Output folders and files. A command first checks that it may write there, and makes a folder when it has something
to put into it: one that is refused leaves nothing behind."""

import os
from pathlib import Path

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
