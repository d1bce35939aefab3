"""The sweep of whole models: real processes on a tiny model, what stops them, and what is made of their figures."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import sweep_with_worker
from bastile.cli import data, main, processes
from bastile.cli.errors import UsageError
from bastile.cli.processes import is_out_of_memory, run_job
from bastile.peers.models import IMPLEMENTATIONS
from bastile.shapes import MODELS
from bastile.sweep import measure, report, run
from bastile.sweep.model import build, fill, random_tokens
from bastile.sweep.results import Results, largest_loss_difference, loss_difference
from command import Copied
from copies import begin

CPU = torch.device("cpu")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
TINY = ["sweep", "--model", "tiny", "--device", "cpu", "--repeats", "2", "--warm-up", "1"]
SETTINGS = {
    "kind": "sweep",
    "model": "tiny",
    "dtype": "float32",
    "batch": 1,
    "gpus": 1,
    "optimizer": "states",
    "profile_floor": False,
    "curve_steps": None,
}


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of their own, which begin at once."""
    monkeypatch.setattr(processes, "Process", Copied)


def content(folder: Path, name: str = "tiny") -> dict[str, Any]:
    return json.loads((folder / f"{name}.json").read_text())


def records(folder: Path, name: str = "tiny") -> dict[tuple[str, int], dict[str, Any]]:
    return {(r["implementation"], r["length"]): r for r in content(folder, name)["records"]}


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


# ---- the command, with real processes --------------------------------------------------------------------------------


@pytest.mark.usefixtures("workers")
def test_a_sweep_is_measured_shown_and_not_repeated(
    tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*TINY, "--lengths", "64,32", "--step", "--profile-floor", "--out", str(tmp_path)]
    assert main(arguments) == 0
    shown = capfd.readouterr().out
    found = records(tmp_path, "tiny-step")
    # Length by length, in the order of the table, so that drift meets all alike.
    assert list(found) == [("hf", 32), ("bastile", 32), ("hf", 64), ("bastile", 64)]
    for (name, length), record in found.items():
        assert record["status"] == "ok"
        assert len(record["samples"]) == len(record["step_samples"]) == 2
        assert 0 < record["seconds"] < record["step_seconds"]
        assert record["tokens_per_second"] == pytest.approx(length / record["step_seconds"])
        assert record["peak_bytes"] is None or record["peak_bytes"] >= record["before_bytes"] > 0
        assert len(record["losses"]) >= 3
        assert ("floor" in record) == (name == "bastile")
    for length in (32, 64):
        ours, stock = found["bastile", length], found["hf", length]
        # One step of random weights: two float32 programs for one loss part by no more than rounding.
        assert ours["losses"][0] == pytest.approx(stock["losses"][0], rel=1e-6)
        assert 0 < ours["floor"]["products"] <= ours["floor"]["seconds"] < ours["floor"]["wall"]
        assert ours["floor"]["attention"] > 0
    assert content(tmp_path, "tiny-step")["command"] == shlex.join(["bastile", *arguments])
    assert "rms_norm_qwen3" in found["bastile", 32]["patched"]
    assert found["hf", 32]["patched"] == []
    assert found["hf", 32]["losses"][0] != found["hf", 64]["losses"][0]
    for name in ("throughput", "latency", "memory"):
        assert is_png(tmp_path / f"tiny-step-{name}.png")
    for word in ("tokens/s", "x hf", "x floor", "Largest relative difference of a loss from hf's", "took"):
        assert word in shown

    before = (tmp_path / "tiny-step.json").read_text()
    monkeypatch.setattr(processes, "Process", None)  # a finished sweep starts no process
    assert main(arguments) == 0
    assert (tmp_path / "tiny-step.json").read_text() == before
    assert "4 of 4 were measured before" in capfd.readouterr().out

    assert main([*arguments, "--repeats", "3"]) == 2
    told = capfd.readouterr().err
    assert "tiny-step.json was made with other settings (repeats: 2 then, 3 now): --fresh starts it over" in told

    for plot in tmp_path.glob("*.png"):
        plot.unlink()
    assert main(["sweep", "--show", str(tmp_path / "tiny-step.json"), "--out", str(tmp_path), "--json"]) == 0
    printed = json.loads(capfd.readouterr().out)
    assert printed["largest_relative_loss_difference"] < 1e-6
    assert printed["records"] == content(tmp_path, "tiny-step")["records"]
    assert is_png(tmp_path / "tiny-step-latency.png")


