"""Where operators go: the pieces of a Python module whose code has a known form.

Each module that OPERATORS names exposes `sites(file)`, which yields a Site for every place where its operator can go in
that file. Everything that a replacement relies on is looked at there, before anything is changed."""

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

from bastile.guards import stock_of
from bastile.models.forms import Code, bare, code_of, codes, runs
from bastile.models.known import KNOWN, Form
from bastile.models.rebind import with_wrapped, wrapped_cell
from bastile.models.table import OPERATORS
from bastile.report import Tally

Replace = Callable[[Any], Callable[..., Any]]  # from an original to what takes its place


@dataclass(frozen=True)
class Site:
    """One operator's place."""

    operator: str
    where: str  # "Qwen3RMSNorm.forward"
    owner: Any  # what holds the original for the whole process: a class, a module, or the cell of a wrapper
    attribute: str
    build: Replace  # from the original in `owner`
    instances: tuple[type, ...]  # the modules that get a method of their own when one model alone is patched
    build_method: Replace  # from their forward to that method
    wrapper: Any = None  # the class's own forward, where `owner` is a cell of it

    @property
    def stock_class(self) -> Any:
        """The class whose forward this is, or is within."""
        return self.instances[0]


@dataclass(frozen=True)
class Found:
    """A class's forward, or a function, whose code has a known form."""

    name: str  # of the class or function
    owner: Any  # the class; the module of a function
    function: Any  # as it was before Bastile replaced it
    code: Code
    form: Form
    methods: dict[str, Any]  # of the class, that the code calls

    @property
    def names(self) -> dict[str, str]:
        """What the form calls its attributes -> what this class does."""
        return dict(zip(self.form.roles, self.code.attributes, strict=True))

    def is_kept_by(self, module: nn.Module) -> bool:
        """Whether a module whose class has inherited this forward has also kept the methods that it calls."""
        cls = type(module)
        return all(getattr(cls, name) is method and name not in vars(module) for name, method in self.methods.items())


