"""A Trainer's batches are copied while the host goes on, where that is safe, and questions about them are answered by
the host: the same answers as the device's. A stand-in for Accelerate's copies shows how they were asked for; what it
returns are other tensors than the host's, as a GPU's are."""

from __future__ import annotations

import gc
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import data_loader
from accelerate.utils import send_to_device
from transformers import BatchEncoding, Trainer, TrainingArguments, masking_utils

import bastile
from bastile import host_copies
from bastile.models import batches, masks, waits
from bastile.models.table import USUAL
from conftest import tiny_model

NAMES = list(masks._REPLACED)
STOCK = {name: getattr(masking_utils, name) for name in NAMES}
METHODS = {name: vars(Trainer)[name] for name in waits._REPLACED}
IDS = torch.arange(12).view(2, 6)
#: Whether models count their positions themselves; in the first releases they have them from `cache_position`.
COUNTS = "cache_position" not in inspect.signature(masking_utils.create_causal_mask).parameters
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Copies:
    """In the place of Accelerate's function: how each batch was asked for."""

    def __init__(self) -> None:
        self.asked: list[bool] = []

    def __call__(self, tensor: Any, device: Any, non_blocking: bool = False, skip_keys: Any = None) -> Any:
        self.asked.append(non_blocking)
        if isinstance(tensor, BatchEncoding):
            tensor.data = {name: value.clone() for name, value in tensor.items()}
            return tensor
        return {name: value.clone() if torch.is_tensor(value) else value for name, value in tensor.items()}


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copies]:
    """As if the CPU's tensors were pinned, and the device a GPU."""
    found = Copies()
    monkeypatch.setattr(data_loader, "send_to_device", found)
    monkeypatch.setattr(batches, "_is_gpu", lambda device: True)
    monkeypatch.setattr(batches, "_is_pinned", lambda tensor: True)
    monkeypatch.setattr(masks, "_DEVICES", frozenset({"cpu"}))
    yield found
    bastile.reset()
    batches.take_out()
    masks.take_out_of(masking_utils)
    assert data_loader.send_to_device is found


def in_a_loop(batch: Any) -> Any:
    batches.put_in()
    with batches.not_waited_for():
        return data_loader.send_to_device(batch, torch.device("cpu"), non_blocking=False)


# ---- copies ----------------------------------------------------------------------------------------------------------


def test_a_batch_that_nobody_else_holds_is_not_waited_for(copies):
    sent = in_a_loop({"input_ids": IDS.clone(), "labels": IDS.clone(), "name": "a batch"})
    encoding = in_a_loop(BatchEncoding({"input_ids": IDS.clone()}))
    assert copies.asked == [True, True]
    for tensor in (sent["input_ids"], encoding["input_ids"]):
        assert torch.equal(host_copies.on_host(tensor), IDS)
    sent["input_ids"][0, 0] = 7
    assert host_copies.on_host(sent["input_ids"]) is None


def test_a_view_of_all_of_it_is_known_too(copies):
    """As of positions that have been expanded to several axes, one of them."""
    sent = in_a_loop({"position_ids": IDS.clone()})["position_ids"]
    views = sent[None].expand(4, -1, -1)
    assert torch.equal(host_copies.on_host(views[0]), IDS)
    for part in (views, sent[:, 1:], sent[1:], sent.T, sent.view(torch.float64)):
        assert host_copies.on_host(part) is None
    sent.add_(1)
    assert host_copies.on_host(views[0]) is None


def test_a_batch_that_others_hold_is_waited_for(copies):
    kept, whole = IDS.clone(), torch.zeros(4, 6, dtype=torch.int64)
    for batch in (
        {"input_ids": kept},
        {"input_ids": whole[:2]},
        {"input_ids": IDS.clone(), "labels": kept},
        {"images": [IDS.clone()]},
        {"input_ids": IDS.clone(), "more": {"labels": IDS.clone()}},
        {"input_ids": torch.nn.Parameter(torch.zeros(2))},
        {},
    ):
        in_a_loop(batch)
    same = IDS.clone()
    in_a_loop({"input_ids": same, "labels": same})
    assert copies.asked == [False] * 8


