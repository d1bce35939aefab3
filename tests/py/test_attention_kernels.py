"""Attentions that Bastile's own kernels compute (docs/segment_attention.md) where the chip has them: which calls go
there, and the errors of what comes back. On a CPU, where PyTorch's attention stands in models, they are put in its
place here, so that all that lies between is tried without a GPU, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bastile.ops import _flash as flash
from bastile.ops import _varlen as varlen
from bastile.ops.masked_attention import masked_attention
from oracle import assert_no_worse_pooled, devices, random_tensor
from test_masked_attention import IDS, PADDED, TYPES, case, kinds, on
from test_sink_attention import MASKS
from test_sink_attention import case as case_of_sinks

KINDS = ("none", "left", "right", "both", "packed")


def has_kernels(device: str) -> bool:
    return device == "cpu" or torch.cuda.get_device_capability() == (9, 0)


class Counted:
    """Calls of the two passes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        serves = varlen.serves
        for name in ("forward", "backward"):
            monkeypatch.setattr(varlen, name, self._counting(name, getattr(varlen, name)))

        def served(q: torch.Tensor, segments: int, window: int, dropout: float) -> bool:
            return serves(q, segments, window, dropout) if q.is_cuda else not window and not dropout and segments > 0

        monkeypatch.setattr(varlen, "serves", served)

    def _counting(self, name: str, original: Any) -> Any:
        def counted(*args: Any) -> Any:
            self.calls.append(name)
            return original(*args)

        return counted


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


@pytest.mark.parametrize(("device", "dtype"), TYPES)
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_no_larger_than_pytorch_s(
    device: str, dtype: torch.dtype, kind: str, width: int, counted: Counted
) -> None:
    if not has_kernels(device):
        pytest.skip("kernels of Hopper's")
    unread = ~PADDED[kind] if kind in PADDED else torch.zeros(IDS.shape, dtype=torch.bool)
    assert_no_worse_pooled(lambda: case(dtype, device, *kinds()[kind], unread, (width, width)), draws=4)
    if device == "cpu" or kind in ("left", "both", "packed"):  # else cuDNN has whole rows on GPUs
        assert counted.calls.count("forward") == counted.calls.count("backward") > 0


@pytest.mark.parametrize(("device", "dtype"), TYPES)
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_both_ways(device: str, dtype: torch.dtype, kind: str, width: int, counted: Counted) -> None:
    """On a GPU PyTorch's attention with a mask has smaller errors of gradients than flash attention, of which these are
    as large (test_attention_both_ways)."""
    if not has_kernels(device):
        pytest.skip("kernels of Hopper's")
    times = 1.02 if device == "cuda" else 1.0
    given = kinds(causal=False)[kind]
    assert_no_worse_pooled(lambda: case(dtype, device, *given, widths=(width, width)), draws=4, times=times)
    assert counted.calls == ["forward", "backward"] * 4


@pytest.mark.parametrize(("device", "dtype"), [each for each in TYPES if each[0] == "cuda"])
@pytest.mark.parametrize("mask", ["ones", "both", "right"])
def test_errors_with_sinks(device: str, dtype: torch.dtype, mask: str, counted: Counted) -> None:
    if not has_kernels(device):
        pytest.skip("kernels of Hopper's")
    assert_no_worse_pooled(lambda: case_of_sinks(dtype, device, 0, MASKS[mask], dim=64), draws=4)
    assert counted.calls == ["forward", "backward"] * 4


@pytest.mark.parametrize("mask", ["ones", "both", "right"])
def test_sinks(mask: str, counted: Counted) -> None:
    """In float32 on a CPU, where PyTorch's attention has the sink in a bias, and an error of its own."""
    given = case_of_sinks(torch.float32, "cpu", 0, MASKS[mask], dim=64)
    leaves = [t.clone().requires_grad_() for t in given.inputs.values()]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    y, want = given.ours(*leaves), given.exact(*wide)
    upstream = torch.randn_like(y)
    found = (y, *torch.autograd.grad(y, leaves, upstream))
    exact = (want, *torch.autograd.grad(want, wide, upstream.double()))
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2e-5, atol=2e-5)
    assert counted.calls == ["forward", "backward"]


@pytest.mark.parametrize("device", devices())
def test_what_is_not_served_goes_to_pytorch(device: str, counted: Counted) -> None:
    """A window, dropout, and on a GPU widths that there are no kernels for."""
    dtype = torch.bfloat16

    def calls(width: int = 64, window: int = 0, dropout: float = 0.0) -> list[str]:
        counted.calls.clear()
        segments, mask = kinds(window, causal=False)["packed"]
        q = random_tensor((len(mask), 2, mask.shape[-1], width), dtype, device).requires_grad_()
        masked_attention(q, q, q, on(device, segments), dropout=dropout).sum().backward()
        return counted.calls

    if has_kernels(device):
        assert calls() == ["forward", "backward"]
    assert not calls(window=6)
    assert not calls(dropout=0.5)
    if device == "cuda":
        assert not calls(width=80)


def test_on_a_cpu_pytorch_s_attention_stays() -> None:
    q = random_tensor((2, 2, 8, 64), torch.bfloat16, "cpu")
    assert not varlen.serves(q, 2, 0, 0.0)
    assert flash.is_known()


def test_tensors_whose_tokens_are_not_aligned(counted: Counted) -> None:
    """They are copied, and keep their bits."""
    q, k, v = [random_tensor((9, 2, 65), torch.bfloat16, "cpu") for _ in range(3)]
    cuts = torch.tensor([[0, 4, 9]] * 2, dtype=torch.int32)
    odd = [t[..., 1:] for t in (q, k, v)]
    one = varlen.forward(*odd, cuts, True, 0.3)
    other = varlen.forward(*[t.contiguous() for t in odd], cuts, True, 0.3)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert varlen._aligned(q[..., :64]).stride() == (128, 64, 1)
    whole = random_tensor((9, 2, 64), torch.bfloat16, "cpu")
    assert varlen._aligned(whole) is whole
