"""Attentions that Bastile's own kernels compute (docs/segment_attention.md) where the chip has them: which calls go
there, and the errors of what comes back. On a CPU, where PyTorch's attention stands in models, they are put in its
place here, so that all that lies between is tried without a GPU, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import bastile
from bastile.models import sdpa
from bastile.ops import _attentions as attentions
from bastile.ops import _flash as flash
from bastile.ops import _varlen as varlen
from bastile.ops.masked_attention import masked_attention
from conftest import tiny_model
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

        def served(q: torch.Tensor, segments: int, dropout: float) -> bool:
            return serves(q, segments, dropout) if q.is_cuda else not dropout and segments > 0

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
@pytest.mark.parametrize("width", [64, 80, 128, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_no_larger_than_pytorch_s(
    device: str, dtype: torch.dtype, kind: str, width: int, counted: Counted
) -> None:
    if not has_kernels(device):
        pytest.skip("kernels of Hopper's")
    unread = ~PADDED[kind] if kind in PADDED else torch.zeros(IDS.shape, dtype=torch.bool)
    assert_no_worse_pooled(lambda: case(dtype, device, *kinds()[kind], unread, (width, width)), draws=4)
    assert counted.calls.count("forward") == counted.calls.count("backward") > 0


@pytest.mark.parametrize(("device", "dtype"), TYPES)
@pytest.mark.parametrize(
    ("kind", "causal"), [("none", True), ("none", False), ("left", True), ("packed", True), ("packed", False)]
)
def test_windows(device: str, dtype: torch.dtype, kind: str, causal: bool, counted: Counted) -> None:
    """Of few keys: little is summed up before it is rounded, and in another order."""
    if not has_kernels(device):
        pytest.skip("kernels of Hopper's")
    segments, mask = kinds(6, causal)[kind]
    unread = ~PADDED[kind] if kind in PADDED else None
    assert_no_worse_pooled(lambda: case(dtype, device, segments, mask, unread, (64, 64)), draws=4, times=1.05)
    assert counted.calls == ["forward", "backward"] * 4


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
@pytest.mark.parametrize("window", [0, 6])
def test_errors_with_sinks(device: str, dtype: torch.dtype, window: int, mask: str, counted: Counted) -> None:
    if not has_kernels(device):
        pytest.skip("kernels of Hopper's")
    times = 1.05 if window else 1.0
    assert_no_worse_pooled(lambda: case_of_sinks(dtype, device, window, MASKS[mask], dim=64), draws=4, times=times)
    assert counted.calls == ["forward", "backward"] * 4


@pytest.mark.parametrize("mask", ["ones", "both", "right"])
@pytest.mark.parametrize("window", [0, 6])
def test_sinks(mask: str, window: int, counted: Counted) -> None:
    """In float32 on a CPU, where PyTorch's attention has the sink in a bias, and an error of its own."""
    given = case_of_sinks(torch.float32, "cpu", window, MASKS[mask], dim=64)
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
    """Dropout, and on a GPU heads that others are faster for."""
    dtype = torch.bfloat16

    def calls(width: int = 64, window: int = 0, dropout: float = 0.0) -> list[str]:
        counted.calls.clear()
        segments, mask = kinds(window, causal=False)["packed"]
        q = random_tensor((len(mask), 2, mask.shape[-1], width), dtype, device).requires_grad_()
        masked_attention(q, q, q, on(device, segments), dropout=dropout).sum().backward()
        return counted.calls

    if has_kernels(device):
        assert calls() == calls(window=6) == ["forward", "backward"]
    assert not calls(dropout=0.5)
    if device == "cuda":
        assert not calls(width=32)


