"""Generating text with the calls for one token each as CUDA graphs: the tokens of stock Transformers. Where there is no
GPU, a recorder that calls the function again stands for CUDA's."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bastile
from bastile.graphs import conditions, decoding, kept_calls
from bastile.graphs.caches import NAMES
from bastile.graphs.recorder import CudaRecorder, RepeatingRecorder
from bastile.models import generation, roomy_cache, sdpa, small
from bastile.models.sites import ModelFile
from conftest import DENSE, modeling, older_than, tiny_batch, tiny_model
from graphing import DEVICE, ON_CUDA, allow_graphs, the_host_draws
from graphing import counted_tokens as counted
from oracle import few_examples
from texts import TOKENS, adapted, assert_text_of_stock, generated, small_one, stock

#: In releases before that, `generate` leaves the cache to the model, and nothing is captured.
pytestmark = pytest.mark.skipif(older_than("5.1"), reason="text is generated as ever")


@pytest.fixture(autouse=True)
def with_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    allow_graphs(monkeypatch)
    counted()
    if not ON_CUDA:
        monkeypatch.setattr(decoding.Decoding, "_capture", _rewound(decoding.Decoding._capture))


def _rewound(capture: Callable[..., Any]) -> Callable[..., Any]:
    """A graph that is captured computes nothing; this recorder does, and a recurrence's state would go on twice."""

    def captured(self: Any, *args: Any) -> Any:
        states = [
            tensor
            for layer in self.cache.layers
            for name in ("conv_states", "recurrent_states")
            for tensor in getattr(layer, name, {}).values()
            if tensor is not None
        ]
        before = [tensor.clone() for tensor in states]
        call = capture(self, *args)
        for tensor, was in zip(states, before, strict=True):
            tensor.copy_(was)
        return call

    return captured


@pytest.mark.parametrize(
    "family",
    # Dense; windows; windows and shared keys; experts; latent attention; without rotary embedding; linear attention and
    # states beside attention; short convolutions.
    [*sorted(DENSE), "gemma3_text", "gemma4_text", "qwen3_moe", "deepseek_v3", "gpt2", "bloom", "qwen3_5_text", "bamba",
     "lfm2"],
)  # fmt: skip
def test_greedy_tokens(family: str) -> None:
    if family not in DENSE and family not in small.causal_types():
        pytest.skip(f"this Transformers has no {family}")
    if family == "bloom" and older_than("5.18"):
        pytest.skip("there it looks for a StaticCache")
    assert_text_of_stock(small_one(family))


@pytest.mark.parametrize(("rows", "tokens"), [(2, 300), (1, 800)])  # which make room twice, and four times
def test_a_text_that_outgrows_its_room(rows: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roomy_cache, "_AT_ONCE", 0)
    assert_text_of_stock(tiny_model(max_position_embeddings=1024).to(DEVICE).eval(), tokens, rows=rows)


def test_room_for_the_whole_text() -> None:
    """Where that is little memory: nothing is captured again."""
    model = tiny_model(max_position_embeddings=1024).to(DEVICE).eval()
    want = stock(model, 300)
    captures = []
    with pytest.MonkeyPatch.context() as patch:
        capture = decoding.Decoding._capture
        patch.setattr(decoding.Decoding, "_capture", lambda *args: (captures.append(None), capture(*args))[1])
        assert torch.equal(generated(model, 300), want)
    assert len(captures) == 1


def test_later_texts_are_captured_at_once() -> None:
    """Where a model's call was captured before; of other sizes, and where it was changed since, it runs first."""
    model = small_one("qwen3")
    want, other = stock(model), stock(model, rows=2)
    for rows, replayed in [(3, TOKENS - 2), (3, TOKENS - 1), (2, TOKENS - 2), (3, TOKENS - 1), (2, TOKENS - 1)]:
        assert torch.equal(generated(model, rows=rows), want if rows == 3 else other)
        assert counted() == (replayed, {})
    model.append = torch.nn.Identity()
    generated(model)
    assert counted() == (TOKENS - 2, {})


