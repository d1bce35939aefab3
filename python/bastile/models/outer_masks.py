"""Masks that a model of images makes for its text model, which would make the same itself (Gemma 3 and 4): left to it,
whose own are in few numbers and may leave out padding. Where tokens of images see each other both ways, they stay."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType
from typing import Any

import torch

from bastile.graphs import caches
from bastile.host_copies import fetched, on_host
from bastile.models import masks, sdpa
from bastile.models.forms import Code
from bastile.models.mask_flow import MASK, is_name, of_self
from bastile.models.rebind import as_keywords, parameter_names, with_global
from bastile.models.sites import ModelFile, Site, calls, own_forward
from bastile.ops._common import has_values
from bastile.report import Tally

#: Of which the first makes masks of tokens that see those before them, and the other of images' blocks, too.
_MAKERS = ("create_masks_for_generate", "create_masks_for_vision_model")
_BLOCKS = "block_sequence_ids"
#: What says of each token whether it is text's, which is 0.
_TYPES = ("token_type_ids", "mm_token_type_ids")
_IMAGES = "pixel_values"
#: What both are told, by names of their own.
_ALIKE = frozenset({"inputs_embeds", "position_ids", *caches.NAMES})


def sites(file: ModelFile, operator: str, texts: tuple[type, ...]) -> Iterator[Site]:
    """texts: the classes of text models that make masks of Bastile's."""
    for cls in file.own_classes():
        if calls(own_forward(cls), _MAKERS[0]):
            read = file.read(cls, text_model)
            if read is not None:
                yield from file.wrapped_sites(operator, cls, partial(_leaving, read[1], texts))
            else:
                file.unknown[f"masks of {cls.__name__}"] = "stay: its text model is not known to make the same"


def text_model(code: Code) -> str | None:
    """By which name a model calls the text model that it makes masks for, if that is given all else that these are made
    of, and nobody else gets to see them."""
    nodes = list(ast.walk(code.node))
    assigned = [each for each in nodes if isinstance(each, ast.Assign)]
    made = [each for each in assigned if _is_maker(each.value)]
    masks, told = {t for each in made for t in _targets(each)}, {_told(each.value) for each in made}
    handed = [
        each for each in nodes if isinstance(each, ast.Call) and of_self(each.func) and _given(each, MASK) in masks
    ]
    if not len(masks) == len(told) == len(handed) == 1:
        return None
    (name,), (of,), (call,) = masks, told, handed
    own = [each.value for each in assigned if _targets(each) == [of]]
    if len(own) != 1 or not isinstance(own[0], ast.Dict) or not _is_told_alike(own[0], call):
        return None
    blocks = [each for each in assigned if _targets(each) == [f"{of}['{_BLOCKS}']"]]
    first = [each for each in nodes if isinstance(each, ast.NamedExpr)]
    first = [each for each in first if is_name(each.target, name) and is_name(each.value, MASK)]
    is_alone = (
        len(_uses(nodes, of, ast.Load)) == len(made) + len(blocks)
        and len(_uses(nodes, name, ast.Load)) == 1
        and len(_uses(nodes, name, ast.Store)) == len(made) + len(first)
        and not _uses(nodes, MASK, ast.Store)
    )
    return of_self(call.func) if is_alone else None


def _targets(node: ast.Assign) -> list[str]:
    return [ast.unparse(target) for target in node.targets]


def _uses(nodes: list[ast.AST], name: str, how: type[ast.expr_context]) -> list[ast.AST]:
    return [each for each in nodes if isinstance(each, ast.Name) and each.id == name and isinstance(each.ctx, how)]


def _is_maker(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and any(is_name(node.func, maker) for maker in _MAKERS)


def _told(call: Any) -> str:
    """The dictionary of all that a maker is told but blocks; "" where it is told more."""
    others = [each for each in call.keywords if each.arg != _BLOCKS]
    return ast.unparse(others[0].value) if not call.args and len(others) == 1 and others[0].arg is None else ""


def _given(call: ast.Call, name: str) -> str | None:
    return next((ast.unparse(each.value) for each in call.keywords if each.arg == name), None)


def _is_told_alike(own: ast.Dict, call: ast.Call) -> bool:
    """Whether a text model's call gives it what masks are made of."""
    told = {ast.literal_eval(k): ast.unparse(v) for k, v in zip(own.keys, own.values, strict=True) if k is not None}
    alike = {name: value for name, value in told.items() if name in _ALIKE}
    return (
        told.keys() == {"config", MASK, *alike}
        and told["config"] == "self.config.get_text_config()"
        and told[MASK] == MASK
        and all(_given(call, name) == value == name for name, value in alike.items())
    )


def _as_given(tally: Tally, maker: Any, **told: Any) -> Any:
    """In the place of a maker of masks. maker: that, for masks of blocks."""
    if maker is not None and told.get(_BLOCKS) is not None:
        return maker(**told)
    tally.count()
    return told[MASK]


def _leaving(name: str, texts: tuple[type, ...], tally: Tally, original: Any) -> Callable[..., Any]:
    """The model's forward. name: its text model's."""
    if not isinstance(original, FunctionType):
        return original

    of_text = without_blocks = original
    for maker in _MAKERS:
        if maker in original.__globals__:
            of_text = with_global(of_text, maker, partial(_as_given, tally, None))
            without_blocks = with_global(without_blocks, maker, partial(_as_given, tally, original.__globals__[maker]))
    names = parameter_names(original)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not _makes_the_same(self, getattr(self, name, None), texts):
            return original(self, *args, **kwargs)
        given = as_keywords(names, args, kwargs)
        mask = given.get(MASK)
        if mask is not None and not (isinstance(mask, torch.Tensor) and mask.dim() == 2):
            return original(self, *args, **kwargs)
        if _is_packed_for_it_alone(self, given):
            return original(self, *args, **kwargs)
        return (of_text if _is_of_text(given) else without_blocks)(self, *args, **kwargs)

    return forward


def _makes_the_same(model: Any, text: Any, texts: tuple[type, ...]) -> bool:
    return type(text) in texts and model.config.get_text_config() is text.config


def _is_packed_for_it_alone(model: Any, given: dict[str, Any]) -> bool:
    """Whether positions tell it of several sequences in a row, and will not tell its text model: that makes a cache for
    itself before it makes masks, and where there is a cache nobody asks positions."""
    uses_cache = given.get("use_cache")
    if uses_cache is None:
        uses_cache = getattr(model.config.get_text_config(), "use_cache", False)
    says_so_itself = sdpa.making.packed is not None
    return bool(uses_cache) and not says_so_itself and masks.sequences_of(given) is not None


def _is_of_text(given: dict[str, Any]) -> bool:
    """Whether no token is known to be an image's. Where there are images nobody waits for what the types say."""
    types = [given[name] for name in _TYPES if given.get(name) is not None]
    has_images = any(name.startswith(_IMAGES) and value is not None for name, value in given.items())
    for each in types:
        if not isinstance(each, torch.Tensor) or not has_values(each) or (has_images and on_host(each) is None):
            return False
    return not any(bool(fetched(each).any()) for each in types)
