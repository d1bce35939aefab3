"""TRL's trainers after bastile.apply(): real trainers, real steps, stock's numbers, and which operator ran counted.

The newest release is what requirements/test.txt names; `make test-trl` runs this file with earlier ones, too."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

import bastile
from bastile.graphs import stack as stacks
from bastile.integrations import log_probs_from_hidden
from bastile.models import graphs
from bastile.models.logits.said import counts
from graphing import allow_graphs
from oracle import Case, assert_no_worse, random_tensor

trl = pytest.importorskip("trl")
import trl_runs  # noqa: E402
from processes import on_processes, zero_config  # noqa: E402

RELEASE = Version(trl.__version__)
NEWEST = Version("1.16") <= RELEASE
newest = pytest.mark.skipif(not NEWEST, reason="of the newest TRL")
needs_peft = pytest.importorskip("peft")

#: Runs that read logits: KTO's `nansum` of them, which it logged, and before 1.0 GKD's loss, in a module of another
#: name.
READ = {"gkd", "kto"} if Version("1.0") > RELEASE else {"kto"} if Version("1.14") > RELEASE else set()
#: Calls of linear_logprobs, for distillation of linear_divergence, in a run of two steps, each one batch: one a step of
#: the policy, one of the reference where there is one; KTO has both twice, RLOO its old policy beside. GKD has
#: a divergence from a teacher's logits.
CALLS = {
    "sft": 2,
    "sft packed": 2,
    "sft assistant": 2,
    "sft completion": 2,
    "sft dft": 2,
    "sft chunked": 2,
    "dpo": 4,
    "kto": 8,
    "grpo": 4,
    "rloo": 6,
    "distillation": 2,
    "distillation forward": 2,
    "distillation reverse": 2,
    "gkd": 2,
}


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    import datasets

    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    folder = tmp_path_factory.mktemp("models")
    paths = {kind: trl_runs.saved_model(kind, folder) for kind in trl_runs.MODELS}
    return paths.__getitem__


class Run:
    """A trainer's run: what it logged, the weights afterwards, who computed its losses."""

    def __init__(self, kind: str, path: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        torch.manual_seed(0)
        try:
            self.trainer = trl_runs.trainer(kind, path, folder, **options)
        except ImportError as error:
            pytest.skip(f"TRL {RELEASE} cannot be imported here: {error}")
        except ValueError as error:
            pytest.skip(f"TRL {RELEASE} has no such run: {error}")
        except AttributeError as error:
            if "warnings_issued" not in str(error):
                raise
            pytest.skip(f"TRL {RELEASE} does not know this Transformers: {error}")
        heads = {id(trl_runs.head_weight(self.trainer.model))}
        self.products = 0  # of hidden states by the head's weight that autograd follows
        linear = torch.nn.functional.linear

        def watched(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            self.products += id(weight) in heads and torch.is_grad_enabled()
            return linear(x, weight, bias)

        counts.clear()
        bastile.report(reset=True)
        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.functional, "linear", watched)
            self.trainer.train()
        self.logged = trl_runs.numbers_of(self.trainer)
        self.weights = {name: p.detach().clone() for name, p in self.trainer.model.named_parameters()}
        self.lines = [
            line for line in bastile.report() if line.operator in ("linear_logprobs", "linear_divergence", LOSS)
        ]
        self.ran = sum(line.ran for line in self.lines)
        self.aside = [reason for line in self.lines for reason in line.aside]
        self.made = [key for key in counts if key[0] == "made"]


LOSS = "fused_linear_cross_entropy"
near = partial(pytest.approx, rel=1e-5, abs=1e-5, nan_ok=True)


def adapters() -> Any:
    return needs_peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")


def both(kind: str, path: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Run:
    """The run with Bastile, whose numbers are those of stock."""
    options = {name: value() if callable(value) else value for name, value in options.items()}
    stock = Run(kind, path, folder, monkeypatch, **options)
    assert stock.ran == 0
    bastile.apply()
    ours = Run(kind, path, folder, monkeypatch, **options)
    assert len(ours.logged) == len(stock.logged) >= 2
    far = [
        set(mine) ^ set(theirs) | {name for name in mine if mine[name] != near(theirs.get(name))}
        for mine, theirs in zip(ours.logged, stock.logged, strict=True)
    ]
    if any(far):  # where stock's own rounding is larger than that, it is float64 that says whose numbers are right
        bastile.reset()
        with monkeypatch.context() as patch:
            load = trl_runs.load
            patch.setattr(trl_runs, "load", lambda path: load(path).double())
            exact = Run(kind, path, folder, monkeypatch, **options)
        bastile.apply()
        for names, mine, theirs, right in zip(far, ours.logged, stock.logged, exact.logged, strict=True):
            for name in names:
                assert abs(mine[name] - right[name]) <= abs(theirs[name] - right[name]), (name, mine, theirs, right)
    for name, weight in stock.weights.items():
        torch.testing.assert_close(ours.weights[name], weight, rtol=1e-5, atol=1e-5)
    return ours


KINDS = [kind for kind in trl_runs.KINDS if NEWEST or not kind.startswith("distillation")]


@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_of_stock(kind: str, saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, metrics and weights after two steps. No logits are made but where the loss is one of all logits."""
    run = both(kind, saved("qwen3"), tmp_path, monkeypatch)
    assert not run.aside
    assert bool(run.made) == (kind in READ)
    assert run.products == 0 or kind in READ
    assert run.ran == CALLS[kind] if NEWEST else run.ran >= CALLS[kind] // 4


@pytest.mark.parametrize("kind", ["sft", "grpo", pytest.param("distillation", marks=newest)])
def test_capped_logits(kind: str, saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 2's, whose cap the operator has to know."""
    run = both(kind, saved("gemma2"), tmp_path, monkeypatch)
    assert run.products == 0
    assert not run.aside
    assert not run.made


@pytest.mark.parametrize("kind", ["sft", "dpo", pytest.param("distillation", marks=newest)])
@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ({"gradient_accumulation_steps": 2}, 2),
        ({"gradient_checkpointing": False}, 1),
        ({"peft_config": adapters}, 1),
    ],
    ids=["accumulation", "no checkpointing", "lora"],
)
def test_as_people_train(
    kind: str, options: dict[str, Any], factor: int, saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if Version("1.0") > RELEASE and "peft_config" in options:
        options = {**options, "gradient_checkpointing": False}
    run = both(kind, saved("qwen3"), tmp_path, monkeypatch, **options)
    assert not run.aside
    assert bool(run.made) == (kind in READ)
    assert run.products == 0 or kind in READ
    assert run.ran == CALLS[kind] * factor if NEWEST else run.ran >= 2 * factor


def test_the_plain_trainer(saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' own asks the model for the loss."""
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

    tokens = torch.randint(5, trl_runs.VOCABULARY, (8, 12), generator=torch.Generator().manual_seed(1)).tolist()

    def plain(kind: str, path: str, folder: Path) -> Any:
        arguments = TrainingArguments(
            output_dir=str(folder), max_steps=2, per_device_train_batch_size=2, learning_rate=0.01, optim="sgd",
            logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        data = Dataset.from_dict({"input_ids": tokens, "labels": tokens})
        return Trainer(model=trl_runs.load(path), args=arguments, train_dataset=data)

    monkeypatch.setattr(trl_runs, "trainer", plain)
    run = both("trainer", saved("qwen3"), tmp_path, monkeypatch)
    assert run.ran == 2
    assert run.products == 0
    assert not run.made


# ---- how it gets there -----------------------------------------------------------------------------------------------


@newest
def test_imported_before_or_after(monkeypatch: pytest.MonkeyPatch) -> None:
    from trl import kernels
    from trl.trainer import dpo_trainer, utils  # noqa: F401

    early, selected = utils._ChunkedLogProbFunction, utils.selective_log_softmax
    bastile.apply()
    assert "apply" in vars(early)
    assert utils.selective_log_softmax is not selected
    bastile.reset()
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "chunked_logprob", kernels.chunked_logprob)  # what importing it anew replaces
        patch.delitem(sys.modules, "trl.kernels.chunked_logprob")
        bastile.apply()
        late = importlib.import_module("trl.kernels.chunked_logprob").ChunkedLogProbFunction
        assert late is not early
        assert "apply" in vars(late)
        bastile.reset()
    for cls in (early, late):
        assert "apply" not in vars(cls)
        assert cls.apply.__self__ is cls
    assert utils.selective_log_softmax is selected
    bastile.apply(fused_linear_cross_entropy=False)
    assert "apply" not in vars(early)
    bastile.apply(model_types=["llama"])
    assert "apply" in vars(early), "the losses of TRL are of no type: they are served if any type is to have them"


@newest
def test_what_a_release_moved_stays_stock_and_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class ChunkedLogProbFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, head, targets):
            return hidden.sum()

    module = types.ModuleType("trl.kernels.chunked_logprob")
    ChunkedLogProbFunction.__module__ = module.__name__
    module.ChunkedLogProbFunction = ChunkedLogProbFunction  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    bastile.report(reset=True)
    bastile.apply()
    for _ in range(2):
        assert ChunkedLogProbFunction.apply(torch.ones(2, 3), None, None) == 6
    [line] = [line for line in bastile.report() if line.operator == "linear_logprobs" and line.aside]
    [(reason, times)] = line.aside.items()
    assert "hidden, head, targets" in reason
    assert times == 2
    assert line.ran == 0
    assert sum("ChunkedLogProbFunction" in record.message for record in caplog.records) == 1, "said once"
    monkeypatch.undo()


@newest
def test_a_missing_function_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from trl.trainer import utils

    monkeypatch.delattr(utils, "_ChunkedLogProbFunction")
    bastile.apply()
    assert any("ChunkedLogProbFunction" in record.message for record in caplog.records)


# ---- the function alone ----------------------------------------------------------------------------------------------


OPTIONS = (0.7, 128, 4.0, 1.5, ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1"))
ROWS, HIDDEN, CLASSES = 37, 64, 301  # no multiple of anything


def through_trl(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, targets: torch.Tensor) -> Any:
    from trl.kernels import ChunkedLogProbFunction

    return ChunkedLogProbFunction.apply(hidden, weight, bias, targets, *OPTIONS)


def in_torch(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, targets: torch.Tensor) -> Any:
    z = torch.nn.functional.linear(hidden, weight, bias) * 1.5
    log_p = (4.0 * torch.tanh(z / 4.0) / 0.7).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def random_inputs(hidden_type: torch.dtype, weight_type: torch.dtype) -> dict[str, torch.Tensor]:
    return {
        "hidden": random_tensor((ROWS, HIDDEN), hidden_type, "cpu"),
        "weight": random_tensor((CLASSES, HIDDEN), weight_type, "cpu", scale=0.2),
        "bias": random_tensor((CLASSES,), weight_type, "cpu"),
    }


@newest
@pytest.mark.parametrize(
    ("hidden_type", "weight_type"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)],
    ids=["float32", "bfloat16", "float32 by bfloat16"],
)
def test_no_worse_than_trls_function(hidden_type: torch.dtype, weight_type: torch.dtype) -> None:
    """With bias, cap, scale and temperature; log-probabilities and entropy with gradients for both."""

    def stock(*tensors: torch.Tensor) -> Any:
        return through_trl(*tensors)[:2]

    def ours(*tensors: torch.Tensor) -> Any:
        bastile.apply()
        try:
            return stock(*tensors)
        finally:
            bastile.reset()

    targets = {"targets": torch.randint(CLASSES, (ROWS,))}
    assert_no_worse(Case(ours, stock, in_torch, random_inputs(hidden_type, weight_type), targets))


@newest
def test_autocast_is_a_cast() -> None:
    """Of all that is multiplied, as for a linear layer; gradients come back in float32."""
    targets = torch.randint(CLASSES, (ROWS,))
    tensors = random_inputs(torch.float32, torch.float32).values()
    bastile.apply()
    left = []
    for enabled in (True, False):
        leaves = [t.clone().requires_grad_() for t in tensors]
        given = leaves if enabled else [t.bfloat16() for t in leaves]
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            log_probs, entropy, *_ = through_trl(*given, targets)
        left.append([log_probs, entropy, *torch.autograd.grad(log_probs.sum() - entropy.sum(), leaves)])
    assert all(t.dtype is torch.float32 for t in left[0])
    torch.testing.assert_close(left[0], left[1])


@newest
def test_all_that_trls_function_gives() -> None:
    tensors = [*random_inputs(torch.float32, torch.float32).values(), torch.randint(CLASSES, (ROWS,))]
    stock = through_trl(*tensors)
    bastile.apply()
    ours = through_trl(*tensors)
    for mine, theirs in zip(ours, stock, strict=True):
        torch.testing.assert_close(mine, theirs)
    found = log_probs_from_hidden(tensors[0], tensors[1], tensors[3], outputs=("lse",))
    assert found.log_probs.shape == (ROWS,)
    assert found.lse is not None
    assert found.entropy is None


@newest
@pytest.mark.parametrize("kind", trl_runs.MODELS)
def test_functions_of_logits_on_demand(kind: str, saved: Any) -> None:
    """What trainers outside of TRL, its experimental ones and its earlier releases do to logits on the way there; rows
    that are masked; and logits that have been read, which are TRL's business."""
    from trl.trainer import utils

    tokens = torch.randint(5, trl_runs.VOCABULARY, (2, 9))
    mask = torch.ones(2, 5, dtype=torch.int64)
    mask[1, 3:] = 0

    def run(model: Any) -> list[torch.Tensor]:
        logits = model(tokens).logits[:, :-1]
        logits = logits[:, -5:]
        logits.div_(0.9)
        log_probs = utils.selective_log_softmax(logits, tokens[:, -5:])
        both = utils.selective_log_softmax_and_entropy(logits, tokens[:, -5:], temperature=0.7, row_mask=mask)
        with torch.no_grad():
            entropy = utils.entropy_from_logits(logits)
        log_probs[mask == 0] = 0.0  # in place, as trainers do
        (log_probs.sum() + both[0].square().sum() - both[1].sum()).backward()
        return [log_probs, *both, entropy, *(p.grad for p in model.parameters())]

    stock = run(trl_runs.load(saved(kind)).train())
    bastile.apply()
    counts.clear()
    bastile.report(reset=True)
    model = trl_runs.load(saved(kind)).train()
    for ours, theirs in zip(run(model), stock, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * theirs.abs().max().item())
    assert bastile.report().ran("linear_logprobs") == 3
    assert not [key for key in counts if key[0] == "made"]
    logits = model(tokens).logits
    read = logits + 0
    torch.testing.assert_close(utils.entropy_from_logits(logits), utils.entropy_from_logits(read))
    assert bastile.report().ran("linear_logprobs") == 3


@newest
@pytest.mark.parametrize("name", ["GKD", "GOLD"])
def test_distillation_of_logits_on_demand(name: str, saved: Any) -> None:
    """Every reduction and kind, with labels and without: as far from float64 as TRL's own, over all gradients. A number
    for each class is TRL's business."""
    module = importlib.import_module(f"trl.experimental.{name.lower()}.{name.lower()}_trainer")
    trainer = getattr(module, f"{name}Trainer")
    was = vars(trainer)["generalized_jsd_loss"]
    tokens = torch.randint(5, trl_runs.VOCABULARY, (2, 9))
    models = {dtype: trl_runs.load(saved("qwen3")).train().to(dtype) for dtype in (torch.float32, torch.float64)}
    teacher = torch.randn(2, 8, models[torch.float32].config.vocab_size)
    labels = tokens[:, 1:].clone()
    labels[0, 5:] = -100
    calls: list[dict[str, Any]] = [
        {"labels": given, "beta": beta, "reduction": reduction, "temperature": 0.7, "num_items_in_batch": items}
        for beta in (0, 0.3, 1)
        for given in (labels, None)
        for reduction, items in (("batchmean", None), ("mean", None), ("sum", None), ("none", torch.tensor(5)))
    ]

    def run(more: dict[str, Any], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        model = models[dtype]
        model.zero_grad()
        found = trainer.generalized_jsd_loss(model(tokens).logits[:, :-1], teacher.to(dtype), **more)
        found.sum().backward()
        return [found.detach(), *(p.grad for p in model.parameters())]

    exact, stock = [run(more, torch.float64) for more in calls], [run(more) for more in calls]
    bastile.apply(rms_norm=False, swiglu=False, rope=False)  # of the loss alone
    counts.clear()
    bastile.report(reset=True)
    errors = torch.zeros(2, dtype=torch.float64)
    for more, *expected in zip(calls, exact, stock, strict=True):
        for ours, true, theirs in zip(run(more), *expected, strict=True):
            torch.testing.assert_close(ours.double(), true, rtol=1e-3, atol=1e-4 * true.abs().max().item())
            size = true.square().mean()
            errors += torch.stack([(t - true).square().mean() / size for t in (ours, theirs)])
    assert errors[0] <= 1.5 * errors[1]  # squares; what is left to luck is the rounding of some hundred tensors
    assert bastile.report().ran("linear_divergence") == len(calls)
    assert not [key for key in counts if key[0] == "made"]
    assert run({"reduction": "none"})[0].shape == teacher.shape
    assert bastile.report().ran("linear_divergence") == len(calls)
    bastile.reset()
    assert vars(trainer)["generalized_jsd_loss"] is was


# ---- weights that are somewhere else ---------------------------------------------------------------------------------


class Partitioned(torch.nn.Parameter):
    """What of a parameter under DeepSpeed's ZeRO-3 is seen from outside."""

    ds_id = 0


class GatheredParameters:
    """Makes parameters whole for a time, as deepspeed.zero.GatheredParameters does on one process."""

    def __init__(self, parameters: list[Any]) -> None:
        self.parameters = parameters

    def __enter__(self) -> None:
        for parameter in self.parameters:
            parameter.data, parameter.ds_status = parameter.kept.clone(), types.SimpleNamespace(name="AVAILABLE")

    def __exit__(self, *_: Any) -> None:
        for parameter in self.parameters:
            parameter.data, parameter.ds_status = torch.empty(0), types.SimpleNamespace(name="NOT_AVAILABLE")


def test_weights_of_zero_3_are_gathered_for_each_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight is not there before, between and after the two passes; gradients are those of a whole one."""
    zero = types.SimpleNamespace(zero=types.SimpleNamespace(GatheredParameters=GatheredParameters))
    monkeypatch.setitem(sys.modules, "deepspeed", zero)
    targets = torch.randint(CLASSES, (ROWS,))
    tensors = list(random_inputs(torch.float32, torch.float32).values())
    left = []
    for partitioned in (False, True):
        hidden, weight, bias = (t.clone().requires_grad_() for t in tensors)
        if partitioned:
            weight, bias = (Partitioned(t.detach()) for t in (weight, bias))
            for parameter in (weight, bias):
                parameter.kept = parameter.data
            GatheredParameters([weight, bias]).__exit__()
        found = log_probs_from_hidden(hidden, weight, targets, bias=bias, softcap=4.0, outputs=("entropy",))
        assert weight.numel() == (0 if partitioned else CLASSES * HIDDEN)
        gradients = torch.autograd.grad(found.log_probs.sum() - found.entropy.sum(), [hidden, weight, bias])
        assert weight.numel() == (0 if partitioned else CLASSES * HIDDEN)
        left.append([found.log_probs.detach(), *gradients])
    torch.testing.assert_close(left[1], left[0])


def sharded(rank: int, path: str) -> None:
    """Two processes with half of each parameter (FSDP2), each with a batch of its own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from trl.trainer.utils import add_fused_lm_head

    mesh = init_device_mesh("cpu", (2,))
    labels = torch.randint(5, trl_runs.VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(rank))
    left = []
    for patched in (False, True):
        model = trl_runs.load(path).train()
        add_fused_lm_head(model, outputs=("log_probs", "entropy"))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if patched:
            bastile.apply()
        bastile.report(reset=True)
        for _ in range(2):  # gradients add up
            output = model(input_ids=labels, labels=labels, fused_lm_head=True)
            (output.loss - 0.1 * output.entropy.mean()).backward()
        assert bastile.report().ran("linear_logprobs") == 2 * patched
        left.append([output.loss.detach(), *(p.grad.full_tensor() for p in model.parameters())])
    torch.testing.assert_close(left[1], left[0], rtol=1e-5, atol=1e-5)


@newest
def test_fsdp2_on_two_processes(saved: Any, tmp_path: Path) -> None:
    on_processes(2, tmp_path, sharded, saved("qwen3"))


def partitioned(rank: int, path: str) -> None:
    """DeepSpeed's ZeRO-3: each process has half of each parameter, the head's weight too when its gradient is due."""
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig
    from trl.trainer.utils import add_fused_lm_head

    nothing_stays = {
        f"stage3_{name}": 0 for name in ("max_live_parameters", "max_reuse_distance", "prefetch_bucket_size")
    }
    config = {**zero_config(3, **nothing_stays), "gradient_accumulation_steps": 2}
    asked = HfDeepSpeedConfig(config)  # by which Transformers and TRL know of it
    labels = torch.randint(5, trl_runs.VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(rank))
    left = []
    for patched in (False, True):
        model = trl_runs.load(path).train()
        add_fused_lm_head(model, outputs=("log_probs", "entropy"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer)
        if patched:
            bastile.apply()
        bastile.report(reset=True)
        for _ in range(4):  # two steps
            output = engine(input_ids=labels, labels=labels, fused_lm_head=True)
            assert model.lm_head.weight.numel() == 0
            engine.backward(output.loss - 0.1 * output.entropy.mean())
            engine.step()
        assert bastile.report().ran("linear_logprobs") == 4 * patched
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            left.append([output.loss.detach(), *(p.detach().clone() for p in model.parameters())])
    del asked
    torch.testing.assert_close(left[1], left[0], rtol=1e-5, atol=1e-5)


@newest
def test_zero_3_on_two_processes(saved: Any, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    on_processes(2, tmp_path, partitioned, saved("qwen3"))


@newest
def test_completions_whose_tokens_are_graphs(
    saved: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without vLLM the model itself generates: the same completions, so the same rewards and losses."""
    allow_graphs(monkeypatch, "cpu")  # where the trainers are
    both("grpo", saved("qwen3"), tmp_path, monkeypatch, max_completion_length=24)
    (of_tokens,) = [line for line in bastile.report() if line.where.endswith("GenerationMixin")]
    assert of_tokens.ran == 22 + 23  # two texts, whose first token, and the first one's second, come without a graph
    assert of_tokens.aside == {}


@newest
@pytest.mark.parametrize("kind", ["dpo", "kto", "grpo"])
def test_a_reference_without_adapters_is_graphs(
    kind: str, saved: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy with its adapters switched off: from the second pass of a kind on, beside the policy's own."""
    options = {"beta": 0.1, "max_steps": 6, "num_train_epochs": 6} if kind == "grpo" else {"max_steps": 6}
    monkeypatch.setattr(graphs, "everywhere", True)
    allow_graphs(monkeypatch, "cpu")  # where the trainers are
    run = both(kind, saved("qwen3"), tmp_path, monkeypatch, peft_config=adapters, **options)
    assert not run.aside
    (layers,) = [line for line in bastile.report() if line.operator == "cuda_graphs" and "Model" in line.where]
    assert layers.ran >= (6 if kind == "kto" else 3)
    assert not layers.aside
    (stack,) = [stack for stack in stacks._stacks.values() if stack.states]
    assert stack.captured
    assert any(state.captured for state in stack.states)
