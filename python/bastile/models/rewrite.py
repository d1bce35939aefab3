"""Statements of a forward that one operator computes at once, found in its code and replaced there. All else of the
function stays as it is, so what surrounds them needs no form:

    x = residual + x; residual = x; x = self.norm(x)    ->  x, residual = add_norm(self.norm, residual, x)
    x = self.norm(residual + x)                         ->  x = add_norm(self.norm, residual, x)[0]
    residual = x; x = self.norm(x)                      ->  x, residual = add_norm(self.norm, x, None)
    x = self.norm(x); x = residual + x                  ->  x = norm_add(self.norm, x, residual)
    q = self.q_norm(q); k = self.k_norm(k); q, k = rotary(q, k, cos, sin)
                                                        ->  q, k = norm_rotary(self.q_norm, self.k_norm, q, k, ...)
    q = self.q_proj(x).view(s); k = self.k_proj(x).view(s)
                                                        ->  a, b = projected(x, self.q_proj, self.k_proj); ...
    logits = self.lm_head(x); CrossEntropyLoss()        ->  logits = traced.head(self, self.lm_head, x); ...

What takes their place asks the modules at each call what they compute, and does what the statements say where that is
nothing that an operator knows. So whatever the names are, a function means what it meant. Calls of an attention for
each chunk of what it is given are found in models/rewrite_chunks.py."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch.compiler import is_compiling

from bastile.guards import in_force, say_what_runs
from bastile.models.forms import Code

ADD_NORM, NORM_ADD = "bastile_add_norm", "bastile_norm_add"
NORM_ROTARY, PROJECTED, TRACED = "bastile_norm_rotary", "bastile_projected", "bastile_traced"
_UNUSED = "bastile_unused"
#: Modules that may be norms, by the attributes that hold them: others need not be looked at. What they are is asked
#: when they are called.
_NORM = re.compile(r"norm|(^|_)ln(_|\d|$)", re.IGNORECASE)
#: Likewise linear layers that others may share their input with.
_PROJECTION = re.compile(r"proj|query|key|value|^(q|k|v)(_|$)", re.IGNORECASE)

Statements = list[ast.stmt]


def add_norms(code: Code) -> ast.FunctionDef | None:
    """The function with sums and norms at once; None where no norm of a sum, and no sum of a norm, is in it."""
    if not _has_norm(code) or is_closed(code):
        return None
    node = copy.deepcopy(code.node)
    rewriter = _AddNorms(_own_name(node))
    rewriter.visit(node)
    return node if rewriter.sums and isinstance(node, ast.FunctionDef) else None


def norm_rotaries(code: Code, rotaries: Collection[str]) -> ast.FunctionDef | None:
    """The function with norms of queries and keys and one of these rotary functions at once, and with what
    `projections` finds, if it finds anything."""
    if not code.rotary or not _has_norm(code) or is_closed(code):
        return None
    node = copy.deepcopy(code.node)
    rewriter = _NormRotaries(_own_name(node), rotaries)
    rewriter.visit(node)
    _Projections(_own_name(node), code.methods).visit(node)
    return node if rewriter.found and isinstance(node, ast.FunctionDef) else None


def projections(code: Code) -> ast.FunctionDef | None:
    """The function with modules of one input, which may be linear layers, called at once: those that a run of
    statements calls in any case, while the input's name means the same."""
    return None if is_closed(code) else projections_in(code, code.node)


def projections_in(code: Code, function: Any) -> ast.FunctionDef | None:
    """As `projections`, of the code's function as it may have been rewritten before."""
    node = copy.deepcopy(function)
    rewriter = _Projections(_own_name(node), code.methods)
    rewriter.visit(node)
    return node if rewriter.found and isinstance(node, ast.FunctionDef) else None


def attended(code: Code) -> ast.FunctionDef | None:
    """As `projections`, of an attention whose heads are not made contiguous on the way to the function that attends:
    that takes them as they lie."""
    node = projections(code)
    if node is not None:
        _leave_as_they_lie(node)
    return node


