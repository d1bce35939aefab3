"""The output head's losses with its weight parted over the vocabulary, on three processes: the results and gradients of
one process. Three, for one part is neither the first nor the last."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import distributed

from bastile.ops import _valid_rows
from bastile.ops.fused_linear_cross_entropy import ValidCount, fused_linear_cross_entropy, set_logits_memory
from bastile.ops.linear_logprobs import OUTPUTS, linear_logprobs
from bastile.ops.vocabulary_parallel import VocabularyShard
from oracle import EMULATED, Case, assert_no_worse, assert_same_bits, numbers, random_tensor
from processes import on_processes

PROCESSES = 3
F = torch.nn.functional
_folder = ""


def process(rank: int, body: Callable[[int], None]) -> None:
    numbers.seed(0)
    body(rank)
    distributed.barrier()


def run(body: Callable[[int], None], folder: Path) -> None:
    on_processes(PROCESSES, folder, process, body)


class Whole(torch.autograd.Function):
    """A tensor of which each process uses a part; its gradient is put together."""

    @staticmethod
    def forward(ctx, t):
        return t.view_as(t)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        distributed.all_reduce(gradient)
        return gradient


def mine(t: torch.Tensor | None, shard: VocabularyShard) -> torch.Tensor | None:
    each = -(-shard.vocabulary // PROCESSES)
    return None if t is None else Whole.apply(t)[shard.start : shard.start + each]


def parted(function: Callable, hidden, weight, target, bias=None, **options):
    shard = VocabularyShard.even(weight.shape[0])
    return function(hidden, mine(weight, shard), target, bias=mine(bias, shard), shard=shard, **options)


def inputs_of(tokens, vocabulary, width, dtype, bias=False):
    target = torch.arange(tokens) * 37 % vocabulary
    target[1::4] = -100
    inputs = {
        "hidden": random_tensor((tokens, width), dtype, "cpu"),
        "weight": random_tensor((vocabulary, width), dtype, "cpu", scale=width**-0.5),
    }
    if bias:
        inputs["bias"] = random_tensor((vocabulary,), dtype, "cpu")
    return inputs, target


# ---- against float64 -------------------------------------------------------------------------------------------------

TYPES = [torch.float32, torch.bfloat16] if EMULATED else [torch.float32, torch.bfloat16, torch.float16]
#: A vocabulary of unequal parts; one of equal parts, of whole vectors.
SIZES = [(13, 101, 16), (9, 192, 8)]
OPTIONS = [
    {},
    {"bias": True, "temperature": 0.7},
    {"softcap": 3.0, "logit_scale": -1.7, "temperature": 1.3, "bias": True},
]
LOSSES = [
    {},
    {"bias": True, "reduction": "sum", "softcap": 5.0, "logit_scale": 0.5},
    {"reduction": "none", "lse_square_scale": 0.1},
    {"num_items": 7, "lse_square_scale": 0.1},
    {"class_weight": True, "bias": True},
    {"class_weight": True, "reduction": "none"},
]


def yardstick(hidden, weight, target, bias=None, temperature=1.0, logit_scale=1.0, softcap=0.0, exact=False):
    z = F.linear(hidden, weight, bias)
    z = (z if exact else z.float()) * logit_scale
    z = (softcap * torch.tanh(z / softcap) if softcap else z) / temperature
    counts, log_p = target != -100, z.log_softmax(-1)
    found = log_p.gather(1, target.masked_fill(~counts, 0)[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    return tuple(t.masked_fill(~counts, 0) for t in (*found, z.logsumexp(-1)))


def loss_of(hidden, weight, target, bias=None, exact=False, **options):
    from bastile.ops.cross_entropy import reference

    z = F.linear(hidden, weight, bias)
    given = (options.get("class_weight"), options.get("num_items"), -100, options.get("reduction", "mean"), 0.0)
    shaped = (options.get("softcap", 0.0), options.get("logit_scale", 1.0), options.get("lse_square_scale", 0.0))
    return reference(z, target, *given, *shaped)


def judged(ours: Callable, stock: Callable, size: tuple[int, int, int], dtype: torch.dtype, **options) -> None:
    bias = options.pop("bias", False)
    inputs, target = inputs_of(*size, dtype, bias)

    def version(function, **more):
        return lambda hidden, weight, *rest: function(
            hidden, weight, rest[-1], bias=rest[0] if bias else None, **options, **more
        )

    # dhidden is summed from parts, each rounded to its type: so are the parts of Transformers' parallel heads.
    # Gradients of chunks are rounded before an upstream gradient multiplies them, dweight and dbias at each chunk.
    late = float(stock is loss_of and options.get("reduction") != "none")
    parts = {"dhidden": 2.0 + late, "dweight": 2 * late, "dbias": 2 * late}
    assert_no_worse(
        Case(
            version(ours), version(stock), version(stock, exact=True), inputs, {"target": target},
            independent=int((target != -100).sum()), terms={"output 0": 4.0, "output 1": 4.0}, extra_roundings=parts,
        )
    )  # fmt: skip


def log_probs_against_float64(rank: int) -> None:
    def ours(*args, **options):
        return parted(linear_logprobs, *args, outputs=("entropy", "lse"), **options)[:3]

    for dtype in TYPES:
        for size in SIZES:
            for options in OPTIONS:
                judged(ours, yardstick, size, dtype, **options)


def losses_against_float64(rank: int) -> None:
    def ours(*args, **options):
        return parted(fused_linear_cross_entropy, *args, **options)

    for budget in (None, 1e-6):  # the second: chunks of 64 rows
        set_logits_memory(budget)
        for dtype in TYPES:
            for options in LOSSES:
                size = SIZES[0] if budget is None else (70, *SIZES[0][1:])
                weights = torch.rand(size[1], generator=torch.Generator().manual_seed(1)) + 0.5
                given = {**options, "class_weight": weights} if "class_weight" in options else options
                judged(ours, loss_of, size, dtype, **given)


# ---- against one process ---------------------------------------------------------------------------------------------


def near(got: torch.Tensor, want: torch.Tensor, units: float = 8) -> None:
    """float32 to some units in the last place of the largest."""
    bound = units * torch.finfo(torch.float32).eps * float(want.detach().abs().max())
    assert float((got - want).detach().abs().max()) <= bound


def statistics_of_one_process(rank: int) -> None:
    inputs, target = inputs_of(40, 101, 16, torch.float32)
    hidden, weight = inputs.values()
    # Targets that are the largest: in each part, and equal to one in another part, before and behind it.
    for row, column in ((0, 3), (4, 50), (8, 100)):
        weight[column] = 9 * hidden[row] / hidden[row].square().sum().sqrt()
        target[row] = column
    weight[60] = weight[3]
    target[12], target[16] = 3, 60
    hidden[12] = hidden[16] = hidden[0]
    want = linear_logprobs(hidden, weight, target, outputs=OUTPUTS)
    got = parted(linear_logprobs, hidden, weight, target, outputs=OUTPUTS)
    assert want.is_top1[[0, 4, 8, 12, 16]].tolist() == [True, True, True, True, False]
    assert torch.equal(got.is_top1, want.is_top1)
    for name in ("log_probs", "entropy", "lse", "log_sum_sq_probs", "mean_logits"):
        near(getattr(got, name), getattr(want, name))


def all_targets_in_one_part(rank: int) -> None:
    """Also: the same numbers in all processes, ignore_index that is a number of a part's, and none that counts."""
    inputs, target = inputs_of(20, 30, 8, torch.float32)
    for labels, ignored in ((target % 10 + 20, 21), (target % 10, 3), (torch.full_like(target, 7), 7)):
        results = []
        for parts in (True, False):
            hidden, weight = (t.clone().requires_grad_() for t in inputs.values())
            call = parted if parts else lambda function, *args, **options: function(*args, **options)
            found = call(linear_logprobs, hidden, weight, labels, ignore_index=ignored, outputs=("entropy",))
            (found.log_probs * torch.arange(20) + found.entropy).sum().backward()
            results.append((found.log_probs, found.entropy, hidden.grad, weight.grad))
        for got, want in zip(*results, strict=True):
            near(got, want, 16)
        for t in results[0]:
            shared = t.detach().clone()
            distributed.broadcast(shared, 0)
            assert_same_bits(t.detach(), shared)


