"""TRL's head on a model, after bastile.apply(): TRL's numbers, without a wait for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM

import bastile
from conftest import tiny_model
from graphing import DEVICE, ON_CUDA
from test_logits_models import SMALL

trl = pytest.importorskip("trl")
if Version(trl.__version__) < Version("1.15"):
    pytest.skip("its models have no such head", allow_module_level=True)
from trl.trainer import utils  # noqa: E402

WHERE = "trl.trainer.utils.add_fused_lm_head"
STATISTICS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")

OTHERS: dict[str, Any] = {
    "gemma2": {"final_logit_softcapping": 3.0},
    "granite": {"logits_scaling": 2.0},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


def model_of(family: str) -> Any:
    if family not in OTHERS:
        return tiny_model(family)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SMALL, **OTHERS[family])).train()


def with_head(family: str = "qwen3", **options: Any) -> Any:
    model = model_of(family).to(DEVICE)
    utils.add_fused_lm_head(model, **{"outputs": STATISTICS, **options})
    return model


def ran(where: str = WHERE) -> int:
    return sum(line.ran for line in bastile.report(reset=True) if line.where == where)


def given(ignored: float, rows: int = 4, columns: int = 90) -> dict[str, torch.Tensor]:
    """So many tokens that rows that do not count are left out."""
    drawn = torch.Generator().manual_seed(3)
    ids = torch.randint(1, 100, (rows, columns), generator=drawn)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=drawn) < ignored, -100)
    return {"input_ids": ids.to(DEVICE), "labels": labels.to(DEVICE)}


def results(model: Any, **batch: Any) -> list[Any]:
    """All that it gives, and the gradients of some of it."""
    out = model(**batch, fused_lm_head=True)
    led = [each for each in (out.loss, out.log_probs, out.entropy) if each.requires_grad]
    assert led
    assert all(each._base is None for each in led), "FSDP2 warns of views"
    model.zero_grad()
    total = out.loss + out.entropy.square().sum() + out.log_probs.square().sum()
    total.backward()
    fields = [getattr(out, name) for name in ("loss", "label_mask", *STATISTICS)]
    return [type(out).__name__, *fields, *[p.grad.clone() for p in model.parameters() if p.grad is not None]]


def assert_alike(ours: list[Any], stock: list[Any]) -> None:
    assert len(ours) == len(stock) > 12
    assert ours[0] == stock[0] == "FusedCausalLMOutput"
    for mine, theirs in zip(ours[1:], stock[1:], strict=True):
        assert mine.dtype is theirs.dtype
        assert mine.shape == theirs.shape
        assert (mine.double() - theirs.double()).norm() <= 1e-4 * theirs.double().norm() + 1e-6


@pytest.mark.parametrize("ignored", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "granite"])
def test_what_trl_gives(family: str, ignored: float) -> None:
    """Gemma 2 caps its logits, Granite divides them; where nothing counts, the loss is zero, and still leads back."""
    batch, options = given(ignored), {"temperature": 0.7}
    stock = results(with_head(family, **options), **batch)
    bastile.apply()
    model = with_head(family, **options)
    ran()
    assert_alike(results(model, **batch), stock)
    assert ran() == 1
    shifted = torch.nn.functional.pad(batch.pop("labels")[:, 1:], (0, 1), value=-100)
    assert_alike(
        results(model, **batch, shift_labels=shifted, num_items_in_batch=torch.tensor(7, device=DEVICE)),
        results(with_head_of_trl(family, **options), **batch, shift_labels=shifted, num_items_in_batch=7),
    )


def with_head_of_trl(*args: Any, **options: Any) -> Any:
    bastile.reset()
    return with_head(*args, **options)


def test_what_is_not_asked_for_is_not_there() -> None:
    bastile.apply()
    out = with_head(outputs=("log_probs",))(**given(0.3), fused_lm_head=True)
    assert [name for name in STATISTICS if getattr(out, name) is None] == list(STATISTICS[1:])


def test_trainers_that_were_imported_before() -> None:
    """As where a script begins with `from trl import SFTTrainer`: that module has the function by a name of its own."""
    from trl.trainer import sft_trainer

    for add in (sft_trainer.add_fused_lm_head, utils.add_fused_lm_head):
        assert add is utils.add_fused_lm_head
    for _ in range(2):
        bastile.apply()
        for module in (sft_trainer, utils):
            model = model_of("qwen3").to(DEVICE)
            module.add_fused_lm_head(model)
            ran()
            model(**given(0.3), fused_lm_head=True)
            assert ran() == 1
        bastile.reset()
        model(**given(0.3), fused_lm_head=True)
        assert ran() == 0


def test_without_the_head_it_is_the_model_s_own_forward() -> None:
    bastile.apply()
    model, batch = with_head(), given(0.3)
    out = model(**batch)
    assert out.logits.shape == (*batch["input_ids"].shape, 101)
    assert ran() == 0
    assert out.loss is not None


@pytest.mark.parametrize(
    ("options", "more"), [({"cast_lm_head_to_fp32": True}, {}), ({}, {"output_router_logits": False})]
)
def test_what_is_more_is_trl_s_own(options: dict[str, Any], more: dict[str, Any]) -> None:
    bastile.apply()
    model = with_head(**options)
    ran()
    model(**given(0.3), **more, fused_lm_head=True)
    assert ran() == (0 if options else 1)


def test_a_mixture_s_own_loss_is_trl_s() -> None:
    batch = given(0.3)

    def losses() -> list[torch.Tensor]:
        out = with_head("qwen3_moe")(**batch, fused_lm_head=True, output_router_logits=True)
        return [out.loss.detach(), out.aux_loss.detach()]

    stock = losses()
    bastile.apply()
    torch.testing.assert_close(losses(), stock, rtol=1e-4, atol=1e-5)
    assert ran() == 0


def test_what_the_backbone_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_head()
    batch = given(0.3)
    asked: list[Any] = []
    monkeypatch.setattr(model.model, "forward", lambda *args, **kwargs: asked.append(kwargs) or 1 / 0)
    bastile.apply()
    ours = with_head()
    monkeypatch.setattr(ours.model, "forward", lambda *args, **kwargs: asked.append(kwargs) or 1 / 0)
    for each in (model, ours):
        with pytest.raises(ZeroDivisionError):
            each(**batch, fused_lm_head=True, position_ids=None)
    assert asked[0].keys() == asked[1].keys() == {"input_ids", "position_ids", "use_cache"}
    assert not asked[1]["use_cache"]


def test_models_made_while_it_was_in_force_run_trl_s_code_after_reset() -> None:
    """And ours again after another apply."""
    bastile.apply()
    model, batch = with_head(), given(0.3)
    ran()
    before = results(model, **batch)
    assert ran() == 1
    bastile.reset()
    assert_alike(results(model, **batch), before)
    bastile.report(reset=True)
    bastile.apply()
    results(model, **batch)
    assert ran() == 1


@pytest.mark.skipif(not ON_CUDA, reason="a CPU waits for nothing")
def test_nobody_waits_for_the_device() -> None:
    bastile.apply()
    model, batch = with_head(), given(0.5, 8, 400)
    results(model, **batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        results(model, **batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("has_kernel", [False, True])
def test_of_logits_in_16_bits_the_results_are_of_the_type_that_trl_gives_them(has_kernel, monkeypatch):
    """TRL's kernels for GPUs write float32 of any logits, its code of PyTorch's operators the logits' type."""
    stock_kernel = vars(utils).get("_fused_logprob_entropy") if ON_CUDA else None
    if has_kernel and ON_CUDA and stock_kernel is None:
        pytest.skip("there is no Triton here")
    if has_kernel and not ON_CUDA:
        monkeypatch.setattr(utils, "_supports_trl_loss_kernel", lambda logits, *_: logits.dtype is torch.bfloat16)
        monkeypatch.setattr(utils, "is_triton_available", lambda: True)
    kernel = stock_kernel if ON_CUDA else _exact
    monkeypatch.setattr(utils, "_fused_logprob_entropy", kernel if has_kernel else None, raising=False)
    if not has_kernel:
        monkeypatch.setattr(utils, "is_triton_available", lambda: False)
    model, ids = tiny_model("qwen3").to(DEVICE, torch.bfloat16), given(0.0)["input_ids"]

    def run() -> list[torch.Tensor]:
        made = lambda: model(ids).logits[:, :-1]  # noqa: E731  (logits are read once)
        selected = utils.selective_log_softmax(made(), ids[:, 1:])
        return [
            selected,
            utils.entropy_from_logits(made()),
            *utils.selective_log_softmax_and_entropy(made(), ids[:, 1:], temperature=0.7),
        ]

    stock = run()
    bastile.apply()
    ran()
    ours = run()
    assert sum(line.ran for line in bastile.report() if line.operator == "linear_logprobs") == 3
    assert [t.dtype for t in ours] == [t.dtype for t in stock]
    assert stock[0].dtype is (torch.float32 if has_kernel else torch.bfloat16)
    for mine, theirs in zip(ours, stock, strict=True):  # of hidden states that differ by bfloat16's roundings
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=0.02, atol=0.05)


def _exact(logits: torch.Tensor, index: torch.Tensor, temperature: float = 1.0, row_mask: Any = None) -> Any:
    """In the place of TRL's kernel."""
    log_p = (logits.float() / temperature).log_softmax(-1)
    return log_p.gather(-1, index[..., None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)
