"""How operators are judged: against float64, no worse than the code they replace.

Both our result and stock's are compared with the same expression in float64 on the same (rounded) inputs.

`assert_no_worse_pooled` is the rule: the root mean square error of each output and gradient, over several draws, is at
most stock's. It allows luck alone, exp(2.5/sqrt(n)) for n errors, which is four standard deviations: 0.5 % at 262,144.
It has no floor and knows no extra roundings.

`assert_no_worse` is for any one shape, option and layout, of few numbers maybe. It finds what is wrong, not what is a
little less exact, for it also allows
- the luck of few numbers, by the same formula: 28 % at n = 100;
- a floor where stock happens to be exact: half a unit in the last place, and for float32 four units, for a sum of few
  terms in another order may be off by those where stock's is not;
- `terms`, where a result is a small difference of large terms, which float32 does not resolve;
- `extra_roundings` that an operator documents, in variances of one rounding: none by default;
- what an operator documents of products whose factors are cut to fewer bits than float32 has: `of_size`, a part of the
  result's size (the worst element: four times that of the largest), or `times_stock`, stock's errors so many times;
- for the worst single element twice stock's worst and two units in the last place more (float32: eight), because the
  maximum over few elements is a matter of luck. It is there for single wrong elements, which a mean hides.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from hypothesis import HealthCheck, register_random, settings

#: The emulated GPU runs kernels thread by thread, and compiles each first: these suites then keep to small shapes and
#: few examples.
EMULATED = os.environ.get("BASTILE_EMULATED") == "1"

#: float16 takes bfloat16's kernels but for conversions. The C fuzzer runs those on the emulated GPU.
DTYPES = [torch.float32, torch.bfloat16, *([] if EMULATED else [torch.float16])]

few_examples = settings(
    max_examples=int(os.environ.get("BASTILE_EXAMPLES", "5" if EMULATED else "40")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)


@contextmanager
def products_of_float32(precision: str) -> Iterator[None]:
    """As cuBLAS is to compute them: "ieee" or "tf32". By hand, for pytest's monkeypatch would delete the setting."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = precision
    try:
        yield
    finally:
        matmul.fp32_precision = before


def devices() -> list[str]:
    """The devices to test on: CPU (or the emulated GPU in its place), and CUDA where there is one."""
    return ["cpu", "cuda"] if torch.cuda.is_available() and not EMULATED else ["cpu"]


def devices_and_types() -> list[tuple[str, torch.dtype]]:
    """What pooled errors judge of norms and rotations: float32 on CPU alone, as roots on CUDA are the hardware's."""
    return [(d, t) for d in devices() for t in DTYPES if t is not torch.float32 or (d == "cpu" and not EMULATED)]


class Numbers:
    """The source of all random numbers here: on the CPU, so that every device sees the same. It is set anew for each
    test, and by hypothesis for each example, so that a test sees the same numbers whichever ran before it."""

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def seed(self, seed: int) -> None:
        self.generator.manual_seed(seed)

    def getstate(self) -> torch.Tensor:
        return self.generator.get_state()

    def setstate(self, state: torch.Tensor) -> None:
        self.generator.set_state(state)


numbers = Numbers()
register_random(numbers)


def random_tensor(shape, dtype, device, *, scale: float = 1.0, offset: float = 0.0) -> torch.Tensor:
    """Normal numbers."""
    return (torch.randn(shape, generator=numbers.generator) * scale + offset).to(dtype).to(device)


@dataclass
class Case:
    """One comparison: three versions of a function of the same inputs."""

    ours: Callable
    stock: Callable
    exact: Callable
    inputs: dict[str, torch.Tensor]
    #: Inputs that take part but have no gradient (targets, rotary tables).
    constants: dict[str, torch.Tensor] | None = None
    #: Where an output or gradient is a small difference of large terms: the terms' size. float32 cannot resolve less.
    terms: dict[str, float] = field(default_factory=dict)
    #: Roundings to the output's type that an operator documents beyond the last one (sums over chunks).
    extra_roundings: dict[str, float] = field(default_factory=dict)
    #: Errors that an operator documents, as a part of the result's size, or of its terms' where that is larger.
    of_size: dict[str, float] = field(default_factory=dict)
    #: And as a multiple of stock's.
    times_stock: dict[str, float] = field(default_factory=dict)
    #: How many errors are independent of each other, where elements share those of what they are computed from, or many
    #: are zero; None: as many as there are elements.
    independent: int | None = None
    #: The upstream gradient of every output, where it is not to be drawn at random.
    upstream: float | None = None


