"""SwiGLU's operators from C, and what the compiler is told of them."""

from __future__ import annotations

import torch

from bastile import _library  # noqa: F401  (registers the operators)

forward = torch.ops.bastile.swiglu_forward.default
backward = torch.ops.bastile.swiglu_backward.default
#: Gives the forward pass's output, too.
backward_with_y = torch.ops.bastile.swiglu_backward_with_y.default
#: da over a, db over b, that output over dy.
backward_inplace = torch.ops.bastile.swiglu_backward_inplace.default


def _like(tensor: torch.Tensor, wanted: bool) -> torch.Tensor:
    shape, dtype = (tensor.shape, tensor.dtype) if wanted else ((0,), torch.float32)
    return torch.empty(shape, dtype=dtype, device=tensor.device)


@torch.library.register_fake("bastile::swiglu_forward")
def _(a, b):
    return _like(a, True)


@torch.library.register_fake("bastile::swiglu_backward")
def _(dy, a, b, want_da, want_db):
    return _like(a, want_da), _like(b, want_db)


@torch.library.register_fake("bastile::swiglu_backward_with_y")
def _(dy, a, b, want_da, want_db):
    return _like(a, want_da), _like(b, want_db), _like(a, True)


@torch.library.register_fake("bastile::swiglu_backward_inplace")
def _(dy, a, b, want_da, want_db, want_y):
    return None
