"""Options that take several names with commas between them."""

from collections.abc import Callable, Iterable

from bastile.cli.errors import UsageError


def chosen(
    option: str,
    given: str | None,
    known: Iterable[str],
    otherwise: Iterable[str],
    meant: Callable[[str], str] = lambda name: name,
) -> list[str]:
    """The names given, each once; `otherwise` where none were. An error that names the option for an unknown one.
    meant: the name that another one stands for."""
    if given is None:
        return list(otherwise)
    known = list(known)
    names = [meant(name.strip()) for name in given.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise UsageError(f"{option}: there is no {name!r}; give one or more of {', '.join(known)}")
    return list(dict.fromkeys(names))
