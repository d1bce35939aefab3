"""Each way of writing the rotary function: what the operator gives in its place, element by element. In a model an
order of a head's elements that queries and keys share would not be seen."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import bastile

B, H, S, D = 2, 3, 5, 8


def heads(*shape: int) -> torch.Tensor:
    return torch.randn(shape or (B, H, S, D))


def tables(width: int, *leading: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.randn(*(leading or (B, S)), width)
    return angles.cos(), angles.sin()


def twice(width: int, *leading: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Both halves alike, as models make them."""
    cos, sin = tables(width // 2, *leading)
    return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)


def turns() -> torch.Tensor:
    return torch.complex(*tables(D // 2))


FORMS: dict[str, tuple[str, str, Callable[[], tuple[Any, ...]], dict[str, int]]] = {
    "halves": ("llama", "apply_rotary_pos_emb", lambda: (heads(), heads(B, 1, S, D), *twice(D)), {}),
    "heads third": (
        "llama",
        "apply_rotary_pos_emb",
        lambda: (heads(B, S, H, D), heads(B, S, 1, D), *twice(D)),
        {"unsqueeze_dim": 2},
    ),
    "interleaved to halves": (
        "deepseek_v3",
        "apply_rotary_pos_emb_interleave",
        lambda: (heads(), heads(B, 1, S, D), *twice(D)),
        {},
    ),
    "complex": ("deepseek_v2", "apply_rotary_emb", lambda: (heads(), heads(B, 1, S, D), turns()), {}),
    "complex, heads third": (
        "llama4",
        "apply_rotary_emb",
        lambda: (heads(B, S, H, D), heads(B, S, 1, D), turns()),
        {},
    ),
    "one tensor": ("gemma4", "apply_rotary_pos_emb", lambda: (heads(B, S, H, D), *twice(D)), {"unsqueeze_dim": 2}),
    "one tensor, sine first": (
        "gptj",
        "apply_rotary_pos_emb",
        lambda: (heads(B, S, H, D), *tables(D // 2)[::-1]),
        {},
    ),
    "the last elements": ("deepseek_v4", "apply_rotary_pos_emb", lambda: (heads(), *tables(D // 4)), {}),
    "the last elements, heads third": (
        "deepseek_v4",
        "apply_rotary_pos_emb",
        lambda: (heads(B, S, H, D), *tables(D // 4)),
        {"unsqueeze_dim": 2},
    ),
    "backward": ("nanochat", "apply_rotary_pos_emb", lambda: (heads(), heads(B, 1, S, D), *twice(D)), {}),
    "one sequence": (
        "qwen2_vl",
        "apply_rotary_pos_emb_vision",
        lambda: (heads(S, H, D), heads(S, H, D), *twice(D, S)),
        {},
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_form_s_function(form: str) -> None:
    family, name, make, options = FORMS[form]
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    torch.manual_seed(0)
    given = make()
    wanted = [t.requires_grad_() for t in given if t.shape[-2:] == (H, D) or t.dim() == 4]

    def run() -> list[torch.Tensor]:
        turned = getattr(module, name)(*given, **options)
        turned = turned if isinstance(turned, tuple) else (turned,)
        return [*turned, *torch.autograd.grad([t.sin().sum() for t in turned], wanted)]

    want = run()
    bastile.report(reset=True)
    bastile.apply()
    for ours, theirs in zip(run(), want, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert bastile.report().ran("rope") == 1