@dataclass
class ModelFile:
    """A Python module with the code of models, or classes of it alone where that module is not to be had."""

    name: str
    module: ModuleType | None
    more: tuple[type, ...] = ()  # classes that are no globals of the module
    unknown: dict[str, str] = field(default_factory=dict)  # what stays stock, and why
    replaced: dict[str, str] = field(default_factory=dict)  # likewise, because others have put something there
    reads: dict[str, tuple[str, ...]] = field(default_factory=dict)  # the attributes that code reads

    def stock(self, operator: str, unknown: bool = True) -> dict[str, str]:
        """What looks as if it were this operator's and stays as it is, and why: others have replaced it, or it is not
        known."""
        row = OPERATORS[operator]
        told = {**(self.unknown if unknown else {}), **self.replaced}
        return {
            where: why
            for where, why in told.items()
            if re.search(row.looks_like, where.partition(".")[0])
            and (not row.reads or any(row.reads in name for name in self.reads.get(where, (row.reads,))))
        }

    def __post_init__(self) -> None:
        self.title = folder_of(self.name)
        self.scope = {} if self.module is None else dict(vars(self.module))
        self._seen: dict[Any, Found | None] = {}
        self._codes: dict[Any, tuple[FunctionType, Code] | None] = {}

    def classes(self) -> Iterator[tuple[str, type]]:
        """The modules' classes that the file binds, by name, and those given beside."""
        for name, item in self.scope.items():
            if isinstance(item, type) and issubclass(item, nn.Module):
                yield name, item
        for item in self.more:
            if item not in self.scope.values():
                yield item.__name__, item

    def own_classes(self) -> Iterator[type]:
        """Those that are defined here and have a forward of their own."""
        for name, item in self.classes():
            if item.__module__ == self.name and "forward" in vars(item):
                yield item
            elif name != item.__name__ and _is_foreign(item, self.name):
                self._note_replaced(name, item)

    def forwards(self, kind: str) -> Iterator[Found]:
        """The classes defined here whose forward is of this kind."""
        for cls in self.own_classes():
            found = self.known(cls)
            if found is not None and found.form.kind == kind:
                yield found

    def modules_of(self, kind: str) -> list[Found]:
        """As `forwards`, and those that the file has from others."""
        found = [
            self.known(cls) for _, cls in self.classes() if "forward" in vars(cls) and _is_of_models(cls, self.name)
        ]
        return [each for each in found if each is not None and each.form.kind == kind]

    def functions(self, kind: str) -> Iterator[Found]:
        """The functions of this kind that the file calls by a global name."""
        for name, item in self.scope.items():
            stock = stock_of(item)
            function = function_in(stock)
            if function is None:
                continue
            if _is_of_models(function, self.name):
                found = self._look(name, self.module, function)
                if found is not None and found.form.kind == kind:
                    yield replace(found, function=stock)
            elif name != function.__name__ and _is_foreign(function, self.name):
                self._note_replaced(name, function)

    def known(self, cls: type) -> Found | None:
        """What this class's own forward is; None where that is not known."""
        stock = stock_of(vars(cls)["forward"])
        if stock not in self._seen:
            self._seen[stock] = self._look(cls.__name__, cls, stock)
        return self._seen[stock]

    def read(self, cls: type, rewritten: Callable[..., Any], *args: Any) -> tuple[Code, Any] | None:
        """The code of a class's forward, known or not, and what a function makes of it; None where that is None, or
        where other code runs than its source says."""
        read = self._read(cls.__name__, cls, stock_of(vars(cls)["forward"]))
        made = None if read is None else read[1].made_by(rewritten, *args)
        return (
            (read[1], made) if read is not None and made is not None and runs(read[1].node, read[1], read[0]) else None
        )

    def _look(self, name: str, owner: Any, stock: Any) -> Found | None:
        read = self._read(name, owner, stock)
        if read is None:
            return None
        inner, code = read
        where = _where(name, owner)
        self.reads.setdefault(where, code.attributes)  # or what an operator has said of it
        form = KNOWN.get(code.fingerprint)
        if form is None and getattr(owner, "__module__", self.name) != self.name:
            return None  # of another file, which says so itself
        if form is None:
            self.unknown[where] = f"has code that is not known, of the fingerprint {code.fingerprint}"
            return None
        other = self._differs(name, owner, inner, code)
        if other is not None:
            self.unknown[where] = f"runs, in {other}, other code than its source says"
            return None
        others = set(code.attributes) ^ set(form.roles) if form.exact and code.attributes != form.roles else set()
        others |= {
            name
            for role, name in zip(form.roles, code.attributes, strict=True)
            if not re.search(form.called.get(role, ""), name)
        }
        if others:
            self.unknown[where] = f"has attributes that are not known: {', '.join(sorted(others))}"
            return None
        return Found(name, owner, stock, code, form, _methods(owner, code))

    def _read(self, name: str, owner: Any, stock: Any) -> tuple[FunctionType, Code] | None:
        """The function that does the work, and its code."""
        if stock not in self._codes:
            self._codes[stock] = self._read_anew(name, owner, stock)
        return self._codes[stock]

    def _read_anew(self, name: str, owner: Any, stock: Any) -> tuple[FunctionType, Code] | None:
        inner, where = stock, _where(name, owner)
        while hasattr(inner, "__wrapped__") and not _is_foreign(inner, self.name):
            inner = stock_of(inner.__wrapped__)
        if not isinstance(inner, FunctionType):
            return None
        if _is_foreign(inner, self.name):
            self._note_replaced(where, inner)
            return None
        code = code_of(inner)
        if code is None:
            self.unknown[where] = "its source cannot be read"
            return None
        return inner, code

    def _differs(self, name: str, owner: Any, inner: FunctionType, code: Code) -> str | None:
        """Which of the functions that make up a code is not what runs."""
        methods = _methods(owner, code)
        functions = {n: stock_of(inner.__globals__.get(n)) for n in code.functions}
        nodes = {**code.methods, **code.functions, inner.__name__: code.node}
        for called, live in {**methods, **functions, inner.__name__: inner}.items():
            if not runs(nodes[called], code, bare(live)):
                return f"{name}.{called}" if called in methods else called if live is not inner else _where(name, owner)
        return None

    def _note_replaced(self, where: str, by: Any) -> None:
        self.replaced[where] = f"other code has replaced {where} of {self.title} by {described(by)}"

    # ---- sites --------------------------------------------------------------------------------------------------

    def forward_site(self, operator: str, cls: type, build: Callable[[Tally, Any], Any]) -> Site:
        """A place that is a class's forward. build: from a tally and the original to the replacement."""
        where = f"{cls.__name__}.forward"
        made = partial(build, Tally.of(operator, f"{self.name}.{cls.__name__}"))
        return Site(operator, where, cls, "forward", made, (cls,), made)

    def wrapped_sites(self, operator: str, cls: type, build: Callable[[Tally, Any], Any]) -> Iterator[Site]:
        """As forward_site, if it can be. Where Transformers wraps that forward, its wrappers stay where they are and
        what the innermost calls is exchanged: they know arguments by the names of earlier releases, and whoever has
        kept the class's own forward, or asks whether this is it, is served too."""
        site, forward = self.forward_site(operator, cls, build), stock_of(vars(cls)["forward"])
        if not hasattr(forward, "__wrapped__"):
            yield site
        elif (cell := wrapped_cell(forward)) is None:
            self.unknown[site.where] = "the function that it wraps cannot be found"
        else:
            method = partial(exchanged, site.build)
            yield replace(site, owner=cell, attribute="cell_contents", build_method=method, wrapper=forward)