def small_losses_keep_their_digits(rank: int) -> None:
    """The target far above the others, in each part: a loss of 1e-26 to 1e-6 and its gradient, p - 1."""
    margins = torch.arange(1, 61, dtype=torch.float32)
    exact = torch.log1p(89 * torch.exp(-margins.double()))
    for dtype in (torch.float32, torch.bfloat16):
        for target in (5, 45, 89):
            weight = torch.zeros(90, 1, dtype=dtype)
            weight[target] = 1
            weight.requires_grad_()
            hidden, labels = margins[:, None].to(dtype), torch.full((60,), target)
            on_chip = 1e-6 + margins.double() * 2 * 2**-24 / math.log(2)
            bound = on_chip if EMULATED and dtype is not torch.float32 else 1e-6
            loss = parted(fused_linear_cross_entropy, hidden, weight, labels, reduction="none")
            assert (((loss.double() - exact) / exact).abs() <= bound).all()
            for row in (0, 30, 59):
                (gradient,) = torch.autograd.grad(loss[row], weight, retain_graph=True)
                want = -torch.expm1(-exact[row]) * -margins[row].double()
                unit = torch.finfo(dtype).eps if dtype is not torch.float32 else 0.0
                off = abs(gradient[target, 0].double() - want) / abs(want)
                assert off <= 1e-6 + margins[row] * 2**-22 + 2 * unit


