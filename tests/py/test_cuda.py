"""What only a real GPU can show: sizes beyond 2^31 elements, streams, graphs, devices, and what the host is spared."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest
import torch

from bastile.ops._grouped import _chip_has_it
from bastile.ops.cross_entropy import cross_entropy
from bastile.ops.fused_linear_cross_entropy import fused_linear_cross_entropy, set_logits_memory
from bastile.ops.moe import moe_experts
from bastile.ops.qk_norm_rope import qk_norm_rope
from bastile.ops.rms_norm import rms_norm
from bastile.ops.rope import rope
from bastile.ops.swiglu import swiglu
from oracle import EMULATED, assert_same_bits

pytestmark = pytest.mark.skipif(EMULATED or not torch.cuda.is_available(), reason="needs a GPU")
BF16 = torch.bfloat16


def normal(*shape, dtype=BF16):
    return torch.randn(*shape, device="cuda", dtype=dtype)


def needs_gib(gib: float) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < gib * 2**30:
        pytest.skip(f"needs {gib} GiB of GPU memory")


# ---- beyond 2^31 elements: the last rows must be what they are in a small tensor ------------------------------------


def test_rms_norm_beyond_2_31():
    needs_gib(30)
    rows, hidden = 2**31 // 4096 + 100, 4096
    x, weight = normal(rows, hidden).requires_grad_(), normal(hidden).requires_grad_()
    dy = normal(rows, hidden)
    y = rms_norm(x, weight)
    (dx,) = torch.autograd.grad(y, x, dy)
    tail = x.detach()[-64:].clone().requires_grad_()
    small = rms_norm(tail, weight)
    assert_same_bits(y[-64:], small)
    assert_same_bits(dx[-64:], torch.autograd.grad(small, tail, dy[-64:])[0])


def test_swiglu_beyond_2_31():
    needs_gib(40)
    rows, width = 2**31 // 8192 + 100, 8192
    a, b = normal(rows, width).requires_grad_(), normal(rows, width).requires_grad_()
    dy = normal(rows, width)
    y = swiglu(a, b)
    da, db = torch.autograd.grad(y, (a, b), dy)
    ta, tb = (t.detach()[-64:].clone().requires_grad_() for t in (a, b))
    small = swiglu(ta, tb)
    assert_same_bits(y[-64:], small)
    for large, want in zip((da, db), torch.autograd.grad(small, (ta, tb), dy[-64:]), strict=True):
        assert_same_bits(large[-64:], want)


def test_rope_beyond_2_31():
    needs_gib(30)
    tokens, heads, width = 2**31 // 4096 + 100, 32, 128
    q = normal(1, tokens, heads, width).transpose(1, 2)
    k = normal(1, tokens, 2, width).transpose(1, 2)
    cos, sin = normal(1, tokens, width), normal(1, tokens, width)
    q_out, k_out = rope(q, k, cos, sin)
    q_small, k_small = rope(q[:, :, -64:], k[:, :, -64:], cos[:, -64:], sin[:, -64:])
    assert_same_bits(q_out[:, :, -64:], q_small)
    assert_same_bits(k_out[:, :, -64:], k_small)


def test_qk_norm_rope_beyond_2_31():
    needs_gib(40)
    tokens, heads, width = 2**31 // 4096 + 100, 32, 128
    q = normal(1, tokens, heads, width).transpose(1, 2).requires_grad_()
    k = normal(1, tokens, 2, width).transpose(1, 2).requires_grad_()
    weights, tables = (normal(width), normal(width)), (normal(1, tokens, width), normal(1, tokens, width))
    upstream = [normal(1, tokens, n, width).transpose(1, 2) for n in (heads, 2)]
    out = qk_norm_rope(q, k, *weights, *tables)
    gradients = torch.autograd.grad(out, (q, k), upstream)
    tail = [t.detach()[:, :, -64:].clone().requires_grad_() for t in (q, k)]
    small = qk_norm_rope(*tail, *weights, *(t[:, -64:] for t in tables))
    want = torch.autograd.grad(small, tail, [u[:, :, -64:] for u in upstream])
    for large, w in zip((*out, *gradients), (*small, *want), strict=True):
        assert_same_bits(large[:, :, -64:], w)


@pytest.mark.parametrize("inplace", [True, False])
def test_cross_entropy_beyond_2_31(inplace):
    needs_gib(30)
    vocabulary = 151936
    tokens = 2**31 // vocabulary + 100
    target = torch.randint(vocabulary, (tokens,), device="cuda")
    leaf = normal(tokens, vocabulary).requires_grad_()
    tail = leaf.detach()[-64:].clone().requires_grad_()
    loss = cross_entropy(leaf * 1 if inplace else leaf, target, reduction="sum", inplace=inplace)
    loss.backward()
    cross_entropy(tail, target[-64:], reduction="sum").backward()
    # One pass and two passes over a row round its sum differently: a unit in the last place of bfloat16.
    torch.testing.assert_close(leaf.grad[-64:], tail.grad, rtol=2**-7, atol=1e-30)


def test_linear_cross_entropy_beyond_2_31():
    needs_gib(40)
    vocabulary, width = 151936, 256
    tokens = 2**31 // vocabulary + 100
    hidden, weight = normal(tokens, width).requires_grad_(), normal(vocabulary, width).mul_(0.1).requires_grad_()
    target = torch.randint(vocabulary, (tokens,), device="cuda")
    results = []
    for mib in (8192, 1024):  # all logits in one piece of more than 2^31 elements, and in chunks
        set_logits_memory(mib)
        try:
            loss = fused_linear_cross_entropy(hidden, weight, target)
            results.append((loss.detach(), *torch.autograd.grad(loss, (hidden, weight))))
        finally:
            set_logits_memory(None)
    for one, other in zip(*results, strict=True):
        error = (one.double() - other.double()).norm() / other.double().norm()
        assert error < 2**-7, error  # sums of five chunks, rounded to bfloat16 at each


def test_moe_beyond_2_31():
    needs_gib(40)
    tokens, choices, experts, width, inner = 2**20 + 100, 1, 3, 64, 1024
    indices = torch.randint(experts, (tokens, choices), device="cuda")
    weights, dout = torch.rand(tokens, choices, device="cuda", dtype=BF16), normal(tokens, width)
    hidden, gate_up, down = (
        normal(tokens, width),
        normal(experts, width, 2 * inner) / 8,
        normal(experts, inner, width) / 32,
    )
    biases = normal(experts, 2 * inner), normal(experts, width)
    # Sorted, the last expert's rows lie beyond 2^31 elements: its tokens alone must give the same.
    last = (indices[:, 0] == experts - 1).nonzero()[-64:, 0]
    results = []
    for chosen in (slice(None), last):
        leaves = [t[chosen].clone().requires_grad_() for t in (hidden, weights)]
        out = moe_experts(leaves[0], indices[chosen], leaves[1], gate_up, biases[0], down, biases[1])
        results.append([out.detach(), *torch.autograd.grad(out, leaves, dout[chosen])])
    for large, small in zip(*results, strict=True):
        # Products of other sizes may sum in another order.
        torch.testing.assert_close(large[last], small, rtol=2**-6, atol=2**-6)


# ---- the host is spared ---------------------------------------------------------------------------------------------


def every_operator(tokens: int) -> list[torch.Tensor]:
    """Forward and backward of each operator; the tensors it made."""
    generator = torch.Generator("cuda").manual_seed(tokens)

    def tensor(*shape):
        return torch.randn(*shape, device="cuda", dtype=BF16, generator=generator).requires_grad_()

    x, weight = tensor(tokens, 1024), tensor(1024)
    a, b = tensor(tokens, 512), tensor(tokens, 512)
    q, k = tensor(1, tokens, 4, 64), tensor(1, tokens, 2, 64)
    heads = q.transpose(1, 2), k.transpose(1, 2)
    q_weight, k_weight = tensor(64), tensor(64)
    cos, sin = tensor(1, tokens, 64).detach(), tensor(1, tokens, 64).detach()
    logits, head = tensor(tokens, 3200), tensor(3200, 1024)
    target = torch.randint(3200, (tokens,), device="cuda", generator=generator)
    n = torch.full((), 7.0, device="cuda")
    outputs = [rms_norm(x, weight), swiglu(a, b), *rope(*heads, cos, sin)]
    outputs += qk_norm_rope(*heads, q_weight, k_weight, cos, sin)
    experts: list[torch.Tensor] = []
    if _chip_has_it(x.device):  # elsewhere the groups' ends are waited for
        experts = [tensor(4, 1024, 512), tensor(4, 512), tensor(4, 256, 1024), tensor(4, 1024), tensor(tokens, 2)]
        indices = torch.randint(4, (tokens, 2), device="cuda", generator=generator)
        outputs += [moe_experts(x, indices, experts[4], *experts[:4])]
    losses = [
        cross_entropy(logits, target),
        cross_entropy(logits * 1, target, inplace=True),
        fused_linear_cross_entropy(x, head, target),
        fused_linear_cross_entropy(x, head, target, num_items=n),
    ]
    leaves = [x, weight, a, b, q, k, q_weight, k_weight, logits, head, *experts]
    total = sum(o.float().square().mean() for o in outputs) + sum(losses)
    return [*outputs, *losses, *torch.autograd.grad(total, leaves)]


def test_nothing_waits_for_the_device():
    every_operator(64)  # compile first
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        every_operator(96)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_graph_captures_and_replays():
    want = every_operator(80)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        every_operator(80)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    x, weight = normal(80, 1024), normal(1024)
    head, target = normal(3200, 1024), torch.randint(3200, (80,), device="cuda")
    with torch.cuda.graph(graph):
        y = rms_norm(x, weight)
        loss = fused_linear_cross_entropy(y, head, target)
    for _ in range(2):
        x.normal_()
        graph.replay()
        assert_same_bits(y, rms_norm(x, weight))
        assert_same_bits(loss, fused_linear_cross_entropy(y, head, target))
    for a, b in zip(want, every_operator(80), strict=True):
        assert_same_bits(a, b)


def test_a_side_stream_is_honoured():
    stream = torch.cuda.Stream()
    want = every_operator(72)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        got = every_operator(72)
    stream.synchronize()
    for a, b in zip(want, got, strict=True):
        assert_same_bits(a, b)


def test_other_lengths_compile_nothing_new(tmp_path):
    """A fresh process, a fresh cache: kernels are files, and a second length adds none."""
    script = (
        "import os, sys, torch\n"
        f"sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
        "import test_cuda\n"
        "counts = []\n"
        "for tokens in (640, 1111, 3, 2048):\n"
        "    test_cuda.every_operator(tokens)\n"
        f"    counts.append(sum(len(f) for _, _, f in os.walk({str(tmp_path)!r})))\n"
        "print('files:', counts)\n"
        "assert counts[0] > 5 and len(set(counts)) == 1, counts\n"
        # Not by way of Python's end: autograd's thread may still be letting go of a node, and would have to wait for a
        # lock that is gone, which C++ takes for the end of everything ("terminate called without an active exception").
        "sys.stdout.flush(); os._exit(0)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "BASTILE_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_a_second_process_finds_the_kernels(tmp_path):
    script = (
        "import torch, bastile\n"
        "from bastile._library import kernel_counts\n"
        "from bastile.ops.rms_norm import rms_norm\n"
        "x = torch.randn(4, 4096, device='cuda'); rms_norm(x, x[0].clone())\n"
        "print(*kernel_counts())\n"
    )
    counts = []
    for _ in range(2):
        environment = {**os.environ, "BASTILE_CACHE": str(tmp_path)}
        run = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        counts.append(run.stdout.split())
    assert counts == [["1", "0"], ["0", "1"]]  # compiled, found


# ---- devices --------------------------------------------------------------------------------------------------------


def test_mixed_devices_are_named():
    with pytest.raises(RuntimeError, match="weight is on cpu:0, but x is on cuda:0"):
        rms_norm(torch.ones(2, 8, device="cuda"), torch.ones(8))
    with pytest.raises(RuntimeError, match="target is on cpu:0"):
        fused_linear_cross_entropy(
            torch.ones(2, 8, device="cuda"), torch.ones(4, 8, device="cuda"), torch.zeros(2).long()
        )


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_device_than_the_current_one():
    x, weight = normal(5, 256).requires_grad_(), normal(256)
    want = rms_norm(x, weight)
    assert torch.cuda.current_device() == 0
    there = x.detach().to("cuda:1").requires_grad_()
    got = rms_norm(there, weight.to("cuda:1"))
    got.sum().backward()
    want.sum().backward()
    assert got.device.index == 1
    assert_same_bits(got.cpu(), want.cpu())
    assert_same_bits(there.grad.cpu(), x.grad.cpu())