def test_elsewhere_and_in_other_ways_copies_stay_as_they_are(copies, monkeypatch):
    batches.put_in()
    data_loader.send_to_device({"input_ids": IDS.clone()}, "cpu")
    with batches.not_waited_for():
        data_loader.send_to_device({"input_ids": IDS.clone()}, "cpu", skip_keys=["labels"])
        monkeypatch.setattr(batches, "_is_pinned", lambda tensor: False)
        data_loader.send_to_device({"input_ids": IDS.clone()}, "cpu")
        monkeypatch.setattr(batches, "_is_gpu", lambda device: False)
        data_loader.send_to_device({"input_ids": IDS.clone()}, "cpu")
    assert copies.asked == [False] * 4


def test_a_function_with_other_parameters_is_left_alone(monkeypatch):
    def send(batch, device):
        return batch

    monkeypatch.setattr(data_loader, "send_to_device", send)
    batches.put_in()
    assert data_loader.send_to_device is send


def test_what_is_remembered_lives_as_long_as_the_tensor():
    device, host = torch.zeros(3), torch.zeros(3)
    gc.collect()
    count = len(host_copies._held)
    host_copies.remember(device, host)
    assert len(host_copies._held) == count + 1
    del device
    gc.collect()
    assert len(host_copies._held) == count


# ---- questions -------------------------------------------------------------------------------------------------------


class Refuses(torch.Tensor):
    """A mask or positions that nobody may ask for a number."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in (torch.Tensor.__bool__, torch.Tensor.item):
            raise AssertionError("it was asked for a number")
        return super().__torch_function__(function, types, args, kwargs or {})


def known(host: torch.Tensor) -> torch.Tensor:
    """A tensor that holds what the host's does, and must not be asked for it."""
    tensor = host.clone().as_subclass(Refuses)
    host_copies.remember(tensor, host)
    return tensor


@pytest.fixture
def asked() -> Iterator[None]:
    masks.put_into(masking_utils)
    yield
    masks.take_out_of(masking_utils)
    assert {name: getattr(masking_utils, name) for name in NAMES} == STOCK


def masks_of(mask: torch.Tensor | None, positions: torch.Tensor | None, make: str, window: int | None) -> Any:
    model = tiny_model()
    config = model.config
    config._attn_implementation = "sdpa"
    config.sliding_window = window
    given = {"config": config, "attention_mask": mask, "past_key_values": None, "position_ids": positions}
    if COUNTS:
        given["inputs_embeds"] = torch.zeros(2, 6, 8)
    else:
        given |= {"input_embeds": torch.zeros(2, 6, 8), "cache_position": torch.arange(6)}
    return getattr(masking_utils, make)(**given)


def ones(*zeros: int) -> torch.Tensor:
    mask = torch.ones(2, 6, dtype=torch.int64)
    mask[0, list(zeros)] = 0
    return mask


@pytest.mark.parametrize(("make", "window"), [("create_causal_mask", None), ("create_sliding_window_causal_mask", 3)])
@pytest.mark.parametrize("mask", [ones(), ones(0, 1), ones(5), torch.zeros(2, 6, dtype=torch.int64)])
def test_masks_are_the_same(mask, make, window, asked):
    for wrapped in (True, False):
        if wrapped:
            answer = masks_of(known(mask), None, make, window)
        else:
            masks.take_out_of(masking_utils)
            stock = masks_of(mask, None, make, window)
    assert (answer is None) == (stock is None)
    assert answer is None or torch.equal(answer.as_subclass(torch.Tensor), stock)


@pytest.mark.parametrize(
    "rows", [[[0, 1, 2, 3, 4, 5]], [[0, 1, 2, 3, 4, 5]] * 2, [[0, 1, 2, 0, 1, 2]], [[3, 4, 5, 6, 7, 8]]]
)
def test_packed_sequences_are_found_as_ever(rows, asked):
    positions = torch.tensor(rows)
    stock = STOCK["find_packed_sequence_indices"](positions.expand(2, -1))
    given = positions.clone()
    host_copies.remember(given, positions)
    found = masking_utils.find_packed_sequence_indices(given.expand(2, -1))
    assert (found is None) == (stock is None)
    assert found is None or torch.equal(found, stock)


def test_positions_that_the_host_knows_are_not_asked(asked):
    """What the device's say would be another answer."""
    given = torch.tensor([[0, 1, 2, 0, 1, 2]])
    host_copies.remember(given, torch.arange(6).unsqueeze(0))
    for positions in (given, given.expand(2, -1)):
        assert masking_utils.find_packed_sequence_indices(positions) is None
        assert masks_of(None, given, "create_causal_mask", None) is None
    parts = given[:, 2:5].expand(2, -1), given[:, :3].expand(2, -1)
    for others in (given[:, :3], given[:, 3:], given.flip(1), given.view(2, 3), given.t(), *parts):
        stock = STOCK["find_packed_sequence_indices"](others)
        found = masking_utils.find_packed_sequence_indices(others)
        assert (found is None) == (stock is None)