def rows_are_left_out(rank: int) -> None:
    inputs, target = inputs_of(300, 40, 8, torch.float32)
    target[20:] = -100
    count = int((target != -100).sum())
    results = []
    for least, valid in (({}, None), ({"cpu": 256}, None), ({"cpu": 256}, count), ({"cpu": 256}, ValidCount(target))):
        _valid_rows.MIN_TOKENS = least
        for chunks in (False, True):
            set_logits_memory(1e-6 if chunks else None)
            hidden, weight = (t.clone().requires_grad_() for t in inputs.values())
            loss = parted(fused_linear_cross_entropy, hidden, weight, target, valid_rows=valid)
            loss.backward()
            found = parted(linear_logprobs, hidden.detach(), weight.detach(), target, valid_rows=valid)
            results.append((loss, hidden.grad, weight.grad, found.log_probs))
    for result in results[1:]:
        for got, want in zip(result, results[0], strict=True):
            near(got, want, 16)


def tensors_of_a_mesh(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (PROCESSES,))
    inputs, target = inputs_of(20, 31, 8, torch.float32, bias=True)
    leaves = [t.clone().requires_grad_() for t in inputs.values()]
    want = fused_linear_cross_entropy(leaves[0], leaves[1], target, bias=leaves[2])
    want.backward()
    hidden = inputs["hidden"].clone().requires_grad_()
    weight, bias = (
        torch.nn.Parameter(distribute_tensor(inputs[name], mesh, [Shard(0)])) for name in ("weight", "bias")
    )
    shard = VocabularyShard.of(weight)
    assert (shard.start, shard.vocabulary) == (11 * rank, 31)
    loss = fused_linear_cross_entropy(hidden, weight, target, bias=bias, shard=shard)
    loss.backward()
    near(loss, want)
    near(hidden.grad, leaves[0].grad)
    for parameter, leaf in ((weight, leaves[1]), (bias, leaves[2])):
        assert isinstance(parameter.grad, DTensor)
        near(parameter.grad.full_tensor(), leaf.grad)
    with pytest.raises(ValueError, match="one Shard"):
        VocabularyShard.of(distribute_tensor(inputs["weight"], mesh, [Replicate()]))