def test_a_later_text_that_cannot_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is generated as ever, and the next one's first call runs before it is captured."""
    monkeypatch.setattr(kept_calls, "_MOST_LOST", 0)  # and is not there
    model = small_one("qwen3")
    want = stock(model)
    generated(model)
    with monkeypatch.context() as patch:

        def fails(*_: Any) -> Any:
            raise RuntimeError("no memory")

        patch.setattr(CudaRecorder if ON_CUDA else RepeatingRecorder, "record", fails)
        counted()
        assert torch.equal(generated(model), want)
        assert counted() == (0, {"the call for one token cannot be captured: no memory": 1})
    assert torch.equal(generated(model), want)
    assert counted() == (TOKENS - 2, {})


def test_masks_are_made_biases_once() -> None:
    """For all layers of a captured call, with the numbers that PyTorch's attention makes of them in each."""
    mask = torch.rand(2, 1, 1, 40, device=DEVICE) > 0.4
    q = torch.randn(2, 4, 1, 16, device=DEVICE, dtype=torch.bfloat16)
    k, v = torch.randn(2, 2, 4, 40, 16, device=DEVICE, dtype=torch.bfloat16)
    assert sdpa._biases.made is None
    with sdpa.masks_as_biases():
        bias = sdpa._bias_of(mask, q, {})
        assert sdpa._bias_of(mask, q, {}) is bias
        assert sdpa._bias_of(mask.clone(), q, {}) is not bias
        assert sdpa._bias_of(mask, q.float(), {}).dtype is torch.float32
        assert sdpa._bias_of(mask, q, {"position_bias": q}) is mask
        assert sdpa._bias_of(None, q, {}) is None
        assert sdpa._bias_of(bias, q, {}) is bias
    assert sdpa._biases.made is None
    attend = torch.nn.functional.scaled_dot_product_attention
    assert torch.equal(attend(q, k, v, attn_mask=bias), attend(q, k, v, attn_mask=mask))


def test_a_window_shorter_than_the_text() -> None:
    assert_text_of_stock(
        small.small_model("gemma3_text", sliding_window=8).to(DEVICE).eval(), 40, repetition_penalty=5.0
    )


def test_tokens_that_are_drawn() -> None:
    """By the same generator: the logits are those of calls without graphs."""
    model = small_one("qwen3")
    drawn = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 30}
    torch.manual_seed(3)
    want = stock(model, **drawn)
    torch.manual_seed(3)
    assert torch.equal(generated(model, **drawn), want)
    assert counted() == (TOKENS - 2, {})


def test_sequences_that_end_early() -> None:
    model = small_one("llama")
    free = stock(model)
    end = int(free[0, -TOKENS + 4])
    want = stock(model, eos_token_id=end)
    assert torch.equal(generated(model, eos_token_id=end), want)
    assert (want == 0)[:, -1].any() or want.shape[1] < free.shape[1]


@pytest.mark.parametrize("at", [3, 4, 9])
@pytest.mark.parametrize("rows", [1, 3])
def test_what_is_drawn_behind_a_text_that_ends_early(rows: int, at: int) -> None:
    """Whether all have ended is asked a token later: that token, and what it drew, is taken back."""
    model = small_one("qwen3")
    drawn = {"do_sample": True, "temperature": 0.7, "rows": rows}
    torch.manual_seed(3)
    free = stock(model, **drawn)
    ends = free[:, -TOKENS + at].tolist()
    found = []
    for apply in (bastile.reset, bastile.apply):
        apply()
        torch.manual_seed(3)
        text = generated(model, eos_token_id=ends, **drawn)
        found.append((text, generated(model, eos_token_id=ends, **drawn), torch.rand(3, device=DEVICE)))
    assert found[0][0].shape[1] < free.shape[1]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_calls_of_processors_of_the_users() -> None:
    """As many as ever: one that counts them, or a streamer, sees each token as it comes."""
    model = small_one("llama")
    end = int(stock(model, rows=1)[0, -TOKENS + 6])
    calls: list[list[int]] = []

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        calls[-1].append(ids.shape[1])
        return scores

    class Streamer:
        def put(self, value: torch.Tensor) -> None:
            calls[-1].append(value.numel())

        def end(self) -> None:
            calls[-1].append(-1)

    for options in ({"logits_processor": [processor]}, {"streamer": Streamer()}):
        for apply in (bastile.reset, bastile.apply):
            apply()
            calls.append([])
            generated(model, rows=1, eos_token_id=end, **options)
        assert calls[-1] == calls[-2]
        assert 5 < len(calls[-1]) < TOKENS


