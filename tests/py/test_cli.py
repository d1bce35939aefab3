"""The bastile command: a comparison from end to end, what is refused and how, what is left behind."""

import argparse
import http.server
import json
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from transformers import ResNetConfig

import bastile
from bastile.cli import compare, data, files, main
from bastile.cli.errors import UsageError
from bastile.cli.report import compared
from bastile.models.table import OPERATORS, USUAL
from command import save_model
from families import FAMILIES

TRAINING = ["--steps", "4", "--batch", "2", "--sequence", "32", "--device", "cpu"]
PATCHES = [f"{operator}_qwen3" for operator in FAMILIES["qwen3"].operators]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(Path(json.__file__).read_text() + Path(subprocess.__file__).read_text(), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), text.read_text())


def run(*arguments: object, status: int = 0) -> None:
    assert main([str(argument) for argument in arguments]) == status


def test_demo_trains_twice_in_turns_and_reports(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With processes as users have them."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "140")
    steps = compare._Shown.steps
    order: list[tuple[str, int]] = []

    def spied(self: Any, name: str, event: dict[str, Any]) -> None:
        order.append((name, len(event["losses"])))
        steps(self, name, event)

    monkeypatch.setattr(compare._Shown, "steps", spied)
    given = ["demo", "--text", text, "--vocabulary", 300, "--lr", "3e-3", "--out", tmp_path, *TRAINING]
    run(*given)
    printed = capsys.readouterr().out
    assert order == [("stock", 1), ("bastile", 1), *3 * [("stock", 1)], *3 * [("bastile", 1)]]
    result = json.loads((tmp_path / "result.json").read_text())
    stock, patched = result["runs"]
    assert (stock["name"], stock["patched"]) == ("stock", [])
    assert (patched["name"], patched["patched"]) == ("bastile", PATCHES)
    for measured in (stock, patched):
        assert measured["status"] == "ok"
        assert len(measured["losses"]) == 4
        assert measured["losses"][-1] < measured["losses"][0]
        assert measured["tokens_per_second"] == pytest.approx(3 * 2 * 32 / measured["timed_seconds"])
        assert measured["seconds_per_step"] == pytest.approx(measured["timed_seconds"] / 3)
        assert [(turn["steps"], turn["tokens"]) for turn in measured["turns"]] == [(3, 3 * 2 * 32)]
        assert 0 < measured["memory_before_training"] < measured["peak_memory"] < 4 * 2**30
    # Three steps part two float32 programs by no more than rounding: of the loss, 4 digits.
    assert result["comparison"]["largest_loss_difference"] < 1e-4 * stock["losses"][0]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    for shown in ("Stock Transformers", "Bastile", "tokens/s", "peak memory", f"{stock['losses'][-1]:.4f}", *PATCHES):
        assert shown in printed
    # How it was measured, and how to have it again.
    assert result["measured"]["speed"].startswith("Speed: the runs take turns of 5 steps; medians over the turns.")
    assert result["command"] == shlex.join(["bastile", *map(str, given)])
    assert f"Command: {result['command']}" in printed


def test_mistakes_are_told_with_their_remedy(
    tmp_path: Path, text: Path, saved_model: Path, capsys: pytest.CaptureFixture
) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    other = tmp_path / "other"
    ResNetConfig().save_pretrained(other)
    good = ["finetune", "--model", saved_model, "--data", text, "--out", tmp_path, "--device", "cpu"]
    for change, told in (
        (["--data", tmp_path / "none.txt"], "none.txt cannot be read (No such file or directory); give the path"),
        (["--lr", "nan"], "--lr"),
        (["--sequence", "1"], "--sequence"),
        (["--out", binary], str(binary)),
        (["--data", binary], "not text in UTF-8 (byte 0); convert it first"),
        (["--model", tmp_path], "no config and tokenizer found there"),
        (["--model", other], "is of the type resnet, in which bastile knows no code"),
        (["--sequence", "10000000"], "give a longer text, or a smaller --batch or --sequence"),
        (["--steps", "1"], "--steps must be at least 2"),
        (["--device", "toaster"], "give cpu, cuda or cuda:N"),
        (["--device", "meta"], "give cpu, cuda or cuda:N"),
    ):
        assert main([str(argument) for argument in (*good, *change)]) == 2
        assert told in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main([str(argument) for argument in (*good, "--device", "cuda")]) == 2
        assert "sees no CUDA device; leave --device out" in capsys.readouterr().err
    assert main(["demo", "--text", str(text), "--vocabulary", "10", "--out", str(tmp_path), "--device", "cpu"]) == 2
    assert "--vocabulary must be at least 256" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["binary", "other"], "what is refused writes nothing"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["demo", "--text", "none.txt"], "none.txt cannot be read"),
        (["demo", "--text", "short.txt", "--vocabulary", "10"], "--vocabulary must be at least 256"),
        (["demo", "--text", "short.txt", "--vocabulary", "300"], "give a longer text"),
        (["finetune", "--model", "none", "--data", "short.txt"], "no config and tokenizer found there"),
        (["finetune", "--model", "none", "--data", "short.txt", "--resume", "--save", "s"], "found there"),
        (["profile", "--shape", "tiny", "--layers", "3"], "--layers is 3"),
        (["profile", "--model", "none"], "no config and tokenizer found there"),
        (["bench", "--dtype", "fp8"], "--dtype: there is no 'fp8'"),
        (["bench", "sofmax"], "there is no 'sofmax'"),
        (["sweep", "--lengths", "1"], "--lengths 1"),
        (["sweep", "--loss-curve", "2", "--lengths", "100000000"], "the text has"),
        (["sweep", "--show", "none.json"], "none.json cannot be read"),
    ],
)
def test_a_refused_command_leaves_nothing_behind(
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    told: str,
) -> None:
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "none").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data, "standard_library_text", lambda: "a few words of text\n")
    run(*arguments, "--device", "cpu", "--out", "out", status=2)
    assert told in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["none", "short.txt"]


