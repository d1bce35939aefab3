"""Chunks of one tensor: computed together they are what they are one by one, whatever their lengths; and how long they
are is asked once, and again where it may have changed."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from bastile import host_copies
from bastile.models import chunked_attention, chunks
from bastile.report import Tally


class Attention(torch.nn.Module):
    num_key_value_groups = 1
    is_causal = False


def boundaries(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def eager() -> Callable[..., Any]:
    from transformers.models.qwen2_vl import modeling_qwen2_vl

    return modeling_qwen2_vl.eager_attention_forward


def stock(attend: Any, q: Any, k: Any, v: Any, lengths: list[int]) -> tuple[torch.Tensor, list[Any]]:
    splits = [torch.split(t, lengths, dim=2) for t in (q, k, v)]
    outputs = [
        attend(Attention(), *each, attention_mask=None, scaling=0.3, dropout=0.0, is_causal=False)
        for each in zip(*splits, strict=True)
    ]
    return torch.cat([output[0] for output in outputs], dim=1), [output[1] for output in outputs]


def ours(attend: Any, q: Any, k: Any, v: Any, cu_seqlens: Any, **more: Any) -> tuple[torch.Tensor, list[Any]]:
    given = {"attention_mask": None, "scaling": 0.3, "dropout": 0.0, "is_causal": False, **more}
    helper = chunked_attention.Chunked(Tally("chunked_attention", "a test"))
    output, outputs = helper.with_outputs(attend, Attention(), q, k, v, cu_seqlens, **given)
    assert torch.equal(output, helper.output(attend, Attention(), q, k, v, cu_seqlens, **given))
    again, weights = helper.with_weights(attend, Attention(), q, k, v, cu_seqlens, **given)
    assert torch.equal(output, again)
    assert torch.equal(torch.cat([each[0] for each in outputs], 1), output)
    assert all(a is b is None or torch.equal(a, b[1]) for a, b in zip(weights, outputs, strict=True) if a is not None)
    return output, weights


def heads(rows: int, many: int = 2, width: int = 4) -> tuple[torch.Tensor, ...]:
    """As the towers make them: queries and keys of their own memory, values from the projection of all three."""
    joint = torch.randn(rows, 3, many, width).requires_grad_()
    q, k, v = joint.unbind(1)
    return joint, *[t.transpose(0, 1).unsqueeze(0) for t in (q * 1, k * 1, v)]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.sampled_from([1, 2, 3, 5, 8, 8, 8]), min_size=1, max_size=24),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1, 1 << 16, 1 << 30]),
)
def test_any_lengths(lengths: list[int], is_eager: bool, trains: bool, worth: int) -> None:
    """worth: never gathered, as it is, wherever a call is saved."""
    attend = eager() if is_eager else sdpa_attention_forward
    with pytest.MonkeyPatch.context() as patch, torch.set_grad_enabled(trains):
        patch.setitem(chunks._WORTH, "cpu", worth)
        joint, q, k, v = heads(sum(lengths))
        want, want_weights = stock(attend, q, k, v, lengths)
        got, weights = ours(attend, q, k, v, boundaries(lengths))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        assert got.is_contiguous()
        for one, other in zip(weights, want_weights, strict=True):
            assert (one is None) is (other is None) is not is_eager
            if one is not None:
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        if trains:
            dy = torch.randn_like(got)
            dx = [torch.autograd.grad(y, joint, dy, retain_graph=True)[0] for y in (got, want)]
            torch.testing.assert_close(*dx, rtol=1e-5, atol=1e-5)


def test_equal_chunks_are_seen_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention is given views, in the forward pass; in float32 on a CPU its results are the very same."""
    seen: list[int] = []
    monkeypatch.setattr(chunked_attention, "_parameters", lambda attend: frozenset())

    def attend(module: Any, q: Any, k: Any, v: Any, attention_mask: Any, **given: Any) -> Any:
        seen.extend(t.untyped_storage().data_ptr() for t in (q, k, v))
        assert q.shape == (3, 2, 8, 4)
        return sdpa_attention_forward(module, q, k, v, attention_mask, **given)

    _, q, k, v = heads(24)
    got, _ = ours(attend, q, k, v, boundaries([8, 8, 8]))
    assert {*seen} == {t.untyped_storage().data_ptr() for t in (q, k, v)}
    assert torch.equal(got, stock(sdpa_attention_forward, q, k, v, [8, 8, 8])[0])


