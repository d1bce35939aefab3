"""A function reduced to its code: what is left equals another's where both compute the same by the same steps.

Names of locals and parameters, annotations, docstrings and decorators are taken away, and attributes of `self` become
numbers in the order in which the code reads them; their names stand beside. Functions of the same file and methods of
the same class that the code calls belong to it. Reading is done on the source's text, so that the files of any release
can be looked at without importing them; `runs` says whether a live function is what was read."""

import ast
import functools
import gc
import hashlib
import linecache
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from types import CodeType
from typing import Any

#: What a replacement calls as the original does, by its name: its code does not matter.
_CALLED_ALIKE = frozenset({"eager_attention_forward"})
#: Functions that are forms of their own. A method that calls one is the same whichever it is.
_ROTARY = "rotary"

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_IGNORED = frozenset({"ctx", "kind", "type_comment", "type_params", "type_ignores", "annotation", "returns"})


@dataclass(frozen=True)
class Code:
    """A function's code."""

    node: _Function
    text: str
    attributes: tuple[str, ...]  # those of self, as they are numbered in the text
    methods: dict[str, _Function]  # of its class, that it calls
    functions: dict[str, _Function]  # of its file, likewise
    rotary: tuple[str, ...]  # rotary functions that a method calls, whatever they do
    imports: tuple[ast.stmt, ...]  # of its file

    @property
    def imports_of_future(self) -> list[ast.stmt]:
        """Those that change what the file's text means."""
        return [each for each in self.imports if isinstance(each, ast.ImportFrom) and each.module == "__future__"]

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()[:12]

    @cached_property
    def _made(self) -> dict[Any, Any]:
        return {}

    def made_by(self, function: Callable[..., Any], *args: Any) -> Any:
        """What a function makes of this code, which it leaves as it is: made once."""
        key = function, *args
        if key not in self._made:
            self._made[key] = function(self, *args)
        return self._made[key]


class Source:
    """A file of Python code."""

    def __init__(self, text: str) -> None:
        self.tree = ast.parse(text)
        self.functions: dict[str, _Function] = {}
        self.classes: dict[str, ast.ClassDef] = {}
        self.modules: dict[str, str] = {}  # what names of modules mean: F -> torch.nn.functional
        self.imports: list[ast.stmt] = []
        self._by_line: dict[int, tuple[_Function, ast.ClassDef | None]] = {}
        self._codes: dict[int, Code] = {}  # likewise
        for node in self.tree.body:
            if isinstance(node, _FUNCTIONS):
                self.functions[node.name] = node
            elif isinstance(node, ast.ClassDef):
                self.classes[node.name] = node
            elif isinstance(node, ast.Import):
                self.modules.update({a.asname or a.name: a.name for a in node.names})
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "torch":
                self.modules.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
        self._index(self.tree, None)

    def _index(self, within: ast.AST, owner: ast.ClassDef | None) -> None:
        for node in _statements_in(within):
            if isinstance(node, _FUNCTIONS):
                # The line at which the compiler says that the function begins.
                first = node.decorator_list[0].lineno if node.decorator_list else node.lineno
                self._by_line[first] = node, owner
            elif isinstance(node, (ast.Import, ast.ImportFrom)) and not isinstance(within, _FUNCTIONS):
                self.imports.append(node)
            self._index(node, node if isinstance(node, ast.ClassDef) else owner)

    def at(self, line: int, name: str) -> Code | None:
        """The function of this name whose code begins there."""
        node, owner = self._by_line.get(line, (None, None))
        if node is None or node.name != name:
            return None
        if line not in self._codes:
            self._codes[line] = _reduced(self, node, owner)
        return self._codes[line]

    def method(self, class_name: str, name: str) -> Code | None:
        """A class's own method."""
        owner = self.classes[class_name]
        node = _method(owner, name)
        return None if node is None else _reduced(self, node, owner)

    def function(self, name: str) -> Code:
        return _reduced(self, self.functions[name], None)


def _statements_in(node: ast.AST) -> Iterator[ast.AST]:
    """What a file, class, function or other statement is made of, but for expressions: in these is no statement."""
    for part in ("body", "handlers", "orelse", "finalbody", "cases"):
        yield from getattr(node, part, ())


_sources: dict[str, tuple[int, Source | None]] = {}  # by file, with the hash of its text
_readers = 0  # that have not ended


def code_of(function: Any) -> Code | None:
    """The code of a live function, in Python; None where its source cannot be read, or is not what runs."""
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    lines = linecache.getlines(code.co_filename, getattr(function, "__globals__", None))
    text = "".join(lines)
    key = hash(text)
    read, source = _sources.get(code.co_filename, (None, None))
    if read != key:
        source = None
        with suppress(SyntaxError, ValueError):
            source = Source(text)
        _sources[code.co_filename] = key, source
    return None if source is None else source.at(code.co_firstlineno, code.co_name)


