"""Which calls of the C operators a training step of a model makes: what compiling its kernels ahead has to repeat.

Kernels are specialised by the widths of rows, by types, and by the gradients that are wanted, but not by the number of
rows: a few do. Generation makes the forward calls of the same list. Which gradients are wanted follows from what is
trained, layer by layer: with adapters, the first layer wants fewer than those behind it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import nn

from bastile.models import experts
from bastile.models.anatomy import Anatomy
from bastile.ops._common import FLOATS
from bastile.ops._glu import ACTIVATION_OF_CONFIG, ALPHA, UNITS
from bastile.ops._heads import LAYOUTS
from bastile.ops._modules import plain_linear
from bastile.ops.cross_entropy import REDUCTION
from bastile.ops.fused_linear_cross_entropy import padded
from bastile.ops.rms_norm import _CASTING

_ROWS = 8
#: As many rows as make nine chunks of 64: beyond eight, the fused loss adds up its gradients in float32.
_MANY_ROWS = 9 * 64
#: The fused loss's kernels know nothing of the width of its input, and a narrow head takes no memory.
_NARROW = 8
#: The fused loss without options: ignore_index, reduction, label_smoothing, softcap, logit_scale, lse_square_scale.
_LOSS = (-100, REDUCTION["mean"], 0.0, 0.0, 1.0, 0.0)
_EPS = 1e-6


@dataclass(frozen=True)
class Zeros:
    """Stands for a tensor among the arguments of a call."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    heads_first: bool = False  # in memory, of a shape [B, S, heads, D]
    value: int = 0  # where zeros mean nothing: another number, the same everywhere
    columns: int | None = None  # of a matrix: only the first ones

    def make(self, device: torch.device) -> torch.Tensor:
        if not self.heads_first:
            whole = torch.full(self.shape, self.value, dtype=self.dtype, device=device)
            return whole if self.columns is None else whole[:, : self.columns]
        batch, positions, heads, dim = self.shape
        return torch.zeros((batch, heads, positions, dim), dtype=self.dtype, device=device).transpose(1, 2)


@dataclass(frozen=True)
class Call:
    """A call of torch.ops.bastile.<operator>; two that are equal need the same kernels."""

    operator: str
    arguments: tuple[Any, ...]
    title: str = field(compare=False)  # the operator as users know it, and its width

    def run(self, device: torch.device) -> None:
        given = (a.make(device) if isinstance(a, Zeros) else a for a in self.arguments)
        getattr(torch.ops.bastile, self.operator).default(*given)


@dataclass(frozen=True)
class Types:
    stream: torch.dtype  # of the embeddings, and so of what runs from layer to layer
    weights: torch.dtype | None = None  # of the norms' weights; None: their own
    autocast: torch.dtype | None = None  # of products; None: that of the stream

    @property
    def product(self) -> torch.dtype:
        return self.autocast or self.stream


def calls(
    config: Any, family: Anatomy, operators: Iterable[str], types: Types, model: nn.Module | None = None
) -> list[Call]:
    """Each call once, the loss's first, for they take longest. model: the Transformers model, which tells what of it is
    trained; None: all is."""
    step = _Step(config, family, frozenset(operators), types)
    return list(dict.fromkeys(step.calls(_Part(model, is_assumed=model is None))))[::-1]


class _Part:
    """A module or parameter of a model. Where only the model's config is known, every part is there and trained."""

    def __init__(self, part: Any, is_assumed: bool) -> None:
        self._part = part
        self._is_assumed = is_assumed

    def __getitem__(self, name: str) -> _Part:
        return _Part(getattr(self._part, name, None), self._is_assumed)

    def __iter__(self) -> Iterator[_Part]:
        """The layers of a list; one, where they are assumed."""
        if self._is_assumed:
            return iter([self])
        return iter([_Part(layer, False) for layer in self._part or ()])

    @property
    def is_there(self) -> bool:
        return self._is_assumed or self._part is not None

    @property
    def is_trained(self) -> bool:
        if self._is_assumed or self._part is None:
            return self._is_assumed
        parameters = self._part.parameters() if isinstance(self._part, nn.Module) else [self._part]
        return any(parameter.requires_grad for parameter in parameters)

    @property
    def is_known_linear(self) -> bool:
        """Whether a node may serve it: see models/adapters.py."""
        return self._is_assumed or type(self._part) is nn.Linear or self.has_adapter

    @property
    def has_adapter(self) -> bool:
        return hasattr(self._part, "lora_A")

    @property
    def is_plain_linear(self) -> bool:
        return self._is_assumed or plain_linear(self._part)

    @property
    def dtype(self) -> torch.dtype | None:
        return getattr(self._part, "dtype", None)


def _promoted(*dtypes: torch.dtype) -> torch.dtype:
    return reduce(torch.promote_types, dtypes)


