"""The attention of vision and audio towers, whose sequences stand one behind another, in few calls.

Where Transformers' attention implementation takes no boundaries, as sdpa and eager do, its forwards cut queries, keys
and values into chunks and call it for each: Qwen2.5-VL's windows of four images are dozens of calls a layer, and asking
how long they are waits for the GPU three times a layer. These statements become one call (models/rewrite_chunks.py),
which asks once, and computes chunks of equal length as a batch, by the same implementation: as they stand, where equal
ones are neighbours, without a copy; else put side by side, where that pays (models/chunks.py)."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from bastile.guards import stock_of
from bastile.models import rewrite, rewrite_chunks, varlen
from bastile.models.chunks import Chunks, Group, chunks_of, lengths_to_read, opened, reordered
from bastile.models.forms import Code, is_known
from bastile.models.sites import ModelFile, Site, calls
from bastile.ops._common import has_values, in_transform
from bastile.report import Tally

OPERATOR = "chunked_attention"
_DEVICES = ("cpu", "cuda")
#: The code of functions named eager_attention_forward whose sequences of a batch have nothing to do with each other.
_EAGER = frozenset({"8c2cd897f49b", "39f6c9721d4a", "e5d13522414c", "7a1161956485", "5211cf994faf"})
#: Of an eager attention at a time, where no backward pass needs them: a quarter of a GiB.
_MOST_WEIGHTS = 1 << 26
#: Tensors that are meant for text's attention and reach a tower's too. Transformers' own functions do not read them,
#: nor any of no dimension, such as the number of a batch's items; any other may be of each chunk.
_NOT_READ = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "seq_idx", "position_ids"})


def sites(file: ModelFile) -> Iterator[Site]:
    for cls in file.own_classes():
        if not calls(stock_of(vars(cls)["forward"]), "tolist"):
            continue  # most ask no tensor for its numbers: their source need not be read
        where = f"{cls.__name__}.forward"
        read = file.read(cls, rewrite_chunks.chunks)
        if read is not None:
            yield from file.wrapped_sites(OPERATOR, cls, partial(chunked_forward, *read))
        elif file.read(cls, _cuts) is not None:
            file.reads[where] = (*file.reads.get(where, ()), _BOUNDARIES)
            file.unknown[where] = "computes chunks in statements that are not known"


_BOUNDARIES = "cu_seqlens"


def _cuts(code: Code) -> bool | None:
    """Whether a forward that is given boundaries cuts something up by numbers that it asks the device for."""
    called = {each.func.attr for each in ast.walk(code.node) if _is_method(each)}  # type: ignore[attr-defined]
    given = {each.arg for each in ast.walk(code.node.args) if isinstance(each, ast.arg)}
    return ({"split", "tolist"} <= called and _BOUNDARIES in given) or None


def _is_method(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)


def chunked_forward(code: Code, node: Any, tally: Tally, original: Callable[..., Any]) -> Callable[..., Any]:
    helpers = {rewrite_chunks.CHUNKED: Chunked(tally)}
    return rewrite.with_others(node, code, original, helpers, rewrite_chunks.chunks_in, in_compiled=original)


class Chunked:
    """What takes the place of the statements: the attention's outputs, one behind another again, and what else each
    chunk's call returns."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally

    def output(self, attend: Any, module: Any, q: Any, k: Any, v: Any, boundaries: Any, /, **given: Any) -> Any:
        return self._run(attend, module, (q, k, v), boundaries, given)[0]

    def with_weights(self, attend: Any, module: Any, q: Any, k: Any, v: Any, boundaries: Any, /, **given: Any) -> Any:
        """And a list of each chunk's weights."""
        output, weights, chunks = self._run(attend, module, (q, k, v), boundaries, given)
        return output, _of_each(weights, chunks)

    def with_outputs(self, attend: Any, module: Any, q: Any, k: Any, v: Any, boundaries: Any, /, **given: Any) -> Any:
        """And a list of what each chunk's call returns."""
        output, weights, chunks = self._run(attend, module, (q, k, v), boundaries, given)
        return output, list(zip(output.split([*chunks.lengths], dim=1), _of_each(weights, chunks), strict=True))

    def _run(self, attend: Any, module: Any, qkv: Any, boundaries: Any, given: Any) -> tuple[Any, Any, Chunks]:
        """The output, weights, and the chunks. Weights: None where none were made, else the list of them."""
        why, is_usual = _refusal(attend, qkv, boundaries, given)
        longest = opened(boundaries)
        if longest is not None and why is None and varlen.is_served(attend, qkv, given):
            self.tally.count()
            rows = qkv[0].shape[2]  # one chunk, for all that is known of them
            return varlen.attention(qkv, boundaries, longest or rows, given), None, Chunks((rows,))
        if longest is not None:
            chunks = Chunks(tuple(length for length in lengths_to_read(boundaries) if length))
        elif why is None or (has_values(boundaries) and not in_transform(boundaries)):
            chunks = chunks_of(boundaries)
        else:
            chunks = Chunks(tuple((boundaries[1:] - boundaries[:-1]).tolist()))
        if why is None and (min(chunks.lengths, default=0) <= 0 or sum(chunks.lengths) != qkv[0].shape[2]):
            why = "a chunk is empty, or they are not all of the sequence"  # with which the original code deals
        if why is None and _is_too_much(attend, qkv[0], chunks):
            why, is_usual = "all weights at once would take much more memory", True
        if why is not None:
            self.tally.step_aside(why, is_usual)
            return (*_one_by_one(attend, module, qkv, chunks, given), chunks)
        self.tally.count()
        gathers = chunks.is_gathered(qkv[0])
        groups = chunks.kinds if gathers else chunks.runs
        if varlen.is_new(attend, qkv, chunks, groups, given):
            return varlen.attention(qkv, boundaries, max(chunks.lengths), given), None, chunks
        return (*_at_once(partial(attend, module, **given), qkv, chunks, groups, gathers), chunks)


