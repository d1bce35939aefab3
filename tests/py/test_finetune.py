"""What `bastile finetune` promises beyond a comparison: resumption, accumulation, LoRA, and each kind of data."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import bastile
from bastile.cli import chats, compare, data, main, processes, report, train
from bastile.cli.errors import UsageError
from bastile.cli.examples import IGNORED, Examples, batch
from bastile.cli.processes import Ending, Process
from command import Copied, one_thread, save_model
from conftest import EPS

# A template that writes its last answer otherwise than those before it, as Qwen3's does with its thoughts.
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n"
    "{% if loop.last and message['role'] == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    "{{ message['content'].strip() }}<|end|>\n{% endfor %}"
)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is two and two?"},
    {"role": "assistant", "content": "Four.\n"},
    {"role": "user", "content": "And Four. again?"},
    {"role": "assistant", "content": "Four."},
]


on_one_thread = pytest.fixture(scope="module", autouse=True)(one_thread)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(Path(json.__file__).read_text()[:562], encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), Path(json.__file__).read_text())


@pytest.fixture(scope="module")
def chat_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": CHAT[: 3 + 2 * (row % 2)]}) + "\n" for row in range(12)))
    return path


class Here:
    """Stands for the process that carries out a plan: does its work in this one."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan

    def lines(self) -> Iterator[str]:
        events: list[dict[str, Any]] = []
        try:
            train.run(self.plan, events.append, lambda: None)
        finally:
            bastile.reset()
        yield from map(json.dumps, events)

    def end(self) -> None:
        pass


class Said:
    """Stands for one that says what is given, and ends so."""

    def __init__(self, turns: list[list[dict[str, Any]]], order: list[str], name: str, ending: Any = None) -> None:
        self.turns, self.order, self.name, self.end_of_it = turns, order, name, ending

    def lines(self) -> Iterator[str]:
        self.order.append(self.name)
        yield from map(json.dumps, self.turns.pop(0))

    def go_on(self) -> None:
        pass

    def ending(self) -> Any:
        return self.end_of_it

    def end(self) -> None:
        pass


