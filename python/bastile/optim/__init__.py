"""The optimiser: AdamW in one pass over parameters, gradients and moments, and the clipping of gradients within it."""

from bastile.optim.adamw import AdamW
from bastile.optim.clip import clip_grad_norm_, clip_in_step

__all__ = ["AdamW", "clip_grad_norm_", "clip_in_step"]
