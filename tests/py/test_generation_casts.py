"""Generating text by a model of float32 under autocast, as Accelerate's mixed precision has it: the tokens of stock
Transformers, each weight cast once a text, and nothing of that left behind it. And the attention of one token to keys
and values that heads have in common, which are not repeated for it."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations import sdpa_attention

import bastile
from bastile.graphs.caches import given_in
from bastile.models import generation, roomy_cache, sdpa
from bastile.models.roomy_cache import RoomyCache
from bastile.ops import _held_casts, low_rank
from bastile.ops._held_casts import cast_once, held_casts
from conftest import gradients, older_than, tiny_batch, tiny_model
from graphing import DEVICE, ON_CUDA, allow_graphs
from graphing import counted_tokens as counted

#: In releases before that, `generate` leaves the cache to the model, and nothing is held.
of_whole_texts = pytest.mark.skipif(older_than("5.1"), reason="text is generated as ever")
#: The second one's MLP and attention are the plainest there are: no norms of queries and keys.
families = pytest.mark.parametrize("family", ["qwen3", "llama"])

TOKENS = 20


@pytest.fixture(autouse=True)
def with_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    allow_graphs(monkeypatch)


@pytest.fixture(autouse=True)
def nothing_is_held_behind() -> Iterator[None]:
    yield
    assert_nothing_is_held()


def assert_nothing_is_held() -> None:
    assert _held_casts._held.made is None
    assert torch.is_autocast_cache_enabled()
    nesting = torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()
    assert nesting == (1, 0)


def autocast(dtype: torch.dtype = torch.bfloat16) -> Any:
    return torch.autocast(DEVICE, dtype)


def in_mixed_precision(model: Any) -> Any:
    """As Accelerate prepares a model: each of its calls opens autocast anew, and closes it."""
    own: Any = model.forward
    forward = autocast()(own)
    try:
        from accelerate.utils.operations import convert_outputs_to_fp32
    except ImportError:
        model.forward = functools.wraps(own)(lambda *args, **kwargs: widened(forward(*args, **kwargs)))
    else:
        model.forward = convert_outputs_to_fp32(forward)
    return model


def widened(outputs: Any) -> Any:
    for name, value in outputs.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            outputs[name] = value.float()
    return outputs


def decided(family: str = "qwen3", **changes: Any) -> Any:
    """A model in mixed precision that leaves no doubt of the next token, whatever 16 bits make of the rest: the head's
    rows are the embeddings, each that of the token before, and the layers add about as much again to what they read.
    (Tokens of random weights are as likely as others up to such rounding, in every second text.)"""
    model: Any = tiny_model(family, hidden_size=128, initializer_range=0.1, **changes)
    with torch.no_grad():
        embeddings = model.get_input_embeddings().weight.normal_()
        model.lm_head.weight.copy_(embeddings.roll(1, 0))
    return in_mixed_precision(model.to(DEVICE).eval())


def plain(family: str, **changes: Any) -> Any:
    """One of float32, whose tokens any wrong number changes."""
    model: Any = tiny_model(family, **changes)
    return model.to(DEVICE).eval()


def generated(model: Any, seed: int = 0, rows: int = 3, **options: Any) -> Any:
    """Left-padded prompts of unequal length."""
    batch = tiny_batch(model, rows=rows, seed=seed)
    given = {name: batch[name].to(DEVICE) for name in ("input_ids", "attention_mask")}
    usual = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "use_cache": True, "disable_compile": True}
    return model.generate(**given, max_new_tokens=TOKENS, **{**usual, **options})


def stock(model: Any, *args: Any, apart: float = 0.1, **options: Any) -> Any:
    """The test could not fail where all tokens are one, nor is it fair where two are as likely up to rounding. apart:
    by how much of the best one's logit the second one's has to be less."""
    bastile.reset()
    found = generated(model, *args, return_dict_in_generate=True, output_logits=True, **options)
    bastile.apply()
    counted()
    best = torch.stack(found.logits).topk(2).values
    assert ((best[..., 0] - best[..., 1]) / best[..., 0].abs()).min() > apart
    assert found.sequences[:, -TOKENS:].unique().numel() > 5
    return found.sequences


def logits_of(model: Any, **options: Any) -> torch.Tensor:
    """Of a text's tokens: a weight that is not what it should be shows in them, if not in tokens."""
    return torch.stack(generated(model, return_dict_in_generate=True, output_logits=True, **options).logits)


