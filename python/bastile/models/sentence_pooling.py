"""Which rows of hidden states Sentence Transformers read in training: where they pool, their tokens' alone.

A model is a list of modules: Transformers' own, what makes a sentence's vector of its tokens', by the batch's mask, and
what goes on with that. Losses read vectors of sentences."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bastile.guards import stock_of
from bastile.models.encoder_heads import rows_read
from bastile.models.forms import Code, is_known
from bastile.models.mask_flow import MASK
from bastile.models.padding import read_by
from bastile.models.sites import ModelFile, Site
from bastile.report import Tally

OPERATOR = "padding_free"
_PACKAGE, _VECTOR, _TOKENS = "sentence_transformers.", "sentence_embedding", "token_embeddings"
#: The codes of a forward that runs modules one after the other, and of one that pools: of 5.0, 5.4, 5.7, 6.0 and 6.2.
_RUNS = frozenset({"d0281628056f"})
_POOLS = frozenset({"e8401606e402", "0abc4f7c60b4", "c9ddbdfdf595", "78a76fcab2e9", "5c3a931e57ef"})
_OF_VECTORS = frozenset({"Dense", "Dropout", "LayerNorm", "Normalize"})


def sites(file: ModelFile) -> Iterator[Site]:
    for cls in file.own_classes():
        if file.read(cls, _runs_one_after_the_other):
            yield file.forward_site(OPERATOR, cls, _reading)


def _runs_one_after_the_other(code: Code) -> bool | None:
    return code.fingerprint in _RUNS or None


def _reading(_: Tally, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: Any, input: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not self.training:
            return original(self, input, **kwargs)
        with read_by(_rows(self, input)):
            return original(self, input, **kwargs)

    return forward


def _rows(model: Any, given: Any) -> torch.Tensor | None:
    mask = given.get(MASK) if isinstance(given, dict) else None
    modules = list(model.children())
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or len(modules) < 2:
        return None
    encoder, pooling, *behind = modules
    if not _is_theirs(encoder, {"Transformer"}) or getattr(encoder, "module_output_name", _TOKENS) != _TOKENS:
        return None
    if not _is_theirs(pooling, {"Pooling"}) or not is_known(inspect.unwrap(stock_of(type(pooling).forward)), _POOLS):
        return None
    if not all(_is_theirs(m, _OF_VECTORS) and getattr(m, "module_input_name", _VECTOR) == _VECTOR for m in behind):
        return None
    return rows_read(*mask.shape, _reads_first(pooling))


def _is_theirs(module: Any, names: set[str] | frozenset[str]) -> bool:
    cls = type(module)
    return cls.__name__ in names and cls.__module__.startswith(_PACKAGE) and "forward" not in vars(module)


def _reads_first(pooling: Any) -> bool:
    """Whether it may read a row's first place, whatever stands there."""
    modes = getattr(pooling, "pooling_mode", None)
    if modes is None:
        return bool(getattr(pooling, "pooling_mode_cls_token", True))
    return "cls" in ((modes,) if isinstance(modes, str) else modes)
