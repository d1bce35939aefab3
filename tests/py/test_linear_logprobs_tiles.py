"""Log-probabilities of many rows on Hopper, whose logits stay in registers: what test_linear_logprobs.py asks of them
elsewhere, where products are cuBLAS's."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from bastile.ops.fused_linear_cross_entropy import set_compaction, set_logits_memory
from bastile.ops.linear_logprobs import OUTPUTS, linear_logprobs, set_float32_dweight
from oracle import assert_no_worse, assert_no_worse_pooled, assert_same_bits
from test_linear_logprobs import case, inputs_of

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="for Hopper's tensor cores"
)

HALVES = [torch.bfloat16, torch.float16]
#: The fewest rows and whole boxes; rows, classes and columns that end within tiles; more than a group of rows' tiles.
SHAPES = [(1024, 1024, 64), (1500, 4099, 72), (4400, 300, 264)]


@pytest.fixture(autouse=True)
def _logits_that_do_not_fit():
    set_logits_memory(1.5)
    set_compaction(False)
    set_float32_dweight(True)
    yield
    set_logits_memory(None)
    set_compaction(None)
    set_float32_dweight(None)


def kernels(run) -> set[str]:
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    return {event.key for event in seen.key_averages()}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "logit_scale": 1.7}], ids=str)
def test_values_and_gradients(shape, dtype, options):
    assert_no_worse(case(*shape, dtype, "cuda", **options))


@pytest.mark.parametrize("dtype", HALVES)
def test_pooled_errors(dtype):
    assert_no_worse_pooled(lambda: case(1100, 1500, 64, dtype, "cuda", ignored=0.0))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("outputs", [(), ("is_top1",), OUTPUTS], ids=str)
def test_statistics_of_exact_logits(outputs, dtype):
    """Whole numbers, so that logits are exact and the largest often several."""
    tokens, classes, width = 2100, 777, 40
    hidden = torch.randint(-1, 2, (tokens, width), device="cuda").to(dtype)
    weight = torch.randint(-1, 2, (classes, width), device="cuda").to(dtype)
    z = hidden.double() @ weight.double().t()
    target = torch.randint(0, classes, (tokens,), device="cuda")
    tops = z.argmax(-1)
    target[::2] = tops[::2]
    target[1::4] = classes - 1 - (z.flip(-1)).argmax(-1)[1::4]  # the last of the largest
    target[7], target[8] = -100, classes + 5
    ran = kernels(lambda: linear_logprobs(hidden, weight, target, outputs=outputs))
    assert {"linear_logprobs_tiles", "linear_logprobs_join"} <= ran
    found = linear_logprobs(hidden, weight, target, outputs=outputs)
    log_p = z.log_softmax(-1)
    p = log_p.exp()
    want = {
        "log_probs": log_p.gather(1, target.clamp(0, classes - 1)[:, None])[:, 0],
        "entropy": -(p * log_p).sum(-1),
        "lse": z.logsumexp(-1),
        "log_sum_sq_probs": p.square().sum(-1).log(),
        "mean_logits": z.mean(-1),
    }
    assert found.log_probs[7] == 0
    assert found.log_probs[8].isnan()
    there = torch.ones_like(target, dtype=torch.bool)
    there[7:9] = False
    for name, expected in want.items():
        if name == "log_probs" or name in outputs:
            torch.testing.assert_close(getattr(found, name)[there].double(), expected[there], rtol=2e-6, atol=1e-5)
    if "is_top1" in outputs:
        assert torch.equal(found.is_top1[there], (tops == target)[there])


@pytest.mark.parametrize("dtype", HALVES)
def test_bits_repeat_of_any_strides_and_parts(dtype):
    inputs, target = inputs_of(3000, 2000, 128, dtype, "cuda")
    hidden, weight = inputs["hidden"], inputs["weight"]
    all_at_once = linear_logprobs(hidden, weight, target, outputs=OUTPUTS)
    wide = torch.cat([hidden, hidden], -1)[:, :128]
    assert not wide.is_contiguous()
    for mebibytes, given in ((1.5, hidden), (1.5, wide), (0.25, hidden)):  # the last: two parts
        set_logits_memory(mebibytes)
        again = linear_logprobs(given, weight, target, outputs=OUTPUTS)
        for ours, before in zip(again, all_at_once, strict=True):
            assert_same_bits(ours.float(), before.float())


def test_what_it_does_not_serve_runs_as_before():
    inputs, target = inputs_of(1024, 500, 68, torch.bfloat16, "cuda", bias=True)
    hidden, weight, bias = inputs["hidden"], inputs["weight"], inputs["bias"]
    even = hidden[:, :64].contiguous(), weight[:, :64].contiguous()
    for tensors, options in (
        ((hidden, weight), {}),  # rows of 136 bytes
        (even, {"bias": bias}),
        (even, {"softcap": 3.0}),
        (even, {"logit_scale": -1.0}),
        ((even[0][:1000], even[1]), {}),
    ):
        labels = target[: len(tensors[0])]
        assert "linear_logprobs_tiles" not in kernels(
            lambda t=tensors, o=options, y=labels: linear_logprobs(*t, y, **o)
        )
