"""Chunks whose sizes come for the first time, by PyTorch's flash attention: when that is chosen, what it computes."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from bastile.models import varlen
from bastile.models.chunked_attention import Chunked
from bastile.models.chunks import Chunks, chunks_of
from bastile.report import Tally
from oracle import EMULATED, Case, assert_no_worse_pooled, random_tensor

HEADS, WIDTH = 4, 72
needs_cuda = pytest.mark.skipif(EMULATED or not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def forgetful(monkeypatch):
    varlen._met.clear()
    yield
    varlen._met.clear()


@pytest.fixture
def served(monkeypatch):
    monkeypatch.setattr(varlen, "is_served", lambda *_: True)
    capturing = SimpleNamespace(now=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing.now)
    return capturing


def is_new(*lengths, chunks=None):
    chunks = Chunks(lengths) if chunks is None else chunks
    q = torch.empty(1, HEADS, sum(chunks.lengths), WIDTH)
    return varlen.is_new(None, (q, q, q), chunks, chunks.runs, {})


def test_sizes_that_come_again_have_a_plan(served):
    assert [is_new(4, 4, 6), is_new(4, 4, 6), is_new(4, 4, 6)] == [True, False, False]
    assert is_new(4, 4, 4)  # three of a size are another shape than two
    assert is_new(6, 9)  # one of which is known
    assert not is_new(6)


def test_all_layers_of_a_pass_compute_alike(served):
    first, second = Chunks((4, 6)), Chunks((4, 6))
    assert [is_new(chunks=first) for _ in range(3)] == [True] * 3
    assert [is_new(chunks=second) for _ in range(3)] == [False] * 3
    assert is_new(chunks=first)  # in a checkpoint's second run


def test_while_a_graph_is_captured_no_plan_is_built(served):
    assert is_new(4, 6)
    served.now = True
    assert is_new(4, 6)  # which has had none yet
    served.now = False
    assert not is_new(4, 6)
    served.now = True
    assert not is_new(4, 6)
    assert is_new(4, 7)
    assert not is_new(4, 6)


def test_what_is_remembered_is_bounded(served, monkeypatch):
    monkeypatch.setattr(varlen, "_MOST", 3)
    for length in range(1, 9):
        assert is_new(length)
    assert len(varlen._met) == 3
    assert not is_new(8)
    assert is_new(1)


def test_on_a_cpu_there_is_none():
    q = torch.empty(1, HEADS, 10, WIDTH, dtype=torch.bfloat16)
    given = {"is_causal": False, "scaling": 0.1}
    assert not varlen.is_new(sdpa_attention_forward, (q, q, q), Chunks((4, 6)), Chunks((4, 6)).runs, given)


# ---- on a GPU --------------------------------------------------------------------------------------------------------


def of_chunks(attend, lengths):
    def run(q, k, v):
        parts = zip(*[t.split(lengths, dim=2) for t in (q, k, v)], strict=True)
        return torch.cat([attend(*each).transpose(1, 2) for each in parts], dim=1)

    return run


def flash(q, k, v):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(q, k, v)


def exact(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2) * WIDTH**-0.5, -1) @ v


@needs_cuda
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lengths", [[64, 16, 64, 16], [1, 7, 100], [256]], ids=str)
def test_results_and_gradients(lengths, dtype, autocast, monkeypatch):
    """The rule, against float64: no worse than the same attention of each chunk. cuDNN's is another, with errors that
    differ from these by up to 2 % either way."""
    ran = []
    monkeypatch.setattr(varlen, "attention", lambda *args, was=varlen.attention: ran.append(1) or was(*args))
    boundaries = torch.tensor([0, *lengths], dtype=torch.int32, device="cuda").cumsum(0).to(torch.int32)
    module = SimpleNamespace(is_causal=False, num_key_value_groups=1)

    def ours(q, k, v):
        varlen._met.clear()
        with torch.autocast("cuda", dtype, enabled=autocast):
            helper = Chunked(Tally.of("chunked_attention", "here"))
            given = {"attention_mask": None, "scaling": WIDTH**-0.5, "dropout": 0.0, "is_causal": False}
            chunks_of(boundaries).ways.clear()
            return helper.output(sdpa_attention_forward, module, q, k, v, boundaries, **given)

    def draw():
        shape = 1, HEADS, sum(lengths), WIDTH
        inputs = {name: random_tensor(shape, dtype, "cuda") for name in "qkv"}
        # The sum of its exponentials is what a row's errors have in common.
        return Case(
            ours, of_chunks(flash, lengths), of_chunks(exact, lengths), inputs, independent=HEADS * sum(lengths)
        )

    assert_no_worse_pooled(draw)
    assert ran


@needs_cuda
def test_what_it_does_not_serve():
    q = torch.empty(1, HEADS, 10, WIDTH, device="cuda", dtype=torch.bfloat16)
    given = {"is_causal": False, "scaling": 0.1}

    def serves(attend=sdpa_attention_forward, q=q, **more):
        return varlen.is_served(attend, (q, q, q), {**given, **more})

    assert serves()
    assert not serves(is_causal=True)
    assert not serves(attention_mask=q)
    assert not serves(attend=scaled_dot_product_attention)
    assert not serves(q=q.float())
    assert not serves(q=q[..., :70])
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert not serves()
