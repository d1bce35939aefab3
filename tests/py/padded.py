"""Batches with padding, and code through which their masks go: of the tests of attentions that take no mask."""

import torch

from bastile.models.forms import Code, Source

#: A row with padding on its right, one with padding on both sides, one without.
ROWS = torch.tensor([[1] * 11 + [0] * 6, [0] * 3 + [1] * 9 + [0] * 5, [1] * 17])
MASKS = {
    "right": torch.stack([ROWS[0], ROWS[2], ROWS[0]]),
    "left": torch.stack([ROWS[0].flip(0), ROWS[2], ROWS[2]]),
    "both": ROWS,
}

BACKBONE = """
class Backbone:
    def forward(self, x, attention_mask):
        masks = {"full": create_causal_mask(x, attention_mask), "near": create_sliding_window_causal_mask(x)}
        for layer in self.layers:
            x = layer(x, attention_mask=masks[layer.kind])
        return x
"""
LAYER = """
class Layer:
    def forward(self, x, attention_mask):
        return self.attention(x, attention_mask=attention_mask), attention_interface(self, x, attention_mask)
"""
#: Changes to LAYER, and whether a mask goes to an attention alone then.
LAYERS = [
    (LAYER, "", "", True),
    (LAYER, "attention_mask=attention_mask", "mask=attention_mask", False),
    (LAYER, "attention_mask)\n", "attention_mask[:, :, -1:])\n", False),
    (LAYER, "attention_interface(", "self.other(", False),
]


def changed_forward(text: str, old: str, new: str) -> tuple[str, Code]:
    """The name of the class in a text, and its forward, with one thing changed."""
    changed = text.replace(old, new) if old else text
    assert (changed != text) == bool(old)
    source = Source(changed)
    (name,) = source.classes
    code = source.method(name, "forward")
    assert code is not None
    return name, code