@pytest.fixture
def finetune(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable[..., str]:
    """What `bastile finetune` prints; the trainings have processes of their own."""
    monkeypatch.setattr(compare, "Process", Copied)
    monkeypatch.setenv("COLUMNS", "140")

    def call(model: Path, source: Path, out: Path, *more: object, status: int = 0) -> str:
        arguments = ["--model", model, "--data", source, "--out", out, "--device", "cpu", "--batch", 2, "--lr", "1e-2"]
        assert main(["finetune", *map(str, arguments), *map(str, more)]) == status
        printed = capsys.readouterr()
        return printed.out + printed.err

    return call


@pytest.fixture
def here(finetune: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The same within this process, where a test looks into the training."""
    monkeypatch.setattr(compare, "start", lambda plan, plan_file, log: Here(plan))
    return finetune


def losses(out: Path) -> dict[str, list[float]]:
    return {run["name"]: run["losses"] for run in json.loads((out / "result.json").read_text())["runs"]}


_LORA = ["--lora", 4, "--accumulate", 2, "--checkpointing", "--offload-checkpoints"]


@pytest.mark.parametrize("more", [[], _LORA], ids=["full", "lora"])
def test_a_resumed_run_is_the_run_that_did_not_stop(
    finetune: Callable[..., str], model: Path, text: Path, tmp_path: Path, more: list
) -> None:
    """Bit for bit: losses and weights. The interruption is within an epoch; without LoRA another epoch follows, whose
    order must be the same too. The learning rate falls all the time."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    size = ["--sequence", 32, "--steps", 8, "--schedule", "cosine", "--save-every", 2, *more]
    finetune(model, text, whole, *size, "--save", tmp_path / "a")
    assert len(Examples.load(whole / "examples.pt")) // 2 == 7  # batches: an epoch ends after step 7, or steps 4 and 8
    shutil.copytree(whole, stopped)
    shutil.rmtree(stopped / "bastile" / "checkpoint-8")  # what a run that was killed after step 6 leaves behind
    (stopped / "bastile.result.json").unlink()
    (stopped / "result.json").unlink()
    stock = (stopped / "stock.result.json").stat().st_mtime_ns
    finetune(model, text, stopped, *size, "--save", tmp_path / "b", "--resume")
    assert (stopped / "stock.result.json").stat().st_mtime_ns == stock  # it had ended, and was not repeated
    assert losses(stopped) == losses(whole)
    assert len(set(losses(whole)["bastile"])) == 8
    saved = next(path.name for path in (tmp_path / "a").glob("*.safetensors"))
    first, second = load_file(tmp_path / "a" / saved), load_file(tmp_path / "b" / saved)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    runs = json.loads((stopped / "result.json").read_text())["runs"]
    assert [run["timed_steps"] for run in runs] == [7, 1]  # the resumed process made two steps, and timed the second
    if more:
        assert saved == "adapter_model.safetensors"
        assert [any("offload_checkpoints" in name for name in run["patched"]) for run in runs] == [False, True]
        assert runs[1]["trainable_parameters"] < runs[1]["parameters"] / 3


def test_a_checkpointed_training_is_saved(here: Callable[..., str], model: Path, text: Path, tmp_path: Path) -> None:
    more = ["--no-baseline", "--gradient-checkpointing", "--sequence", 32, "--steps", 4, "--save", tmp_path / "saved"]
    printed = here(model, text, tmp_path, *more)
    assert f"Model and tokenizer: {tmp_path / 'saved'}" in printed
    result = json.loads((tmp_path / "result.json").read_text())
    assert [run["name"] for run in result["runs"]] == ["bastile"]
    assert result["comparison"] == {}
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (model, tmp_path / "saved"))
    assert not torch.equal(before.lm_head.weight, after.lm_head.weight)
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").encode("import json")


def test_accumulated_batches_equal_one_large_batch(
    here: Callable[..., str], model: Path, chat_file: Path, tmp_path: Path
) -> None:
    """Chats of unequal length: a mean of the batches' means would weigh their tokens differently."""
    size = ["--steps", 3, "--sequence", 128, "--lr", "1e-3"]
    here(model, chat_file, tmp_path / "one", *size, "--batch", 4)
    here(model, chat_file, tmp_path / "two", *size, "--batch", 2, "--accumulate", 2)
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    for name in ("stock", "bastile"):
        # Two float32 programs for one formula: of a loss near 6, a few dozen roundings after three steps.
        assert one[name] == pytest.approx(two[name], rel=200 * EPS), name
    assert one["stock"] == pytest.approx(one["bastile"], rel=200 * EPS)


def test_bf16_keeps_float32_weights_and_follows_stock(
    here: Callable[..., str], model: Path, text: Path, tmp_path: Path
) -> None:
    here(model, text, tmp_path / "mixed", "--sequence", 32, "--steps", 3, "--bf16", "--save", tmp_path / "saved")
    mixed = losses(tmp_path / "mixed")
    assert mixed["stock"] == pytest.approx(mixed["bastile"], rel=2**-7)  # a rounding to bfloat16
    assert load_file(tmp_path / "saved" / "model.safetensors")["lm_head.weight"].dtype == torch.float32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_qlora_follows_stock(here: Callable[..., str], text: Path, tmp_path: Path, dtype: str) -> None:
    """A base in 4 bits, and float32 adapters, beside 16 bits under autocast: all layers of which run as nodes."""
    pytest.importorskip("bitsandbytes")
    rows_of_whole_blocks = {"hidden_size": 64, "intermediate_size": 128}
    model = save_model(tmp_path / "model", Path(json.__file__).read_text(), **rows_of_whole_blocks)
    before = bastile.report().ran("lora_linear")
    here(model, text, tmp_path / "out", "--sequence", 32, "--steps", 3, "--lora", 4, "--load-in-4bit", "--dtype", dtype)
    found = losses(tmp_path / "out")
    assert found["stock"] == pytest.approx(found["bastile"], rel=200 * EPS if dtype == "float32" else 2**-7)
    layers = AutoConfig.from_pretrained(model).num_hidden_layers
    assert bastile.report().ran("lora_linear") - before == 3 * 7 * layers
    assert "goes with --checkpointing" in here(model, text, tmp_path / "kept", "--offload-checkpoints", status=2)
    assert "goes with --lora" in here(model, text, tmp_path / "alone", "--load-in-4bit", status=2)


@pytest.mark.parametrize("lora", [[], ["--lora"]], ids=["full", "lora"])
def test_checkpointing_runs_layers_again(
    here: Callable[..., str],
    model: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lora: list[str],
) -> None:
    calls: list[int] = []
    attention = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *args, **kwargs: calls.append(1) or attention(*args, **kwargs),
    )
    for folder, more, times in (("a", [], 1), ("b", ["--checkpointing"], 2)):
        calls.clear()
        here(model, text, tmp_path / folder, "--sequence", 32, "--steps", 2, "--no-baseline", *lora, *more)
        assert len(calls) == 2 * 2 * times  # layers, steps
    assert losses(tmp_path / "a")["bastile"] == pytest.approx(losses(tmp_path / "b")["bastile"], rel=200 * EPS)


