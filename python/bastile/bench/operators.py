"""Each operator's inputs for a case, and the least that any program must move or compute for it.

Values are random, of the sizes that training sees: zeros can run faster than real data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bastile.bench import mlp, moe
from bastile.bench.cases import Case

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Cost:
    """The limit of a case: `moved` bytes at the speed of a device copy (read plus written), or the operator's matrix
    products, `flops` of them, run alone by the framework on the same operands."""

    moved: int = 0
    flops: int = 0


@dataclass(frozen=True)
class Random:
    """Makes normal numbers of the case's type."""

    dtype: torch.dtype
    device: torch.device

    def __call__(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, device=self.device) * scale).to(self.dtype)

    def weight(self, size: int) -> torch.Tensor:
        """Of a norm: near one."""
        return 1 + self(size, scale=0.1)


@dataclass(frozen=True)
class Operator:
    #: Inputs, and the gradients of the outputs as "upstream 0", "upstream 1", ...
    inputs: Callable[[Case, Random], Tensors]
    arguments: tuple[str, ...]  #: the inputs that contenders are called with, in this order
    leaves: tuple[str, ...]  #: those that get a gradient
    #: Elements read and written, or operations, for each one of `size`: forward; forward and backward.
    times: tuple[int, int]
    model: str  #: the same in words
    size: Callable[[Case], int] = lambda case: math.prod(case.shape)
    #: Where the limit is in products: a call that runs those alone, on the operands of the given inputs.
    products: Callable[[Case, Tensors], Callable[[Tensors], tuple[torch.Tensor, ...]]] | None = None

    def cost(self, case: Case, itemsize: int) -> Cost:
        work = self.times[case.backward] * self.size(case)
        return Cost(flops=work) if self.products else Cost(moved=work * itemsize)


# ---- norms, swiglu ---------------------------------------------------------------------------------------------------


def _rows(*names: str) -> Callable[[Case, Random], Tensors]:
    """Tensors of the case's shape."""
    return lambda case, random: {name: random(*case.shape) for name in names}


def _norm_inputs(case: Case, random: Random) -> Tensors:
    return {"weight": random.weight(case.shape[-1]), **_rows("x", "upstream 0")(case, random)}


def _add_norm_inputs(case: Case, random: Random) -> Tensors:
    return {**_norm_inputs(case, random), **_rows("residual", "upstream 1")(case, random)}


def _gated_norm_inputs(case: Case, random: Random) -> Tensors:
    return {**_norm_inputs(case, random), **_rows("gate")(case, random)}


def _low_rank_inputs(case: Case, random: Random) -> Tensors:
    rows, columns, rank = case.shape
    return {"dy": random(rows, columns), "thin": random(rows, rank), "b": random(columns, rank)}


# ---- rope ------------------------------------------------------------------------------------------------------------


