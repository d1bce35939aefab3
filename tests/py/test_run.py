"""`bastile run`: commands as users give them, in processes of their own: TRL's, torchrun, a file, whatever is on the
path."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import bastile
import trl_runs
from bastile.cli import main
from bastile.models.table import OPERATORS, USUAL
from command import command

AT_START = Path(bastile.__file__).parent / "at_start"

LAYERS = 2 * 7  # with adapters; each runs twice a step, for TRL checkpoints them

SHOWS = """
import importlib.util, sys
print("early", sorted({"bastile", "torch"} & set(sys.modules)))
assert importlib.util.find_spec("transformers") is not None
assert "bastile" not in sys.modules
import transformers
assert type(transformers.__spec__.loader).__module__ != "sitecustomize"
import bastile
print("in force", *bastile.get_patched_ops())
print("given", *sys.argv[1:])
sys.exit(7)
"""

TRAINS = """
import torch, transformers
model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{sizes}))
ids = torch.arange(5, 14)[None]
model(input_ids=ids, labels=ids).loss.backward()
"""


def test_a_file_of_python(tmp_path: Path) -> None:
    """Nothing is imported before Transformers is; what is left out stays out; status and arguments are the command's.
    A sitecustomize of the environment's own runs, too."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("print('own sitecustomize')\n")
    file = tmp_path / "shows.py"
    file.write_text(SHOWS)
    path = os.pathsep.join(filter(None, (str(tmp_path / "own"), os.environ.get("PYTHONPATH"))))
    printed = command("run", "--report", "--no-rope", file, "--no-swiglu", "x y", status=7, PYTHONPATH=path)
    lines = printed.splitlines()
    assert "own sitecustomize" in lines
    assert "early []" in lines
    (names,) = [set(line.split()[2:]) for line in lines if line.startswith("in force")]
    assert names == set(USUAL) - {"rope", "qk_norm_rope"}
    assert "given --no-swiglu x y" in lines
    assert "calls  where" not in printed  # nothing ran


def test_the_command_of_trl(tmp_path: Path) -> None:
    """A model that is named, in float32 for want of a dtype: trained by TRL's own command."""
    trl = Path(sys.executable).with_name("trl")
    if not trl.exists():
        pytest.skip("TRL was installed without its command")
    path = trl_runs.saved_as_loaded("qwen3", tmp_path)
    trl_runs.tokenizer().save_pretrained(path)
    (tmp_path / "data").mkdir()
    rows = [json.dumps({"text": trl_runs.words(number, 8)}) for number in range(8)]
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(rows))
    printed = command(
        "run", "--report", trl, "sft", "--model_name_or_path", path, "--dataset_name", tmp_path / "data",
        "--use_peft", "--lora_target_modules", "all-linear", "--bf16", "true", "--use_cpu", "--max_steps", "2",
        "--output_dir", tmp_path / "out", "--report_to", "none", "--save_strategy", "no",
        HF_HOME=str(tmp_path / "cache"),
    )  # fmt: skip
    ran = {
        line.split()[0]: int(line.split()[1]) for line in printed.splitlines() if line.endswith(("Linear", "Trainer"))
    }
    assert ran == {"lora_linear": 2 * 2 * LAYERS, "adamw": 1, "frozen_bf16": 1}
    assert printed.count("calls  where") == 1  # of the launcher nothing


def test_workers_of_a_launcher(tmp_path: Path) -> None:
    """Each trains with it, and the first reports."""
    sizes = {**trl_runs.SIZES, "vocab_size": 40}
    file = tmp_path / "trains.py"
    file.write_text(TRAINS.replace("{sizes}", repr(sizes)))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", file]
    printed = command("run", "--report", *launcher)
    (line,) = [line for line in printed.splitlines() if line.startswith("fused_linear_cross_entropy")]
    assert line.split()[1:] == ["1", "Qwen3ForCausalLM"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "a command is needed"),
        (["--"], "a command is needed"),
        (["no-such-command-anywhere", "x"], "no command 'no-such-command-anywhere'"),
        (["/dev/null"], "python FILE"),
        (["--qk-norm-rope", "--no-rms-norm", "no-such-command-anywhere"], "fuses rms_norm"),
    ],
)
def test_refused(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *arguments]) == 2
    assert told in capsys.readouterr().err