def _refusal(attend: Any, qkv: tuple[Any, ...], boundaries: Any, given: dict[str, Any]) -> tuple[str | None, bool]:
    """Why chunks are to be computed one by one, and whether that is usual."""
    if not has_values(*qkv, boundaries) or in_transform(*qkv) or qkv[0].device.type not in _DEVICES:
        return "its tensors have no values, are of a subclass or another device, or are transformed", True
    parameters = _parameters(attend)
    if parameters is None:
        return "its attention is not Transformers' own sdpa or eager one", True
    if given.get("dropout"):
        return "it drops weights, of which the random numbers would be others", True
    if any(t.dim() != 4 or t.shape[0] != 1 for t in qkv) or any(t.shape[2] != qkv[0].shape[2] for t in qkv):
        return "it is no batch of one", False
    for name, value in given.items():
        if isinstance(value, torch.Tensor) and (name in parameters or (value.dim() and name not in _NOT_READ)):
            return f"it is given {name}", False
    return None, False


@functools.lru_cache(maxsize=64)
def _parameters(attend: Any) -> frozenset[str] | None:
    """The arguments of an attention in which the sequences of a batch have nothing to do with each other, by
    Transformers' code; None of any other."""
    stock = stock_of(attend)
    is_served = varlen.is_sdpa(attend) or is_known(stock, _EAGER)
    return frozenset(inspect.signature(stock).parameters) if is_served else None


def _is_too_much(attend: Any, q: torch.Tensor, chunks: Chunks) -> bool:
    """Whether an attention that makes its weights, of which a call keeps nothing, would have many of them at a time."""
    if torch.is_grad_enabled() or varlen.is_sdpa(attend):
        return False
    return q.shape[1] * max(count * length**2 for count, length in chunks.kinds) > _MOST_WEIGHTS


def _one_by_one(attend: Any, module: Any, qkv: tuple[Any, ...], chunks: Chunks, given: Any) -> tuple[Any, list[Any]]:
    """What the statements do."""
    splits = [torch.split(tensor, [*chunks.lengths], dim=2) for tensor in qkv]
    outputs = [attend(module, *each, **given) for each in zip(*splits, strict=True)]
    return torch.cat([output[0] for output in outputs], dim=1), [output[1] for output in outputs]


def _at_once(
    attend: Any, qkv: tuple[torch.Tensor, ...], chunks: Chunks, groups: list[Group], gathers: bool
) -> tuple[torch.Tensor, Any]:
    """q, k and v: [1, heads, rows, width]. The output: [1, rows, heads, width]. gathers: whether chunks of one length
    are put side by side first."""
    if gathers:
        order, back = chunks.rows(qkv[0].device)
        qkv = tuple([reordered(t[0].transpose(0, 1), order, back).transpose(0, 1)[None] for t in qkv])
    outputs, weights = [], []
    for parts in zip(*[_grouped(t[0], groups) for t in qkv], strict=True):
        found = attend(*parts)
        outputs.append(found[0].flatten(0, 1))
        weights.append(found[1])
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if gathers:
        output = reordered(output, back, order)
    return output[None], None if weights[0] is None else _in_order(weights, groups, chunks, gathers)


def _grouped(x: torch.Tensor, groups: list[Group]) -> list[torch.Tensor]:
    """[heads, rows, width] as a batch of chunks for each group, without a copy: [count, heads, length, width]."""
    pieces = [x] if len(groups) == 1 else x.split([count * length for count, length in groups], dim=1)
    return [piece.unflatten(1, group).transpose(0, 1) for piece, group in zip(pieces, groups, strict=True)]


def _in_order(weights: list[torch.Tensor], groups: list[Group], chunks: Chunks, gathers: bool) -> list[torch.Tensor]:
    """The weights of each chunk, as a batch of one."""
    each = [one for many in weights for one in many.split(1)]
    if not gathers:
        return each
    queues: dict[int, Iterator[torch.Tensor]] = {}
    for length in dict.fromkeys(chunks.lengths):
        own = [
            one for (one, n) in zip(each, [n for count, n in groups for _ in range(count)], strict=True) if n == length
        ]
        queues[length] = iter(own)
    return [next(queues[length]) for length in chunks.lengths]


def _of_each(weights: Any, chunks: Chunks) -> list[Any]:
    return [None] * len(chunks.lengths) if weights is None else weights
