"""Layers with convolutions and recurrences, told where sequences begin: batches without their padding, and packed ones,
each of whose sequences has the numbers that it has by itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import bastile
import test_chunked_attention as pictures
from bastile.graphs.stack import _stacks
from bastile.guards import mark_as_ours, stock_of
from bastile.models import mixers, sdpa, small
from bastile.models import side_by_side as rows_side_by_side
from bastile.models.packages import cuts_of
from conftest import assert_same_up_to_rounding, gradients, older_than
from graphing import DEVICE, ON_CUDA, allow_graphs, counted
from padded import MASKS
from replaced_function import modeling
from test_masks_of_segments import step
from test_padding_free import aside, assert_pictures_as_stock, beside_a_text, of_kind, ragged, ran, seen

if not older_than("5.17.0"):
    from transformers import Qwen3_5ForConditionalGeneration

pytestmark = pytest.mark.skipif(older_than("5.17.0"), reason="layers do not hand on where sequences begin")

ATTENTION_BEHIND = ["linear_attention", "full_attention"]
#: By the gated delta rule, by a convolution alone, by Mamba-2's state space.
TYPES: dict[str, dict[str, Any]] = {
    "qwen3_next": {},
    "qwen3_5_text": {},
    "olmo_hybrid": {},
    "lfm2": {},
    "bamba": {},
    "granitemoehybrid": {"layers_block_type": ATTENTION_BEHIND},
    "nemotron_h": {"layer_types": ATTENTION_BEHIND},
}
each_type = pytest.mark.parametrize("model_type", TYPES)
LENGTHS = [5, 1, 9, 3, 2]


@pytest.fixture(autouse=True)
def any_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of float32 too, which shows what is computed to seven digits, and of few tokens."""
    monkeypatch.setattr(sdpa, "TYPES", (*sdpa.TYPES, torch.float32))
    monkeypatch.setattr(rows_side_by_side, "_LEAST_STEP", 2)


def hybrid(model_type: str) -> Any:
    return small.small_model(model_type, **TYPES[model_type]).train()


# ---- padding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MASKS)
@each_type
def test_any_padding(model_type: str, kind: str) -> None:
    model, given = hybrid(model_type), of_kind(kind)
    rows = given["attention_mask"] != 0
    want, want_grads, want_logits = step(model, given)
    seen(model)
    got, grads, logits = step(model, given)
    assert ran()[0] == 1
    assert_same_up_to_rounding(got, want, model, "loss")
    assert_same_up_to_rounding(logits[rows], want_logits[rows], model, "logits")
    assert grads.keys() == want_grads.keys()
    for name, gradient in want_grads.items():
        assert_same_up_to_rounding(grads[name], gradient, model, name)


def test_one_model_alone() -> None:
    """Whose modules have functions of their own."""
    model, other = hybrid("qwen3_next"), hybrid("qwen3_next")
    want = step(model, of_kind("both"))[0]
    bastile.apply_to_model(model)
    for each, passes in ((model, 1), (other, 0)):
        step(each, of_kind("right"))
        ran()
        got = step(each, of_kind("both"))[0]
        assert_same_up_to_rounding(got, want, model, "loss")
        assert ran()[0] == passes


@pytest.mark.parametrize("left_out", ["causal_conv1d", "gated_delta_rule"])
def test_functions_that_are_transformers_own_keep_the_padding(left_out: str) -> None:
    model, given = hybrid("qwen3_next"), of_kind("both")
    want = step(model, given)[0]
    seen(model, **{left_out: False})
    assert_same_up_to_rounding(step(model, given)[0], want, model, "loss")
    assert aside() == ["its layers are not known to see more than one token in what can be told of rows alone"]


def test_a_function_that_is_replaced_behind_our_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two steps, as by an import of the package that it is from."""
    model, given = hybrid("lfm2"), of_kind("both")
    want = step(model, given)[0]
    seen(model)
    step(model, given)
    module = modeling("lfm2")
    monkeypatch.setattr(module, "causal_conv1d_fn", stock_of(module.causal_conv1d_fn))
    ran()
    assert_same_up_to_rounding(step(model, given)[0], want, model, "loss")
    assert ran()[0] == 0


def test_a_function_that_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a layer of somebody's hands on less: the pass begins again, with its padding, and so do all after it."""
    model, given = hybrid("qwen3_next"), of_kind("both")
    want = step(model, given)[0]
    seen(model)
    module = modeling("qwen3_next")
    ours = module.causal_conv1d_fn

    def untold(*args: Any, seq_idx: Any = None, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    monkeypatch.setattr(module, "causal_conv1d_fn", mark_as_ours(untold))
    for _ in range(2):
        assert_same_up_to_rounding(step(model, given)[0], want, model, "loss")
        assert ran()[0] == 0
    assert sdpa.making.packed is None


def test_code_that_is_not_known_keeps_the_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixers, "_HAND_ON", frozenset())
    model, given = hybrid("qwen3_next"), of_kind("both")
    want = step(model, given)[0]
    seen(model)
    assert_same_up_to_rounding(step(model, given)[0], want, model, "loss")
    assert ran()[0] == 0


