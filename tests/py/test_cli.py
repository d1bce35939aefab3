"""The bastile command, run as its users run it."""

import http.server
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, OPTConfig

from bastile.cli import data, strict_json
from bastile.cli.report import compared
from bastile.models.table import FAMILIES
from command import command, save_model

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


def test_demo_trains_twice_and_reports(tmp_path: Path, text: Path) -> None:
    printed = command("demo", "--text", text, "--vocabulary", 300, "--lr", "3e-3", "--out", tmp_path, *TRAINING)
    result = json.loads((tmp_path / "result.json").read_text())
    stock, patched = result["runs"]
    assert (stock["name"], stock["patched"]) == ("stock", [])
    assert (patched["name"], patched["patched"]) == ("bastile", PATCHES)
    for run in (stock, patched):
        assert len(run["losses"]) == 4
        assert run["losses"][-1] < run["losses"][0]
        assert run["tokens_per_second"] == pytest.approx(3 * 2 * 32 / run["timed_seconds"])
        assert run["seconds_per_step"] == pytest.approx(run["timed_seconds"] / 3)
        assert 0 < run["memory_before_training"] < run["peak_memory"] < 4 * 2**30
    # Three steps part two float32 programs by no more than rounding: of the loss, 4 digits.
    assert result["comparison"]["largest_loss_difference"] < 1e-4 * stock["losses"][0]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    for shown in ("Stock Transformers", "Bastile", "tokens/s", "peak memory", f"{stock['losses'][-1]:.4f}", *PATCHES):
        assert shown in printed


def test_finetune_trains_checkpointed_and_saves(tmp_path: Path, text: Path, saved_model: Path) -> None:
    arguments = ["--model", saved_model, "--data", text, "--no-baseline", "--gradient-checkpointing", "--lr", "1e-3"]
    printed = command("finetune", *arguments, *TRAINING, "--save", tmp_path / "saved", "--out", tmp_path)
    assert f"Model and tokenizer: {tmp_path / 'saved'}" in printed
    result = json.loads((tmp_path / "result.json").read_text())
    assert [run["name"] for run in result["runs"]] == ["bastile"]
    assert result["comparison"] == {}
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (saved_model, tmp_path / "saved"))
    assert not torch.equal(before.lm_head.weight, after.lm_head.weight)
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").encode("import json")


def test_mistakes_are_told_with_their_remedy(
    tmp_path: Path, text: Path, saved_model: Path, capsys: pytest.CaptureFixture
) -> None:
    from bastile.cli import main

    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    other = tmp_path / "other"
    OPTConfig().save_pretrained(other)
    good = ["finetune", "--model", saved_model, "--data", text, "--out", tmp_path, "--device", "cpu"]
    for change, told in (
        (["--data", tmp_path / "none.txt"], "none.txt cannot be read (No such file or directory); give the path"),
        (["--lr", "nan"], "--lr"),
        (["--sequence", "1"], "--sequence"),
        (["--out", binary], str(binary)),
        (["--data", binary], "not text in UTF-8 (byte 0); convert it first"),
        (["--model", tmp_path], "no config and tokenizer found there"),
        (["--model", other], "is of the type opt; supported are: "),
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


class _Hub(http.server.BaseHTTPRequestHandler):
    """A hub that knows no model."""

    def do_GET(self) -> None:
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
def hub() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_a_mistyped_hub_name_fails_fast(hub: str, tmp_path: Path, text: Path) -> None:
    arguments = ["finetune", "--data", text, "--out", tmp_path, "--device", "cpu", "--model"]
    online = {"HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path), "no_proxy": "127.0.0.1"}
    for endpoint, name, told in (
        (hub, "Quen/Quen3-0.6B", "neither a folder nor a model on the Hugging Face hub; check the spelling"),
        (hub, "no/such/folder", "there is no such folder, and it is no hub name"),
        ("http://127.0.0.1:1", "Qwen/Qwen3-0.6B", "the hub cannot be asked"),
    ):
        begin = time.perf_counter()
        printed = command(*arguments, name, status=2, HF_ENDPOINT=endpoint, **online)
        assert told in printed.replace("\n", " ")
        assert time.perf_counter() - begin < 15  # most of it imports; the hub's client repeats itself for longer


def test_results_are_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    strict_json.write(path, {"losses": (1.5, float("nan"), float("-inf")), 3: {"a": None}})
    assert json.loads(path.read_text()) == {"losses": [1.5, None, None], "3": {"a": None}}


def test_missing_packages_are_named() -> None:
    program = (
        "import sys\n"
        "for name in ('transformers', 'packaging', 'rich', 'matplotlib'): sys.modules[name] = None\n"
        "from bastile.cli import main\n"
        "assert main(['demo']) == 2\n"
        "import bastile\n"
        "try: bastile.apply()\n"
        "except ImportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pip install transformers rich matplotlib" in done.stderr
    assert "patching models needs Hugging Face Transformers: pip install transformers" in done.stdout


def test_a_failed_run_shows_the_end_of_its_log(tmp_path: Path, text: Path, saved_model: Path) -> None:
    (tmp_path / "broken").mkdir()
    for file in saved_model.iterdir():
        (tmp_path / "broken" / file.name).write_bytes(b"" if file.suffix == ".safetensors" else file.read_bytes())
    arguments = ["--model", tmp_path / "broken", "--data", text, "--out", tmp_path, "--no-baseline"]
    printed = command("finetune", *arguments, *TRAINING, status=1)
    assert f"its whole output is in {tmp_path / 'bastile.log'}" in printed
    assert "Error" in printed


def test_a_nan_loss_is_the_largest_difference() -> None:
    run = {"losses": [1.0, float("nan"), 1.0], "tokens_per_second": 1.0, "peak_memory": 1}
    found = compared([{**run, "losses": [1.0, 1.0, 1.5]}, run])
    assert found["largest_loss_difference"] == float("inf")
    assert found["at_step"] == 2


def test_the_standard_library_is_enough_text() -> None:
    text = data.standard_library_text()
    assert len(text) >= 4_000_000
    assert text == data.standard_library_text()