def test_chosen_operators_alone_are_used(here: Callable[..., str], model: Path, text: Path, tmp_path: Path) -> None:
    printed = here(
        model, text, tmp_path, "--sequence", 32, "--epochs", 1, "--no-baseline", "--rms-norm", "--cross-entropy"
    )
    run = json.loads((tmp_path / "result.json").read_text())["runs"][0]
    assert run["patched"] == ["rms_norm_qwen3", "fused_linear_cross_entropy_qwen3"]
    assert len(run["losses"]) == len(Examples.load(tmp_path / "examples.pt")) // 2
    assert "swiglu" not in printed


def test_longer_sequences_than_the_model_was_made_for_are_told(
    here: Callable[..., str], model: Path, text: Path, tmp_path: Path
) -> None:
    most = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    for sequence, told in ((most, False), (most + 1, True)):
        printed = here(model, text, tmp_path / str(sequence), "--sequence", sequence, "--steps", 2, "--no-baseline")
        assert (f"at most {most} tokens (max_position_embeddings)" in printed.replace("\n", " ")) is told


# ---- turns, progress, and runs that end early ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[Any]]:
    """A plan and what a training by it says, in turns of two steps: five of them."""
    out = tmp_path_factory.mktemp("turns")
    plan = {
        "model": {"pretrained": str(model)},
        "name": "bastile",
        "folder": str(out / "bastile"),
        "examples": str(out / "examples.pt"),
        "device": "cpu",
        "dtype": "float32",
        "operators": {},
        "checkpoint": None,
        "lr": 1e-3,
        "seed": 0,
        "turn": 2,
        **{"steps": 6, "batch": 2, "sequence": 32, "accumulate": 1, "bf16": False, "checkpointing": False},
        **{
            "load_in_4bit": False,
            "lora": None,
            "max_grad_norm": 1.0,
            "offload_checkpoints": False,
            "optimizer": "torch",
            "save": None,
            "save_every": None,
            "schedule": "constant",
        },
        **{"warmup": 1, "weight_decay": 0.0},
    }
    tokenizer = AutoTokenizer.from_pretrained(model)
    data.load(str(text), "", tokenizer, 32)[0].save(out / "examples.pt")
    events: list[Any] = []
    try:
        train.run(plan, events.append, lambda: events.append("goes on"))
    finally:
        bastile.reset()
    return plan, events


def test_a_training_waits_for_its_turns(measured: tuple[dict[str, Any], list[Any]]) -> None:
    """Before its first step, after it, and after every two; not after the last."""
    _, events = measured
    seen = ["step" if "losses" in e else "waits" if "waits" in e else e for e in events[:-1]]
    turn = ["waits", "goes on"]
    assert seen == [*turn, "step", *turn, "step", "step", *turn, "step", "step", *turn, "step"]
    result = events[-1]["result"]
    assert [(turn["steps"], turn["tokens"]) for turn in result["turns"]] == [(2, 128), (2, 128), (1, 64)]
    steps = [event for event in events if "losses" in event]
    assert [event["seconds"] > 0 for event in steps] == [False] + 5 * [True]
    assert sum(turn["seconds"] for turn in result["turns"]) == pytest.approx(sum(e["seconds"] for e in steps))
    assert result["losses"] == [loss for event in steps for loss in event["losses"]]


def test_a_turn_that_was_disturbed_does_not_decide() -> None:
    """Waiting is nobody's time, and one turn in five that took ten times as long does not change what is measured."""
    watch = train._Watch(None, lambda *_: None, lambda: None, 5)
    watch.turns = [{"steps": 5, "tokens": 500, "seconds": seconds} for seconds in (1.0, 1.1, 10.0, 1.0, 1.05)]
    found = watch.measured()
    assert found["tokens_per_second"] == pytest.approx(500 / 1.05)
    assert found["seconds_per_step"] == pytest.approx(1.05 / 5)
    assert (found["timed_steps"], found["timed_seconds"]) == (25, pytest.approx(14.15))


def say(steps: int, seconds: float = 0.5, first: int = 0) -> list[dict[str, Any]]:
    return [{"losses": [5.0 - 0.125 * (first + at)], "tokens": 64, "seconds": seconds} for at in range(steps)]