def test_no_more_chunks_at_a_time_than_a_grid_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "_MOST", 4)
    assert chunks.Chunks((2,) * 9 + (3,)).runs == [(4, 2), (4, 2), (1, 2), (1, 3)]
    assert chunks.Chunks((2, 3) * 5).kinds == [(4, 2), (1, 2), (4, 3), (1, 3)]
    _, q, k, v = heads(25)
    monkeypatch.setitem(chunks._WORTH, "cpu", 1 << 30)
    lengths = [2, 3] * 5
    for attend in (sdpa_attention_forward, eager()):
        got, want = ours(attend, q, k, v, boundaries(lengths)), stock(attend, q, k, v, lengths)
        torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-6)
        assert [None if w is None else w.shape for w in got[1]] == [None if w is None else w.shape for w in want[1]]


def test_gathering_pays_by_calls_and_bytes() -> None:
    """Of Qwen2.5-VL's 4096 patches of 1280 it takes three calls saved, of ten times as many ten times as many."""
    worth = chunks._WORTH["cuda"]
    assert 2 * worth < chunks._COPIES * 4096 * 1280 <= 3 * worth
    assert not chunks.Chunks((8,) * 50).is_gathered(torch.empty(1))
    assert not chunks.Chunks((8, 4, 2)).is_gathered(torch.empty(1))
    assert chunks.Chunks((8, 4, 8)).is_gathered(torch.empty(1))
    assert not chunks.Chunks((8, 4, 8)).is_gathered(torch.empty(1 << 16))


@pytest.mark.parametrize("lengths", [[4, 0, 4], [0, 8], [], [4, 3], [4, 8], [9, -1]])
def test_what_is_empty_or_does_not_fit_is_the_original_s(lengths: list[int]) -> None:
    _, q, k, v = heads(8)

    def result(call: Callable[[], Any]) -> Any:
        try:
            return call()[0]
        except Exception as error:
            return type(error), str(error)

    got, want = (
        result(lambda: ours(sdpa_attention_forward, q, k, v, boundaries(lengths))),
        result(lambda: stock(sdpa_attention_forward, q, k, v, lengths)),
    )
    assert torch.equal(got, want) if isinstance(want, torch.Tensor) else got == want
    helper = chunked_attention.Chunked(Tally("chunked_attention", "a test"))
    given = {"attention_mask": None, "scaling": 0.3}
    result(lambda: helper.with_weights(sdpa_attention_forward, Attention(), q, k, v, boundaries(lengths), **given))
    assert helper.tally.ran == 0


def test_several_gradients_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(chunks._WORTH, "cpu", 1 << 30)
    joint, q, k, v = heads(12)
    y = ours(eager(), q, k, v, boundaries([4, 2, 4, 2]))[0]
    dy = torch.randn(3, *y.shape)
    want = torch.stack([torch.autograd.grad(y, joint, one, retain_graph=True)[0] for one in dy])
    (got,) = torch.autograd.grad(y, joint, dy, retain_graph=True, is_grads_batched=True)
    torch.testing.assert_close(got, want)
    (first,) = torch.autograd.grad(y, joint, dy[0], create_graph=True)
    assert torch.autograd.grad(first.square().sum(), joint)[0].abs().sum() > 0


def test_masks_and_biases_are_given_to_each_chunk() -> None:
    _, q, k, v = heads(8)
    mask = torch.randn(4, 4)
    splits = [torch.split(t, [4, 4], dim=2) for t in (q, k, v)]
    want = torch.cat(
        [
            sdpa_attention_forward(Attention(), *each, attention_mask=mask, scaling=0.3)[0]
            for each in zip(*splits, strict=True)
        ],
        1,
    )
    assert torch.equal(ours(sdpa_attention_forward, q, k, v, boundaries([4, 4]), attention_mask=mask)[0], want)
    helper = chunked_attention.Chunked(Tally("chunked_attention", "a test"))

    def aside(**more: Any) -> list[str]:
        helper.tally.aside.clear()
        helper.output(
            sdpa_attention_forward, Attention(), q, k, v, boundaries([4, 4]), attention_mask=None, scaling=0.3, **more
        )
        return [*helper.tally.aside]

    assert aside(is_causal=False, num_items_in_batch=torch.tensor(3), cu_seq_lens_q=torch.arange(3)) == []
    assert aside(is_causal=False, something=torch.arange(3)) == ["it is given something"]