def head_calls(code: Code) -> ast.FunctionDef | None:
    """The function with calls of modules of its own, any of which may be the output head, by way of `TRACED.head`, and
    with PyTorch's class of losses by way of `TRACED.loss_class`."""
    if is_closed(code):
        return None
    node = copy.deepcopy(code.node)
    rewriter = _HeadCalls(_own_name(node), code.methods)
    rewriter.visit(node)
    return node if rewriter.found and isinstance(node, ast.FunctionDef) else None


@dataclass(frozen=True)
class Rewriting:
    """What a function was made of."""

    made: Any
    node: ast.FunctionDef
    helpers: dict[str, Any]


def rewriting_of(function: Any) -> Rewriting | None:
    """What `rewritten` made this function of; None where it did not."""
    found = getattr(function, _REWRITING, None)
    return found if found is not None and found.made is function else None  # functools.wraps copies what is there


def rewritten(node: ast.FunctionDef, code: Code, original: Any, helpers: dict[str, Any]) -> Any:
    """The function that the original is, or wraps, with the code of `node`, in which these names mean these helpers.
    Its globals are that function's."""
    innermost, inner = inspect.unwrap(original), original
    while inner is not innermost and getattr(inner, "__code__", None) is not innermost.__code__:
        inner = inner.__wrapped__
    scope: dict[str, Any] = {}
    exec(code.made_by(_compiled, node, tuple(helpers), inner.__code__.co_filename), inner.__globals__, scope)
    made = scope["make"](*helpers.values())
    made.__code__ = made.__code__.replace()  # one of its own: by it torch.compile keeps what it compiles
    made.__defaults__, made.__kwdefaults__ = inner.__defaults__, inner.__kwdefaults__
    functools.update_wrapper(made, original)
    setattr(made, _REWRITING, Rewriting(made, node, helpers))
    return made


def _compiled(code: Code, node: ast.FunctionDef, helpers: tuple[str, ...], filename: str) -> CodeType:
    """What defines `make`, which is given these helpers and returns the function."""
    bare = copy.copy(node)
    bare.decorator_list, bare.returns = [], None
    arguments = ast.arguments([], [ast.arg(name) for name in helpers], None, [], [], None, [])
    outer = ast.FunctionDef("make", arguments, [bare, ast.Return(ast.Name(bare.name, ast.Load()))], [])
    outer.type_params = []  # type: ignore[attr-defined]  # of Python 3.12
    module = ast.fix_missing_locations(ast.Module([*code.imports_of_future, outer], []))
    return compile(module, filename, "exec", dont_inherit=True)


_REWRITING = "_bastile_rewriting"


def with_others(
    node: ast.FunctionDef,
    code: Code,
    original: Any,
    helpers: dict[str, Any],
    again: Callable[[ast.FunctionDef], ast.FunctionDef | None],
    in_compiled: Any = None,
) -> Any:
    """As `rewritten`, and with what another operator, whose replacement the original is, has rewritten of the same
    function, while that is in force. again: makes of the other's code what `node` is of the function's own.
    in_compiled: what torch.compile sees, None: this alone."""
    alone = rewritten(node, code, original, helpers)

    @functools.lru_cache(maxsize=4)
    def beside(below: Any) -> Any:
        others = rewriting_of(below)
        both = None if others is None else again(others.node)
        if others is None or both is None:
            return alone
        return rewritten(both, code, below, {**others.helpers, **helpers})

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return (in_compiled or alone)(*args, **kwargs)
        return beside(in_force(original))(*args, **kwargs)

    say_what_runs(forward, lambda: beside(in_force(original)))
    return forward


def _has_norm(code: Code) -> bool:
    return any(map(_NORM.search, code.attributes))


def is_closed(code: Code) -> bool:
    """Whether it may need its class, by `super()` or by name, which a copy of the function does not have."""
    return any(isinstance(each, ast.Name) and each.id in ("super", "__class__") for each in ast.walk(code.node))


def _own_name(node: Any) -> str:
    return node.args.args[0].arg if node.args.args else ""


class Blocks(ast.NodeTransformer):
    """Visits every list of statements."""

    def block(self, body: Statements) -> Statements:
        raise NotImplementedError

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for field in ("body", "orelse", "finalbody"):
            body = getattr(node, field, None)
            if isinstance(body, list) and body:
                setattr(node, field, self.block(body))
        return node