def carried_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: dict[str, Said], turn: int | None, steps: int
) -> list[dict[str, Any]]:
    monkeypatch.setattr(compare, "start", lambda plan, plan_file, log: said[plan["name"]])
    plan = {"steps": steps, "turn": turn, "save": None, "checkpoint": None, "device": "cpu"}
    plans = compare.plans(plan, said, tmp_path, False)
    return compare.run_all(plans, tmp_path, False)


def test_runs_take_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """And off a terminal there is a line of progress for the first step and each tenth of them."""
    order: list[str] = []
    waits = {"waits": True}
    said = {
        name: Said(
            [
                [waits],
                [*say(1, 0.0), waits],
                [*say(20, first=1), waits],
                [*say(19, first=21), {"result": {"at": name}}],
            ],
            order,
            name,
        )
        for name in ("stock", "bastile")
    }
    runs = carried_out(monkeypatch, tmp_path, said, 20, 40)
    assert order == 4 * ["stock", "bastile"]
    assert runs == [{"name": name, "status": "ok", "at": name} for name in said]
    printed = capsys.readouterr().out.splitlines()
    assert printed[:4] == [
        "stock: starting",
        "bastile: starting",
        "stock: step 1 of 40, loss 5.0000",
        "bastile: step 1 of 40, loss 5.0000",
    ]
    assert [line for line in printed if line.startswith("bastile: step")][1:] == [
        f"bastile: step {step} of 40, loss {5 - 0.125 * (step - 1):.4f}, 128 tokens/s" for step in range(4, 41, 4)
    ]


def test_without_turns_one_follows_the_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    order: list[str] = []
    said = {name: Said([[*say(3), {"result": {}}]], order, name) for name in ("stock", "bastile")}
    carried_out(monkeypatch, tmp_path, said, None, 3)
    assert order == ["stock", "bastile"]


GONE = Ending("out of memory", "killed by the system, which had run out of memory", killed=True)