def test_weights_that_nobody_keeps_are_not_there_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_attention, "_MOST_WEIGHTS", 2 * 4 * 16)
    helper = chunked_attention.Chunked(Tally("chunked_attention", "a test"))
    for count, attend, trains, ran in (
        (4, eager(), 0, 1),
        (5, eager(), 0, 0),
        (5, eager(), 1, 1),
        (5, sdpa_attention_forward, 0, 1),
    ):
        _, q, k, v = heads(4 * count)
        helper.tally.ran = 0
        with torch.set_grad_enabled(bool(trains)):
            helper.output(attend, Attention(), q, k, v, boundaries([4] * count), attention_mask=None, scaling=0.3)
        assert helper.tally.ran == ran


def test_transforms_run_the_original() -> None:
    _, q, k, v = heads(8)
    cuts = boundaries([4, 4])
    helper = chunked_attention.Chunked(Tally("chunked_attention", "a test"))

    def run(q: torch.Tensor) -> torch.Tensor:
        given = {"attention_mask": None, "scaling": 0.3}
        return helper.output(eager(), Attention().eval(), q, k.detach(), v.detach(), cuts, **given).sum()  # type: ignore[no-any-return]

    want = torch.autograd.grad(run(q), q)[0]
    assert helper.tally.ran == 1
    torch.testing.assert_close(torch.func.grad(run)(q.detach()), want)
    assert helper.tally.ran == 1


# ---- what is remembered ---------------------------------------------------------------------------------------------


@contextmanager
def questions(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    asked: list[int] = []
    tolist = torch.Tensor.tolist
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "tolist", lambda self: asked.append(len(self)) or tolist(self))
        yield asked


def test_a_tensor_is_asked_once_and_again_when_it_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    cuts = boundaries([4, 4])
    assert not chunks.are_known(cuts)
    with questions(monkeypatch) as asked:
        assert chunks.lengths_of(cuts) == chunks.lengths_of(cuts) == (4, 4)
        assert chunks.are_known(cuts)
        assert asked == [3]
        assert chunks.lengths_of(cuts.clone()) == (4, 4)
        assert asked == [3, 3]
        cuts[1] = 2
        assert not chunks.are_known(cuts)
        assert chunks.lengths_of(cuts) == (2, 6)
        assert asked == [3, 3, 3]


def test_rows_are_those_of_a_changed_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(chunks._WORTH, "cpu", 1 << 30)
    _, q, k, v = heads(12)
    cuts = boundaries([4, 2, 4, 2])
    ours(sdpa_attention_forward, q, k, v, cuts)
    cuts.copy_(boundaries([2, 4, 2, 4]))
    torch.testing.assert_close(
        ours(sdpa_attention_forward, q, k, v, cuts)[0], stock(sdpa_attention_forward, q, k, v, [2, 4, 2, 4])[0]
    )


def test_what_was_made_in_inference_serves_a_training_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(chunks._WORTH, "cpu", 1 << 30)
    joint, q, k, v = heads(12)
    cuts = boundaries([4, 2, 4, 2])
    with torch.inference_mode():
        ours(sdpa_attention_forward, q, k, v, cuts)
    ours(sdpa_attention_forward, q, k, v, cuts)[0].sum().backward()
    assert joint.grad is not None


def test_inference_tensors_are_asked_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.inference_mode(), questions(monkeypatch) as asked:
        cuts = boundaries([4, 4])
        assert chunks.lengths_of(cuts) == (4, 4)
        cuts[1] = 3
        assert chunks.lengths_of(cuts) == (3, 5)
        assert asked == [3, 3]
        assert not chunks.are_known(cuts)


def test_nothing_outlives_its_tensor() -> None:
    gc.collect()
    before = len(chunks._known)
    cuts = [boundaries([n, 4]) for n in range(1, 20)]
    assert [chunks.lengths_of(each) for each in cuts] == [(n, 4) for n in range(1, 20)]
    assert len(chunks._known) == before + 19
    del cuts
    gc.collect()
    assert len(chunks._known) == before
    assert all(chunks.lengths_of(boundaries([n])) == (n,) for n in range(1, 50))  # at addresses that were others'


def test_what_the_host_has_sent_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cuts, host = boundaries([4, 4]), boundaries([4, 4])
    host_copies.remember(cuts, host)
    asked: list[torch.Tensor] = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: asked.append(self) or tolist(self))
    assert chunks.are_known(cuts)
    assert chunks.lengths_of(cuts) == (4, 4)
    assert [each is host for each in asked] == [True]