class _AddNorms(Blocks):
    def __init__(self, own: str) -> None:
        self.own = own
        self.sums = 0

    def block(self, body: Statements) -> Statements:
        made: Statements = []
        for statement in body:
            norm = _assigned_call(statement, self.own)
            made.append(statement)
            if norm is None or not _NORM.search(norm[1].attr):
                continue
            target, module, given = norm
            if isinstance(given, ast.BinOp):
                if isinstance(given.op, ast.Add):
                    call = _call(ADD_NORM, [module, given.left, given.right])
                    first = ast.Subscript(call, ast.Constant(0), ast.Load())
                    made[-1] = ast.copy_location(ast.Assign([store(target)], first), statement)
                    self.sums += 1
                continue
            if not isinstance(given, ast.Name):
                continue
            x = given.id
            before = made[:-1]
            alias = _alias(before[-1]) if before else None  # residual = x
            residual = alias[0] if alias and alias[1] == x and alias[0] != x else None
            if residual is not None:
                before = before[:-1]
            total = _sum(before[-1], x) if before else None  # x = left + right
            if total is not None:
                before = before[:-1]
                self.sums += 1
                operands = [total.left, total.right]
            elif residual is not None:
                operands = [given, ast.Constant(None)]
            else:
                continue
            kept = residual or (_UNUSED if target == x else x)
            pair = ast.Tuple([store(target), store(kept)], ast.Store())
            taken: Statements = [ast.Assign([pair], _call(ADD_NORM, [module, *operands]))]
            if total is not None and residual is not None and target != x:
                taken.append(ast.Assign([store(x)], ast.Name(residual, ast.Load())))
            made = [*before, *(ast.copy_location(each, statement) for each in taken)]
        return self._norms_added(made)

    def _norms_added(self, body: Statements) -> Statements:
        """With each norm whose result is added, there and then, in one call."""
        made: Statements = []
        for statement in body:
            norm = _assigned_call(made[-1], self.own) if made else None
            total = None if norm is None else _sum(statement, norm[0])
            if norm is not None and total is not None and _NORM.search(norm[1].attr):
                terms = [total.left, total.right]
                others = [each for each in terms if not _is_name(each, norm[0])]
                if len(others) == 1 and isinstance(others[0], ast.Name):
                    call = _call(NORM_ADD, [norm[1], norm[2], others[0]])
                    made[-1] = ast.copy_location(ast.Assign([store(norm[0])], call), statement)
                    self.sums += 1
                    continue
            made.append(statement)
        return made


class _NormRotaries(Blocks):
    def __init__(self, own: str, rotaries: Collection[str]) -> None:
        self.own = own
        self.rotaries = rotaries
        self.found = 0

    def block(self, body: Statements) -> Statements:
        for place, statement in enumerate(body):
            turn = self._rotary(statement)
            if turn is None:
                continue
            before = [copy.deepcopy(each) for each in body[:place]]
            norms = [self._norm(before, name) for name in turn[:2]]
            if None in norms:
                continue
            (q_norm, q_test, q_turned), (k_norm, k_test, k_turned) = norms  # type: ignore[misc]
            before = [each for each in before if not (isinstance(each, ast.If) and not each.body)]
            assign: Any = statement
            call = assign.value
            modules = [_if(test, norm) for test, norm in ((q_test, q_norm), (k_test, k_norm))]
            told = [ast.Constant(call.func.id), call.func, ast.Constant(q_turned), ast.Constant(k_turned)]
            made = ast.Assign(assign.targets, _call(NORM_ROTARY, [*modules, *call.args, *told]))
            self.found += 1
            return [*before, ast.copy_location(made, statement), *self.block(body[place + 1 :])]
        return body

    def _rotary(self, statement: ast.stmt) -> tuple[str, str] | None:
        """q and k of `q, k = rotary(q, k, cos, sin)`."""
        if not (isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call)):
            return None
        call, target = statement.value, statement.targets[0]
        if not (isinstance(call.func, ast.Name) and call.func.id in self.rotaries) or len(call.args) != 4:
            return None
        if call.keywords or not isinstance(target, ast.Tuple) or len(target.elts) != 2:
            return None
        names = [each.id for each in (*call.args[:2], *target.elts) if isinstance(each, ast.Name)]
        return (names[0], names[1]) if len(names) == 4 and names[:2] == names[2:] else None

    def _norm(self, before: Statements, name: str) -> tuple[ast.Attribute, ast.expr | None, bool] | None:
        """The norm whose result is last given to this name, taken out of these statements; under which condition it is
        called, and whether its result is transposed before it is turned."""
        turned = False
        for place in range(len(before) - 1, -1, -1):
            statement = before[place]
            if isinstance(statement, ast.If) and not statement.orelse and _is_of(statement.test, self.own):
                inner = [(i, each) for i, each in enumerate(statement.body) if _mentions(each, name)]
                if len(inner) != 1:
                    if inner:
                        return None
                    continue
                assigned = _assigned_call(inner[0][1], self.own)
                is_only = all(_assigned_call(each, self.own) is not None for each in statement.body)
                if assigned is None or not is_only or assigned[0] != name or not _is_name(assigned[2], name):
                    return None
                del statement.body[inner[0][0]]
                return assigned[1], statement.test, turned
            if not _mentions(statement, name):
                continue
            if not (isinstance(statement, ast.Assign) and _is_name(statement.targets[0], name)):
                return None
            value, times = _before_transposes(statement.value)
            turned ^= times % 2 == 1
            if _is_name(value, name):
                continue
            norm = _call_of(value, self.own)
            if norm is None or not _NORM.search(norm[0].attr):
                return None
            before[place] = ast.copy_location(
                ast.Assign(statement.targets, _replaced(statement.value, value, norm[1])), statement
            )
            return norm[0], None, turned
        return None