@pytest.mark.parametrize(
    ("events", "ending", "status", "reason"),
    [
        (say(3), GONE, "out of memory", GONE.reason),
        (say(3), Ending("failed", "killed by SIGKILL", killed=True), "killed", "killed by SIGKILL"),
        ([*say(3), {"out_of_memory": "CUDA out of memory."}], None, "out of memory", "CUDA out of memory."),
    ],
)
@pytest.mark.parametrize("turn", [None, 5])
def test_a_run_that_does_not_fit_leaves_the_other(
    monkeypatch: pytest.MonkeyPatch,
    measured: tuple[dict[str, Any], list[Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    events: list[dict[str, Any]],
    ending: Ending | None,
    status: str,
    reason: str,
    turn: int | None,
) -> None:
    order: list[str] = []
    whole = [event for event in measured[1] if "losses" in event or "result" in event]
    said = {"stock": Said([events], order, "stock", ending), "bastile": Said([whole], order, "bastile")}
    runs = carried_out(monkeypatch, tmp_path, said, turn, 6)
    assert order == ["stock", "bastile"]
    assert runs[0] == {"name": "stock", "status": status, "reason": reason, "losses": [5.0, 4.875, 4.75]}
    assert runs[1]["status"] == "ok"
    assert not (tmp_path / "stock.result.json").exists(), "--resume tries it again"
    assert f"stock: {status} after 3 steps: {reason}" in capsys.readouterr().out
    report.write(measured[0], runs, tmp_path, "bastile finetune")
    printed = capsys.readouterr().out
    (speeds,) = [line for line in printed.splitlines() if "tokens/s" in line and "│" in line]
    assert status in speeds
    assert f"{runs[1]['tokens_per_second']:,.0f}" in speeds
    assert f"Stock Transformers: {status}: {reason}" in printed
    assert json.loads((tmp_path / "result.json").read_text())["comparison"] == {}


def test_a_training_that_runs_out_of_memory_says_so(
    measured: tuple[dict[str, Any], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore of it")

    monkeypatch.setattr(train, "_build_model", fail)
    events: list[dict[str, Any]] = []
    train.run(measured[0], events.append, lambda: None)
    assert events == [{"out_of_memory": "CUDA out of memory. Tried to allocate 2.00 GiB."}]
    monkeypatch.setattr(train, "_build_model", lambda plan: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train.run(measured[0], events.append, lambda: None)


def test_where_bastile_does_not_fit_the_command_fails(
    finetune: Callable[..., str], monkeypatch: pytest.MonkeyPatch, model: Path, text: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        compare, "start", lambda plan, plan_file, log: Said([[{"out_of_memory": "no more"}]], [], plan["name"])
    )
    printed = finetune(model, text, tmp_path, "--sequence", 32, "--steps", 2, status=1)
    assert "the bastile run did not end (out of memory): a smaller --batch or --sequence" in printed.replace("\n", " ")


@pytest.mark.parametrize(
    ("counts", "program", "ending"),
    [
        ((3, 4), "os.kill(os.getpid(), signal.SIGKILL)", GONE),
        ((3, 3), "os.kill(os.getpid(), signal.SIGKILL)", Ending("failed", "killed by SIGKILL", killed=True)),
        ((None, None), "os.kill(os.getpid(), signal.SIGKILL)", Ending("failed", "killed by SIGKILL", killed=True)),
        ((3, 4), "os.abort()", Ending("failed", "killed by SIGABRT")),
        ((3, 4), "sys.exit('no good')", Ending("failed", "no good")),
    ],
)
def test_how_a_process_ended(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    counts: tuple[int | None, int | None],
    program: str,
    ending: Ending,
) -> None:
    """counts: how many processes the system had killed for memory, before and after."""
    found = iter(counts)
    monkeypatch.setattr(processes, "killed_for_memory", lambda: next(found))
    command = [sys.executable, "-c", f"import os, signal, sys\n{program}"]
    process = Process(command, os.environ, tmp_path / "log")
    try:
        assert list(process.lines()) == []
        assert process.ending() == ending
    finally:
        process.end()
    process.end()  # once more changes nothing


def test_a_failed_run_shows_the_end_of_its_log(
    finetune: Callable[..., str], monkeypatch: pytest.MonkeyPatch, model: Path, text: Path, tmp_path: Path
) -> None:
    """A crash, which the other model would meet too, ends the command."""
    command = [sys.executable, "-c", "raise ValueError('weights that are none')"]
    monkeypatch.setattr(compare, "start", lambda plan, plan_file, log: Process(command, os.environ, log))
    printed = finetune(model, text, tmp_path, "--sequence", 32, "--steps", 2, status=1)
    assert f"its whole output is in {tmp_path / 'stock.log'}" in printed
    assert "    ValueError: weights that are none" in printed


def test_what_cannot_be_resumed_is_told(here: Callable[..., str], model: Path, text: Path, tmp_path: Path) -> None:
    size = ["--sequence", 32, "--no-baseline"]
    printed = here(model, text, tmp_path / "none", *size, "--resume", status=2)
    assert "there is no run in" in printed
    here(model, text, tmp_path, *size, "--steps", 2, "--save-every", 1)
    printed = here(model, text, tmp_path, *size, "--steps", 3, "--save-every", 1, status=2)
    assert "holds checkpoints of an earlier run; --resume continues it" in printed.replace("\n", " ")
    printed = here(model, text, tmp_path, *size, "--steps", 3, "--save-every", 1, "--resume", status=2)
    assert "was started differently: steps (was 2, now 3)" in printed.replace("\n", " ")
    again = ["--steps", 2, "--save-every", 1, "--resume", "--save", tmp_path / "late"]
    printed = here(model, text, tmp_path, *size, *again, status=2).replace("\n", " ")
    assert "late: the run in" in printed
    assert "checkpoint-2, holds what it trained" in printed
    assert not (tmp_path / "late").exists()
    held = (tmp_path / "examples.pt").read_bytes()
    changed = tmp_path / "changed.txt"
    changed.write_text(text.read_text().replace("JSON", "YAML"))
    printed = here(model, changed, tmp_path, *size, "--steps", 2, "--save-every", 1, "--resume", status=2)
    assert "data (was" in printed
    assert (tmp_path / "examples.pt").read_bytes() == held, "what is refused changes nothing"
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("template", [TEMPLATE, None], ids=["template", "plain"])
def test_only_answers_are_learned(model: Path, template: str | None) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template
    ((ids, labels),) = chats.tokenize([("here", CHAT)], tokenizer, 10_000)
    learned = "".join(
        tokenizer.decode([label]) if label != IGNORED else "~" for label in labels
    )  # one ~ a token that is not learned
    pieces = [piece for piece in learned.split("~") if piece]
    assert pieces == ["Four.<|end|>", "Four.<|end|>"]
    assert all(label in (IGNORED, token) for token, label in zip(ids, labels, strict=True))
    if template:
        assert "<think>" in tokenizer.decode(ids)
    # Cut within the first answer, it is learned as far as it goes; cut before it, nothing is left to learn.
    start = next(at for at, label in enumerate(labels) if label != IGNORED)
    assert len(list(chats.tokenize([("here", CHAT)], tokenizer, start + 1))) == 1
    assert list(chats.tokenize([("here", CHAT)], tokenizer, start)) == []


def test_every_kind_of_data(model: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = {"chats": {"messages": CHAT}, "texts": {"text": "import json " * 20}}
    for kind, row in rows.items():
        (tmp_path / f"{kind}.jsonl").write_text(3 * (json.dumps(row) + "\n"))
    examples, what = data.load(str(tmp_path / "chats.jsonl"), "train", tokenizer, 200)
    assert (len(examples), what) == (3, "3 chats")
    examples, what = data.load(str(tmp_path / "texts.jsonl"), "train", tokenizer, 16)
    assert tokenizer.eos_token_id in examples.ids
    assert what.startswith("a text of")
    pytest.importorskip("datasets", reason="the data set library is not installed")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text((tmp_path / "chats.jsonl").read_text())
    from_set, _ = data.load(str(tmp_path / "set"), "train", tokenizer, 200)
    assert torch.equal(from_set.ids[: len(from_set.ids) // 3], from_set[0]["input_ids"])
    assert len(from_set) == 3


def test_lines_end_where_json_lines_end_them(model: Path, tmp_path: Path) -> None:
    """Text may hold what Unicode calls ends of lines; and a file that Windows wrote begins with a mark."""
    rows = [{"text": f"{end}import json{end}"} for end in ("\u2028", "\u0085", "\v", "\f")]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in rows)
    (tmp_path / "rows.jsonl").write_bytes(lines.encode("utf-8-sig"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    examples, _ = data.load(str(tmp_path / "rows.jsonl"), "train", tokenizer, 4)
    assert tokenizer.decode(examples.ids).startswith("\u2028import json\u2028")


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("{", "line 1: not JSON"),
        ('{"text": "a"}\n{"text": ', "line 2: not JSON .* at column 10"),
        ("[1]", "line 1: must be an object"),
        ('{"prompt": "a"}', "line 1: needs 'messages' or 'text'; it has prompt"),
        ('{"text": "a"}\n{"messages": []}', "line 2: has no 'text', which the first row has"),
        ('{"messages": []}', "line 1: 'messages' must be a list of messages"),
        ('{"messages": [{"role": "user"}]}', "line 1: each message needs a 'role' and a 'content', both text"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "no chat has an answer of the assistant within 8 tokens"),
    ],
)
def test_bad_rows_are_told_with_their_line(model: Path, tmp_path: Path, lines: str, told: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(lines)
    with pytest.raises(UsageError, match=told.replace("[", r"\[")):
        data.load(str(path), "train", AutoTokenizer.from_pretrained(model), 8)


def test_a_data_set_that_is_not_there_is_told(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    with pytest.raises(UsageError, match=r"neither a file nor a data set with the split train|pip install datasets"):
        data.load("nobody/no-such-set", "train", tokenizer, 8)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install datasets"):
        data.load("nobody/no-such-set", "train", tokenizer, 8)


def test_batches_are_padded_at_the_right_and_masked_only_then() -> None:
    examples = Examples.of_sequences([([1, 2, 3], [IGNORED, 2, 3]), ([4], [4]), ([5, 6, 7], [5, 6, 7])])
    padded = batch([examples[0], examples[1]])
    assert padded["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert padded["labels"].tolist() == [[IGNORED, 2, 3], [4, IGNORED, IGNORED]]
    assert "attention_mask" not in batch([examples[0], examples[2]])
    assert Examples.of_text(torch.arange(10), 4)[1]["input_ids"].tolist() == [4, 5, 6, 7]
    assert len(Examples.of_text(torch.arange(10), 4)) == 2


def test_a_run_sees_its_own_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert compare.environment("cuda:2")["CUDA_VISIBLE_DEVICES"] == "2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-7")
    assert compare.environment("cuda")["CUDA_VISIBLE_DEVICES"] == "5"
    assert compare.environment("cuda:1")["CUDA_VISIBLE_DEVICES"] == "GPU-7"
    assert compare.environment("cpu")["CUDA_VISIBLE_DEVICES"] == "5,GPU-7"