@pytest.mark.usefixtures("workers")
def test_out_of_memory_is_a_result(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    """A real one: 256 MiB do not hold the activations of 200000 tokens, of which each layer's take 50 MiB a tensor.
    Longer ones are not tried."""
    arguments = [*TINY, "--lengths", "32,200000,300000", "--share-process", "--memory-limit", "0.25"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    found = records(tmp_path)
    for name in ("hf", "bastile"):
        assert found[name, 32]["status"] == "ok"
        assert found[name, 200000]["status"] == "out of memory"
        assert "reason" not in found[name, 200000]
        assert found[name, 300000]["status"] == "out of memory"
        assert found[name, 300000]["reason"] == "not tried: 200000 tokens were too many"
    shown = capfd.readouterr().out
    assert "OOM" in shown
    assert "out of memory: not tried: 200000 tokens were too many" not in shown.split("tokens/s")[-1]
    # One process for all lengths of an implementation.
    jobs = sorted(path.name for path in (tmp_path / "jobs" / "tiny").glob("*.log"))
    assert jobs == ["bastile-32-to-300000.log", "hf-32-to-300000.log"]


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize(("more", "name"), [([], "tiny-lora4-step"), (["--load-in-4bit"], "tiny-qlora4-step")])
def test_adapters(tmp_path: Path, capfd: pytest.CaptureFixture, more: list[str], name: str) -> None:
    """Of both implementations the same model, whose adapters alone are trained: at 16 bits, under autocast."""
    if more:
        pytest.importorskip("bitsandbytes")
    arguments = ["--lengths", "32", "--lora", "4", "--dtype", "bfloat16", "--step", "--out", str(tmp_path)]
    assert main([*TINY, *arguments, *more]) == 0
    assert ("LoRA of rank 4" + ", base in NF4" * len(more)) in " ".join(capfd.readouterr().out.split())
    found = records(tmp_path, name)
    ours, stock = found["bastile", 32], found["hf", 32]
    assert ours["losses"] == pytest.approx(stock["losses"], rel=2**-7)
    assert len(set(ours["losses"])) > 1  # it learns
    assert main([*TINY, "--load-in-4bit", "--out", str(tmp_path)]) == 2


@pytest.mark.usefixtures("workers")
def test_what_is_not_there_leaves_the_others_alone(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    if "liger" in sys.modules or __import__("importlib.util").util.find_spec("liger_kernel"):
        pytest.skip("Liger-Kernel is installed here")
    assert main([*TINY, "--lengths", "16,32", "--against", "liger", "--out", str(tmp_path)]) == 0
    found = records(tmp_path)
    assert found["bastile", 32]["status"] == "ok"
    for length in (16, 32):
        assert found["liger", length]["status"] == "cannot run"
        assert found["liger", length]["reason"].startswith("Liger-Kernel cannot be imported (No module named")
    assert not (tmp_path / "jobs" / "tiny" / "liger-32.log").exists(), "asked once is enough"
    assert "liger (16, 32 tokens) cannot run: Liger-Kernel cannot be imported" in capfd.readouterr().out


def test_a_killed_sweep_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while its second worker waits for a file that is there when it goes on."""
    worker, go = tmp_path / "worker.py", tmp_path / "go"
    worker.write_text(
        "import json, os, sys, time\n"
        "plan = json.load(open(sys.argv[1]))\n"
        "(length,) = plan['lengths']\n"
        f"if plan['implementation'] == 'bastile' and not os.path.exists({str(go)!r}):\n"
        "    sys.exit(sys.stdin.read())\n"
        "print(json.dumps({'machine': {'name': 'H'}}))\n"
        "print(json.dumps({'result': {'length': length, 'status': 'ok', 'seconds': 1.0, 'tokens_per_second': 1.0,"
        " 'peak_bytes': None, 'losses': [1.0]}}), flush=True)\n" + DONE
    )
    arguments = [*TINY, "--lengths", "16,32", "--out", str(tmp_path)]
    with open(os.devnull, "r+") as nothing:
        first = begin("sweep_with_worker", [str(worker), *arguments], os.environ, 3 * [nothing])
    while not (tmp_path / "jobs" / "tiny" / "bastile-16.log").exists():
        assert is_alive(first.pid), "it ended before its second worker began"
        time.sleep(0.02)
    os.kill(first.pid, signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    done = content(tmp_path)["records"]
    assert [(r["implementation"], r["length"]) for r in done] == [("hf", 16)]
    go.touch()
    monkeypatch.setattr(run.carry_out, "__kwdefaults__", dict(run.carry_out.__kwdefaults__))
    sweep_with_worker.use(str(worker))
    assert main(arguments) == 0
    after = content(tmp_path)["records"]
    assert after[: len(done)] == done
    assert [(r["implementation"], r["length"], r["status"]) for r in after] == [
        (name, length, "ok") for length in (16, 32) for name in ("hf", "bastile")
    ]


def test_a_worker_ends_with_the_sweep_that_started_it(tmp_path: Path) -> None:
    """Else it would go on to hold the device's memory. This one has work for an hour, and could go on writing."""
    plan = {**SETTINGS, "device": "cpu", "seed": 0, "warm_up": 1, "repeats": 1_000_000, "memory_limit": None}
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({**plan, "implementation": "hf", "lengths": [64], "describe": True}))
    worker = subprocess.Popen([*run.WORKER, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert "machine" in json.loads(worker.stdout.readline())
        worker.stdin.close()
        assert worker.wait(timeout=300) == 1
    finally:
        worker.kill()
        worker.wait()
        worker.stdout.close()


def is_alive(process: int) -> bool:
    """Not so where it has ended and nobody has asked for its status."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.usefixtures("workers")
def test_fsdp_on_two_processes(tmp_path: Path) -> None:
    """A rank's sequences are its own; with both of them in one batch, one process finds the same loss."""
    assert main([*TINY, "--fsdp", "--gpus", "2", "--lengths", "32", "--against", "hf", "--out", str(tmp_path)]) == 0
    found = records(tmp_path, "tiny-fsdp2")
    for record in found.values():
        assert record["status"] == "ok", record
        assert record["tokens_per_second"] == pytest.approx(2 * 32 / record["seconds"])
        assert len(record["peak_bytes_of_ranks"]) == 2
        assert record["peak_bytes"] == max(record["peak_bytes_of_ranks"])
    model = build("tiny", torch.float32, CPU, 0)
    ids = torch.cat([random_tokens(1024, 1, 32, CPU, rank) for rank in (0, 1)])
    whole = model(input_ids=ids, labels=ids).loss.item()
    assert found["hf", 32]["losses"][0] == pytest.approx(whole, rel=1e-6)
    assert found["bastile", 32]["losses"][0] == pytest.approx(whole, rel=1e-6)
    assert is_png(tmp_path / "tiny-fsdp2-memory.png")


@pytest.mark.usefixtures("workers")
def test_loss_curves(tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_LIBRARY_BYTES", 300_000)  # a vocabulary of all of it takes seconds
    assert main([*TINY, "--loss-curve", "30", "--lengths", "64", "--out", str(tmp_path)]) == 0
    found = records(tmp_path, "tiny-curve")
    stock, ours = found["hf", 64], found["bastile", 64]
    for record in (stock, ours):
        assert len(record["losses"]) == 30
        assert record["losses"][-1] < record["losses"][0] - 0.1, "it learns"
        assert record["tokens_per_second"] == pytest.approx(4 * 64 / record["seconds"])
    # Thirty steps of float32: rounding grows, but not to a thousandth.
    assert loss_difference(ours, stock) < 1e-3
    assert is_png(tmp_path / "tiny-curve.png")
    assert "Largest relative difference of a loss from hf's" in capfd.readouterr().out


@needs_cuda
def test_a_sweep_on_cuda(tmp_path: Path) -> None:
    arguments = ["sweep", "--model", "tiny", "--device", "cuda", "--repeats", "2", "--warm-up", "1", "--against", "hf"]
    assert main([*arguments, "--lengths", "64", "--step", "--profile-floor", "--out", str(tmp_path)]) == 0
    found = records(tmp_path, "tiny-step")
    weights = 2 * sum(p.numel() for p in build("tiny", torch.bfloat16, CPU, 0).parameters())
    for record in found.values():
        assert 0 < record["seconds"] < record["step_seconds"]
        assert 3 * weights <= record["before_bytes"] < record["peak_bytes"]  # weights and both states, then gradients
    ours = found["bastile", 64]
    assert 0 < ours["floor"]["products"] < ours["seconds"]
    assert 0 < ours["floor"]["attention"] < ours["seconds"]
    # bfloat16's rounding, of a loss of about seven.
    assert ours["losses"][0] == pytest.approx(found["hf", 64]["losses"][0], rel=2**-8)

    # 16384 logits of 1024 in float32 are 64 MiB.
    assert main([*arguments, "--lengths", "16384", "--memory-limit", "0.06", "--out", str(tmp_path)]) in (0, 1)
    assert records(tmp_path)["hf", 16384]["status"] == "out of memory"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_fsdp_on_two_gpus(tmp_path: Path) -> None:
    arguments = ["sweep", "--model", "tiny", "--fsdp", "--gpus", "2", "--lengths", "64", "--against", "hf"]
    assert main([*arguments, "--repeats", "2", "--warm-up", "1", "--out", str(tmp_path)]) == 0
    found = records(tmp_path, "tiny-fsdp2")
    assert [record["status"] for record in found.values()] == ["ok", "ok"]
    assert found["bastile", 64]["losses"][0] == pytest.approx(found["hf", 64]["losses"][0], rel=2**-8)


# ---- jobs ------------------------------------------------------------------------------------------------------------


def job(tmp_path: Path, *programs: str, timeout: float = 60) -> tuple[Any, list[dict[str, Any]]]:
    """Runs the programs as the ranks of one job: how it ended, and the events."""
    events: list[dict[str, Any]] = []

    def handle(event: dict[str, Any]) -> bool:
        events.append(event)
        return event.get("status") != "stop"

    logs = [tmp_path / f"{rank}.log" for rank in range(len(programs))]
    command = [sys.executable, "-c", "import os; exec(os.environ['PROGRAM'])"]
    return run_job(command, [{"PROGRAM": program} for program in programs], logs, timeout, handle), events


DONE = "print('{\"done\": true}', flush=True)\n"
WAIT = "import time\ntime.sleep(600)\n"


def test_a_job_that_ends_well_may_linger(tmp_path: Path) -> None:
    """Were it waited for, its time would be over."""
    ending, events = job(tmp_path, "print('{\"a\": 1}')\n" + DONE + WAIT, DONE)
    assert (ending, events) == (None, [{"a": 1}])


@pytest.mark.parametrize(
    ("program", "status", "reason"),
    [
        ("import sys\nprint('before\\nwhy it failed\\n', file=sys.stderr)\nsys.exit(3)", "failed", "why it failed"),
        ("raise ValueError('too odd')", "failed", "ValueError: too odd"),
        ("import os\nos.abort()", "failed", "killed by SIGABRT"),
        ("import os\nos._exit(7)", "failed", "ended with status 7 and said nothing"),
        ("pass", "failed", "ended with status 0 and said nothing"),
    ],
)
def test_a_crash_is_told_and_ends_the_others(tmp_path: Path, program: str, status: str, reason: str) -> None:
    other = tmp_path / "other"
    writes = f"import os\nopen({str(other) + '.part'!r}, 'w').write(str(os.getpid()))\n"
    waits = f"import os, time\nwhile not os.path.exists({str(other)!r}): time.sleep(0.01)\n"
    ending, _ = job(tmp_path, f"{writes}os.rename({str(other) + '.part'!r}, {str(other)!r})\n{WAIT}", waits + program)
    assert (ending.status, ending.reason) == (status, reason)
    assert not is_alive(int(other.read_text()))


def test_a_job_is_ended_when_its_time_is_over_or_when_told(tmp_path: Path) -> None:
    ending, _ = job(tmp_path, WAIT, timeout=1)
    assert (ending.status, ending.reason) == ("timed out", "not done after 1 s")
    children = "import subprocess, sys\np = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    stop = 'print(\'{"status": "stop", "child": %d}\' % p.pid, flush=True)\n' + WAIT
    ending, (event,) = job(tmp_path, children + stop)
    assert ending is None
    while is_alive(event["child"]):  # it has been killed
        time.sleep(0.02)


def test_a_crash_in_a_shared_process_leaves_the_other_lengths(tmp_path: Path) -> None:
    """The worker fails at 20 tokens whenever it comes there first; the others are run in a new process."""
    program = tmp_path / "worker.py"
    program.write_text(
        "import json, sys\n"
        "plan = json.load(open(sys.argv[1]))\n"
        "for length in plan['lengths']:\n"
        "    assert length != 20, 'twenty'\n"
        "    print(json.dumps({'result': {'length': length, 'status': 'ok', 'seconds': 1.0, 'tokens_per_second': 1.0,"
        " 'peak_bytes': None, 'losses': [1.0]}}), flush=True)\n" + DONE
    )
    results = Results(tmp_path / "tiny.json", {"date": "", "settings": SETTINGS, "machine": None, "records": []})
    told: list[run.Told] = []
    options: dict[str, Any] = {"timeout": 60, "tell": told.append, "worker": [sys.executable, str(program)]}
    assert run.carry_out(results, [("hf", [10, 20, 30])], tmp_path, budget=None, **options)
    assert [(r["length"], r["status"]) for r in results.records] == [(10, "ok"), (20, "failed"), (30, "ok")]
    assert results.find("hf", 20)["reason"] == "AssertionError: twenty"
    assert [one.length for one in told if one.record] == [10, 20, 30]
    # What failed is tried again, what is done is not; without time nothing is.
    assert not run.carry_out(results, [("hf", [10, 20, 30])], tmp_path, budget=0.0, **options)
    assert run.carry_out(results, [("hf", [10, 30])], tmp_path, budget=0.0, **options)


def test_a_sweep_on_a_cpu_sees_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch would open it now and then, though nothing is computed there."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    program = tmp_path / "worker.py"
    program.write_text(
        "import json, os\n"
        "print(json.dumps({'result': {'length': 8, 'status': 'ok', 'seen': os.environ['CUDA_VISIBLE_DEVICES'],"
        " 'seconds': 1.0, 'tokens_per_second': 1.0, 'peak_bytes': None}}), flush=True)\n" + DONE
    )
    for device, visible in (("cpu", ""), ("cuda", "1")):
        content = {"date": "", "settings": {**SETTINGS, "device": device}, "machine": None, "records": []}
        results = Results(tmp_path / f"{device}.json", content)
        options: dict[str, Any] = {"timeout": 60, "tell": lambda told: None, "worker": [sys.executable, str(program)]}
        assert run.carry_out(results, [("hf", [8])], tmp_path, budget=None, **options)
        assert results.find("hf", 8)["seen"] == visible


# ---- what is made of the figures -------------------------------------------------------------------------------------


def made_up(tmp_path: Path, **settings: Any) -> Results:
    """Two implementations at two lengths; stock Transformers does not fit at the longer one."""
    results = Results(
        tmp_path / "made.up-8b.json",
        {"date": "2026-11-21T00:00:00", "settings": {**SETTINGS, **settings}, "machine": {"name": "H"}, "records": []},
    )
    for name, length, seconds, took in (
        ("hf", 256, 0.1, 10.0),
        ("bastile", 256, 0.05, 8.0),
        ("bastile", 512, 0.09, 9.0),
    ):
        figures = {"seconds": seconds, "tokens_per_second": length / seconds, "peak_bytes": 61 << 30, "took": took}
        figures |= {"losses": [12.25, 12.0], "step_seconds": 2 * seconds, "floor": {"seconds": 0.04, "wall": 0.05}}
        results.add({"implementation": name, "length": length, "status": "ok", **figures})
    results.add({"implementation": "hf", "length": 512, "status": "out of memory", "took": 0.0})
    return results


def test_tables_fit_a_terminal(tmp_path: Path) -> None:
    results = made_up(tmp_path, optimizer="step", profile_floor=True, gpus=8, model="llama-3.1-8b")
    console = Console(width=200, file=io.StringIO())
    console.print(report.table(results))
    shown = console.file.getvalue()
    lines = shown.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80, shown
    row = next(line.split() for line in lines if line.split()[:2] == ["256", "bastile"])
    assert row == ["256", "bastile", "50.0", "100.0", "5,120", "2.00", "61.00", "12.25000", "1.25", "-"]
    assert next(line.split() for line in lines if line.split()[:2] == ["512", "hf"]) == ["512", "hf", "OOM"]


def test_host_and_device_of_profiled_steps(tmp_path: Path) -> None:
    results = made_up(tmp_path, profile_floor=True)
    assert report.host_table(results) is None, "on a CPU"
    device = {"seconds": 0.0104, "launches": 1150.0, "idle": 0.163}
    results.find("bastile", 256).update(host_seconds=0.0105, device=device)
    row = [next(iter(column.cells)) for column in report.host_table(results).columns]
    assert row == ["256", "bastile", "10.5", "10.4", "1,150", "16"]


def test_plots_of_what_does_not_fit(tmp_path: Path) -> None:
    written = report.draw(made_up(tmp_path), tmp_path / "made.up-8b")
    assert [path.name for path in written] == [f"made.up-8b-{name}.png" for name in ("throughput", "latency", "memory")]
    assert all(is_png(path) for path in written)
    nothing = Results(tmp_path / "n.json", {"date": "x", "settings": SETTINGS, "machine": None, "records": []})
    assert all(is_png(path) for path in report.draw(nothing, tmp_path / "nothing"))
    none_ran = Results(tmp_path / "n.json", {**nothing.content, "settings": {**SETTINGS, "kind": "curve"}})
    assert is_png(report.draw(none_ran, tmp_path / "curve")[0])
    broken = made_up(tmp_path, kind="curve", curve_steps=2)
    broken.find("hf", 256)["losses"][1] = None  # it was not a number
    assert is_png(report.draw(broken, tmp_path / "broken")[0])


def test_the_time_that_is_left(tmp_path: Path) -> None:
    results = made_up(tmp_path)
    todo = run.jobs(["hf", "liger", "bastile"], [256, 512, 1024], share=False)
    # liger: never measured, so the average of 10, 8 and 9; bastile at 1024: as at 512. hf: done, then not tried.
    assert run.seconds_left(todo, results) == pytest.approx(3 * 9.0 + 9.0 + 10.0)
    results.records.clear()
    assert run.seconds_left(todo, results) is None


def test_the_order_of_jobs() -> None:
    assert run.jobs(["a", "b"], [2, 1], share=False) == [("a", [1]), ("b", [1]), ("a", [2]), ("b", [2])]
    assert run.jobs(["a", "b"], [2, 1], share=True) == [("a", [1, 2]), ("b", [1, 2])]


def test_losses_are_compared(tmp_path: Path) -> None:
    assert loss_difference({"losses": [1.0, 2.2]}, {"losses": [1.0, 2.0]}) == pytest.approx(0.1)
    assert loss_difference({"losses": [1.0, 2.2]}, {"losses": [1.0, 2.0]}, steps=1) == 0.0
    for nothing in (None, float("nan")):
        assert loss_difference({"losses": [nothing]}, {"losses": [1.0]}) == float("inf")
    results = made_up(tmp_path)
    results.find("bastile", 256)["losses"] = [12.25 * 1.001, 0.0]
    difference, record, reference = largest_loss_difference(results, IMPLEMENTATIONS, 1)
    assert difference == pytest.approx(1e-3)
    assert (record["implementation"], reference["implementation"]) == ("bastile", "hf")


def test_a_file_of_another_machine_is_not_mixed(tmp_path: Path) -> None:
    results = made_up(tmp_path)
    results.set_machine({"name": "H"})
    with pytest.raises(UsageError, match=r"made on another machine \(H; this one is J\): --fresh"):
        results.set_machine({"name": "J"})


def test_weights_are_random_and_depend_on_names_alone() -> None:
    model = build("tiny", torch.float32, CPU, 0)
    assert model.training
    for name, weight in model.named_parameters():
        assert not (weight == 0).any(), name
        assert weight.std().item() == pytest.approx(0.0 if "norm" in name else 0.02, abs=0.002), name
    assert not torch.equal(next(build("tiny", torch.float32, CPU, 1).parameters()), next(model.parameters()))

    # As where a library has put its own modules, which register their parameters in another order.
    one = nn.ModuleDict({"up": nn.Linear(4, 4), "down": nn.Linear(4, 4)})
    other = nn.ModuleDict({"down": nn.Linear(4, 4), "up": nn.Linear(4, 4)})
    for module in (one, other):
        fill(module, seed=3)
    for name, weight in one.named_parameters():
        assert torch.equal(weight, other.get_parameter(name)), name
    assert not torch.equal(one["up"].weight, one["down"].weight)


@pytest.mark.parametrize("name", MODELS)
def test_every_shape_is_a_model(name: str) -> None:
    """On the meta device: their parameters, in billions, are those that their names promise."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS[name]))
    size = sum(parameter.numel() for parameter in model.parameters())
    promised = dict(zip(MODELS, (8.19, 0.596, 4.2, 8.03, 20.9, 8.1, 0.0002), strict=True))
    assert size / 1e9 == pytest.approx(promised[name], rel=0.01 if name != "tiny" else 0.5)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_256x128_64x4_2x1_v_bz_coopA_TNN", "products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1", "products"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_nn_align8>", "products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "products"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16>", "products"),
        ("aten::mm", "products"),
        ("aten::addmm", "products"),
        ("aten::mul", "rest"),
        ("aten::mm_like", "rest"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention)", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob", "attention"),
        ("cudnn::fusion::compute_dot_do_o_specialized<true, 128>", "attention"),
        ("void cudnn::fusion::convert_dq_to_16bits<true>", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add>", "rest"),
        ("bst_rms_norm_forward", "rest"),
        ("bst_cross_entropy", "rest"),
        ("Memcpy DtoD (Device -> Device)", "rest"),
    ],
)
def test_kernels_are_sorted_by_name(name: str, kind: str) -> None:
    assert measure.kind_of(name) == kind


def test_out_of_memory_is_known_by_its_words() -> None:
    for error in (
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        MemoryError(),
    ):
        assert is_out_of_memory(error)
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_mistakes_are_told_with_their_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other.json").write_text("[]")
    for arguments, told in (
        (["--model", "gpt-2"], "--model: there is no 'gpt-2'; give one of qwen3-8b"),
        (["--against", "apex"], "--against: there is no 'apex'; give one or more of hf, compile"),
        (["--lengths", "a"], "--lengths a: give whole numbers with commas"),
        (["--lengths", "1,2"], "at least 2 tokens are needed"),
        (["--device", "toaster"], "give cpu, cuda or cuda:N"),
        (["--timeout", "0"], "--timeout is 0.0; a positive number is needed"),
        (["--memory-limit", "nan"], "--memory-limit is nan"),
        (["--budget", "-1"], "--budget is -1.0; a positive number is needed"),
        (["--gpus", "2"], "several processes are for --fsdp"),
        (["--fsdp", "--gpus", "1"], "--fsdp needs at least 2 GPUs; --gpus is 1"),
        (["--fsdp", "--against", "compile"], "compile is not measured on several GPUs"),
        (["--loss-curve", "20", "--fsdp"], "--fsdp does not go with it: --loss-curve trains whole steps"),
        (["--loss-curve", "20", "--lengths", "8,16"], "give one of --lengths, not several"),
        (["--loss-curve", "1"], "--loss-curve must be at least 2"),
        (["--loss-curve", "2", "--lengths", "100000000"], "the text has"),
        (["--show", str(tmp_path / "none.json")], "none.json cannot be read (No such file or directory)"),
        (["--show", str(tmp_path / "other.json")], "is not a file that sweep has written"),
    ):
        (tmp_path / "tokens-1024.pt").unlink(missing_ok=True)
        torch.save(torch.zeros(100), tmp_path / "tokens-1024.pt")
        assert (
            main(
                [
                    "sweep",
                    *(["--device", "cpu"] if "--device" not in arguments else []),
                    *arguments,
                    "--out",
                    str(tmp_path),
                ]
            )
            == 2
        ), arguments
        assert told in capsys.readouterr().err

    monkeypatch.setenv("WORLD_SIZE", "2")
    for variables, told in (
        ({"RANK": "0"}, "several processes are for --fsdp"),
        ({"LOCAL_WORLD_SIZE": "1"}, "all processes must run on one host"),
        ({"LOCAL_WORLD_SIZE": "2"}, "--gpus 3: torchrun has started 2 processes"),
    ):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        arguments = [] if told.startswith("several") else ["--fsdp", "--gpus", "3"]
        assert main([*TINY, *arguments, "--out", str(tmp_path)]) == 2
        assert told in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    assert main([*TINY, "--fsdp", "--out", str(tmp_path)]) == 0, "the first of torchrun's processes does the work"
    assert not (tmp_path / "tiny-fsdp2.json").exists()