class _Step:
    def __init__(self, config: Any, family: Anatomy, operators: frozenset[str], types: Types) -> None:
        self.config = config
        self.family = family
        self.operators = operators
        self.types = types
        self.casting = _CASTING[family.norm_casting]
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    def calls(self, model: _Part) -> Iterator[Call]:
        """From the embeddings to the loss. `x` says whether a gradient is wanted of what runs from layer to layer,
        `stream` its type."""
        backbone = model[self.family.backbone] if model[self.family.backbone].is_there else model
        hidden, product, parts = self.config.hidden_size, self.types.product, self.family.layer
        sums = "add_rms_norm" in self.operators
        stream = self.types.stream
        # Adapters and checkpointing may ask for the embeddings' gradient by a hook.
        x = backbone["embed_tokens"].is_trained or model["_require_grads_hook"].is_there
        for layer in backbone["layers"]:
            norm, attention = layer[parts["input_norm"]], layer[parts["attention"]]
            yield from self._norm(hidden, stream, norm, x, sums=sums)
            normed = x or norm.is_trained
            yield from self._heads(attention, stream, normed)
            x = normed or attention.is_trained
            wide = _promoted(stream, product)
            # Torch adds terms of two types, neither of which is that of their sum.
            adds = None if wide not in (stream, product) else product if stream is wide else stream
            norm, mlp, stream = layer[parts["attention_norm"]], layer[parts["mlp"]], wide
            yield from self._norm(hidden, stream, norm, x, sums=sums, adds=adds if sums else None)
            normed = x or norm.is_trained
            yield from self._swiglu(mlp, normed)
            yield from self._experts(mlp, normed)
            x = normed or mlp.is_trained
        norm = backbone["norm"]
        yield from self._norm(hidden, stream, norm, x)
        yield from self._loss(model[self.family.head], x or norm.is_trained)

    def _norm(
        self,
        width: int,
        x_type: torch.dtype,
        module: _Part,
        x: bool,
        sums: bool = False,
        adds: torch.dtype | None = None,
    ) -> Iterator[Call]:
        """x: whether its gradient is wanted. sums: add_rms_norm, whose backward pass adds the gradient of the sum.
        adds: the type of what is added, where it also makes the sum."""
        if not sums and "rms_norm" not in self.operators:
            return
        title = f"{'add_rms_norm' if sums else 'rms_norm'} {width}"
        weight_type = self._weight_type(module)
        rows, weight = Zeros((_ROWS, width), x_type), Zeros((width,), weight_type)
        dy = Zeros((_ROWS, width), self._normed_type(x_type, weight_type))
        rstd = Zeros((_ROWS,), torch.float32)
        wanted = self.casting, x, module.is_trained
        # Also where the sum is made with it: recomputation makes the norm alone again.
        yield Call("rms_norm_forward", (rows, weight, _EPS, self.casting), title)
        if adds is not None:
            yield Call("add_rms_norm_forward", (rows, Zeros(rows.shape, adds), weight, _EPS, self.casting), title)
        if sums and x:
            yield Call("add_rms_norm_backward", (dy, rows, rows, weight, rstd, *wanted), title)
        elif x or module.is_trained:
            yield Call("rms_norm_backward", (dy, rows, weight, rstd, *wanted), title)

    def _head_norm_backward(self, x_type: torch.dtype, module: _Part, x: bool) -> Iterator[Call]:
        """The original rotary code hands back gradients that lie heads first, and those of a single sequence are read
        as they lie."""
        if "rms_norm" not in self.operators or not (x or module.is_trained):
            return
        shape, weight_type = (1, _ROWS, self.config.num_attention_heads, self.head_dim), self._weight_type(module)
        rows, dy = Zeros(shape, x_type), Zeros(shape, self._normed_type(x_type, weight_type), heads_first=True)
        weight, rstd = Zeros((self.head_dim,), weight_type), Zeros((shape[1] * shape[2],), torch.float32)
        wanted = self.casting, x, module.is_trained
        yield Call("rms_norm_backward", (dy, rows, weight, rstd, *wanted), f"rms_norm {self.head_dim}")

    @property
    def _pairs(self) -> tuple[int, bool, bool]:
        """layout, half_tables, keep_type"""
        read_as = self.family.rotary
        return LAYOUTS.index(read_as["layout"]), read_as["half_tables"], read_as["keep_type"]

    def _rotary_tables(self, stream: torch.dtype) -> list[Zeros]:
        return [Zeros((1, _ROWS, self.head_dim // (2 if self.family.rotary["half_tables"] else 1)), stream)] * 2

    def _heads(self, attention: _Part, stream: torch.dtype, x: bool) -> Iterator[Call]:
        """Queries and keys between their projections and the attention. x: whether a gradient is wanted of what is
        projected. Transformers gives the rotary tables the type of the stream."""
        family, dim, product = self.family, self.head_dim, self.types.product
        q, k = (x or attention[name].is_trained for name in ("q_proj", "k_proj"))
        in_type = product
        if family.attention:
            norms = attention[family.attention["q_norm"]], attention[family.attention["k_norm"]]
            if "qk_norm_rope" in self.operators:
                yield from self._qk_norm_rope(norms, stream, q, k)
                return
            for norm, wanted in zip(norms, (q, k), strict=True):
                yield from self._norm(dim, product, norm, wanted)
                if "rope" not in self.operators:
                    yield from self._head_norm_backward(product, norm, wanted)
            q, k = q or norms[0].is_trained, k or norms[1].is_trained
            in_type = self._normed_type(product, self._weight_type(norms[0]))
        if "rope" not in self.operators:
            return
        title = f"rope {dim}"
        heads, tables = self._head_tensors(in_type), self._rotary_tables(stream)
        turned = self._head_tensors(_promoted(in_type, stream))
        yield Call("rope_forward", (*heads, *tables, *self._pairs, False, False), title)
        if q or k:
            gradients = [t for t, is_wanted in zip(turned, (q, k), strict=True) if is_wanted]
            first, second = gradients if q and k else (gradients[0], None)
            options = *self._pairs, False, False, FLOATS.index(in_type)
            yield Call("rope_backward", (first, second, *tables, *options), title)

    def _qk_norm_rope(self, norms: tuple[_Part, _Part], stream: torch.dtype, q: bool, k: bool) -> Iterator[Call]:
        dim, product = self.head_dim, self.types.product
        title = f"qk_norm_rope {dim}"
        weight_type = self._weight_type(norms[0])
        weights, tables = [Zeros((dim,), weight_type)] * 2, self._rotary_tables(stream)
        inputs = *self._head_tensors(product), *weights, *tables
        options = _EPS, self.casting, *self._pairs, False, False
        yield Call("qk_norm_rope_forward", (*inputs, *options), title)
        q_weight, k_weight = (norm.is_trained for norm in norms)
        wanted = q, k, q_weight, k_weight
        if any(wanted):
            dq, dk = self._head_tensors(_promoted(self._normed_type(product, weight_type), stream))
            gradients = dq if q or q_weight else None, dk if k or k_weight else None
            yield Call("qk_norm_rope_backward", (*gradients, *inputs, *options, *wanted), title)

    def _swiglu(self, mlp: _Part, x: bool) -> Iterator[Call]:
        activation = ACTIVATION_OF_CONFIG.get(
            getattr(self.config, "hidden_act", getattr(self.config, "hidden_activation", "silu"))
        )
        if "swiglu" not in self.operators or activation is None:
            return
        width = self.config.intermediate_size
        title = f"swiglu {width}"
        rows = Zeros((_ROWS, width), self.types.product)
        parts = self.family.mlp
        both = parts.get("gate_up") or parts.get("up_gate", "")  # where they are one projection
        projections = gate, up, down = [mlp[n] for n in (parts.get("gate", both), parts.get("up", both), parts["down"])]
        if not all(p.is_there for p in projections):  # experts in its place
            return
        name, kind = ("swiglu", ()) if activation == "silu" else ("glu", (UNITS.index(activation), ALPHA, math.inf))
        yield Call(f"{name}_forward", (*kind, rows, rows), title)
        wanted = x or gate.is_trained, x or up.is_trained
        # Weights that are shards now are whole when the layer runs: then both ways are made ready.
        is_plain = all(p.is_plain_linear for p in projections)
        # One node makes the activation again where its reader's gradients need it; of layers with biases or adapters
        # also where nothing before the activation has a gradient.
        is_read = down.is_trained or down.has_adapter
        is_fused = not both and is_read and all(p.is_known_linear for p in projections)
        if is_fused and (any(wanted) or not is_plain):
            yield Call(f"{name}_backward_with_y", (*kind, rows, rows, rows, *wanted), title)
        if any(wanted) and not (is_fused and is_plain):
            yield Call(f"{name}_backward", (*kind, rows, rows, rows, *wanted), title)

    def _experts(self, mlp: _Part, x: bool) -> Iterator[Call]:
        """What surrounds the grouped products of moe_experts, which have their weights' type under autocast too."""
        config, form, given = self.config, self.family.experts, mlp["experts"]
        activation = form.get("activation") or ACTIVATION_OF_CONFIG.get(getattr(config, "hidden_act", "silu"))
        counts = experts.expert_counts(config)
        if "moe_experts" not in self.operators or not given.is_there or activation is None or len(counts) != 1:
            return
        gate_up, gate_up_bias, down, down_bias = (given[name] for name in experts.PARAMETERS)
        dtype = gate_up.dtype or self.types.stream
        width, inner = config.hidden_size, getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        (count,), choices = counts, config.num_experts_per_tok
        title = f"moe_experts {width}"
        pairs = _ROWS * choices
        tokens, rows, gated = (Zeros(s, dtype) for s in ((_ROWS, width), (pairs, width), (pairs, inner)))
        h, h_bias, bias = Zeros((pairs, 2 * inner), dtype), None, None
        if form["has_bias"]:
            h_bias, bias = Zeros((count, 2 * inner), dtype), Zeros((count, width), dtype)
        indices, position = Zeros((_ROWS, choices), torch.int64), Zeros((_ROWS, choices), torch.int32)
        order = places = Zeros((pairs,), torch.int32)
        ends = Zeros((count,), torch.int32, value=pairs)
        weights, dots = Zeros((_ROWS, choices), self.types.product), Zeros((pairs,), torch.float32)
        # alpha and limit, where there is one, are arguments of the kernels.
        unit = UNITS.index(activation), form["interleaved"], 1.0, 1.0 if form["limit"] else math.inf
        want_gate_up, want_down = gate_up.is_trained, down.is_trained
        want_h_bias, want_bias = (bias is not None and part.is_trained for part in (gate_up_bias, down_bias))
        want_weights = x or mlp["router"].is_trained or mlp["gate"].is_trained
        want_h = x or want_gate_up or want_h_bias

        yield Call("moe_sort", (indices, count), title)
        yield Call("moe_gather", (tokens, places), title)
        yield Call("moe_glu_forward", (h, h_bias, ends, *unit), title)
        yield Call("moe_combine_forward", (rows, position, weights, bias, indices), title)
        has_dots = bias is not None and (want_weights or want_bias)
        if has_dots:
            arguments = tokens, order, ends, weights, bias, want_weights, want_bias
            yield Call("moe_combine_backward", arguments, title)
        if want_h or want_weights or want_down:
            inputs = gated, h, h_bias, ends, order, weights, dots if has_dots and want_weights else None
            yield Call("moe_glu_backward", (*inputs, *unit, want_h, want_down, want_weights, want_h_bias), title)
        if x:
            yield Call("moe_combine_forward", (rows, position, None, None, None), title)

    def _loss(self, head: _Part, x: bool) -> Iterator[Call]:
        """Where the gradients are made depends on the number of rows and the type: see _LinearCrossEntropy. Each way is
        taken once."""
        wanted = x, head["weight"].is_trained, head["bias"].is_trained and head["bias"].dtype is not None
        if "fused_linear_cross_entropy" not in self.operators or not head.is_there or not any(wanted):
            return
        vocabulary, dtype = self.config.vocab_size, self.types.product
        title = f"fused_linear_cross_entropy {vocabulary}"
        weight, bias = Zeros((vocabulary, _NARROW), dtype), None
        if head["bias"].dtype is not None:
            bias = Zeros((vocabulary,), dtype)
        upstream, nothing = Zeros((), torch.float32), (False, False, False)

        def inputs(rows: int) -> tuple[Any, ...]:
            return Zeros((rows, _NARROW), dtype), weight, Zeros((rows,), torch.int64), bias, None, None

        def lse(rows: int) -> Zeros:
            return Zeros((rows, 2), torch.float32)

        few, many = inputs(_ROWS), inputs(_MANY_ROWS)
        kept = Zeros((_ROWS, padded(vocabulary)), dtype, columns=vocabulary)
        yield Call("linear_cross_entropy_forward", (*few, *_LOSS, 0, True, *nothing), title)
        yield Call("linear_cross_entropy_backward", (upstream, *few, lse(_ROWS), kept, *_LOSS, 0, *wanted), title)
        smallest_chunks = 1  # bytes
        if dtype is torch.float16:
            options = *_LOSS, smallest_chunks
            yield Call("linear_cross_entropy_forward", (*many, *options, False, *nothing), title)
            yield Call(
                "linear_cross_entropy_backward", (upstream, *many, lse(_MANY_ROWS), None, *options, *wanted), title
            )
        else:
            yield Call("linear_cross_entropy_forward", (*many, *_LOSS, smallest_chunks, False, *wanted), title)
            yield Call("scale_", (Zeros((_ROWS, _NARROW), dtype), upstream), title)

    def _head_tensors(self, dtype: torch.dtype) -> tuple[Zeros, Zeros]:
        counts = self.config.num_attention_heads, self.config.num_key_value_heads
        q, k = (Zeros((1, count, _ROWS, self.head_dim), dtype) for count in counts)
        return q, k

    def _weight_type(self, norm: _Part) -> torch.dtype:
        return self.types.weights or norm["weight"].dtype or self.types.stream

    def _normed_type(self, x: torch.dtype, weight: torch.dtype) -> torch.dtype:
        return _promoted(x, weight) if self.family.norm_casting == "llama" else x