@pytest.mark.parametrize("model_type", ["bailing_hybrid", "jamba", "kimi_linear", "minimax", "zaya"])
def test_other_recurrences_keep_their_padding(model_type: str) -> None:
    if model_type not in small.causal_types():
        pytest.skip("Transformers has no such type in this release")
    model = small.small_model(model_type).train()
    seen(model)
    step(model, of_kind("right"))
    assert ran()[0] == 0


@pytest.mark.parametrize("graphs", ["auto", False])
def test_a_cache_is_not_filled_with_several_rows(graphs: Any) -> None:
    model, given = hybrid("qwen3_next"), of_kind("both")
    del given["use_cache"]
    model.config.use_cache = True
    seen(model, cuda_graphs=graphs)
    assert model(**given).past_key_values is None
    assert ran()[0] == 1


def test_a_batch_that_is_padded_and_packed() -> None:
    """Says itself which sequence each token is of: nothing is put elsewhere."""
    model, given = hybrid("lfm2"), of_kind("right")
    seen(model)
    model(**given, seq_idx=torch.zeros(3, 17, dtype=torch.int32))
    assert ran()[0] == 0


@pytest.mark.parametrize("first", [True, False])
def test_pictures(first: bool) -> None:
    """Qwen3.5 as it is published, whose positions have several axes; beside a shorter row of text."""
    vision = {name: value for name, value in pictures.VISION["qwen3_vl"].items() if name != "deepstack_visual_indexes"}
    vision = {**small.small_config("qwen3_5").vision_config.to_dict(), **vision}
    tokens = {"image_token_id": pictures.IMAGE, "vision_start_token_id": pictures.START}
    model = Qwen3_5ForConditionalGeneration(small.small_config("qwen3_5", vision_config=vision, **tokens)).train()
    given = beside_a_text(pictures.batch_of("qwen3_5", model, pictures.SIZES["mixed"]), first)
    assert assert_pictures_as_stock(model, given) == 1


# ---- sequences side by side ------------------------------------------------------------------------------------------


def side_by_side(lengths: list[int] = LENGTHS, seed: int = 0) -> dict[str, Any]:
    """As TRL's collator packs them."""
    ids = torch.randint(3, 90, (1, sum(lengths)), generator=torch.Generator().manual_seed(seed))
    cuts = torch.tensor([0, *lengths]).cumsum(0).int()
    positions = torch.cat([torch.arange(each) for each in lengths])[None]
    labels = ids.masked_fill(positions == 0, -100)
    return {
        "input_ids": ids,
        "labels": labels,
        "position_ids": positions,
        "cu_seq_lens_q": cuts,
        "cu_seq_lens_k": cuts,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
        "seq_idx": torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), torch.tensor(lengths))[None],
    }