def test_bastile_itself(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its commands have processes with Bastile and without."""
    monkeypatch.setenv("BASTILE_RUN", "{}")
    for words in (["demo"], ["run", "true"], ["support", "qwen3"]):
        assert main(words) == 2
        assert "not for `bastile run`" in capsys.readouterr().err


# ---- what the processes are given ------------------------------------------------------------------------------------


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[str], dict[str, Any], str]]:
    """The words, what is asked for, and the path of Python, of a `bastile run` that executes nothing."""
    found: list[Any] = []

    def execute(file: str, words: list[str], environment: dict[str, str]) -> None:
        assert file == words[0]
        found[:] = [words, json.loads(environment["BASTILE_RUN"]), environment["PYTHONPATH"]]

    monkeypatch.setattr(os, "execvpe", execute)

    def of(*arguments: str) -> tuple[list[str], dict[str, Any], str]:
        main(["run", *arguments])
        return found[0], found[1], found[2]

    return of


def test_what_is_asked_for(executed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "here")
    words, asked, path = executed("trl", "sft", "--report", "--lr", "1")
    assert words == ["trl", "sft", "--report", "--lr", "1"]
    assert asked == {"apply": {}, "report": False}
    assert path == f"{AT_START}{os.pathsep}here"
    monkeypatch.delenv("PYTHONPATH")
    words, asked, path = executed("--report", "--offload-checkpoints", "--no-adamw", "train.py", "x")
    assert words == [sys.executable, "train.py", "x"]
    assert asked == {"apply": {"offload_checkpoints": True, "adamw": False}, "report": True}
    assert path == str(AT_START)
    assert executed("--report", "--", "trl", "--", "x")[0] == ["trl", "--", "x"]
    _, asked, _ = executed("--swiglu", "trl")
    assert asked["apply"] == {
        name: False for name, row in OPERATORS.items() if not (row.on_request or name == "swiglu")
    }
    bastile.apply(**asked["apply"])
    assert bastile.get_patched_ops() == ["swiglu"]


def test_the_folder_has_nothing_else() -> None:
    """It is the first on the path of every Python that the command begins."""
    assert [file.name for file in AT_START.iterdir() if file.name != "__pycache__"] == ["sitecustomize.py"]


@pytest.fixture
def at_start(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("BASTILE_RUN", json.dumps({"apply": {"rope": False}, "report": True}))
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:])
    spec = importlib.util.spec_from_file_location("at_start_here", AT_START / "sitecustomize.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_python_without_bastile(at_start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bastile", None)
    with pytest.raises(ImportError, match=f"{sys.executable}, which runs this program, cannot import bastile"):
        at_start._apply()


def test_applied_once(at_start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often Transformers is looked for; and what is looked for by others is found as ever."""
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(bastile, "apply", lambda **asked: given.append(asked))
    finder = sys.meta_path[0]
    assert finder.find_spec("torch") is None
    several = [finder.find_spec("transformers") for _ in range(2)]
    assert given == []
    for spec in several:
        assert spec.loader.get_filename("transformers").endswith("__init__.py")  # asked of a loader by others
        monkeypatch.setattr(spec.loader._loader, "exec_module", lambda module: None, raising=False)
        spec.loader.exec_module(SimpleNamespace(__spec__=spec))
    assert given == [{"rope": False}]
    assert finder not in sys.meta_path


@pytest.mark.parametrize(("rank", "registered"), [(None, 1), ("0", 1), ("1", 0)])
def test_the_first_process_reports(
    at_start: Any, monkeypatch: pytest.MonkeyPatch, rank: str | None, registered: int
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setattr(bastile, "apply", lambda **asked: None)
    functions: list[Any] = []
    monkeypatch.setattr(at_start.atexit, "register", lambda function, *_: functions.append(function))
    at_start._apply()
    assert len(functions) == registered
