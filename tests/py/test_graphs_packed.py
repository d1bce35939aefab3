"""Towers of images of ever new sizes: padded to few, by sequences that the others see nothing of."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

import bastile
from bastile.graphs import packed
from bastile.graphs.packed import Packed, Packs
from bastile.graphs.recorder import RepeatingRecorder
from bastile.graphs.stack import Stack, _stacks
from bastile.models import chunks
from conftest import gradients, older_than
from graphing import DEVICE, ON_CUDA, allow_graphs
from test_chunked_attention import TYPES, assert_near, batch_of, model_of

#: From the ninth number of patches on they are padded; then each kind is noted once.
STEPS = 30
KEPT: list[Any] = []  # with the graphs of their layers

Sizes = list[tuple[int, int, int]]


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> Any:
    allow_graphs(monkeypatch)
    yield
    KEPT.clear()


def sizes_of(step: int) -> Sizes:
    """Two to four pictures."""
    drawn = random.Random(step)
    return [(1, 2 * drawn.randint(1, 5), 2 * drawn.randint(2, 6)) for _ in range(drawn.randint(2, 4))]


def trained(kind: str, model: Any, graphs: bool, sizes: Callable[[int], Sizes] = sizes_of, **more: Any) -> list[Any]:
    """Loss and gradients of each step, of weights that stay."""
    bastile.apply(cuda_graphs=graphs)
    bastile.report(reset=True)
    model = copy.deepcopy(model).to(DEVICE).train()
    found = []
    for step in range(STEPS):
        batch = {name: tensor.to(DEVICE) for name, tensor in batch_of(kind, model, sizes(step)).items()}
        loss = model(**batch, **more).loss
        loss.backward()
        found.append((loss.detach(), gradients(model)))
        model.zero_grad()
    KEPT.append(model)
    return found


def tower() -> tuple[Stack, Any]:
    """The stack of the tower's layers, and the report's line of it."""
    [stack] = [each for module, each in _stacks.items() if "Vision" in type(module).__name__]
    lines = [line for line in bastile.report() if line.operator == "cuda_graphs"]
    [line] = [line for line in lines if "Vision" in line.where.rpartition(".")[2]]
    return stack, line


def assert_alike(kind: str, model: Any, sizes: Callable[[int], Sizes] = sizes_of, **more: Any) -> tuple[Stack, Any]:
    want = trained(kind, model, False, sizes, **more)
    got = trained(kind, model, True, sizes, **more)
    for mine, theirs in zip(got, want, strict=True):
        assert_near(mine, theirs, 1e-5)
    return tower()


@pytest.mark.skipif(ON_CUDA, reason="float32, which flash attention does not take")
@pytest.mark.parametrize("grows", [True, False])
@pytest.mark.parametrize("kind", TYPES)
def test_the_numbers_of_steps_without_graphs(kind: str, grows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """grows: the pool does, from which smaller kinds need not go then."""
    monkeypatch.setattr(RepeatingRecorder, "grows", grows)
    stack, line = assert_alike(kind, model_of(kind))
    assert stack.packs.lengths.never is False
    assert not line.aside
    assert line.ran >= 8
    assert len(stack.captured) <= (9 if grows else 4)
    sizes = {key[1][0][-2] for key in stack.captured}
    assert sizes <= {96, 112, 128, 160, 192, 224, 256} | ({48, 64} if grows else set())


@pytest.mark.skipif(ON_CUDA, reason="float32")
def test_how_long_the_longest_may_be_is_part_of_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that cannot be as long as all together: attention starts as many blocks as it was captured with."""
    monkeypatch.setattr(packed, "_MOST_EMPTY", 0)
    stack, line = assert_alike("qwen2_vl", model_of("qwen2_vl"))
    assert not line.aside
    kinds = {key: key[-2][-1] for key in stack.notes if key[-2][-1] and type(key[-2][-1][0]) is int}
    assert len(set(kinds.values())) > 1
    assert all(tuple(note.open.values()) == kinds[key] for key, note in stack.notes.items() if key in kinds)


@pytest.mark.skipif(ON_CUDA, reason="float32")
@pytest.mark.parametrize("checkpoints", [False, True])
def test_adapters_and_checkpoints(checkpoints: bool) -> None:
    lora = LoraConfig(target_modules="all-linear", r=2, init_lora_weights=False)
    model = get_peft_model(model_of("qwen3_vl", depth=4, deepstack_visual_indexes=[1]), lora).train()
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    _, line = assert_alike("qwen3_vl", model)
    assert not line.aside
    assert line.ran >= 8