class Casts(TorchDispatchMode):
    """Counts what is made, in another type, of each of a model's parameters of float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {p.data_ptr(): name for name, p in model.named_parameters() if p.dtype is torch.float32}
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if (
            function.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.to)
            and result.dtype is not args[0].dtype
        ):
            name = self.names.get(args[0].data_ptr())
            if name is not None:
                self.counts[name] += 1
        return result


def casts_in(model: Any, call: Callable[[], Any]) -> tuple[Any, Counter[str]]:
    """What a call returns, and the casts in the model's own calls: around all of it, such a mode were a reason not to
    capture any."""
    casts, forward = Casts(model), model.forward

    @functools.wraps(forward)
    def watched(*args: Any, **kwargs: Any) -> Any:
        with casts:
            return forward(*args, **kwargs)

    model.forward = watched
    try:
        return call(), casts.counts
    finally:
        model.forward = forward


# ---- a text ----------------------------------------------------------------------------------------------------------


@of_whole_texts
@families
def test_tokens_and_casts(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several texts, the first of which is captured a token later."""
    model = decided(family)
    want = [stock(model, seed) for seed in range(3)]
    linear = [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert len(linear) == 2 * 7 + 1
    for seed, text in enumerate(want):
        got, casts = casts_in(model, functools.partial(generated, model, seed))
        assert torch.equal(got, text)
        assert counted() == (TOKENS - 2 + (seed > 0), {})
        assert casts == dict.fromkeys(linear, 1)
    # Where nothing is held, all weights are cast for each token; a graph does it by itself.
    monkeypatch.setattr(generation, "held_casts", nullcontext)
    got, casts = casts_in(model, functools.partial(generated, model, 0))
    assert torch.equal(got, want[0])
    assert casts.keys() == set(linear)
    assert min(casts.values()) >= (2 if ON_CUDA else TOKENS)


@of_whole_texts
@families
def test_the_bits_of_casts_that_are_not_held(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all logits, which tell of each weight in the model, by the products that both have: on a GPU what is held goes
    to kernels for layers of few rows."""
    monkeypatch.setattr(low_rank, "one_token_layers", lambda *given: None)
    model = decided(family)
    bastile.apply()
    got = [logits_of(model, seed=seed) for seed in range(3)]
    monkeypatch.setattr(generation, "held_casts", nullcontext)
    assert all(torch.equal(logits, logits_of(model, seed=seed)) for seed, logits in enumerate(got))


def scores_of(model: Any, seed: int, cache: list[Any], monkeypatch: pytest.MonkeyPatch, casts: bool | None) -> Any:
    """What a text's tokens are drawn by, and the types of the keys and values that it has. casts: None: as ever."""
    scores: list[torch.Tensor] = []

    class Seen(RoomyCache):
        def __init__(self, *args: Any, **given: Any) -> None:
            super().__init__(*args, **(given if casts is None else {**given, "casts": casts}))

        def release(self) -> None:
            cache[:] = [(layer.keys.dtype, layer.values.dtype) for layer in self.layers]
            super().release()

    def watch(ids: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        scores.append(made.clone())
        return made

    with monkeypatch.context() as patch:
        patch.setattr(roomy_cache, "RoomyCache", Seen)
        generated(model, seed, logits_processor=[watch])
    return torch.stack(scores)


@of_whole_texts
@families
def test_keys_are_kept_as_attention_reads_them(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their norm and rotary embedding are of float32: the same bits as where they are cast for each token. Not where
    the cache is returned, nor for an attention that may do more with them."""
    model = decided(family)
    bastile.apply()
    half, own = torch.bfloat16, torch.float32
    types: list[Any] = []
    for seed in range(2):
        kept = scores_of(model, seed, types, monkeypatch, None)
        assert types == [(half, half)] * 2
        assert torch.equal(kept, scores_of(model, seed, types, monkeypatch, False))
        assert types == [(own, half)] * 2
    returned = generated(model, return_dict_in_generate=True)
    assert {layer.keys.dtype for layer in given_in(returned).layers} == {own}
    model.set_attn_implementation("eager")
    scores_of(model, 0, types, monkeypatch, None)
    assert types == [(own, half)] * 2


@of_whole_texts
def test_nothing_is_held_behind_a_text() -> None:
    """Nor behind one that ends in the middle. What is held in it, the test sees there."""
    model = decided()
    bastile.apply()
    held: list[int] = []

    class Stop(Exception):
        pass

    def watch(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        made = _held_casts._held.made
        assert made is not None
        held.append(len(made))
        return scores

    def stop(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > 11 + TOKENS // 2:  # behind the prompt
            raise Stop
        return watch(ids, scores)

    generated(model, logits_processor=[watch])
    assert_nothing_is_held()
    # Queries, keys, values, and the MLP's three, by cast_once: the others are in autocast's own cache.
    assert held == [2 * 6] * TOKENS
    held.clear()
    with pytest.raises(Stop):
        generated(model, logits_processor=[stop])
    assert_nothing_is_held()
    assert held == [2 * 6] * (TOKENS // 2 + 1)
    # The next text casts anew.
    _, casts = casts_in(model, lambda: generated(model))
    assert set(casts.values()) == {1}


@of_whole_texts
@families
@pytest.mark.parametrize("is_stock", [False, True])
def test_training_behind_a_text(family: str, is_stock: bool) -> None:
    """The bits of a step without one. Of casts that stay, the step would not see that weights have changed since, and
    earlier releases of PyTorch make them without gradients, which would leave weights without any. is_stock: the step
    is Transformers' own, whose layers all ask autocast for its casts; few of ours do."""

    def step(texts: int) -> dict[str, torch.Tensor]:
        bastile.reset()
        bastile.apply()
        model = decided(family)
        for seed in range(texts):
            generated(model, seed)
        if is_stock:
            bastile.reset()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        batch = {name: tensor.to(DEVICE) for name, tensor in tiny_batch(model).items()}
        model.train()(**batch, use_cache=False).loss.backward()
        assert all(p.grad is not None and bool(p.grad.any()) for p in model.parameters())
        return gradients(model)

    want = step(0)
    for texts in (1, 2):
        got = step(texts)
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], gradient) for name, gradient in want.items())


@of_whole_texts
@families
def test_weights_that_change_between_texts(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place, as an optimizer changes them: those that the next text casts are the new ones."""
    model = decided(family)
    bastile.apply()
    before, logits = generated(model), logits_of(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
        model.lm_head.weight.copy_(model.lm_head.weight.roll(1, 0))  # to other tokens
    after = generated(model)
    changed = logits_of(model)
    assert torch.equal(after, stock(model))
    assert (after != before)[:, -TOKENS:].all()
    monkeypatch.setattr(generation, "held_casts", nullcontext)
    assert torch.equal(changed, logits_of(model))
    assert not torch.equal(changed, logits)


# ---- what holds ------------------------------------------------------------------------------------------------------


def layer(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, nn.Parameter, nn.Parameter]:
    x, weight, bias = torch.randn(2, 1, 8), torch.randn(4, 8), torch.randn(4)
    return x.to(DEVICE, dtype), nn.Parameter(weight.to(DEVICE, dtype)), nn.Parameter(bias.to(DEVICE, dtype))


def assert_as_they_are(x: torch.Tensor, *weights: torch.Tensor | None) -> None:
    y, found = cast_once(x, weights)
    assert y is x
    assert len(found) == len(weights)
    assert all(one is other for one, other in zip(found, weights, strict=True))


def test_what_is_not_cast() -> None:
    """Where nothing is held, without autocast, and where it would leave one alone, or all are of its type."""
    x, weight, bias = layer()
    with autocast():
        assert_as_they_are(x, weight, bias, None)
    with held_casts():
        assert_as_they_are(x, weight, bias, None)
        with autocast():
            assert_as_they_are(x, weight.double(), bias)
            assert_as_they_are(x, weight, bias.double())
            assert_as_they_are(x.double(), weight, bias)
            assert_as_they_are(*layer(torch.bfloat16), None)
            with torch.autocast(DEVICE, enabled=False):
                assert_as_they_are(x, weight, bias, None)
        assert _held_casts._held.made == {}
    with autocast():
        assert_as_they_are(x, weight, bias, None)


def test_what_is_cast_once() -> None:
    x, weight, bias = layer()
    with held_casts(), autocast():
        y, (first, none, last) = cast_once(x, (weight, None, bias))
        assert none is None
        pairs: list[tuple[Any, torch.Tensor]] = [(y, x), (first, weight), (last, bias)]
        for got, want in pairs:
            assert got.dtype is torch.bfloat16
            assert not got.requires_grad
            assert torch.equal(got, want.detach().bfloat16())
        _, (again, none, last_again) = cast_once(x + 1, (weight, None, bias))
        assert (again is first, none is None, last_again is last) == (True, True, True)
        # Another weight, with the same numbers, is another one.
        assert cast_once(x, (nn.Parameter(weight.detach().clone()),))[1][0] is not first


def test_another_type_is_cast_anew() -> None:
    x, weight, _ = layer()
    with held_casts():
        for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
            with autocast(dtype):
                y, (got,) = cast_once(x, (weight,))
                assert (y.dtype, got.dtype) == (dtype, dtype)
                assert torch.equal(got, weight.detach().to(dtype))
                assert cast_once(x, (weight,))[1][0] is got


def test_texts_within_texts() -> None:
    """Each holds its own, for weights may be others there; the outer one's are there again behind it, autocast's own
    among them, which stay until the last text ends."""
    x, *_ = layer()
    linear = nn.Linear(8, 4, bias=False).to(DEVICE)

    def casts() -> int:
        """By autocast, in a call that opens it."""
        counting = Casts(linear)
        with torch.no_grad(), autocast(), counting:
            linear(x)
        return counting.counts["weight"]

    assert (casts(), casts()) == (1, 1)
    with held_casts():
        assert (casts(), casts()) == (1, 0)
        with autocast():
            _, (outer,) = cast_once(x, (linear.weight,))
        with held_casts(), autocast():
            assert cast_once(x, (linear.weight,))[1][0] is not outer
        with autocast():
            assert cast_once(x, (linear.weight,))[1][0] is outer
        assert casts() == 0
    assert casts() == 1


# ---- attention of one token ------------------------------------------------------------------------------------------


def one_token(rows: int = 3, heads: int = 6, of_keys: int = 2, length: int = 13, queries: int = 1) -> tuple[Any, ...]:
    """q, k, v, and a mask by which each query sees something."""
    q = torch.randn(rows, heads, queries, 16, device=DEVICE)
    k, v = torch.randn(2, rows, of_keys, length, 16, device=DEVICE)
    mask = torch.rand(rows, 1, queries, length, device=DEVICE) > 0.4
    mask[..., 0] = True
    return q, k, v, mask


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("heads", "of_keys"), [(6, 2), (4, 1)])  # the second: one head of keys for all
def test_packed_heads(heads: int, of_keys: int, bias: bool, scale: float | None) -> None:
    q, k, v, mask = one_token(heads=heads, of_keys=of_keys)
    if bias:
        mask = torch.randn(mask.shape, device=DEVICE).masked_fill(~mask, -torch.inf)
    got = sdpa._packed(q, k, v, mask, scale)
    k, v = (each.repeat_interleave(heads // of_keys, 1) for each in (k, v))
    want = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2)
    assert got.is_contiguous()
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


def test_what_is_packed() -> None:
    q, k, _, mask = one_token()
    module = SimpleNamespace(num_key_value_groups=3)

    def is_packed(
        q: Any = q, k: Any = k, mask: Any = mask, args: Any = (), module: Any = module, **kwargs: Any
    ) -> bool:
        return sdpa._is_of_one_token(module, q, k, mask, args, kwargs)

    with torch.no_grad():
        for row in (mask, torch.zeros_like(mask, dtype=q.dtype), mask[:1]):
            assert is_packed(mask=row, scaling=0.3, dropout=0.0, position_bias=None)
        several = one_token(queries=2)
        assert not is_packed(q=several[0], mask=several[3])
        assert not is_packed(q=several[0])
        assert not is_packed(mask=None)
        assert not is_packed(mask=mask.expand(-1, 6, -1, -1))
        assert not is_packed(mask=mask[..., None])
        assert not is_packed(mask=mask[..., 1:])
        assert not is_packed(dropout=0.1)
        assert not is_packed(position_bias=mask)
        assert not is_packed(softcap=30.0)
        assert not is_packed(args=(0.0,))
        # Heads that are not as many as the module says, for which the original does something else.
        assert not is_packed(module=SimpleNamespace())
        assert not is_packed(module=SimpleNamespace(num_key_value_groups=2))
    assert not is_packed()


@of_whole_texts
@families
@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("of_keys", [1, 2, 4])  # of four heads: with the last ones nothing is packed
def test_texts_with_packed_heads(family: str, of_keys: int, is_mixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a release of Transformers that repeats keys and values; in this one, what is not packed here is an error."""
    calls: list[tuple[int, int]] = []
    packed = sdpa._packed

    def noted(q: torch.Tensor, k: torch.Tensor, *args: Any) -> torch.Tensor:
        calls.append((q.shape[1], k.shape[1]))
        return packed(q, k, *args)

    monkeypatch.setattr(sdpa, "_packed", noted)
    monkeypatch.setattr(sdpa, "serves_token", lambda *_: False)  # on GPUs: test_token_attention.py
    model = decided(family, num_key_value_heads=of_keys) if is_mixed else plain(family, num_key_value_heads=of_keys)
    want = stock(model, apart=0.1 if is_mixed else 1e-4)
    bastile.reset()
    monkeypatch.delattr(sdpa_attention, "pack_gqa", raising=False)
    bastile.apply()
    # That of 16 bits is put in where a prompt's mask is made.
    assert is_mixed or sdpa.register()
    assert torch.equal(generated(model), want)
    assert counted() == (TOKENS - 2, {})
    assert set(calls) == ({(4, of_keys)} if of_keys < 4 else set())
    assert of_keys == 4 or len(calls) >= 2 * (2 if ON_CUDA else TOKENS - 1)


@of_whole_texts
def test_a_release_that_packs_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is left to do so."""
    model = decided()
    want = stock(model)
    bastile.reset()
    monkeypatch.setattr(sdpa_attention, "pack_gqa", getattr(sdpa_attention, "pack_gqa", None), raising=False)
    monkeypatch.setattr(sdpa, "_packed", None)
    monkeypatch.setattr(sdpa, "serves_token", lambda *_: False)
    bastile.apply()
    assert torch.equal(generated(model), want)