def test_weights_that_were_trained_since() -> None:
    model = small_one("qwen3")
    bastile.apply()
    before = generated(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    after = generated(model)
    assert counted()[0] == TOKENS - 2 + TOKENS - 1
    assert torch.equal(after, stock(model))
    assert not torch.equal(after, before)


def test_training_between_texts() -> None:
    """Whose layers are graphs too, with memory of their own."""
    model = tiny_model().to(DEVICE)
    batch = {name: tensor.to(DEVICE) for name, tensor in tiny_batch(model).items()}
    bastile.apply(cuda_graphs=True)
    texts, losses = [], []
    for _ in range(4):
        texts.append(generated(model))
        losses.append(model(**batch, use_cache=False).loss)
        losses[-1].backward()
        model.zero_grad()
    assert counted()[0] == TOKENS - 2 + 3 * (TOKENS - 1)
    assert all(torch.equal(text, stock(model)) for text in texts)
    assert len({loss.item() for loss in losses}) == 1


def test_adapters() -> None:
    """With the hook on embeddings that trainers put there for them; and without graphs where hooks do more."""
    model = adapted()
    model.enable_input_require_grads()
    want = stock(model)
    assert torch.equal(generated(model), want)
    assert counted() == (TOKENS - 2, {})
    seen: list[Any] = []
    model.get_input_embeddings().register_forward_hook(lambda *_: seen.append(None))
    assert torch.equal(generated(model), want)
    assert counted() == (0, {"hooks on the model or a module in it": 1})
    assert len(seen) == TOKENS


def test_a_forward_of_accelerates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixed precision is a forward of the model's own, in which graphs may be captured."""
    accelerate = pytest.importorskip("accelerate")
    model = small_one("qwen3")
    forward = torch.autocast(DEVICE, torch.bfloat16)(type(model).forward)
    model.forward = accelerate.utils.convert_outputs_to_fp32(forward).__get__(model)
    bastile.apply()
    counted()
    got = generated(model)
    assert counted() == (TOKENS - 2, {})
    # Rounded to 16 bits, attention over a longer cache makes other tokens: they are compared with calls of the same.
    monkeypatch.setattr(conditions, "recorder_for", lambda _: Failing())
    decoding.forget()
    assert torch.equal(generated(model), got)
    assert counted()[0] == 0


def as_dynamic(model: Any) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"cache_implementation": "static"}, "no cache, or one that was given or asked for"),
        ({"use_cache": False}, "no cache, or one that was given or asked for"),
        ({"prefill_chunk_size": 4}, "compile_config or prefill_chunk_size, which say how the model is to be called"),
        ({"tokens": 8}, None),
    ],
    ids=str,
)
def test_what_runs_as_ever(options: dict[str, Any], reason: str | None) -> None:
    model = small_one("qwen3")
    want = stock(model, **options)
    got = generated(model, **options)
    assert torch.equal(getattr(got, "sequences", got), getattr(want, "sequences", want))
    assert counted() == (0, {} if reason is None else {reason: 1})


def test_two_texts_at_once() -> None:
    """In the middle of one another one begins, as from another thread."""
    model = small_one("qwen3")
    want, want_within = stock(model), stock(model, seed=1)
    within: list[torch.Tensor] = []

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == 20 and not within:
            within.append(generated(model, seed=1))
        return scores

    assert torch.equal(generated(model, logits_processor=[processor]), want)
    assert torch.equal(within[0], want_within)
    assert counted() == (TOKENS - 2, {"another text is generated by this model meanwhile": 1})


def test_a_loop_of_other_code() -> None:
    """Which would not come to the call that counts tokens."""
    file = ModelFile(generation.FILE, sys.modules[generation.FILE])
    assert list(generation.sites(file))

    class GenerationMixin:
        def _sample(self) -> None: ...

        def _prepare_cache_for_generation(self) -> None: ...

    file.scope["GenerationMixin"] = GenerationMixin
    assert not list(generation.sites(file))
    assert file.unknown["GenerationMixin._sample"] == "does not ask for what it calls"


