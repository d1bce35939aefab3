"""How results are judged that a library's matrix products went into.

In which order a library sums is its own choice, by the CPU, by the operands' shapes, strides and alignment, by the
number of threads: the same product may have other bits on another machine, of unaligned operands, or beside more rows.
Bits are asserted where all arithmetic is ours, and where the very same product is computed again. Everywhere else each
of the two results is compared with float64.
"""

import torch


def assert_near(got: torch.Tensor, exact: torch.Tensor, terms: int, roundings: int = 1) -> None:
    """`got` is no further from `exact`, of float64, than rounding takes it.

    A sum of n terms in float32, in whatever order, is off by at most n units of rounding of its terms' sizes (Higham,
    Accuracy and Stability of Numerical Algorithms, section 4.2), and errors pass through a chain of sums with the
    values: so `terms` is the number of terms of all sums on a value's path, and `roundings` how often it is rounded to
    the type of `got`. The largest element stands for the terms' sizes, since each element sums terms of that size."""
    assert got.shape == exact.shape
    assert exact.dtype == torch.float64
    bound = (terms * torch.finfo(torch.float32).eps + roundings * torch.finfo(got.dtype).eps) / 2
    scale = exact.abs().max().item()
    error = (got.double() - exact).abs().max().item()
    assert error <= bound * scale, f"off by {error / scale:.2g} of the largest element, allowed {bound:.2g}"