@pytest.mark.parametrize("more", [{"attention": "eager"}, {"dtype": torch.float32}], ids=["eager", "float32 on a GPU"])
def test_an_attention_that_asks_how_long_they_are(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Which a graph cannot do: nothing is padded after the first time."""
    monkeypatch.setattr(chunks, "lengths_to_read", lambda boundaries: chunks.chunks_of(boundaries).lengths)
    monkeypatch.setattr("bastile.models.chunked_attention.lengths_to_read", chunks.lengths_to_read)
    stack, _ = assert_alike("qwen2_vl", model_of("qwen2_vl", more.get("attention", "sdpa")))
    assert stack.packs.lengths.never is True


@pytest.mark.skipif(older_than("5.17"), reason="the tower is not told there, nor asked")
def test_what_single_layers_have_made_is_not_padded() -> None:
    stack, _ = assert_alike("qwen2_vl", model_of("qwen2_vl"), output_hidden_states=True)
    assert len(stack.packs.lengths._seen) == 0


def test_few_sizes_keep_their_bits() -> None:
    def few(step: int) -> Sizes:
        return [(1, 4, 4 + 2 * (step % 8))]

    want = trained("qwen2_vl", model_of("qwen2_vl"), False, few)
    got = trained("qwen2_vl", model_of("qwen2_vl"), True, few)
    assert all(torch.equal(mine[0], theirs[0]) for mine, theirs in zip(got, want, strict=True))
    assert tower()[1].ran == STEPS - 8


@pytest.mark.skipif(not ON_CUDA, reason="on a GPU")
@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind != "paddleocr_vl"])
def test_on_a_gpu(kind: str) -> None:
    """In bfloat16, as close to float64 as without graphs."""
    model = model_of(kind).to(torch.bfloat16)
    exact = trained(kind, copy.deepcopy(model).double(), False)
    want = trained(kind, model, False)
    got = trained(kind, model, True)
    stack, line = tower()
    assert stack.packs.lengths.never is False
    assert not line.aside
    assert line.ran >= 8
    errors = [_errors(each, exact) for each in (got, want)]
    assert errors[0] <= 1.1 * errors[1]


def _errors(found: list[Any], exact: list[Any]) -> float:
    """Of all gradients of all steps."""
    pairs = [(one[1][name], other[1][name]) for one, other in zip(found, exact, strict=True) for name in other[1]]
    return sum((mine.double() - theirs.double()).square().sum().item() for mine, theirs in pairs) ** 0.5


# ---- what is padded, and how ----------------------------------------------------------------------------------------


def layers() -> list[torch.nn.Module]:
    return [torch.nn.Linear(4, 4)]


def given(rows: int, lengths: list[int]) -> dict[str, Any]:
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    return {"cu_seqlens": ends, "tables": (torch.ones(rows, 3), torch.ones(rows, 3)), "mask": None, "is_causal": False}


def packs() -> Packs:
    found = Packs()
    for rows in range(1, 10):
        assert found.of(layers(), (torch.ones(rows, 4),), given(rows, [rows])) is None or rows == 9
    assert found.lengths.vary
    return found


def test_the_padding_is_a_sequence_of_its_own() -> None:
    found = packs().of(layers(), (torch.ones(37, 4),), kwargs := given(37, [30, 7]))
    assert found is not None
    (hidden,), longer = found.longer((torch.ones(37, 4),), kwargs, is_first=True)
    assert hidden.shape == (48, 4)
    assert hidden[37:].eq(0).all()
    assert longer["tables"][0].shape == (48, 3)
    assert longer["cu_seqlens"].tolist() == [0, 30, 37, 48, 48, 48, 48, 48, 48]
    assert chunks.opened(longer["cu_seqlens"]) == 0
    again = found.longer((torch.ones(37, 4),), kwargs, is_first=False)[1]
    assert again["tables"] is longer["tables"]
    assert again["cu_seqlens"] is longer["cu_seqlens"]


def test_many_windows() -> None:
    """No sequence of the padding is longer than what is said of them all."""
    lengths = [64] * 1000 + [40]
    found = packs().of(layers(), (torch.ones(64040, 1),), kwargs := given(64040, lengths))
    assert found is not None
    ends = found.longer((torch.ones(64040, 1),), kwargs, is_first=True)[1]["cu_seqlens"]
    assert chunks.opened(ends) == 64
    assert ends.diff().max() == 64
    assert (ends[0], ends[-1], len(ends)) == (0, found.to, 2049)
    assert ends[:1002].tolist() == kwargs["cu_seqlens"].tolist()


@pytest.mark.parametrize(
    "other",
    [
        {"cu_seqlens": torch.tensor([0, 30])},
        {"cu_seqlens": torch.tensor([0, 30, 30, 37])},
        {"cu_seqlens": None},
        {"max_seqlen": 30},
        {"mask": torch.ones(1, 1, 5, 5)},
    ],
    ids=["not all rows", "an empty one", "no boundaries", "a length", "another tensor"],
)
def test_what_is_not_known_is_left(other: dict[str, Any]) -> None:
    kwargs = {**given(37, [30, 7]), **other}
    found = packs().of(layers(), (torch.ones(37, 4),), kwargs)
    assert found is None or not found.takes((torch.ones(37, 4),), kwargs)
    assert Packed(37, 48, 0).takes((torch.ones(37, 4),), given(37, [30, 7]))


def test_layers_that_mix_rows() -> None:
    found, mixing = packs(), [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Conv1d(4, 4, 3))]
    found.lengths.never = None
    assert found.of(mixing, (torch.ones(37, 4),), given(37, [37])) is None
    assert found.lengths.never is True