def each_by_itself(model: Any, given: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits and gradients of the mean over labels."""
    cuts = given["cu_seq_lens_q"].tolist()
    count = (given["labels"] != -100).sum()
    model.zero_grad()
    found = []
    for begin, end in pairwise(cuts):
        ids, labels = (given[name][:, begin:end] for name in ("input_ids", "labels"))
        logits = model(input_ids=ids, use_cache=False).logits
        found.append(logits.detach())
        torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum").div(count).backward()
    return torch.cat(found, 1), gradients(model)


@pytest.mark.parametrize("model_type", [each for each in TYPES if each != "granitemoehybrid"])
def test_each_has_its_own_numbers(model_type: str) -> None:
    """Of which Transformers' own functions would make one sequence, or refuse them. (Granite's backbone does not hand
    positions to what makes masks: its attention knows of no sequences but by FlashAttention.)"""
    model, given = hybrid(model_type), side_by_side()
    want, want_grads = each_by_itself(model, given)
    bastile.apply()
    _, grads, logits = step(model, given)
    bastile.reset()
    assert_same_up_to_rounding(logits, want, model, "logits")
    for name, gradient in want_grads.items():
        assert_same_up_to_rounding(grads[name], gradient, model, name)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("training", [True, False])
def test_a_model_that_makes_caches(mode: Any, training: bool) -> None:
    """As configurations have it, in evaluation too: there is none of several sequences."""
    model, given = hybrid("qwen3_next").train(training), side_by_side()
    want = each_by_itself(model, given)[0]
    model.config.use_cache = True
    bastile.apply()
    with mode():
        output = model(**given)
    assert output.past_key_values is None
    bastile.reset()
    assert_same_up_to_rounding(output.logits, want, model, "logits")


@pytest.mark.skipif(older_than("5.20.0"), reason="sequences are taken for one")
def test_without_ours_transformers_refuses() -> None:
    model = hybrid("qwen3_next")
    bastile.apply(gated_delta_rule=False)
    with pytest.raises(ValueError, match="flash-linear-attention"):
        step(model, side_by_side())


def test_checkpoints() -> None:
    model, given = hybrid("qwen3_5_text"), side_by_side()
    want, want_grads = each_by_itself(model, given)
    model.gradient_checkpointing_enable()
    bastile.apply()
    _, grads, logits = step(model, {**given, "use_cache": False})
    bastile.reset()
    assert_same_up_to_rounding(logits, want, model, "logits")
    for name, gradient in want_grads.items():
        assert_same_up_to_rounding(grads[name], gradient, model, name)


@pytest.mark.parametrize(
    "told",
    [
        {"cu_seqlens": torch.tensor([0, 2, 3, 7])},
        {"cu_seq_lens_q": torch.tensor([0, 2, 3, 7]), "seq_idx": torch.tensor([[4, 4, 0, 1, 1, 1, 1]])},
        {"seq_idx": torch.tensor([[4, 4, 0, 1, 1, 1, 1]])},
    ],
)
def test_by_whatever_a_function_is_told(told: dict[str, torch.Tensor]) -> None:
    found = cuts_of(told)
    assert found is not None
    assert found.tolist() == [0, 2, 3, 7]


@pytest.mark.parametrize("given", [{}, {"seq_idx": None}, {"cu_seq_lens_q": torch.tensor([0, 2, 7])}])
def test_what_the_packages_do_not_read_says_nothing(given: dict[str, Any]) -> None:
    assert cuts_of(given) is None


# ---- graphs ----------------------------------------------------------------------------------------------------------


def packs(number: int) -> dict[str, Any]:
    """Of ever other lengths, and numbers of sequences."""
    lengths = torch.randint(1, 9, (5 + number % 4,), generator=torch.Generator().manual_seed(number)).tolist()
    return side_by_side(lengths, number)


@pytest.mark.parametrize("batch", [ragged, packs])
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "lfm2", "bamba"])
def test_few_kinds_of_steps(model_type: str, batch: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches none of which is like another, in a handful of graphs, with the gradients that they have without."""
    allow_graphs(monkeypatch)
    model = hybrid(model_type).to(DEVICE, torch.bfloat16 if ON_CUDA else torch.float32)
    found = []
    for graphs in (False, True):
        bastile.apply(cuda_graphs=graphs)
        counted()
        for number in range(24):
            given = {n: t.to(DEVICE) if isinstance(t, torch.Tensor) else t for n, t in batch(number).items()}
            model.zero_grad()
            loss = model(**given).loss
            loss.backward()
            found.append((loss.detach(), gradients(model)))
    passes = bastile.report().ran("padding_free")
    [stack] = _stacks.values()
    assert len(stack.captured) <= 4
    replayed, why = counted()
    assert replayed >= 10
    assert not why
    assert passes >= 22 or batch is packs
    for (got, grads), (want, want_grads) in zip(found[24:], found[:24], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-2 if ON_CUDA else 1e-5, atol=0)
        for name, gradient in want_grads.items():
            if not ON_CUDA:  # where they are of 16 bits
                assert_same_up_to_rounding(grads[name], gradient, model, name)


# ---- TRL -------------------------------------------------------------------------------------------------------------


def test_trl_packs_its_rows(tmp_path: Path) -> None:
    """SFT, packing=True: which stops in its first step without these functions or the packages that it asks for."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    import trl_runs

    losses = []
    model = hybrid("qwen3_5_text")
    start = copy.deepcopy(model.state_dict())
    for packing in (False, True):
        model.load_state_dict(start)
        bastile.apply()
        arguments = trl.SFTConfig(
            output_dir=str(tmp_path), report_to=[], use_cpu=DEVICE == "cpu", max_steps=2, logging_steps=1,
            per_device_train_batch_size=1 if packing else 4, packing=packing, max_length=64, bf16=False,
            learning_rate=0.0, save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        rows = Dataset.from_dict({"text": [trl_runs.words(n, 4 + n) for n in range(4)]})
        trainer = trl.SFTTrainer(model, args=arguments, train_dataset=rows, processing_class=trl_runs.tokenizer())
        bastile.report(reset=True)
        trainer.train()
        losses.append([each["loss"] for each in trainer.state.log_history if "loss" in each])
        report = bastile.report()
        if packing or not ON_CUDA:  # where the gated delta rule of float32 is Transformers' own otherwise
            assert report.ran("gated_delta_rule") == report.ran("causal_conv1d") > 0
        bastile.reset()
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