def test_other_ways_of_generating_run_as_ever() -> None:
    model = small_one("qwen3")
    want = stock(model, num_beams=3)
    assert torch.equal(generated(model, num_beams=3), want)
    assert counted() == (0, {})


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "lfm2"])
def test_all_that_is_returned(family: str) -> None:
    """On demand: scores, logits, and the usual cache, with which one may go on."""
    model = small.small_model(family, sliding_window=8) if family == "gemma3_text" else small_one(family)
    model = model.to(DEVICE).eval()
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    want = stock(model, **asked)
    got = generated(model, **asked)
    assert counted() == (TOKENS - 2, {})
    assert type(got) is type(want)
    assert got.keys() == want.keys()
    assert torch.equal(got.sequences, want.sequences)
    torch.testing.assert_close(got.scores, want.scores, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-4)
    mine, theirs = (next(found[name] for name in NAMES if name in found) for found in (got, want))
    assert type(mine) is type(theirs)
    assert mine.get_seq_length() == theirs.get_seq_length() == got.sequences.shape[1] - 1
    for one, other in zip(mine.layers, theirs.layers, strict=True):
        assert type(one) is type(other)
        if getattr(other, "keys", None) is not None:
            torch.testing.assert_close((one.keys, one.values), (other.keys, other.values), rtol=1e-4, atol=1e-4)


def test_hidden_states_run_as_ever() -> None:
    model = small_one("qwen3")
    asked = {"return_dict_in_generate": True, "output_hidden_states": True}
    want = stock(model, **asked)
    got = generated(model, **asked)
    assert torch.equal(got.sequences, want.sequences)
    assert len(got.hidden_states) == TOKENS
    assert counted() == (0, {"the call for one token cannot be captured: the model returns hidden_states": 1})


def test_a_cache_of_the_users() -> None:
    """Who may go on with it."""
    model = small_one("qwen3")
    bastile.apply()
    cache = as_dynamic(model)
    name = "past_key_values" if older_than("5.24") else "cache"
    got = generated(model, **{name: cache})
    assert cache.get_seq_length() == got.shape[1] - 1
    assert counted() == (0, {"no cache, or one that was given or asked for": 1})


def test_switched_off() -> None:
    model = small_one("qwen3")
    want = stock(model)
    bastile.apply(cuda_graphs=False)
    assert torch.equal(generated(model), want)
    assert counted() == (0, {})


def test_code_that_looks_for_a_static_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Bloom's did: what it does for that alone is needed for a cache like it."""
    model = small_one("qwen3")
    want = stock(model)
    monkeypatch.setattr(modeling("qwen3"), "StaticCache", object, raising=False)
    assert torch.equal(generated(model), want)
    assert counted() == (0, {"code that looks for Transformers' own static cache": 1})


def test_compiled_layers_run_as_ever() -> None:
    model = small_one("qwen3")
    want = stock(model)
    for layer in model.model.layers:
        layer._compiled_call_impl = lambda *args, layer=layer, **kwargs: layer._call_impl(*args, **kwargs)
    assert torch.equal(generated(model), want)
    assert counted() == (0, {"layers that torch.compile has compiled": 1})


class Failing(RepeatingRecorder):
    def record(self, function: Any) -> Any:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nand more")


def test_a_capture_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_one("qwen3")
    want = stock(model)
    monkeypatch.setattr(conditions, "recorder_for", lambda _: Failing())
    assert torch.equal(generated(model), want)
    why = "the call for one token cannot be captured: CUDA error: operation not permitted when stream is capturing"
    assert counted() == (0, {why: 1})


def test_what_the_host_draws_is_drawn_for_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_one("qwen3")
    the_host_draws(monkeypatch, model)
    torch.manual_seed(3)
    want = stock(model)
    torch.manual_seed(3)
    assert torch.equal(generated(model), want)
    assert counted() == (0, {"the call for one token cannot be captured: the host draws random numbers within it": 1})


def test_arguments_that_change_from_token_to_token() -> None:
    model = small_one("qwen3")
    want = stock(model)
    prepare = model.prepare_inputs_for_generation
    kinds = iter(range(1000))

    def prepared_anew(input_ids: Any, **kwargs: Any) -> dict[str, Any]:
        return {**prepare(input_ids, **kwargs), "kind": next(kinds)}

    def forward(input_ids: Any = None, attention_mask: Any = None, kind: Any = None, **kwargs: Any) -> Any:
        return type(model).forward(model, input_ids=input_ids, attention_mask=attention_mask, **kwargs)

    model.prepare_inputs_for_generation, model.forward = prepared_anew, forward
    assert torch.equal(generated(model), want)
    ran, aside = counted()
    assert ran == 3
    assert aside == {"the call for one token cannot be captured: arguments that change from token to token": 1}


def test_no_memory_waits_for_garbage_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    begin = roomy_cache.RoomyCache.begin

    def noted(self: Any, *args: Any) -> None:
        made.append(weakref.ref(self))
        begin(self, *args)

    monkeypatch.setattr(roomy_cache.RoomyCache, "begin", noted)
    model = small_one("qwen3")
    bastile.apply()
    gc.disable()
    try:
        generated(model)
        for shelf in decoding._shelves.values():
            shelf.graph = None  # what stands for one on a CPU holds the call
        assert made
        assert all(cache() is None for cache in made)
    finally:
        gc.enable()


def test_nothing_stays_on_the_model() -> None:
    model = small_one("qwen3")
    bastile.apply()
    before = dict(vars(model))
    generated(model)
    assert vars(model) == before

    class Stop(Exception):
        pass

    def stop(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > 20:
            raise Stop
        return scores

    with pytest.raises(Stop):
        generated(model, logits_processor=[stop])
    assert vars(model) == before


@few_examples
@given(
    st.integers(1, 200),
    st.integers(1, 300),
    st.lists(st.sampled_from(["full", "window"]), min_size=1, max_size=3),
    st.sampled_from([0, 1 << 40]),
)
def test_room(prompt: int, tokens: int, kinds: list[str], at_once: int) -> None:
    """Each token's place, memory of at most twice what is in it, or for the whole text, and zeros behind."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    usual = DynamicCache()
    usual.layers = [DynamicLayer() if kind == "full" else DynamicSlidingWindowLayer(4) for kind in kinds]
    cache = roomy_cache.RoomyCache(usual, tokens)
    states = torch.arange(1.0, prompt + tokens + 1).view(1, 1, -1, 1)
    assert cache.get_seq_length() == 0
    assert not cache.is_compileable
    assert cache.get_mask_sizes(prompt, 0) == (prompt, 0)
    for layer in range(len(kinds)):
        with mock.patch.object(roomy_cache, "_AT_ONCE", at_once):
            keys, values = cache.update(states[:, :, :prompt], -states[:, :, :prompt].expand(1, 1, -1, 2), layer)
        assert torch.equal(keys, states[:, :, :prompt])
        assert values.shape == (1, 1, prompt, 2)
    for at in range(prompt, prompt + tokens - 1):  # the last token is no input
        assert cache.is_compileable
        assert cache.get_seq_length() == at
        for layer in range(len(kinds)):
            token = states[:, :, at : at + 1]
            keys, values = cache.update(token, -token.expand(1, 1, 1, 2), layer)
            assert cache.get_mask_sizes(1, layer) == (keys.shape[2], 0)
            assert torch.equal(keys[0, 0, : at + 1], states[0, 0, : at + 1])
            assert torch.equal(values[0, 0, : at + 1, 1], -states[0, 0, : at + 1, 0])
            assert not keys[0, 0, at + 1 :].any()
        held = keys.shape[2]
        assert held - prompt <= (tokens if at_once else max(2 * (at + 1 - prompt), 64)) + 127
        assert cache.advance() == (cache.room != held)


@pytest.mark.skipif(not ON_CUDA, reason="memory of a GPU")
def test_memory_goes_back() -> None:
    """All but a pool that the next text uses again: no segment of PyTorch's allocator, 2 MiB at least, a text."""
    model = small_one("qwen3")
    bastile.apply()
    for seed in range(6):
        generated(model, 100, seed=seed)
    torch.cuda.synchronize()
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for seed in range(12):
        generated(model, 100, seed=seed)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before
    assert torch.cuda.memory_reserved() <= reserved + 4 * 2**20