def bad_calls(rank: int) -> None:
    inputs, target = inputs_of(20, 31, 8, torch.float32)
    hidden, weight = inputs.values()
    items = torch.tensor([7])  # a number in a tensor of any rank
    assert parted(fused_linear_cross_entropy, hidden, weight, target, num_items=items).shape == ()
    with pytest.raises(ValueError, match="leave some of 3 processes nothing"):
        VocabularyShard.even(4)
    with pytest.raises(ValueError, match=r"label_smoothing is .* with a shard"):
        parted(fused_linear_cross_entropy, hidden, weight, target, label_smoothing=0.1)
    with pytest.raises(ValueError, match=r"class_weight has shape \[11\]"):
        parted(fused_linear_cross_entropy, hidden, weight, target, class_weight=torch.ones(11))
    with pytest.raises(TypeError, match=r"hidden is torch\.float64"):
        parted(linear_logprobs, hidden.double(), weight.double(), target)
    with pytest.raises(RuntimeError, match=r"target\[2\] is 31; 0 to 30"):
        parted(linear_logprobs, hidden, weight, torch.full((20,), 31).scatter(0, torch.tensor([0, 1]), 3))
    leaf = weight.clone().requires_grad_()
    loss = parted(fused_linear_cross_entropy, hidden, leaf, target)
    (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        gradient.sum().backward()


def float32_weights_under_autocast(rank: int) -> None:
    """The gradient of a float32 weight is float32, not rounded to autocast's type, and no further from float64 than one
    that is: of a sum in one chunk and in several, of losses a row, of log-probabilities. On a CPU, whose products of 16
    bits are rounded, several chunks alone show it."""
    inputs, target = inputs_of(200, 40, 16, torch.float32)
    lower = [t.bfloat16() for t in inputs.values()]
    wide = [t.double().requires_grad_() for t in lower]
    F.cross_entropy(F.linear(*wide), target, reduction="sum").backward()
    ways = [
        lambda *t: parted(fused_linear_cross_entropy, *t, reduction="sum"),
        lambda *t: parted(fused_linear_cross_entropy, *t, reduction="none").sum(),
        lambda *t: -parted(linear_logprobs, *t).log_probs.sum(),
    ]
    for budget in (None, 1e-6):
        set_logits_memory(budget)
        for way in ways:
            weight = inputs["weight"].clone().requires_grad_()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = way(inputs["hidden"], weight, target)
            loss.backward()
            rounded = lower[1].clone().requires_grad_()
            way(lower[0], rounded, target).backward()
            assert weight.grad.dtype is torch.float32
            errors = [float((w.grad - wide[1].grad).square().mean()) for w in (weight, rounded)]
            assert errors[0] <= errors[1]
            if EMULATED or budget:
                assert (weight.grad != weight.grad.bfloat16()).sum() > weight.numel() / 2


BODIES = [
    float32_weights_under_autocast,
    log_probs_against_float64,
    losses_against_float64,
    statistics_of_one_process,
    all_targets_in_one_part,
    small_losses_keep_their_digits,
    rows_are_left_out,
    tensors_of_a_mesh,
    bad_calls,
]


def everything(rank: int) -> None:
    for body in BODIES:
        numbers.seed(0)
        try:
            body(rank)
        except BaseException as error:
            error.add_note(f"in {body.__name__}, process {rank}") if hasattr(error, "add_note") else None
            raise
        set_logits_memory(None)
        _valid_rows.MIN_TOKENS = {"cuda": 2048, "cpu": 256}


def test_three_processes_are_one(tmp_path: Path) -> None:
    """All in processes that are started once: starting them takes longer than any of it."""
    run(everything, tmp_path)
