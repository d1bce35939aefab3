"""SwiGLU's operators from C."""

from __future__ import annotations

import torch

from bastile.ops import _fakes  # noqa: F401  (registers the operators, with their fakes)

forward = torch.ops.bastile.swiglu_forward.default
backward = torch.ops.bastile.swiglu_backward.default
#: Gives the forward pass's output, too.
backward_with_y = torch.ops.bastile.swiglu_backward_with_y.default
#: da over a, db over b, that output over dy.
backward_inplace = torch.ops.bastile.swiglu_backward_inplace.default