@contextmanager
def reading() -> Iterator[None]:
    """While this lasts each file is read once. What `code_of` has read, which is long, is freed when the last that has
    begun this ends. Nobody looks for garbage meanwhile: none comes of reading, and Python would look, time and again,
    through all that a process has imported, which takes longer than to read."""
    global _readers
    _readers += 1
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        _readers -= 1
        if not _readers:
            forget_sources()
        if collects:
            gc.enable()


def forget_sources() -> None:
    """Each file is read again when it is asked for again."""
    _sources.clear()


@functools.cache
def is_known(function: Any, fingerprints: frozenset[str]) -> bool:
    """Whether a function's code is of one of these, and is what runs."""
    with reading():
        code = code_of(function)
        return code is not None and code.fingerprint in fingerprints and runs(code.node, code, function)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def bare(function: Any) -> Any:
    """What contextlib's own wrapper calls; anything else, others' wrappers too, is itself."""
    return function.__wrapped__ if getattr(function, "__code__", None) is _nothing.__code__ else function


def runs(node: _Function, code: Code, function: Any) -> bool:
    """Whether this function of the code's file is what the live function runs: a file may have been changed since it
    was imported. The compiler calls what is imported otherwise than what is not."""
    return code.made_by(_is_made_into, node, getattr(function, "__code__", None))


def _is_made_into(code: Code, node: _Function, live: CodeType | None) -> bool:
    bare: Any = _undecorated(node)
    if "__class__" in getattr(live, "co_freevars", ()):  # super() is compiled so within a class
        bare = ast.copy_location(ast.parse("class _: pass").body[0], node)
        bare.body = [_undecorated(node)]
    compiled = compile(ast.Module([*code.imports, bare], []), "<form>", "exec", dont_inherit=True)
    made = next(c for c in codes(compiled) if c.co_name == node.name)
    return _same(made, live)


def codes(code: CodeType) -> Iterator[CodeType]:
    """Some code, its functions and classes, and what is in these."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from codes(each)


def _undecorated(node: _Function) -> _Function:
    fields = {**dict(ast.iter_fields(node)), "decorator_list": [], "returns": None}
    copy = type(node)(**fields)
    copy.args = _without_annotations(node.args)
    return ast.copy_location(copy, node)


def _without_annotations(arguments: ast.arguments) -> ast.arguments:
    def bare(arg: ast.arg) -> ast.arg:
        return ast.copy_location(ast.arg(arg.arg, None), arg)

    return ast.arguments(
        posonlyargs=[bare(a) for a in arguments.posonlyargs],
        args=[bare(a) for a in arguments.args],
        vararg=arguments.vararg and bare(arguments.vararg),
        kwonlyargs=[bare(a) for a in arguments.kwonlyargs],
        # Defaults are evaluated outside of the function.
        kw_defaults=[None] * len(arguments.kwonlyargs),
        kwarg=arguments.kwarg and bare(arguments.kwarg),
        defaults=[],
    )


def _same(one: CodeType, other: Any) -> bool:
    if not isinstance(other, CodeType):
        return False
    constants, others = one.co_consts, other.co_consts
    return (
        one.co_code == other.co_code
        and one.co_names == other.co_names
        and one.co_varnames == other.co_varnames
        and one.co_freevars == other.co_freevars
        and len(constants) == len(others)
        and all(
            _same(a, b) if isinstance(a, CodeType) else (a is b or (type(a) is type(b) and a == b))
            for a, b in zip(constants, others, strict=True)
        )
    )


def _method(owner: ast.ClassDef, name: str) -> _Function | None:
    return next((node for node in owner.body if isinstance(node, _FUNCTIONS) and node.name == name), None)


def _reduced(source: Source, node: _Function, owner: ast.ClassDef | None) -> Code:
    reducer = _Reducer(source, owner)
    text = reducer.text(node)
    return Code(
        node,
        text,
        tuple(reducer.attributes),
        reducer.methods,
        reducer.functions,
        tuple(dict.fromkeys(reducer.rotary)),
        tuple(source.imports),
    )


class _Reducer:
    def __init__(self, source: Source, owner: ast.ClassDef | None) -> None:
        self.source = source
        self.owner = owner
        self.attributes: dict[str, str] = {}
        self.methods: dict[str, _Function] = {}
        self.functions: dict[str, _Function] = {}
        self.rotary: list[str] = []
        self._pending: list[tuple[str, _Function, bool]] = []

    def text(self, node: _Function) -> str:
        """The function's code, and behind it that of each that it calls."""
        parts = [self._function(node, self.owner is not None)]
        while self._pending:
            title, called, is_method = self._pending.pop(0)
            parts.append(f"{title}: {self._function(called, is_method)}")
        return "\n".join(parts)

    def _function(self, node: _Function, is_method: bool) -> str:
        handed = _handed_on(node)
        names = dict.fromkeys(handed, "handed on")
        positional = [*node.args.posonlyargs, *node.args.args]
        if is_method and positional and not any(_is_static(d) for d in node.decorator_list):
            names[positional[0].arg] = "self"
        for local in _locals(node):
            names.setdefault(local, f"v{len(names) - len(handed)}")
        body = node.body
        if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            body = body[1:]
        arguments = _without(node.args, handed) if handed else node.args
        return f"{self._written(arguments, names)} {self._written(body, names)}"

    def _written(self, node: Any, names: dict[str, str]) -> str:
        if isinstance(node, list):
            return "[" + " ".join(self._written(item, names) for item in node) + "]"
        if not isinstance(node, ast.AST):
            return repr(node)
        if isinstance(node, ast.Name):
            return names.get(node.id) or self._global(node.id)
        if isinstance(node, ast.arg):
            return names[node.arg]
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and names.get(node.value.id) == "self":
            return f"self.{self._attribute(node.attr)}"
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            return self._written(ast.Assign([node.target], node.value), names)
        if isinstance(node, ast.Call):
            kept = [k for k in node.keywords if names.get(k.arg or "") != "handed on"]
            return f"call({self._written([node.func, *node.args, *kept], names)})"
        if isinstance(node, _FUNCTIONS):
            return f"def({names.get(node.name)} {self._written(node.args, names)} {self._written(node.body, names)})"
        fields = [
            f"{name}={self._written(value, names)}"
            for name, value in ast.iter_fields(node)
            if name not in _IGNORED and value not in (None, [])
        ]
        return f"{type(node).__name__}({' '.join(fields)})"

    def _attribute(self, name: str) -> str:
        node = None if self.owner is None else _method(self.owner, name)
        if node is None or any(_is_property(d) for d in node.decorator_list):
            return self.attributes.setdefault(name, f"a{len(self.attributes)}")
        if name not in self.methods:
            self.methods[name] = node
            self._pending.append((f"method{len(self.methods) - 1}", node, True))
        return f"method{list(self.methods).index(name)}"

    def _global(self, name: str) -> str:
        if name in self.source.modules:
            return self.source.modules[name]
        if self.owner is not None and name.startswith("apply_") and _ROTARY in name:
            self.rotary.append(name)
            return _ROTARY
        node = self.source.functions.get(name)
        if node is None or name in _CALLED_ALIKE:
            return name
        if name not in self.functions:
            self.functions[name] = node
            self._pending.append((f"function{len(self.functions) - 1}", node, False))
        return f"function{list(self.functions).index(name)}"