def test_a_mask_that_has_been_changed_is_asked_itself(asked):
    device, host = ones(), ones()
    host_copies.remember(device, host)
    device[0, 0] = 0
    assert masks_of(device, None, "create_causal_mask", None) is not None


def test_code_that_does_more_with_a_mask_or_positions_is_left_alone():
    def prepares(config, inputs_embeds, attention_mask):
        attention_mask = attention_mask.to(device=inputs_embeds.device, dtype=torch.bool)
        return False, attention_mask

    def inverts(config, inputs_embeds, attention_mask):
        attention_mask = attention_mask.to(device=inputs_embeds.device, dtype=torch.bool)
        attention_mask = ~attention_mask
        return False, attention_mask

    assert masks._only_casts(STOCK["_preprocess_mask_arguments"])
    assert masks._only_casts(prepares)
    assert not masks._only_casts(inverts)
    assert not masks._only_casts(len)

    def counts(self, input_ids=None, position_ids=None, inputs_embeds=None, past_key_values=None):
        if position_ids is None:
            seen = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + seen
            position_ids = position_ids.unsqueeze(0)
        return position_ids

    def counts_from_two(self, input_ids=None, position_ids=None, inputs_embeds=None, past_key_values=None):
        if position_ids is None:
            seen = past_key_values.get_seq_length() if past_key_values is not None else 2
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + seen
            position_ids = position_ids.unsqueeze(0)
        return position_ids

    def counts_and_shifts(self, input_ids=None, position_ids=None, inputs_embeds=None, past_key_values=None):
        if position_ids is None:
            seen = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + seen
            position_ids = position_ids.unsqueeze(0)
        position_ids += 1
        return position_ids, seen

    assert masks._counts_positions(counts)
    assert masks._counts_positions(type(tiny_model().model).forward) == COUNTS
    assert not masks._counts_positions(counts_from_two)
    assert not masks._counts_positions(counts_and_shifts)
    assert not masks._counts_positions(len)


# ---- in a Trainer ----------------------------------------------------------------------------------------------------


