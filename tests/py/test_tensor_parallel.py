"""Transformers' tensor parallelism on two processes: the fused loss runs, with one process's loss and gradients."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

import bastile
from bastile.models import small
from bastile.models.support import Check
from conftest import older_than
from processes import on_processes

PROCESSES = 2
#: Odd, where Transformers parts such a head; earlier releases refuse it.
VOCABULARY = 98 if older_than("5.23") else small.SIZES["vocab_size"]


def step(model: Any, backward: Any = torch.Tensor.backward) -> tuple[torch.Tensor, dict[str, torch.Tensor], Any]:
    """As small.step, and the output's logits."""
    ids = torch.randint(3, 90, (2, 11), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, 4] = -100
    output = model(input_ids=ids, labels=labels, num_items_in_batch=torch.tensor(17))
    backward(output.loss)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return output.loss.detach(), gradients, output


def step_of_evaluation(model: Any) -> torch.Tensor:
    ids = torch.randint(3, 90, (2, 11), generator=torch.Generator().manual_seed(0))
    return model(input_ids=ids, labels=ids).logits


def one_of_two(rank: int, folder: str, model_type: str, want: dict[str, Any]) -> None:
    from torch.distributed.tensor import DTensor
    from transformers import AutoModelForCausalLM

    bastile.apply()
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").train()
    assert model.get_output_embeddings().weight.to_local().shape[0] < VOCABULARY  # it is parted
    gathered = []
    full_tensor = DTensor.full_tensor
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(DTensor, "full_tensor", lambda t, **how: gathered.append(t.shape) or full_tensor(t, **how))
    loss, gradients, output = step(model)
    assert not gathered  # the head's weight stays in parts
    told = bastile.report()
    assert told.ran("fused_linear_cross_entropy") == 1, told
    assert told.ran("swiglu") == 2
    assert told.ran("add_rms_norm") == 4
    assert gradients.keys() == want["gradients"].keys()
    near(loss, want["loss"])
    for name, gradient in gradients.items():
        near(gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient, want["gradients"][name])
    near(output.logits.detach(), want["logits"])  # by all processes
    with torch.no_grad():
        logits = step_of_evaluation(model)
    if rank == 0:  # alone: nothing waits for the other process
        near(logits + 0, want["logits"])
    monkeypatch.undo()
    distributed.barrier()


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    assert float((got - want).abs().max()) <= Check.ALLOWED_GRADIENT * float(want.abs().max())


@pytest.mark.parametrize("model_type", ["llama", "gemma"])  # gemma's head is its embedding
def test_two_processes_train_as_one(model_type: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers.distributed.tensor_parallel", reason="this release parts heads in another way")
    model = small.small_model(model_type, num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCABULARY)
    model.save_pretrained(tmp_path)
    loss, gradients, output = step(model)
    want = {"loss": loss, "gradients": gradients, "logits": output.logits.detach()}
    on_processes(PROCESSES, tmp_path, one_of_two, str(tmp_path), model_type, want)