def _run(function: Callable, case: Case, dtype: torch.dtype | None, upstream: list[torch.Tensor] | None):
    """Outputs and gradients, by name; `upstream` is drawn at the first run and then shared."""
    leaves = {}
    for name, tensor in case.inputs.items():
        # Strides are part of the case: a leaf of the same layout.
        leaf = tensor.detach() if dtype is None else tensor.detach().to(dtype)
        leaves[name] = leaf.requires_grad_() if dtype is None else leaf.clone().requires_grad_()
    constants = {
        name: t.to(dtype) if dtype is not None and t.is_floating_point() else t
        for name, t in (case.constants or {}).items()
    }
    outputs = function(*leaves.values(), *constants.values())
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    if upstream is None:
        if case.upstream is None:
            upstream = [random_tensor(o.shape, o.dtype, o.device) for o in outputs]
        else:
            upstream = [torch.full_like(o, case.upstream) for o in outputs]
    gradients = torch.autograd.grad(
        outputs, list(leaves.values()), [u.to(o.dtype) for u, o in zip(upstream, outputs, strict=True)]
    )
    named = {f"output {i}": o.detach() for i, o in enumerate(outputs)}
    named |= {f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}
    return named, upstream


#: Four standard deviations of the logarithm of the ratio of two errors, each of n roundings, times sqrt(n).
LUCK = 2.5


def _rms(t: torch.Tensor) -> float:
    return t.double().square().mean().sqrt().item() if t.numel() else 0.0


def _three(case: Case):
    """Ours, stock's and float64's outputs and gradients, by name."""
    ours, upstream = _run(case.ours, case, None, None)
    stock, _ = _run(case.stock, case, None, upstream)
    return ours, stock, _run(case.exact, case, torch.float64, upstream)[0]


def assert_no_worse_pooled(
    draw: Callable[[], Case], names: tuple[str, ...] = (), draws: int = 8, times: float = 1.0
) -> None:
    """The rule itself: over so many draws that luck is no excuse, each error of ours is no larger than stock's.
    `names`: what is judged, if not everything. `times`: where an operator documents so many times stock's errors. For
    inputs whose errors no few elements make up."""
    sums: dict[str, list[float]] = {}
    for _ in range(draws):
        case = draw()
        ours, stock, exact = _three(case)
        for name, want in exact.items():
            if names and name not in names:
                continue
            pooled = sums.setdefault(name, [0.0, 0.0, 0.0])
            pooled[0] += (ours[name].double() - want).square().sum().item()
            pooled[1] += (stock[name].double() - want).square().sum().item()
            pooled[2] += min(want.numel(), case.independent or want.numel())
    for name, (squares, allowed, n) in sums.items():
        # The error of n roundings scatters by 0.45/sqrt(n), the ratio of two by 0.63/sqrt(n): four times that is luck.
        assert squares <= allowed * times**2 * math.exp(2 * LUCK / n**0.5), (
            f"{name}: pooled error {(squares / allowed) ** 0.5:.4f} times stock's over {n:.0f} elements, "
            f"{math.exp(LUCK / n**0.5):.4f} is allowed"
        )