@pytest.mark.parametrize("command", [["profile", "--shape", "tiny"], ["finetune", "--model", "m", "--data", "d"]])
def test_operators_that_contradict_each_other_are_told_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture, command: list[str]
) -> None:
    """Before a model is looked for or built."""
    run(*command, "--qk-norm-rope", "--no-rope", "--out", tmp_path / "out", status=2)
    printed = capsys.readouterr()
    assert "--qk-norm-rope fuses rope: it does not go with --no-rope" in printed.err
    assert not printed.out


def test_folders_that_cannot_be_written_to_are_told(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    for out, reason in (("file", "File exists"), ("file/below", "Not a directory")):
        run("bench", "--device", "cpu", "--out", tmp_path / out, status=2)
        assert f"no folder can be made there ({reason}); give another" in capsys.readouterr().err
    if os.geteuid():  # nothing is closed to root
        (tmp_path / "closed").mkdir(0o500)
        run("bench", "--device", "cpu", "--out", tmp_path / "closed" / "out", status=2)
        assert "may not be written to; give another folder" in capsys.readouterr().err


# ---- one set of options ----------------------------------------------------------------------------------------------


def parsed(*arguments: str) -> dict[str, Any]:
    from bastile.cli.arguments import parse

    options = vars(parse(arguments))
    del options["given"]
    return options


FINETUNE = ["finetune", "--model", "m", "--data", "d"]


@pytest.mark.parametrize(
    ("now", "before"),
    [
        ([*FINETUNE, "--steps", "9"], [*FINETUNE, "--max-steps", "9"]),
        ([*FINETUNE, "--lr-warmup", "9"], [*FINETUNE, "--warmup", "9"]),
        ([*FINETUNE, "--lr-warmup", "9"], [*FINETUNE, "--warm-up", "9"]),
        ([*FINETUNE, "--checkpointing"], [*FINETUNE, "--gradient-checkpointing"]),
        ([*FINETUNE, "--dtype", "bfloat16"], [*FINETUNE, "--dtype", "bf16"]),
        ([*FINETUNE, "--cross-entropy"], [*FINETUNE, "--fused-linear-cross-entropy"]),
        (["demo", "--dtype", "float32"], ["demo", "--dtype", "fp32"]),
        (["profile", "--model", "m"], ["profile", "m"]),
        (["profile", "--shape", "tiny", "--dtype", "bfloat16"], ["profile", "--shape", "tiny", "--dtype", "bf16"]),
        (["warmup", "--shape", "tiny", "--dtype", "float16"], ["warmup", "--shape", "tiny", "--dtype", "fp16"]),
        (["bench", "--cases", "small"], ["bench", "--shapes", "small"]),
        (["bench", "--cases", "small"], ["bench", "--shape", "small"]),
        (["sweep", "--shape", "tiny"], ["sweep", "--model", "tiny"]),
        (["sweep", "--steps", "9", "--untimed", "2"], ["sweep", "--repeats", "9", "--warm-up", "2"]),
        (["sweep", "--whole-step", "--untimed", "2"], ["sweep", "--step", "--warmup", "2"]),
    ],
)
def test_earlier_spellings_go_on_working_unseen(
    now: list[str], before: list[str], capsys: pytest.CaptureFixture
) -> None:
    assert parsed(*now) == parsed(*before)
    run(now[0], "--help")
    words = capsys.readouterr().out.replace(",", " ").split()
    for word in now:
        assert not word.startswith("--") or word in words
    for word in before:
        assert not word.startswith("--") or word in now or word not in words


def test_what_an_option_is_called_it_is_called_everywhere() -> None:
    """Two options of one name take the same kind of value, whatever the command."""
    from bastile.cli import arguments

    kinds: dict[str, set[Any]] = {}
    for command in ("demo", "finetune", "profile", "bench", "sweep", "warmup"):
        for action in arguments.parser()._subparsers._group_actions[0].choices[command]._actions:
            for name in action.option_strings if action.help != argparse.SUPPRESS else ():
                kinds.setdefault(name, set()).add((action.type, action.nargs))
    kinds.pop("--dtype")  # bench takes several
    assert {name for name, found in kinds.items() if len(found) > 1} == set()


def test_each_option_stands_in_the_table_and_is_taken_by_a_command() -> None:
    from bastile.cli import arguments
    from bastile.cli.options import OPTIONS

    taken = set()
    for name, command in arguments.parser()._subparsers._group_actions[0].choices.items():
        for action in command._actions:
            if action.option_strings and action.help != argparse.SUPPRESS and not action.dest.startswith("use_"):
                taken.add(action.option_strings[-1])
        # What `run` prints is another command's.
        assert ("--json" in command._option_string_actions) is (name != "run")
    assert taken - {"--help"} == set(OPTIONS)


def test_operators_can_be_named_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from bastile.cli import options
    from bastile.cli.arguments import parse
    from bastile.cli.options import operators

    def chosen(*flags: str) -> set[str]:
        return {name for name, wanted in operators(parse([*FINETUNE, *flags])).items() if wanted}

    assert chosen() == set(USUAL)
    assert chosen("--rms-norm", "--cross-entropy") == {"rms_norm", "fused_linear_cross_entropy"}
    assert chosen("--no-rope", "--no-cross-entropy") == set(USUAL) - {"rope", "fused_linear_cross_entropy"}
    assert chosen("--rope", "--no-rms-norm") == {"rope"}
    assert chosen("--rope", "--no-rope") == set(USUAL) - {"rope"}, "the last one counts"
    fused = SimpleNamespace(**vars(OPERATORS["qk_norm_rope"]) | {"needs": ("rms_norm", "rope")})
    monkeypatch.setattr(options, "OPERATORS", {**OPERATORS, "qk_norm_rope": fused})
    assert chosen("--qk-norm-rope") == {"qk_norm_rope", "rms_norm", "rope"}
    with pytest.raises(UsageError, match="--qk-norm-rope fuses rope: it does not go with --no-rope"):
        chosen("--qk-norm-rope", "--no-rope")


def test_steps_and_epochs_exclude_each_other(capsys: pytest.CaptureFixture) -> None:
    run(*FINETUNE, "--steps", "100", "--epochs", "2", status=2)
    assert "--epochs: not allowed with argument --steps" in capsys.readouterr().err
    run(*FINETUNE, "--epochs", "2", "--max-steps", "100", status=2)
    assert "--max-steps: not allowed with argument --epochs" in capsys.readouterr().err


def test_help_says_what_is_there(capsys: pytest.CaptureFixture) -> None:
    run("--version")
    assert capsys.readouterr().out == f"bastile {bastile.__version__}\n"
    run("demo", "--help")
    printed = " ".join(capsys.readouterr().out.split())
    assert "checkpoint" not in printed
    assert "in turns" in printed
    run("finetune", "--help")
    assert "the checkpoints" in " ".join(capsys.readouterr().out.split())


# ---- the hub ---------------------------------------------------------------------------------------------------------


class _Hub(http.server.BaseHTTPRequestHandler):
    """A hub that knows no model, and hangs up at what is asked about one of its names."""

    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if "hangs-up" in self.path:
            self.close_connection = True
            return
        body = b'{"error": "Repository not found"}'
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """What it was asked."""
    _Hub.asked = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield _Hub.asked
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("name", "told", "times"),
    [
        ("Quen/Quen3-0.6B", "neither a folder nor a model on the Hugging Face hub; check the spelling", 1),
        ("no/such/folder", "there is no such folder, and it is no hub name", 0),
        ("Qwen/hangs-up", "the hub cannot be asked", 1),
    ],
)
def test_a_mistyped_hub_name_fails_fast(
    hub: list[str], tmp_path: Path, text: Path, capsys: pytest.CaptureFixture, name: str, told: str, times: int
) -> None:
    """It asks once: the hub's client, which loads models, would repeat itself for half a minute."""
    run("finetune", "--data", text, "--out", tmp_path, "--device", "cpu", "--model", name, status=2)
    assert told in capsys.readouterr().err.replace("\n", " ")
    assert sum(path.startswith("/api/models/") for path in hub) == times