def rotary_tables(tokens: int, dim: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [1, tokens, dim] as Transformers makes them for a batch of one."""
    frequencies = 1.0 / 1e6 ** (torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)
    angles = torch.arange(tokens, device=device, dtype=torch.float32)[:, None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)[None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rope_inputs(case: Case, random: Random) -> Tensors:
    """q and k as projections leave them, [1, tokens, heads, dim]; rotary code sees them transposed, and so are the
    gradients that attention hands back."""
    tokens, q_heads, k_heads, dim = case.shape
    q, k = (random(1, tokens, heads, dim) for heads in (q_heads, k_heads))
    dq, dk = (random(1, tokens, heads, dim).transpose(1, 2) for heads in (q_heads, k_heads))
    cos, sin = rotary_tables(tokens, dim, random.dtype, random.device)
    return {"q": q, "k": k, "cos": cos, "sin": sin, "upstream 0": dq, "upstream 1": dk}


def _qk_norm_rope_inputs(case: Case, random: Random) -> Tensors:
    weights = {name: random.weight(case.shape[-1]) for name in ("q_weight", "k_weight")}
    return _rope_inputs(case, random) | weights


def _heads(case: Case) -> int:
    """Elements of q and k."""
    tokens, q_heads, k_heads, dim = case.shape
    return tokens * (q_heads + k_heads) * dim


# ---- linear attention ------------------------------------------------------------------------------------------------


def _conv_inputs(case: Case, random: Random) -> Tensors:
    """x as a projection leaves it, [1, tokens, channels]; the convolution sees it transposed, and what follows it the
    transpose of its result."""
    tokens, channels = case.shape
    return {name: random(1, tokens, channels) for name in ("x", "upstream 0")} | {"weight": random(channels, 4)}


def _delta_inputs(case: Case, random: Random) -> Tensors:
    """Decays of which some reach far back, in float32 as models have them."""
    batch, tokens, keys, values, key, value = case.shape
    rows = {name: random(batch, tokens, keys, key) for name in ("q", "k")}
    rows |= {name: random(batch, tokens, values, value) for name in ("v", "upstream 0")}
    decays = -0.1 * torch.randn(batch, tokens, values, device=random.device).abs()
    return rows | {"g": decays, "beta": random(batch, tokens, values).sigmoid()}


def _delta_elements(case: Case) -> int:
    batch, tokens, keys, values, key, value = case.shape
    of_keys, of_values = (6, 5) if case.backward else (2, 2)
    return batch * tokens * (of_keys * keys * key + of_values * values * value)


# ---- losses ----------------------------------------------------------------------------------------------------------


def _labels(case: Case, device: torch.device) -> Tensors:
    target = torch.randint(0, case.shape[-1], case.shape[:1], device=device)
    target.masked_fill_(torch.rand(target.shape, device=device) < case.ignored, -100)
    return {"target": target, "upstream 0": torch.ones((), device=device)}


def _loss_inputs(case: Case, random: Random) -> Tensors:
    return {"logits": random(*case.shape, scale=2.0), **_labels(case, random.device)}


def _linear_loss_inputs(case: Case, random: Random) -> Tensors:
    rows, hidden, vocabulary = case.shape
    weight = random(vocabulary, hidden, scale=0.02)
    return {"hidden": random(rows, hidden), "weight": weight, **_labels(case, random.device)}


def _log_prob_inputs(case: Case, random: Random) -> Tensors:
    """Every row has an upstream gradient of its own."""
    upstream = torch.randn(case.shape[0], device=random.device)
    return {**_linear_loss_inputs(case, random), "upstream 0": upstream}


def _divergence_inputs(case: Case, random: Random) -> Tensors:
    """The sum over the rows, as trainers have it, has the same upstream gradient in each of them."""
    rows, hidden, vocabulary = case.shape
    own = {name: t for name, t in _linear_loss_inputs(case, random).items() if name != "target"}
    teacher = {"teacher_hidden": random(rows, hidden), "teacher_weight": random(vocabulary, hidden, scale=0.02)}
    return {**own, **teacher}


def _divergence_products(case: Case, tensors: Tensors) -> Callable[[Tensors], tuple[torch.Tensor, ...]]:
    """The four products alone (forward alone: two), the latter ones of the true gradient of the logits."""
    hidden, weight, *of_teacher = (
        tensors[name].detach() for name in ("hidden", "weight", "teacher_hidden", "teacher_weight")
    )
    logits, other = hidden @ weight.t(), of_teacher[0] @ of_teacher[1].t()
    if case.backward:
        gradient = torch.empty_like(logits)
        for rows in range(0, len(logits), 512):
            part = slice(rows, rows + 512)
            gradient[part] = logits[part].float().softmax(-1) - other[part].float().softmax(-1)
        dhidden, dweight = torch.empty_like(hidden), torch.empty_like(weight)

    def run(t: Tensors) -> tuple[torch.Tensor, ...]:
        hidden, weight = t["hidden"].detach(), t["weight"].detach()
        torch.mm(hidden, weight.t(), out=logits)
        torch.mm(t["teacher_hidden"].detach(), t["teacher_weight"].detach().t(), out=other)
        if not case.backward:
            return (logits,)
        torch.mm(gradient, weight, out=dhidden)
        torch.mm(gradient.t(), hidden, out=dweight)
        return dhidden, dweight

    return run


def _linear_loss_products(case: Case, tensors: Tensors) -> Callable[[Tensors], tuple[torch.Tensor, ...]]:
    """The three products alone, as the framework runs them (forward alone: one).

    Their second operands are the true gradient of the logits, not random numbers: power limits products, and power
    depends on the values."""
    hidden, weight, target = (tensors[name].detach() for name in ("hidden", "weight", "target"))
    logits = hidden @ weight.t()
    if not case.backward:
        return lambda t: (torch.mm(t["hidden"].detach(), t["weight"].detach().t(), out=logits),)
    kept = target != -100
    gradient = torch.empty_like(logits)
    for rows in range(0, len(logits), 512):
        part = slice(rows, rows + 512)
        p = logits[part].float().softmax(-1)
        p.scatter_add_(1, target[part].clamp(min=0)[:, None], p.new_full((len(p), 1), -1.0))
        gradient[part] = p * (kept[part, None] / kept.sum())
    dhidden, dweight = torch.empty_like(hidden), torch.empty_like(weight)

    def run(t: Tensors) -> tuple[torch.Tensor, ...]:
        hidden, weight = t["hidden"].detach(), t["weight"].detach()
        torch.mm(hidden, weight.t(), out=logits)
        torch.mm(gradient, weight, out=dhidden)
        torch.mm(gradient.t(), hidden, out=dweight)
        return ()

    return run


# ---- the optimiser ---------------------------------------------------------------------------------------------------


def _adamw_inputs(case: Case, random: Random) -> Tensors:
    """After some steps of it."""
    found = _rows("parameter", "gradient", "exp_avg", "exp_avg_sq")(case, random)
    found["exp_avg_sq"].square_()
    steps = torch.full((case.shape[0],), 9.0, device=found["parameter"].device)
    return {**found, "steps": steps}


_GATED_NORM = Operator(
    _gated_norm_inputs,
    arguments=("x", "gate", "weight"),
    leaves=("x", "gate", "weight"),
    times=(3, 8),
    model="x and gate read, y written; backward: x, gate and dy read, dx and dgate written",
)

OPERATORS = {
    "rms_norm": Operator(
        _norm_inputs,
        arguments=("x", "weight"),
        leaves=("x", "weight"),
        times=(2, 5),
        model="x read, y written; backward: x and dy read, dx written",
    ),
    "add_rms_norm": Operator(
        _add_norm_inputs,
        arguments=("x", "residual", "weight"),
        leaves=("x", "residual", "weight"),
        times=(4, 8),
        model="x and residual read, sum and y written; backward: sum, dsum and dy read, one gradient for both written",
    ),
    "gated_rms_norm": _GATED_NORM,
    "gate_first_rms_norm": _GATED_NORM,
    "swiglu": Operator(
        _rows("a", "b", "upstream 0"),
        arguments=("a", "b"),
        leaves=("a", "b"),
        times=(3, 8),
        model="a and b read, y written; backward: a, b and dy read, da and db written",
    ),
    "gated_mlp": Operator(
        mlp.inputs,
        arguments=mlp.ARGUMENTS,
        leaves=mlp.ARGUMENTS,
        times=(6, 18),
        model="three products, nine with their gradients, as the framework runs them",
        products=mlp.products,
    ),
    "rope": Operator(
        _rope_inputs,
        arguments=("q", "k", "cos", "sin"),
        leaves=("q", "k"),
        times=(2, 4),
        model="q and k read and written; backward: their gradients read and written",
        size=_heads,
    ),
    "qk_norm_rope": Operator(
        _qk_norm_rope_inputs,
        arguments=("q", "k", "q_weight", "k_weight", "cos", "sin"),
        leaves=("q", "k", "q_weight", "k_weight"),
        times=(2, 5),
        model="q and k read and written once; backward: q, k and the gradients read, dq and dk written",
        size=_heads,
    ),
    "causal_conv1d": Operator(
        _conv_inputs,
        arguments=("x", "weight"),
        leaves=("x", "weight"),
        times=(2, 5),
        model="x read, y written; backward: x and dy read, dx written",
    ),
    "gated_delta_rule": Operator(
        _delta_inputs,
        arguments=("q", "k", "v", "g", "beta"),
        leaves=("q", "k", "v", "g", "beta"),
        times=(1, 1),
        model="q, k and v read, y written; backward: q, k, v and dy read, dq, dk and dv written",
        size=_delta_elements,
    ),
    "cross_entropy": Operator(
        _loss_inputs,
        arguments=("logits", "target"),
        leaves=("logits",),
        times=(1, 2),
        model="logits read once, their gradient written once",
    ),
    "fused_linear_cross_entropy": Operator(
        _linear_loss_inputs,
        arguments=("hidden", "weight", "target"),
        leaves=("hidden", "weight"),
        times=(2, 6),
        model="three products of 2 x rows x hidden x vocabulary each (forward alone: one)",
        products=_linear_loss_products,
    ),
    "linear_logprobs": Operator(
        _log_prob_inputs,
        arguments=("hidden", "weight", "target"),
        leaves=("hidden", "weight"),
        times=(2, 6),
        model="as fused_linear_cross_entropy",
        products=_linear_loss_products,
    ),
    "linear_divergence": Operator(
        _divergence_inputs,
        arguments=("hidden", "weight", "teacher_hidden", "teacher_weight"),
        leaves=("hidden", "weight"),
        times=(4, 8),
        model="four products of 2 x rows x hidden x vocabulary each (forward alone: two)",
        products=_divergence_products,
    ),
    "moe_experts": Operator(
        moe.inputs,
        arguments=("hidden", "indices", "weights", "gate_up", "gate_up_bias", "down", "down_bias"),
        leaves=("hidden", "weights", "gate_up", "gate_up_bias", "down", "down_bias"),
        times=(6, 18),
        model="two products of tokens x choices rows, six with their gradients, as the framework runs them in groups",
        size=lambda case: math.prod(case.shape[:3]) * case.shape[4],
        products=moe.products,
    ),
    "swiglu_experts": Operator(
        moe.swiglu_inputs,
        arguments=("hidden", "indices", "weights", "gate_up", "down"),
        leaves=("hidden", "weights", "gate_up", "down"),
        times=(6, 18),
        model="as moe_experts",
        size=lambda case: math.prod(case.shape[:3]) * case.shape[4],
        products=moe.products,
    ),
    "adamw": Operator(
        _adamw_inputs,
        arguments=("parameter", "gradient", "exp_avg", "exp_avg_sq", "steps"),
        leaves=(),
        times=(7, 7),
        model="parameter and both moments read and written, gradient read",
    ),
    "grad_norm": Operator(
        _rows("gradient"),
        arguments=("gradient",),
        leaves=(),
        times=(1, 1),
        model="gradients read",
    ),
    "dropout": Operator(
        _rows("x", "upstream 0"),
        arguments=("x",),
        leaves=("x",),
        times=(2, 4),
        model="x read, y written; backward: dy read, dx written",
    ),
    "low_rank": Operator(
        _low_rank_inputs,
        arguments=("dy", "thin", "b"),
        leaves=(),
        times=(1, 1),
        model="dy read",
        size=lambda case: math.prod(case.shape[:2]),
    ),
}
