"""What is in force in each Python module: replacements that have been put there, and how they are taken out."""

import functools
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from bastile.guards import is_ours, mark_as_ours, say_what_runs, stand_in_for, stock_of
from bastile.models import loading
from bastile.models.loading import is_model_file
from bastile.models.rebind import with_globals_of
from bastile.models.sites import ModelFile, Site, described, file_of, sites


@dataclass
class Applied:
    site: Site
    original: Any
    replacement: Any = None
    is_in_force: bool = True

    def put(self) -> None:
        self.replacement = _while_in_force(self)
        setattr(self.site.owner, self.site.attribute, self.replacement)

    def take_out(self) -> None:
        self.is_in_force = False
        if getattr(self.site.owner, self.site.attribute) is self.replacement:
            setattr(self.site.owner, self.site.attribute, self.original)

    def others(self) -> Any:
        """What other code has put in its place, or around it; None where it is as it was put."""
        found = getattr(self.site.owner, self.site.attribute)
        if found is not self.replacement:
            return found
        wrapper, now = self.site.wrapper, self.site.stock_class.forward if self.site.wrapper else None
        return None if stock_of(now) is wrapper else now  # around it there may be another operator

    def is_called(self) -> bool:
        """Whether calls still come to it, directly or through what others have wrapped around it."""
        site = self.site
        return _leads_to(getattr(site.owner, site.attribute), self.replacement) and (
            site.wrapper is None or _leads_to(site.stock_class.forward, site.wrapper)
        )


def _leads_to(function: Any, inner: Any) -> bool:
    while function is not None and function is not inner:
        function = getattr(function, "__wrapped__", None)
    return function is not None


def _while_in_force(entry: Applied) -> Any:
    """The replacement, and the original once the patch is taken out: hooks and wrappers of other packages keep the
    method that a class had when they came, and call it ever after."""
    original, replacement = entry.original, entry.site.build(entry.original)

    @functools.wraps(original)
    def either(*args: Any, **kwargs: Any) -> Any:
        if entry.is_in_force:
            return replacement(*args, **kwargs)
        return original(*args, **kwargs)

    call: Any = either
    if loading.is_torchs(original.__module__ or ""):
        # torch.jit.script compiles the original's source, and looks up what it names among this function's globals.
        call = with_globals_of(original, either)
    stand_in_for(original, call)
    say_what_runs(call, lambda: replacement if entry.is_in_force else entry.original)
    return mark_as_ours(call) if is_ours(replacement) else call


@dataclass
class File:
    """What is in force in one Python module."""

    title: str  # the folder that the module is in
    more: set[type] = field(default_factory=set)  # classes that are no globals of the module
    applied: dict[str, list[Applied]] = field(default_factory=dict)  # by operator
    #: Of code that is not Transformers', or of a release that nobody tried: operator -> what looks like its and is not
    #: known, and why.
    unknown: dict[str, dict[str, str]] = field(default_factory=dict)

    def holds(self, site: Site) -> bool:
        """Whether this very place is in force."""
        return any(_same_place(e.site, site) and e.is_called() for e in self.applied.get(site.operator, ()))

    def has(self, operator: str) -> bool:
        return any(entry.is_called() for entry in self.applied.get(operator, ()))

    def put_by(self, function: Any) -> Applied | None:
        """The patch in force that this function is the replacement of."""
        entries = (entry for several in self.applied.values() for entry in several)
        return next((entry for entry in entries if entry.replacement is function and entry.is_in_force), None)

    def above(self, below: Applied) -> Applied | None:
        """The patch of another operator that replaces the replacement of this one."""
        entries = (entry for several in self.applied.values() for entry in several)
        return next((entry for entry in entries if entry.original is below.replacement), None)


FILES: dict[str, File] = {}  # by the name of the module


@dataclass
class Plan:
    """What a file is to have, found before anything is changed."""

    name: str
    file: ModelFile
    operators: tuple[str, ...]
    new: list[Site]

    @classmethod
    def of(cls, name: str, operators: Iterable[str], more: Iterable[type] = ()) -> "Plan":
        entry = FILES.get(name)
        file = file_of(name, {*more, *(entry.more if entry else ())})
        if entry is None:
            return cls(name, file, tuple(operators), sites(file, operators))
        # Model files are what they are; a module of a user's may have got more classes since.
        open_ones = [op for op in operators if not (is_model_file(name) and entry.has(op))]
        new = [site for site in sites(file, open_ones) if not entry.holds(site)]
        return cls(name, file, tuple(operators), new)

    def serves(self, operator: str) -> bool:
        entry = FILES.get(self.name)
        return any(site.operator == operator for site in self.new) or (entry is not None and entry.has(operator))

    def carry_out(self, function: str) -> None:
        entry = FILES.setdefault(self.name, File(self.file.title))
        entry.more.update(self.file.more)
        is_told = not is_model_file(self.name) or loading.is_untried(self.name)
        entry.unknown = {operator: self.file.stock(operator) for operator in self.operators} if is_told else {}
        leaving = [op for op in entry.applied if op not in self.operators]
        take_out(entry, leaving, function)
        for site in self.new:
            places = entry.applied.setdefault(site.operator, [])
            for old in [old for old in places if _same_place(old.site, site)]:
                old.is_in_force = False  # others have replaced it, and undone that in their way
                places.remove(old)
            now = getattr(site.owner, site.attribute)
            applied = Applied(site, now if entry.put_by(now) else stock_of(now))
            applied.put()
            places.append(applied)


def _same_place(one: Site, other: Site) -> bool:
    return one.owner is other.owner and one.attribute == other.attribute


def carry_out(plans: list[Plan], function: str) -> None:
    for plan in plans:
        plan.carry_out(function)
        for reason in dict.fromkeys(r for op in plan.operators for r in reasons_for([plan.file], op, False)):
            _warn(f"bastile.{function}: {reason}; it stays as it is, the rest is served")


def take_out(entry: File, operators: Iterable[str], function: str) -> None:
    """Puts the originals back, wherever nobody has put something else since."""
    for operator in operators:
        for applied in entry.applied.pop(operator):
            above = entry.above(applied)
            if above is not None:  # which calls the original through this one from now on, and will put it back
                applied.is_in_force, above.original = False, applied.original
                continue
            others = applied.others()
            applied.take_out()
            if others is not None:
                _warn(
                    f"bastile.{function}: other code has replaced {applied.site.where} since bastile.apply(): "
                    f"{described(others)} stays there. {operator}_{entry.title} is no longer in force all the same"
                )


def _warn(message: str) -> None:
    """At the line of the user's that called Bastile."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("bastile"):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, RuntimeWarning, stacklevel=level)


def reasons_for(files: Iterable[ModelFile], operator: str, unknown: bool = True) -> list[str]:
    """Why code that looks as if it were this operator's stays stock: others have replaced it, or it is not known."""
    told = [
        why if where in file.replaced else f"{where} {why}"
        for file in files
        for where, why in file.stock(operator, unknown).items()
    ]
    return list(dict.fromkeys(told))
