"""Options that take several names with commas between them."""

from collections.abc import Iterable

from bastile.cli.errors import UsageError


def chosen(option: str, given: str | None, known: Iterable[str], otherwise: Iterable[str]) -> list[str]:
    """The names given, each once; `otherwise` where none were. An error that names the option for an unknown one."""
    if given is None:
        return list(otherwise)
    known = list(known)
    names = [name.strip() for name in given.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise UsageError(f"{option}: there is no {name!r}; give one or more of {', '.join(known)}")
    return list(dict.fromkeys(names))
