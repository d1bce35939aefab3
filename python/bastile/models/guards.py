"""When a module's own call may be skipped, because its weights alone say what it computes."""

from torch import nn


def untouched(module: nn.Module) -> bool:
    """Whether calling this module does what its class's forward does and nothing else."""
    own = module.__dict__.get("forward")  # Hugging Face's `kernels` puts the class's own there
    return not (
        (own is not None and getattr(own, "__func__", None) is not type(module).forward)
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )
