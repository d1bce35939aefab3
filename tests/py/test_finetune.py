"""What `bastile finetune` promises beyond a comparison: resumption, accumulation, LoRA, and each kind of data."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

import bastile
from bastile.cli import chats, compare, data, main, strict_json, train
from bastile.cli.errors import UsageError
from bastile.cli.examples import IGNORED, Examples, batch
from command import command, save_model
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


def finetune(model: Path, source: Path, out: Path, *more: object, status: int = 0) -> str:
    arguments = ["--model", model, "--data", source, "--out", out, "--device", "cpu", "--batch", 2, "--lr", "1e-2"]
    return command("finetune", *arguments, *more, status=status)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable[..., str]:
    """`finetune` within this process, which spares the imports of the processes that the command starts."""

    def run(plan: dict[str, Any], out: Path) -> dict[str, Any]:
        strict_json.write(out / f"{plan['name']}.plan.json", plan)
        try:
            return {"name": plan["name"], **train.train(plan, lambda losses, tokens: None)}
        finally:
            bastile.reset()

    monkeypatch.setattr(compare, "_run", run)

    def call(model: Path, source: Path, out: Path, *more: object, status: int = 0) -> str:
        arguments = ["--model", model, "--data", source, "--out", out, "--device", "cpu", "--batch", 2, "--lr", "1e-2"]
        assert main(["finetune", *map(str, arguments), *map(str, more)]) == status
        printed = capsys.readouterr()
        return printed.out + printed.err

    return call


def losses(out: Path) -> dict[str, list[float]]:
    return {run["name"]: run["losses"] for run in json.loads((out / "result.json").read_text())["runs"]}


@pytest.mark.parametrize("more", [[], ["--lora", 4, "--accumulate", 2, "--checkpointing"]], ids=["full", "lora"])
def test_a_resumed_run_is_the_run_that_did_not_stop(model: Path, text: Path, tmp_path: Path, more: list) -> None:
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
        assert runs[1]["trainable_parameters"] < runs[1]["parameters"] / 3


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
    assert list((tmp_path / "late").iterdir()) == []
    changed = tmp_path / "changed.txt"
    changed.write_text(text.read_text().replace("JSON", "YAML"))
    printed = here(model, changed, tmp_path, *size, "--steps", 2, "--save-every", 1, "--resume", status=2)
    assert "data (was" in printed


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