def sites(file: ModelFile, operators: Iterable[str]) -> list[Site]:
    """The places of these operators in this file, in the order of OPERATORS."""
    chosen = set(operators)
    return [
        site
        for name, operator in OPERATORS.items()
        if name in chosen
        for site in import_module(f"bastile.models.{operator.module}").sites(file)
    ]


def exchanged(build: Replace, forward: Any) -> Any:
    """What `build` makes of a class's own forward; within its wrappers, where it has any."""
    cell = wrapped_cell(forward) if hasattr(forward, "__wrapped__") else None
    return build(forward) if cell is None else with_wrapped(forward, build(stock_of(cell.cell_contents)))


def calls(function: Any, name: str) -> bool:
    """Whether the code of a function, or of what it wraps, or code within it, mentions this global or attribute."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is not None and any(name in each.co_names for each in codes(code))


def own_forward(cls: type) -> Any:
    return stock_of(vars(cls)["forward"])


def owner_of_forward(cls: type) -> type:
    """The class that a class has its forward from."""
    return next((each for each in cls.__mro__ if "forward" in vars(each)), nn.Module)


def parts_of(layers: Iterable[type]) -> list[type]:
    """Layers and all classes of modules that they, and what they are made of, name when they are made."""
    found: list[type] = []
    todo = list(layers)
    while todo:
        cls = todo.pop()
        if cls in found:
            continue
        found.append(cls)
        init = inspect.unwrap(cls.__init__)  # type: ignore[misc]
        for code in codes(init.__code__) if isinstance(init, FunctionType) else ():
            todo += [item for name in code.co_names for item in classes_in(init.__globals__.get(name))]
    return found


def classes_in(item: Any) -> list[type]:
    """The classes of modules that a name stands for, one or a table of them."""
    items = item.values() if isinstance(item, dict) else [item]
    return [each for each in items if isinstance(each, type) and issubclass(each, nn.Module)]


def folder_of(name: str) -> str:
    """What a module is called in names of patches: the folder in which Transformers has it, else itself."""
    parts = name.split(".")
    return parts[2] if parts[:2] == ["transformers", "models"] and len(parts) > 3 else name


def described(found: Any) -> str:
    """A function or class with the module that it is from."""
    return f"{found.__module__}.{getattr(found, '__qualname__', type(found).__qualname__)}"


def _is_foreign(item: Any, name: str) -> bool:
    """Whether this comes from a package that is neither the module's own nor one that models are made of."""
    package = (getattr(item, "__module__", None) or "").partition(".")[0]
    return package not in (name.partition(".")[0], "transformers", "torch", "bastile")


def _is_of_models(item: Any, name: str) -> bool:
    """Whether this is defined in the module, or in a model file that the module may have it from."""
    where = item.__module__ or ""
    return where == name or where.startswith("transformers.models.")


def _where(name: str, owner: Any) -> str:
    return f"{name}.forward" if isinstance(owner, type) else name


def _methods(owner: Any, code: Code) -> dict[str, Any]:
    """Those of the class that the code calls."""
    return {n: stock_of(getattr(owner, n, None)) for n in code.methods}


def function_in(item: Any) -> FunctionType | None:
    """A function; Hugging Face's package `kernels` makes a module of one, whose forward calls it."""
    if isinstance(item, nn.Module):
        cells = getattr(type(item).forward, "__closure__", None) or ()
        item = next((cell.cell_contents for cell in cells if isinstance(cell.cell_contents, FunctionType)), None)
    return item if isinstance(item, FunctionType) else None


def file_of(name: str, more: Iterable[type] = ()) -> ModelFile:
    return ModelFile(name, sys.modules.get(name), tuple(more))