def trainer_of(folder: Path, with_mask: bool, **changes: Any) -> Trainer:
    model = tiny_model()
    drawn = torch.randint(0, 64, (24, 16), generator=torch.Generator().manual_seed(3))
    rows = [
        {"input_ids": row, "labels": row, **({"attention_mask": torch.ones(16).long()} if with_mask else {})}
        for row in drawn
    ]
    given: dict[str, Any] = {
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    given |= {"report_to": "none", "disable_tqdm": True, "optim": "sgd", "output_dir": str(folder)}
    return Trainer(model, TrainingArguments(**given | changes), train_dataset=rows)


def test_apply_before_transformers_is_imported() -> None:
    """A model's forward finds them then, in whatever loop."""
    program = """
import bastile, sys
bastile.apply()
assert "transformers.masking_utils" not in sys.modules
from transformers import masking_utils
from bastile.guards import stock_of
from bastile.models.masks import _REPLACED
print(*(getattr(masking_utils, name) is not stock_of(getattr(masking_utils, name)) for name in _REPLACED))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"] * len(NAMES)


def losses(trainer: Trainer) -> list[str]:
    trainer.train()
    return [repr(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("with_mask", [True, False])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_trainer_gets_its_batches_and_asks_nobody(with_mask, accumulation, copies, tmp_path, monkeypatch):
    changes = {"use_cpu": True, "gradient_accumulation_steps": accumulation}
    stock = losses(trainer_of(tmp_path, with_mask, **changes))
    assert not any(copies.asked)
    del copies.asked[:]
    looked: list[Any] = []
    name = "on_host" if with_mask else "_rows_on_host"
    look = getattr(masks, name)
    monkeypatch.setattr(masks, name, lambda tensor: (found := look(tensor), looked.append(found))[0])
    # Only what this is about: with other code in the layers losses differ in their last digits.
    bastile.apply(**dict.fromkeys(USUAL, False) | {"cuda_graphs": True})
    ours = losses(trainer_of(tmp_path, with_mask, **changes))
    assert ours == stock
    assert len(copies.asked) >= 6 * accumulation
    assert all(copies.asked)
    bastile.reset()
    assert {name: getattr(masking_utils, name) for name in NAMES} == STOCK
    assert {name: vars(Trainer)[name] for name in METHODS} == METHODS
    assert len(looked) == 6 * accumulation * (2 if with_mask else 1)  # cast, and asked about
    assert all(host is not None for host in looked) is (with_mask or COUNTS)


def test_a_trainer_gets_its_batches_with_all_operators(copies, tmp_path):
    """Some of which are put into the Trainer, too."""
    bastile.apply()
    trainer_of(tmp_path, True, use_cpu=True).train()
    assert len(copies.asked) >= 6
    assert all(copies.asked)


def test_taken_out_in_the_middle(copies, tmp_path):
    from test_running_loss import AtEachStep

    bastile.apply(**dict.fromkeys(USUAL, False) | {"layer_norm": True})
    trainer = trainer_of(tmp_path, True, use_cpu=True)

    def reset() -> None:
        bastile.reset()
        assert {name: getattr(masking_utils, name) for name in NAMES} == STOCK

    trainer.add_callback(AtEachStep(reset))
    trainer.train()
    assert copies.asked[0]
    assert not any(copies.asked[2:])
    assert waits._running == 0


def test_after_an_error_nothing_is_left(copies, tmp_path, monkeypatch):
    bastile.apply(**dict.fromkeys(USUAL, False) | {"layer_norm": True})
    trainer = trainer_of(tmp_path, True, use_cpu=True)
    monkeypatch.setattr(trainer, "compute_loss", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert data_loader.send_to_device is copies
    bastile.reset()
    assert {name: getattr(masking_utils, name) for name in NAMES} == STOCK


@on_gpu
def test_pinned_memory_is_not_used_again_before_it_was_copied():
    """Many batches through one block of pinned memory, behind work that takes the GPU longer than the host."""
    busy = torch.randn(4096, 4096, device="cuda")
    batches.put_in()
    try:
        sent = []
        with batches.not_waited_for():
            for n in range(64):
                busy = busy @ busy / busy.norm()
                batch = {"input_ids": torch.full((4, 4096), n).pin_memory()}
                sent.append(data_loader.send_to_device(batch, torch.device("cuda"), non_blocking=False))
                assert host_copies.on_host(sent[-1]["input_ids"]) is not None
                del batch
        assert [int(each["input_ids"].min()) for each in sent] == [int(each["input_ids"].max()) for each in sent]
        assert [int(each["input_ids"][0, 0]) for each in sent] == list(range(64))
    finally:
        batches.take_out()


@on_gpu
def test_a_trainer_on_a_gpu_waits_for_nothing(tmp_path):
    """Between the second step and the last one, nothing that waits for the device; the losses are the same."""
    from test_running_loss import AtEachStep

    found = {}
    for is_ours in (False, True):
        if is_ours:
            bastile.apply(**dict.fromkeys(USUAL, False) | {"cuda_graphs": True, "adamw": True})
        trainer = trainer_of(tmp_path, True, logging_steps=100, max_steps=8, optim="adamw_torch")
        modes = iter(["default", "default", *["error" if is_ours else "default"] * 5, "default"])
        trainer.add_callback(AtEachStep(lambda modes=modes: torch.cuda.set_sync_debug_mode(next(modes))))
        try:
            trainer.train()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found[is_ours] = [entry["train_loss"] for entry in trainer.state.log_history if "train_loss" in entry]
    bastile.reset()
    assert found[True] == pytest.approx(found[False], rel=1e-5)


def test_accelerate_s_function_is_the_one_that_is_known():
    assert tuple(inspect.signature(send_to_device).parameters) == batches._PARAMETERS
    assert data_loader.send_to_device is send_to_device


def test_a_package_is_looked_for_once_a_training(copies, tmp_path, monkeypatch):
    from accelerate import optimizer

    asked: list[bool] = []
    monkeypatch.setattr(optimizer, "is_lomo_available", lambda: bool(asked.append(True)))
    stock = optimizer.is_lomo_available
    trainer_of(tmp_path, True, use_cpu=True).train()
    assert len(asked) >= 6
    asked.clear()
    bastile.apply(**dict.fromkeys(USUAL, False) | {"layer_norm": True})
    trainer_of(tmp_path, True, use_cpu=True).train()
    assert len(asked) == 1
    assert optimizer.is_lomo_available is stock
