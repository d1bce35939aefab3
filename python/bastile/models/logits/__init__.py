"""Logits on demand: in training a model's output head returns logits that are made when they are read.

    call of a model  ->  served_model: for its time the head's call is put off (head.py, serving.py)
    head(hidden)     ->  Logits: a tensor without memory that knows hidden states and weight (tensor.py, pending.py)
    parts, types, scales and caps of them   ->  noted down (parts.py, follow.py)
    those of several heads in one tensor    ->  each head's remain what they are (stacked.py)
    a loss of them   ->  the fused loss (losses.py); what else reads them makes them, once, as the head would have
    traced.py        ->  the same while torch.compile traces a model
    said.py          ->  what ran, what made logits and why

Nothing here knows a family of models: what the model does to its logits is seen as it does it."""

from bastile.models.logits.head import output_heads, why_not
from bastile.models.logits.losses import divergence_of, log_probs_of
from bastile.models.logits.serving import serve, served_model, serving_forward
from bastile.models.logits.tensor import Logits

__all__ = [
    "Logits",
    "divergence_of",
    "log_probs_of",
    "output_heads",
    "serve",
    "served_model",
    "serving_forward",
    "why_not",
]