class _Projections(Blocks):
    def __init__(self, own: str, methods: Collection[str]) -> None:
        self.own = own
        self.methods = methods
        self.found = 0

    def block(self, body: Statements) -> Statements:
        made: Statements = []
        for place, statement in enumerate(body):
            for x in dict.fromkeys(given.id for _, given in self._calls(statement)):
                together = self._together(body[place:], x)
                if len(together) > 1:
                    made.append(ast.copy_location(self._at_once(x, together), statement))
            made.append(statement)
        return made

    def _together(self, body: Statements, x: str) -> dict[str, tuple[ast.stmt, ast.Call]]:
        """The calls with this input and the statements that they are in, by the attribute that holds the module."""
        found: dict[str, tuple[ast.stmt, ast.Call]] = {}
        for statement in body:
            if not isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Expr)):
                break
            for call, given in self._calls(statement):
                if given.id == x:
                    found.setdefault(call.func.attr, (statement, call))  # type: ignore[attr-defined]
            named = [each for each in ast.walk(statement) if isinstance(each, ast.Name) and each.id == x]
            if any(isinstance(each.ctx, ast.Store) for each in named):
                break
        return found

    def _at_once(self, x: str, together: dict[str, tuple[ast.stmt, ast.Call]]) -> ast.Assign:
        """The call of them all, whose results then stand where each was called."""
        names = [f"{PROJECTED}_{self.found + i}" for i in range(len(together))]
        self.found += len(names)
        for name, (statement, call) in zip(names, together.values(), strict=True):
            _replaced(statement, call, ast.Name(name, ast.Load()))
        targets = ast.Tuple([store(name) for name in names], ast.Store())
        modules = [call.func for _, call in together.values()]
        return ast.Assign([targets], _call(PROJECTED, [ast.Name(x, ast.Load()), *modules]))

    def _calls(self, statement: ast.stmt) -> list[tuple[ast.Call, ast.Name]]:
        """`self.module(x)` of a module that may be a linear layer, wherever the statement calls it in any case."""
        found = []
        for each in (each for each in _always(statement) if isinstance(each, ast.Call)):
            call = _call_of(each, self.own)
            if call is None or not isinstance(call[1], ast.Name):
                continue
            if _PROJECTION.search(call[0].attr) and call[0].attr not in self.methods:
                found.append((each, call[1]))
        return found


