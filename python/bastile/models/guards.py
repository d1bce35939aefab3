"""When a module's own call may be skipped, because its weights alone say what it computes."""

from torch import nn


def untouched(module: nn.Module) -> bool:
    """Whether calling this module does what its class's forward does and nothing else."""
    return not (
        "forward" in module.__dict__
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )
