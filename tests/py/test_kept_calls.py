"""Captured calls for one token that a model keeps from one text to the next: the tokens of stock Transformers, and what
must not stay as it was. Where there is no GPU, what stands for a graph calls the model again."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch

import bastile
from bastile.graphs import decoding, kept_calls
from bastile.graphs.recorder import CudaRecorder, RepeatingRecorder
from bastile.models import roomy_cache, small
from conftest import older_than, tiny_model
from graphing import DEVICE, ON_CUDA, allow_graphs
from graphing import counted_tokens as counted
from texts import TOKENS, adapted, generated, small_one, stock

#: In releases before that, `generate` leaves the cache to the model, and nothing is captured.
pytestmark = pytest.mark.skipif(older_than("5.1"), reason="text is generated as ever")


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One for each call that is captured."""
    allow_graphs(monkeypatch)
    recorder: Any = CudaRecorder if ON_CUDA else RepeatingRecorder
    monkeypatch.setattr(recorder, "spare", lambda self: 1 << 40)
    made: list[None] = []
    record = recorder.record
    monkeypatch.setattr(recorder, "record", lambda self, function: (record(self, function), made.append(None))[0])
    return made


def captured(captures: list[None], model: Any, want: Any = None, **options: Any) -> int:
    """How many calls a text captures."""
    before = len(captures)
    got = generated(model, **options)
    assert want is None or torch.equal(got, want)
    return len(captures) - before


def assert_kept(captures: list[None], model: Any, **options: Any) -> None:
    want = stock(model, **options)
    found = [captured(captures, model, want, **options) for _ in range(3)]
    assert found == [1, 0, 0]
    assert counted() == (3 * (TOKENS - 1) - 1, {})


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "gemma4_text", "qwen3_moe", "gpt2"])
def test_one_capture_for_all_texts(family: str, captures: list[None]) -> None:
    if family not in small.causal_types() and family not in ("llama", "qwen3"):
        pytest.skip(f"this Transformers has no {family}")
    assert_kept(captures, small_one(family))


def test_adapters(captures: list[None]) -> None:
    assert_kept(captures, adapted())


def test_states_that_are_made_anew_for_each_text(captures: list[None]) -> None:
    if "lfm2" not in small.causal_types():
        pytest.skip("this Transformers has no lfm2")
    model = small_one("lfm2")
    want = [stock(model, seed=seed) for seed in (0, 1)]
    for seed, text in enumerate(want):
        # What stands for a graph on a CPU has moved on the states when it is captured.
        assert captured(captures, model, text if ON_CUDA else None, seed=seed) == 1


def test_weights_that_are_trained_in_place(captures: list[None]) -> None:
    model = tiny_model().to(DEVICE).eval()
    bastile.apply()
    assert captured(captures, model) == 1
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 1.1)
    got = generated(model)
    assert len(captures) == 1
    assert torch.equal(got, stock(model))


def test_other_prompts_and_lengths(captures: list[None]) -> None:
    """In the same memory, as long as it is enough; each size has a call of its own."""
    model = tiny_model(max_position_embeddings=1024).to(DEVICE).eval()
    texts: list[dict[str, Any]] = [{"rows": 3}, {"rows": 2}, {"tokens": 300, "rows": 2}, {"tokens": 200, "rows": 3}]
    want = [stock(model, **options) for options in texts]
    bastile.apply()
    found = [[captured(captures, model, text, **each) for text, each in zip(want, texts, strict=True)] for _ in "123"]
    assert found[0] == [1] * 4
    assert found[2] == [0] * 4