def assert_no_worse(case: Case) -> None:
    """Every output and gradient of ours is at least as close to float64 as stock's, in the same type."""
    ours, stock, exact = _three(case)
    for name, want in exact.items():
        got, other = ours[name], stock[name]
        assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
        assert got.dtype == other.dtype, f"{name}: {got.dtype}, stock gives {other.dtype}"
        if not want.numel():
            continue
        error, allowed = _rms(got.double() - want), _rms(other.double() - want)
        # A rounding error is uniform within half a unit in the last place; the root mean square of n of them scatters
        # by 0.45/sqrt(n) of itself. Four standard deviations, of the ratio to stock's (its logarithm, for few numbers)
        # and of the rounding alone, keep luck out of a few thousand comparisons; at n = 10,000 that is 2.5 %.
        unit, n = torch.finfo(got.dtype).eps / 2, min(want.numel(), case.independent or want.numel())
        rounding = max(unit / 3**0.5, 4 * torch.finfo(torch.float32).eps) * min(1 + 1.8 / n**0.5, 3**0.5)
        floor = _rms(want) * rounding + torch.finfo(got.dtype).smallest_normal * unit
        floor += 4 * torch.finfo(torch.float32).eps * case.terms.get(name, 0.0)
        # Independent errors add up by their squares.
        extra = case.extra_roundings.get(name, 0) ** 0.5 * _rms(want) * unit / 3**0.5 * (1 + 2.5 / n**0.5)
        times, of_size = case.times_stock.get(name, 1.0), case.of_size.get(name, 0.0)
        terms = case.terms.get(name, 0.0)
        bound = max(allowed * times * math.exp(LUCK / n**0.5), floor, of_size * max(_rms(want), terms))
        assert error <= (bound**2 + extra**2) ** 0.5, (
            f"{name}: error {error:.3g} against float64, stock's is {allowed:.3g}, rounding alone {floor:.3g}"
        )
        worst, stock_worst = (got.double() - want).abs().max().item(), (other.double() - want).abs().max().item()
        ulps = 8 if got.dtype == torch.float32 else 2  # float32 sums in another order scatter more
        bound = max(2, math.exp(LUCK / n**0.5)) * times * stock_worst + floor
        largest = want.abs().max().item()
        bound += 2 * ulps * unit * largest + 4 * of_size * max(largest, terms)
        assert worst <= bound, (
            f"{name}: worst element off by {worst:.3g}, stock's by {stock_worst:.3g}, bound {bound:.3g}"
        )


_MAP_NORESERVE = 0x4000  # of Linux; Python names it from 3.13 on: the memory need not be there


def far_apart(t: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """The same numbers with 2^32 elements from one to the next along `dim`. The memory between is mapped, not used."""
    strides = list(torch.empty_like(t, memory_format=torch.contiguous_format).stride())
    strides[dim] = 2**32
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    memory = mmap.mmap(-1, ((t.shape[dim] - 1) * 2**32 + t.numel()) * t.element_size(), flags=flags)
    return torch.frombuffer(memory, dtype=t.dtype).as_strided(t.shape, strides).copy_(t)


def assert_offsets_have_64_bits(function: Callable, *tensors: torch.Tensor, dim: int = 0) -> None:
    """The same bits from tensors and upstream gradients that are spread so far."""
    results, upstream = [], None
    for place in (lambda t: t, lambda t: far_apart(t, dim)):
        leaves = [place(t).requires_grad_() for t in tensors]
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        upstream = upstream or [random_tensor(o.shape, o.dtype, o.device) for o in outputs]
        spread = [place(u) if u.dim() else u for u in upstream]
        results.append([*(o.detach() for o in outputs), *torch.autograd.grad(outputs, leaves, spread)])
    for far, near in zip(results[1], results[0], strict=True):
        assert_same_bits(far, near)


def assert_rounds_to(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """Of a gradient that a GPU's product has left in float32, and one that was rounded to `dtype` before: within two of
    its units. On a CPU both were rounded, to the same bits."""
    assert got.dtype is want.dtype is torch.float32
    if got.is_cuda:
        torch.testing.assert_close(got, want, rtol=2 * torch.finfo(dtype).eps, atol=1e-4)
    else:
        assert_same_bits(got, want)


def assert_same_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    """Equal to the last bit, NaN included."""
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    view = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    assert torch.equal(a.contiguous().view(view), b.contiguous().view(view)), "the bits differ"