def _always(node: ast.AST) -> Iterator[ast.AST]:
    """What is evaluated whenever this is, in order."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.IfExp, ast.BoolOp, ast.Lambda, ast.comprehension, ast.stmt, *COMPREHENSIONS)):
            yield from _always(child)
            yield child


COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


#: What a heads' tensor may be handed to: a cache, and what an attention calls the function that attends.
_TAKE_HEADS = ("update", "attention_interface")


def _leave_as_they_lie(node: ast.FunctionDef) -> None:
    """`q = x.transpose(1, 2).contiguous()`, where q goes to such calls alone, without the copy."""
    calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
    takers = [c for c in calls if getattr(c.func, "id", getattr(c.func, "attr", None)) in _TAKE_HEADS]
    handed = {id(a) for c in takers for a in (*c.args, *[k.value for k in c.keywords])}
    loads = [n for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
    looked_at = {load.id for load in loads if id(load) not in handed}
    for each in ast.walk(node):
        match each:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(func=ast.Attribute(value=value, attr="contiguous"), args=[], keywords=[]),
            ) if name not in looked_at and _before_transposes(value)[1] == 1:
                each.value = value


class _HeadCalls(ast.NodeTransformer):
    def __init__(self, own: str, methods: Collection[str]) -> None:
        self.own = own
        self.methods = methods
        self.found = 0

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        call = _call_of(node, self.own)
        if getattr(node.func, "id", getattr(node.func, "attr", None)) == "CrossEntropyLoss":
            node.func = call_in(TRACED, "loss_class", [node.func])
        elif call is not None and call[0].attr not in self.methods:
            self.found += 1
            node = ast.copy_location(call_in(TRACED, "head", [ast.Name(self.own, ast.Load()), *call]), node)
        return node


def _assigned_call(statement: ast.stmt, own: str) -> tuple[str, ast.Attribute, ast.expr] | None:
    """x, self.module and y of `x = self.module(y)`."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    target, call = statement.targets[0], _call_of(statement.value, own)
    return (target.id, *call) if call is not None and isinstance(target, ast.Name) else None


def _call_of(value: ast.expr, own: str) -> tuple[ast.Attribute, ast.expr] | None:
    """self.module and y of `self.module(y)`."""
    if not isinstance(value, ast.Call) or value.keywords or len(value.args) != 1:
        return None
    function = value.func
    if isinstance(value.args[0], ast.Starred) or not isinstance(function, ast.Attribute):
        return None
    return (function, value.args[0]) if _is_name(function.value, own) else None


def _alias(statement: ast.stmt) -> tuple[str, str] | None:
    """a and b of `a = b`."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.value, ast.Name):
        target = statement.targets[0]
        return (target.id, statement.value.id) if isinstance(target, ast.Name) else None
    return None


def _sum(statement: ast.stmt, x: str) -> ast.BinOp | None:
    """left + right of `x = left + right`."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and _is_name(statement.targets[0], x):
        value = statement.value
        return value if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add) else None
    return None


def _before_transposes(value: ast.expr) -> tuple[ast.expr, int]:
    """What is transposed by `.transpose(1, 2)`, and how often."""
    times = 0
    while (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and value.func.attr == "transpose"
        and [getattr(a, "value", None) for a in value.args] == [1, 2]
        and not value.keywords
    ):
        value, times = value.func.value, times + 1
    return value, times


def _replaced(within: Any, old: ast.expr, new: ast.expr) -> Any:
    """In place, but for `within` itself."""

    class Replace(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> Any:
            return new if node is old else super().visit(node)

    return Replace().visit(within)


def _if(test: ast.expr | None, norm: ast.expr) -> ast.expr:
    return norm if test is None else ast.IfExp(copy.deepcopy(test), norm, ast.Constant(None))


def _call(name: str, arguments: list[Any]) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), arguments, [])


def call_in(module: str, name: str, arguments: list[Any]) -> ast.Call:
    return ast.Call(ast.Attribute(ast.Name(module, ast.Load()), name, ast.Load()), arguments, [])


def store(name: str) -> ast.Name:
    return ast.Name(name, ast.Store())


def _is_name(node: Any, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _is_of(node: Any, own: str) -> bool:
    """Whether this is `self.name`."""
    return isinstance(node, ast.Attribute) and _is_name(node.value, own)


def _mentions(node: ast.AST, name: str) -> bool:
    return any(_is_name(each, name) for each in ast.walk(node))