def test_texts_that_outgrow_their_room(captures: list[None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roomy_cache, "_AT_ONCE", 0)
    model = tiny_model(max_position_embeddings=1024).to(DEVICE).eval()
    want = stock(model, 400)
    found = [captured(captures, model, want, tokens=400) for _ in range(4)]
    # The memory of the last room is that of the others in the texts behind.
    assert found == [3, 2, 0, 0]


def replaced(model: Any) -> None:
    weight = model.get_decoder().layers[0].mlp.down_proj
    weight = getattr(weight, "base_layer", weight).weight
    weight.data = 3 * weight.data


def of_another_scale(model: Any) -> None:
    for module in model.modules():
        if isinstance(scaling := getattr(module, "scaling", None), dict):
            scaling["default"] *= 3


def with_another_forward(model: Any) -> None:
    inner = model.get_base_model()
    inner.forward = MethodType(_with_more_logits, inner)


def _with_more_logits(self: Any, *args: Any, **kwargs: Any) -> Any:
    outputs = type(self).forward(self, *args, **kwargs)
    outputs.logits = outputs.logits.roll(1, -1)
    return outputs


def with_another_tensor(model: Any) -> None:
    rotary = model.get_decoder().rotary_emb
    rotary.original_inv_freq = rotary.original_inv_freq.clone()


def with_another_setting(model: Any) -> None:
    model.get_base_model().config.final_logit_softcapping = 0.5


@pytest.mark.parametrize(
    "change",
    [
        replaced,
        of_another_scale,
        with_another_forward,
        with_another_tensor,
        with_another_setting,
        lambda model: model.set_adapter("other"),
        lambda model: model.merge_adapter(),
        lambda model: model.base_model.disable_adapter_layers(),
        lambda model: model.set_attn_implementation("eager"),
        lambda model: torch.backends.cuda.enable_math_sdp(False),
    ],
)
def test_what_was_changed_since(change: Callable[[Any], None], captures: list[None]) -> None:
    model = adapted()
    model.add_adapter("other", model.peft_config["default"])
    model.to(DEVICE)
    bastile.apply()
    generated(model)
    generated(model)
    assert len(captures) == 1
    try:
        change(model)
        assert captured(captures, model) == 1
        got = generated(model)
        assert len(captures) == 2
        assert torch.equal(got, stock(model))
    finally:
        torch.backends.cuda.enable_math_sdp(True)


def test_what_changes_time_and_again(captures: list[None]) -> None:
    """Is looked at no more."""
    model = adapted()
    bastile.apply()
    found = []
    for _ in range(5):
        found.append(captured(captures, model))
        of_another_scale(model)
    assert found == [1] * 5
    assert not decoding.shelf_of(model.get_base_model(), torch.device(DEVICE)).calls._kept
    assert torch.equal(generated(model), stock(model))


def test_what_a_text_left_in_memory(captures: list[None]) -> None:
    """Is hidden by masks: and zero times NaN is NaN."""
    model = tiny_model().to(DEVICE).eval()
    want = stock(model)
    generated(model)
    memory = decoding.shelf_of(model, torch.device(DEVICE)).calls.memory
    assert memory.nbytes() > 0
    for tensor in memory._taken.values():
        tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
    assert captured(captures, model, want) == 0


def test_a_cache_that_was_returned(captures: list[None]) -> None:
    """Is the text's own."""
    model = tiny_model().to(DEVICE).eval()
    bastile.apply()
    texts = [generated(model, seed=seed, return_dict_in_generate=True, output_logits=True) for seed in range(3)]
    name = next(name for name in ("past_key_values", "cache") if name in texts[0])
    assert len(captures) == 1
    bastile.reset()
    for seed, text in enumerate(texts):
        want = generated(model, seed=seed, return_dict_in_generate=True, output_logits=True)
        assert torch.equal(text.sequences, want.sequences)
        torch.testing.assert_close(text.logits, want.logits, rtol=1e-4, atol=1e-4)
        for one, other in zip(text[name].layers, want[name].layers, strict=True):
            torch.testing.assert_close((one.keys, one.values), (other.keys, other.values), rtol=1e-4, atol=1e-4)


def test_memory_that_is_much(captures: list[None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what PyTorch has of the driver: it is not kept."""
    model = tiny_model().to(DEVICE).eval()
    want = stock(model)
    calls = decoding.shelf_of(model, torch.device(DEVICE)).calls
    generated(model)
    recorder: Any = CudaRecorder if ON_CUDA else RepeatingRecorder
    bytes_ = calls.memory.nbytes()
    for spare in (bytes_, bytes_ - 1):
        monkeypatch.setattr(recorder, "spare", lambda self, spare=spare: spare)
        captured(captures, model, want)
        assert bool(calls._kept) == bool(calls.memory.nbytes()) == (spare == bytes_)
    monkeypatch.setattr(kept_calls, "_State", None)  # which nobody asks for then
    assert captured(captures, model, want) == 1


def test_memory_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = object.__new__(CudaRecorder)
    recorder.device, total = torch.device("cuda"), 512 << 20
    for free, reserved, spare in [(total, 0, 1 << 20), (total // 8, 32 << 20, 2 << 20), (total // 8 - 1, 32 << 20, 0)]:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, total))
        monkeypatch.setattr(CudaRecorder, "most_reserved", lambda self, reserved=reserved: reserved)
        assert recorder.spare() == spare


def test_casts_of_weights(captures: list[None]) -> None:
    """They are there as long as a text is: nothing that reads them is kept."""
    model = tiny_model().to(DEVICE).eval()
    bastile.apply()
    with torch.autocast(DEVICE, torch.bfloat16):
        found = [captured(captures, model) for _ in range(3)]
    assert found == [1, 1, 1]
    assert captured(captures, model) == 1


def test_casts_that_autocast_makes(captures: list[None]) -> None:
    """In code that no operator of ours serves: they would be made with each token."""
    if "gpt2" not in small.causal_types():
        pytest.skip("this Transformers has no gpt2")
    model = small_one("gpt2")
    bastile.apply()
    with torch.autocast(DEVICE, torch.bfloat16):
        found = [captured(captures, model) for _ in range(3)]
    assert found == [1, 1, 1]


def test_half_the_bits_under_autocast(captures: list[None]) -> None:
    model = tiny_model().to(DEVICE, torch.bfloat16).eval()
    bastile.apply()
    with torch.autocast(DEVICE, torch.bfloat16):
        found = [captured(captures, model) for _ in range(3)]
    assert found == [1, 0, 0]
    assert captured(captures, model) == 1  # that of a text without


@pytest.mark.skipif(not ON_CUDA, reason="a kernel of ours reads adapters of float32")
def test_adapters_of_float32_under_autocast(captures: list[None]) -> None:
    model = adapted().to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "lora" in name:
            parameter.data = parameter.data.float()
    bastile.apply()
    with torch.autocast(DEVICE, torch.bfloat16):
        found = [captured(captures, model) for _ in range(3)]
    assert found == [1, 0, 0]


def test_inference_mode(captures: list[None]) -> None:
    """Memory of one kind of tensors is not the other's."""
    model = tiny_model().to(DEVICE).eval()
    want = stock(model)
    for _ in range(2):
        with torch.inference_mode():
            captured(captures, model, want)
        captured(captures, model, want)


def test_models_are_not_held(captures: list[None]) -> None:
    models = [adapted(), tiny_model().to(DEVICE).eval()]
    forward: Any = models[1].forward
    models[1].forward = functools.wraps(forward)(functools.partial(forward))
    bastile.apply()
    for model in models:
        generated(model)
    assert len(captures) == 2
    found = [weakref.ref(model) for model in models]
    del model, models, forward
    gc.collect()
    assert [each() for each in found] == [None, None]