@pytest.mark.skipif(not (torch.cuda.is_available() and has_kernels("cuda")), reason="kernels of Hopper's")
def test_where_whole_rows_are_faster_here() -> None:
    def is_faster(rows: int, heads: int, length: int, width: int, dtype: torch.dtype = torch.bfloat16) -> bool:
        q = torch.empty(rows, heads, length, width, dtype=dtype, device="cuda")
        return attentions.are_faster_here(q, q, q)

    assert is_faster(4, 16, 1024, 128)
    assert is_faster(1, 32, 8192, 128)
    assert is_faster(2, 32, 4096, 64)
    assert not is_faster(1, 32, 8192, 64)
    assert not is_faster(1, 16, 512, 128)
    assert not is_faster(4, 16, 1024, 128, torch.float32)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        assert not is_faster(4, 16, 1024, 128)  # as is asked for


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("checkpointing", [False, True])
def test_models_whose_rows_are_whole(
    device: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch, counted: Counted
) -> None:
    """No mask says that they are: causal, of as many queries as keys. Text that is generated behind a cache is left."""
    if not has_kernels(device):
        pytest.skip("kernels of Hopper's")
    asked: list[tuple[int, ...]] = []

    def are_faster(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
        asked.append(tuple(q.shape))
        return True

    monkeypatch.setattr(sdpa, "are_faster_here", are_faster)
    monkeypatch.setattr(sdpa, "is_much", lambda _: True)
    monkeypatch.setattr(sdpa, "_DEVICES", ("cpu", "cuda"))
    model = tiny_model(dtype=torch.bfloat16, head_dim=64).to(device).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(1, 100, (2, 19), device=device)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        model.zero_grad()
        out = model(input_ids=ids, labels=ids, use_cache=False)
        out.loss.backward()
        return out.loss.detach(), model.model.layers[0].self_attn.q_proj.weight.grad.clone()

    want = run()
    assert not counted.calls
    bastile.apply(cuda_graphs=False)
    try:
        found = run()
        layers = len(model.model.layers)
        assert counted.calls.count("forward") == layers * (2 if checkpointing else 1)
        assert counted.calls.count("backward") == layers
        assert {*asked} == {(2, 4, 19, 64)}
        for a, b in zip(found, want, strict=True):
            torch.testing.assert_close(a.float(), b.float(), rtol=0.03, atol=2e-3)
        counted.calls.clear()
        with torch.no_grad():
            model.eval().generate(ids, max_new_tokens=3, do_sample=False, use_cache=True)
        assert counted.calls == ["forward"] * layers  # the prompt's
    finally:
        bastile.reset()


@pytest.mark.parametrize(
    ("tokens", "width", "than_cudnn"),
    [(4096, 64, True), (4104, 64, False), (8192, 128, True), (8200, 80, False), (8200, 128, False), (16384, 256, True)],
)
def test_long_rows(tokens: int, width: int, than_cudnn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose are faster elsewhere: cuDNN's, not flash attention's."""
    monkeypatch.setattr(varlen, "serves", lambda q, segments, dropout: True)
    q = torch.empty(1, 8, tokens, width, device="meta")
    for choice, faster in ((attentions._FLASH, True), (attentions._CUDNN, than_cudnn), (0, False)):
        monkeypatch.setattr(attentions, "_choice", lambda *_, choice=choice: choice)
        assert attentions.are_faster_here(q, q, q) == faster


def test_on_a_cpu_pytorch_s_attention_stays() -> None:
    q = random_tensor((2, 2, 8, 64), torch.bfloat16, "cpu")
    assert not varlen.serves(q, 2, 0.0)
    assert flash.is_known()


def test_tensors_whose_tokens_are_not_aligned(counted: Counted) -> None:
    """They are copied, and keep their bits."""
    q, k, v = [random_tensor((9, 2, 65), torch.bfloat16, "cpu") for _ in range(3)]
    cuts = torch.tensor([[0, 4, 9]] * 2, dtype=torch.int32)
    odd = [t[..., 1:] for t in (q, k, v)]
    one = varlen.forward(*odd, cuts, True, 0.3)
    other = varlen.forward(*[t.contiguous() for t in odd], cuts, True, 0.3)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    rows = [torch.tensor([[0, 3, 6, 9]] * 2, dtype=torch.int32), None]
    one, other = [varlen.forward(*odd, cuts, True, 0.3, 2, 0 if cuts is not None else 3) for cuts in rows]
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert varlen._aligned(q[..., :64]).stride() == (128, 64, 1)
    whole = random_tensor((9, 2, 64), torch.bfloat16, "cpu")
    assert varlen._aligned(whole) is whole