def _locals(node: _Function) -> Iterator[str]:
    """Names that the function binds, parameters first; those of functions among its parameters' defaults last."""
    arguments = node.args
    defaults = [default for default in (*arguments.defaults, *arguments.kw_defaults) if default is not None]
    for arg in (*arguments.posonlyargs, *arguments.args, arguments.vararg, *arguments.kwonlyargs, arguments.kwarg):
        if arg is not None:
            yield arg.arg
    for inner in _in_order(node.body):
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            yield inner.id
        elif isinstance(inner, ast.arg):
            yield inner.arg
        elif isinstance(inner, _FUNCTIONS):
            yield inner.name
    yield from (inner.arg for inner in _in_order(defaults) if isinstance(inner, ast.arg))


def _handed_on(node: _Function) -> frozenset[str]:
    """Parameters that do nothing but go on, by their own names, to one call that gets the function's other keywords
    too. Which of them a release names, and in which order, changes nothing."""
    rest = node.args.kwarg
    if rest is None:
        return frozenset()
    calls = [
        call
        for call in _in_order(node.body)
        if isinstance(call, ast.Call)
        and any(k.arg is None and isinstance(k.value, ast.Name) and k.value.id == rest.arg for k in call.keywords)
    ]
    uses = Counter(inner.id for inner in _in_order(node.body) if isinstance(inner, ast.Name))
    for call in calls:
        handed = [k.arg for k in call.keywords if k.arg and isinstance(k.value, ast.Name) and k.value.id == k.arg]
        if handed:
            parameters = {a.arg for a in (*node.args.args[2:], *node.args.kwonlyargs)}
            return frozenset(name for name in handed if name in parameters and uses[name] == 1)
    return frozenset()


def _without(arguments: ast.arguments, names: frozenset[str]) -> ast.arguments:
    """These parameters, but for some. Of defaults the remaining ones' stay."""
    first_default = len(arguments.args) - len(arguments.defaults)
    kept = [(i, a) for i, a in enumerate(arguments.args) if a.arg not in names]
    keywords = list(zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True))
    return ast.arguments(
        posonlyargs=arguments.posonlyargs,
        args=[a for _, a in kept],
        vararg=arguments.vararg,
        kwonlyargs=[a for a, _ in keywords if a.arg not in names],
        kw_defaults=[d for a, d in keywords if a.arg not in names],
        kwarg=arguments.kwarg,
        defaults=[arguments.defaults[i - first_default] for i, _ in kept if i >= first_default],
    )


def _in_order(node: Any) -> Iterator[ast.AST]:
    for child in node if isinstance(node, list) else ast.iter_child_nodes(node):
        yield child
        yield from _in_order(child)


def _is_static(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Name) and decorator.id == "staticmethod"


def _is_property(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Name) and decorator.id in ("property", "cached_property")
