"""Which code reads weights of layers beside these layers' own calls, as far as its text says."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any, NamedTuple

#: Packages whose trainers and callbacks, if they read the weight of a head, do it in autocast's type or make float32 of
#: it.
_KNOWN = frozenset({"transformers", "trl", "builtins"})
_READS_ENDS = re.compile(r"\.weight\b|get_(in|out)put_embeddings")
#: Where Transformers has what all models are: their ends are read to tie, resize and share them out, and their types to
#: generate, where that is the type of an empty tensor.
_BASES = re.compile(r"transformers\.(?!models\.)")
#: Attributes of classes that name weights for who loads and saves them.
_KEYS = re.compile(r"_tied_weights_keys|_keys_to_ignore_on_(load|save)\w*")
_ASK_FOR_TYPES = frozenset({"dtype", "get_extended_attention_mask", "invert_attention_mask"})


def files_of(kind: type) -> set[str]:
    """The Python modules with the code of a class, but PyTorch's."""
    return {each.__module__ for each in kind.__mro__ if not each.__module__.startswith(("torch.", "builtins"))}


def files_of_models(kind: type) -> set[str]:
    """Those of a model's own code."""
    return {file for file in files_of(kind) if not _BASES.match(file)}


def reads(files: Iterable[str], names: Set[str]) -> bool:
    """Whether code in these reads the weight of a layer by one of these names, or may."""
    return _is_in(files, names, lambda seen: seen.read)


def asks_for_types(files: Iterable[str], names: Set[str]) -> bool:
    """Whether code in these asks for the type of a module by one of these names, which is that of its first weight."""
    return _is_in(files, names, lambda seen: seen.typed)


def may_read_ends(what: Any) -> bool:
    """Whether code of others, by which a trainer or a callback is more than the packages' own, may read the weight of
    an embedding or of a head."""
    files = {kind.__module__ for kind in type(what).__mro__ if kind.__module__.partition(".")[0] not in _KNOWN}
    return any((text := _text_of(file)) is None or _READS_ENDS.search(text) for file in files)


class _Seen(NamedTuple):
    read: frozenset[str]  # what the code calls layers whose weights it reads, but to give models their first weights
    typed: frozenset[str]  # and modules whose type it asks for


def _is_in(files: Iterable[str], names: Set[str], which: Callable[[_Seen], frozenset[str]]) -> bool:
    return any((seen := _seen_in(file)) is None or not which(seen).isdisjoint(names) for file in files)


@functools.lru_cache(maxsize=256)
def _seen_in(file: str) -> _Seen | None:
    """None: the code cannot be seen."""
    text = _text_of(file)
    try:
        tree = None if text is None else ast.parse(text)
    except SyntaxError:
        return None
    return None if tree is None else _Seen(frozenset(_owners_of_weights(tree)), frozenset(_asked_for_types(tree)))


def _text_of(file: str) -> str | None:
    try:
        return inspect.getsource(sys.modules[file])
    except (KeyError, OSError, TypeError):
        return None


def _owners_of_weights(tree: ast.AST) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.FunctionDef(name="_init_weights"):
                continue
            case ast.Assign(targets=[ast.Name(id=name)]) if _KEYS.fullmatch(name):
                continue
            case ast.Attribute(attr="requires_grad" | "device" | "shape", value=ast.Attribute(attr="weight", value=of)):
                yield from _owners_of_weights(of)
                continue
            case ast.Attribute(attr="weight" | "parameters", value=ast.Name(id=name) | ast.Attribute(attr=name)):
                yield name
            case ast.Constant(value=str(text)):
                yield from re.findall(r"(\w+)\.weight\b", text)
        yield from _owners_of_weights(node)


def _asked_for_types(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=attr, value=ast.Name(id=name) | ast.Attribute(attr=name)) if attr in _ASK_FOR_TYPES:
                yield name