# ---- what is made of it ----------------------------------------------------------------------------------------------


def test_results_are_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    files.write_json(path, {"losses": (1.5, float("nan"), float("-inf")), 3: {"a": None}})
    assert json.loads(path.read_text()) == {"losses": [1.5, None, None], "3": {"a": None}}


def test_missing_packages_are_named() -> None:
    program = (
        "import runpy, sys\n"
        "for name in ('transformers', 'packaging', 'rich', 'matplotlib'): sys.modules[name] = None\n"
        "sys.argv = ['bastile', 'demo']\n"
        "try: runpy.run_module('bastile', run_name='__main__')\n"  # as python -m bastile does
        "except SystemExit as ending: assert ending.code == 2\n"
        "import bastile\n"
        "try: bastile.apply()\n"
        "except ImportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pip install transformers rich matplotlib" in done.stderr
    assert "patching models needs Hugging Face Transformers: pip install transformers" in done.stdout


def test_a_nan_loss_is_the_largest_difference() -> None:
    run = {"losses": [1.0, float("nan"), 1.0], "tokens_per_second": 1.0, "peak_memory": 1}
    found = compared([{**run, "losses": [1.0, 1.0, 1.5]}, run])
    assert found["largest_loss_difference"] == float("inf")
    assert found["at_step"] == 2


def test_the_standard_library_is_enough_text() -> None:
    text = data.standard_library_text()
    assert len(text) >= 4_000_000
    assert text == data.standard_library_text()
