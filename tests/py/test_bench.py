"""The benchmark: its byte models, its harness on small shapes, and the command."""

from __future__ import annotations

import functools
import gc
import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bastile.bench import cases, machine, report, run, timing
from bastile.bench.cases import HOST, LIMITS, OPS, Case, Need
from bastile.bench.operators import OPERATORS
from bastile.cli import main
from bastile.peers.operators import PEERS
from command import one_thread
from conftest import older_than

CPU = torch.device("cpu")
TINY = {
    "rms_norm": (6, 32),
    "add_rms_norm": (6, 32),
    "gated_rms_norm": (6, 32),
    "gate_first_rms_norm": (6, 32),
    "swiglu": (6, 32),
    "gated_mlp": (6, 32, 48),
    "rope": (6, 4, 2, 8),
    "qk_norm_rope": (6, 4, 2, 8),
    "causal_conv1d": (6, 32),
    "gated_delta_rule": (2, 6, 1, 2, 8, 4),
    "cross_entropy": (6, 101),
    "fused_linear_cross_entropy": (6, 32, 101),
    "linear_logprobs": (6, 32, 101),
    "linear_divergence": (6, 32, 101),
    "moe_experts": (6, 32, 16, 4, 2),
    "swiglu_experts": (6, 32, 16, 4, 2),
    "adamw": (3, 40),
    "grad_norm": (3, 40),
    "dropout": (6, 32),
    "low_rank": (6, 32, 8),
}
on_one_thread = pytest.fixture(scope="module", autouse=True)(one_thread)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a figure is worth does not matter here; that it is measured does."""
    monkeypatch.setattr(timing, "_WALL_SECONDS", 1e-3)
    monkeypatch.setitem(timing._COPY_BYTES, "cpu", 1 << 20)


@pytest.fixture(scope="module", autouse=True)
def little_garbage() -> Iterator[None]:
    """Each case ends with a collection, which would go through all that every library has made so far."""
    gc.freeze()
    yield
    gc.unfreeze()


def measure(
    case: Case, contenders: tuple[str, ...] = ("bastile", "hf"), dtype: str = "fp32", **options: Any
) -> dict[str, Any]:
    (result,) = run.run_cases([(case, dtype)], contenders, CPU, copy_speed=1e9, rounds=2, **options)
    assert "note" not in result, result["note"]
    return result


def rows(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in result["rows"]}


def test_the_byte_models_give_the_limits_of_the_table() -> None:
    """Microseconds at 4.28 TB/s, as computed by hand for each row."""
    by_hand = {
        ("rms_norm", (16384, 4096), False): 62.7,
        ("rms_norm", (16384, 4096), True): 157,
        ("rms_norm", (4096, 4096), True): 39.2,
        ("rms_norm", (131072, 128), True): 39.2,
        ("add_rms_norm", (16384, 4096), False): 125.4,
        ("add_rms_norm", (16384, 4096), True): 250.9,
        ("gated_rms_norm", (262144, 128), False): 47.0,
        ("gated_rms_norm", (262144, 128), True): 125.4,
        ("gate_first_rms_norm", (8192, 8192), False): 94.1,
        ("gate_first_rms_norm", (8192, 8192), True): 250.9,
        ("swiglu", (16384, 12288), True): 752,
        ("rope", (16384, 32, 8, 128), False): 78.4,
        ("rope", (16384, 32, 8, 128), True): 157,
        ("qk_norm_rope", (16384, 32, 8, 128), False): 78.4,
        ("qk_norm_rope", (16384, 32, 8, 128), True): 196,
        ("causal_conv1d", (16384, 8192), False): 125.4,
        ("causal_conv1d", (16384, 8192), True): 313.6,
        ("gated_delta_rule", (4, 2048, 16, 32, 128, 128), False): 47.0,
        ("gated_delta_rule", (4, 2048, 16, 32, 128, 128), True): 125.4,
        ("cross_entropy", (4096, 128256), True): 491,
        ("cross_entropy", (1024, 128256), True): 122.7,
        ("cross_entropy", (4096, 151936), True): 581.6,
        ("cross_entropy", (4096, 32000), True): 122.5,
        ("adamw", (8, 4096 * 12288), False): 1317,
        ("grad_norm", (8, 4096 * 12288), False): 188.2,
        ("dropout", (8192, 4096), False): 31.4,
        ("dropout", (8192, 4096), True): 62.7,
        ("low_rank", (8192, 12288, 16), False): 47.0,
        ("low_rank", (8192, 4096, 16), False): 15.7,
        ("low_rank", (8192, 1024, 16), False): 3.92,
    }
    seen = set()
    for case in LIMITS:
        cost = OPERATORS[case.op].cost(case, 2)
        if case.op.endswith("_experts"):
            tokens, width, inner, _, choices = case.shape
            assert (cost.moved, cost.flops) == (0, 3 * 2 * tokens * choices * (width * 2 * inner + inner * width))
            continue
        if case.op == "gated_mlp":
            tokens, width, inner = case.shape
            assert (cost.moved, cost.flops) == (0, 3 * 3 * 2 * tokens * width * inner)
            continue
        if case.op in ("fused_linear_cross_entropy", "linear_logprobs", "linear_divergence"):
            rows_, hidden, vocabulary = case.shape
            products = 4 if case.op == "linear_divergence" else 3 if case.backward else 1
            assert (cost.moved, cost.flops) == (0, products * 2 * rows_ * hidden * vocabulary)
            continue
        key = (case.op, case.shape, case.backward)
        assert cost.moved / 4.28e12 * 1e6 == pytest.approx(by_hand[key], rel=0.005), key
        seen.add(key)
    assert seen == by_hand.keys()


def lacks(peer: str, op: str) -> bool:
    """Whether this release of PyTorch has no function of its own for it."""
    return peer in ("torch", "compile-torch") and op == "linear_logprobs" and not hasattr(F, "linear_cross_entropy")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("op", OPS)
def test_every_operator_is_measured_and_agrees_with_what_it_replaces(op: str, dtype: str) -> None:
    contenders = ("bastile", "unfused", "torch", "hf", "hf-eager", "hf-batched")
    result = measure(Case(op, TINY[op], backward=bool(OPERATORS[op].leaves)), contenders, dtype)
    assert [row["name"] for row in result["rows"]] == [name for name in contenders if op in PEERS[name]]
    for row in result["rows"]:
        if lacks(row["name"], op):
            assert row["note"].startswith("not installed"), row
            continue
        assert "note" not in row, row
        assert row["seconds"] > 0
        assert len(row["samples"]) == 2
        assert row["extra_bytes"] is None or row["extra_bytes"] >= 0
        assert row["share"] == pytest.approx(result["floor"]["seconds"] / row["seconds"])
    assert result["floor"]["seconds"] > 0


def test_forward_alone_and_ignored_labels_and_host_time() -> None:
    for case in (
        Case("rms_norm", (6, 32), backward=False),
        Case("fused_linear_cross_entropy", (6, 32, 101), backward=False),
        Case("fused_linear_cross_entropy", (64, 32, 101), ignored=0.5),
        Case("swiglu", (1, 32), host=True),
    ):
        for row in measure(case)["rows"]:
            assert row["seconds"] > 0, (case, row)
    assert measure(Case("swiglu", (1, 32), host=True))["floor"] is None


@pytest.mark.parametrize("op", OPS)
def test_torch_compile_traces_the_code_whole(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' and PyTorch's. What the compiler makes of the trace is torch's business, and would need a C++
    compiler here."""
    if op.endswith("_experts") and older_than("5.23"):
        pytest.skip("Transformers' own grouped_mm for CPUs, all that is traced here, can be from 5.23 on")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    case = Case(op, TINY[op], backward=bool(OPERATORS[op].leaves))
    result = measure(case, ("hf", "compile", "compile-torch"))
    assert [row["name"] for row in result["rows"] if "seconds" in row] == [
        name for name in ("hf", "compile", "compile-torch") if op in PEERS[name] and not lacks(name, op)
    ], result


def test_a_contender_that_computes_something_else_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (lambda a, b: a * b, lambda a, b: torch.nn.functional.silu(a) * b * float("nan")):
        monkeypatch.setitem(PEERS["torch"], "swiglu", lambda wrong=wrong: wrong)
        found = rows(measure(Case("swiglu", (6, 32)), ("bastile", "torch", "hf")))
        assert found["torch"]["note"].startswith("wrong results")
        assert "seconds" not in found["torch"]
        assert "seconds" in found["bastile"]


def test_bastile_itself_is_compared_with_the_replaced_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where that is no contender."""
    monkeypatch.setitem(PEERS["bastile"], "swiglu", lambda: lambda a, b: a * b)
    (row,) = measure(Case("swiglu", (6, 32)), ("bastile",))["rows"]
    assert row["note"].startswith("wrong results")
    assert row["failed"]


def test_results_that_nothing_checked_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise ImportError("No module named 'transformers'")

    monkeypatch.setitem(PEERS["hf"], "swiglu", missing)
    result = measure(Case("swiglu", (6, 32)), ("bastile", "hf"))
    assert "results not checked: the replaced code failed (ImportError)" in report.as_text(result)
    assert "seconds" in rows(result)["bastile"]


def test_a_contender_that_fails_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def late(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        if len(calls) > 6:
            raise RuntimeError("no more of this")
        return torch.nn.functional.silu(a) * b

    def missing() -> Any:
        raise ImportError("No module named 'other'")

    monkeypatch.setitem(PEERS["torch"], "swiglu", lambda: late)
    monkeypatch.setitem(PEERS["liger"], "swiglu", missing)
    monkeypatch.setattr(run, "CUDA_ONLY", ())
    found = rows(measure(Case("swiglu", (6, 32)), ("bastile", "torch", "hf", "liger", "quack")))
    assert found["torch"]["note"] == "failed while timed: RuntimeError: no more of this"
    assert found["torch"]["failed"]
    assert "seconds" not in found["torch"]
    assert found["liger"]["note"] == "not installed: No module named 'other'"
    assert not found["liger"]["failed"]
    assert "quack" not in found  # it has no such operator
    assert "seconds" in found["bastile"]
    assert "seconds" in found["hf"]


def test_a_contender_that_fails_late_has_no_figure() -> None:
    entry = run._Entry("torch", call=lambda tensors: (), seconds=[1.0])
    entry.fail("failed while timed", RuntimeError("no\nmore"), CPU)
    assert entry.row == {"note": "failed while timed: RuntimeError: no", "failed": True}
    assert (entry.call, entry.clock, entry.seconds) == (None, None, [])


def test_inputs_that_cannot_be_made_are_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    too_large = Case("swiglu", (1 << 40, 1 << 20))
    results = list(
        run.run_cases([(too_large, "fp32"), (Case("swiglu", (6, 32)), "fp32")], ("bastile",), CPU, copy_speed=1e9)
    )
    assert results[0]["note"].startswith("failed: ")
    assert "seconds" in results[1]["rows"][0]


def test_inputs_are_restored_and_differ_in_memory() -> None:
    pristine = {"a": torch.randn(5, 7), "b": torch.randn(3, 4).t(), "target": torch.arange(5)}
    rotation = timing.Rotation(pristine, ("a",), CPU)
    assert len(rotation.sets) > 1
    assert len({tensors["a"].data_ptr() for tensors in rotation.sets}) == len(rotation.sets)
    for tensors in rotation.sets:
        assert tensors["a"].requires_grad
        assert tensors["b"].stride() == (1, 4)
        for tensor in tensors.values():
            tensor.detach().zero_()
    rotation.restore()
    for tensors in rotation.sets:
        for name, tensor in tensors.items():
            assert torch.equal(tensor, pristine[name])


def test_results_live_for_one_turn() -> None:
    """Else each call would write where the one before it wrote, into the cache."""
    rotation = timing.Rotation({"a": torch.randn(64, 64)}, (), CPU)
    kept = timing._keep_one_turn(lambda t: (t["a"] + 1,), rotation, 2 * len(rotation.sets) + 1)
    assert len({result.data_ptr() for (result,) in kept}) == len(rotation.sets)


@pytest.mark.skipif(sys.platform != "linux", reason="the peak can be reset on Linux only")
def test_extra_memory_counts_what_a_call_held_at_once() -> None:
    x = torch.randn(16 << 20)  # 64 MiB: so large that malloc returns it to the system, whatever ran before

    def two_at_once() -> torch.Tensor:
        return (x + 1) * 2  # its intermediate and its result

    two_at_once()
    torch.ones(64 << 20)  # 256 MiB, gone again: an earlier peak is none of the call's
    found = timing.extra_bytes(two_at_once, CPU)
    if found is None:
        pytest.skip("this system cannot reset the peak")
    assert found == pytest.approx(128 << 20, abs=2 << 20)
    assert timing.extra_bytes(lambda: x.add_(0), CPU) < 2 << 20


def test_needs_are_judged_by_ratios() -> None:
    result = {
        "floor": {"seconds": 2.0},
        "rows": [
            {"name": "bastile", "seconds": 2.1, "extra_bytes": 3 << 20},
            {"name": "torch", "seconds": 4.2, "extra_bytes": 12 << 20},
        ],
    }

    def met(**need: Any) -> bool | None:
        (verdict,) = run.judge(Need(**need), result, 4.0)
        return verdict["met"]

    assert met(limit=1.06) is True
    assert met(limit=1.04) is False
    assert met(peers={"torch": 0.5}) is True
    assert met(peers={"torch": 0.49}) is False
    assert met(peers={"liger": 1.0}) is None
    assert met(mib=3) is True
    assert met(mib=2.9) is False
    assert met(memory_of=("torch", 0.25)) is True
    assert met(memory_of=("torch", 0.24)) is False
    assert met(all_labels=0.6) is True  # of 4 s
    assert met(all_labels=0.5) is False
    (unknown,) = run.judge(Need(all_labels=0.6), result, None)
    assert unknown["met"] is None


def test_ignored_labels_are_compared_with_the_case_that_ignores_none() -> None:
    shape = (8, 16, 32)
    half = Case("fused_linear_cross_entropy", shape, ignored=0.5, needs={"fp32": Need(all_labels=0.6)})
    full, compared = run.run_cases(
        [(Case(half.op, shape), "fp32"), (half, "fp32")], ("bastile",), CPU, copy_speed=1e9, rounds=2
    )
    (verdict,) = compared["needs"]
    ours = compared["rows"][0]["seconds"] / full["rows"][0]["seconds"]
    assert verdict["found"] == pytest.approx(ours)


def test_the_budget_stops_new_cases() -> None:
    table = [(Case("swiglu", (6, 32)), "fp32")] * 2
    results = list(run.run_cases(table, ("bastile",), CPU, copy_speed=1e9, budget=0.0))
    assert all(result["note"] == "not started: the budget of 0 s was used up" for result in results)
    assert report.summary(results).count("not started") == 2


def test_tables_fit_a_terminal() -> None:
    result = measure(Case("fused_linear_cross_entropy", (64, 32, 101), needs={"fp32": Need(limit=1e-9)}))
    result["rows"][0] |= {"seconds": 123.4567, "rate": 123.4e12, "extra_bytes": 28488 << 20, "first_call": 90.123}
    text = report.as_text(result)
    table = [line for line in text.splitlines()[1:] if not line.startswith("  time")]
    assert max(map(len, table)) <= 80, text
    assert "TFLOP/s" in text
    missed = {"text": "time / torch", "limit": 1.0, "found": 1.0009, "met": False}
    assert "time / torch <= 1: 1.001, MISSED" in report.as_text({**result, "needs": [missed]})
    assert "time / limit <= 1e-09: " in text
    assert "MISSED" in text
    result["rows"][0]["spread"] = 0.01
    result["rows"][1]["spread"] = 0.2
    assert "unsteady" not in report.as_text(result)
    result["rows"][1]["spread"] = 0.3
    assert "unsteady" in report.as_text(result)


def test_the_host_s_time_is_one_table(tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch) -> None:
    monkeypatch.setattr(cases, "HOST", (Case("swiglu", (1, 32), host=True), Case("rope", (1, 4, 2, 8), host=True)))
    arguments = ["bench", "swiglu", "rope", "--host", "--device", "cpu", "--dtype", "fp32", "--rounds", "1"]
    assert main([*arguments, "--against", "torch,hf", "--out", str(tmp_path)]) == 0
    printed = capfd.readouterr().out
    (file,) = tmp_path.glob("bench-cpu-*.json")
    results = json.loads(file.read_text())["results"]
    assert [(result["op"], result["measured"]) for result in results] == [("swiglu", "host"), ("rope", "host")]
    head, swiglu, rope = (line.split() for line in report.host_table(results).splitlines())
    assert head[-3:] == ["bastile", "torch", "hf"]
    assert swiglu[0] == "swiglu"
    assert float(swiglu[1]) == pytest.approx(rows(results[0])["bastile"]["seconds"] * 1e6, rel=0.01)
    assert rope[2] == "-"  # PyTorch has no such function
    assert report.host_table(results) in printed
    assert report.host_table([]) == ""
    row = {"seconds": 12.3456e-3}
    timed = [name for name in PEERS if any(case.op in PEERS[name] for case in HOST)]
    full = [
        {"op": op, "dtype": dtype, "measured": "host", "rows": [{"name": name, **row} for name in timed]}
        for dtype in ("bf16", "fp32")
        for op in OPS
    ]
    shown = report.host_table(full)
    assert max(map(len, shown.splitlines())) <= 100, shown
    assert "rms_norm, fp32" in shown


def test_the_command_writes_what_it_prints(tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch) -> None:
    monkeypatch.setitem(cases.SHAPES, "small", (Case("swiglu", (6, 32)),))
    arguments = ["bench", "swiglu", "--device", "cpu", "--shapes", "small", "--dtype", "fp32", "--rounds", "1"]
    assert main([*arguments, "--against", "hf,liger", "--json", "--plots", "--out", str(tmp_path)]) == 0
    printed = json.loads(capfd.readouterr().out)
    (file,) = tmp_path.glob("bench-cpu-*.json")
    assert json.loads(file.read_text()) == printed
    assert [result["measured"] for result in printed["results"]] == ["device", "host"]
    assert torch.__version__.startswith(printed["versions"]["torch"])
    assert printed["machine"]["threads"] == torch.get_num_threads()
    assert rows(printed["results"][0])["liger"]["note"] == "needs CUDA"
    assert (tmp_path / "swiglu.png").read_bytes().startswith(b"\x89PNG")

    for name in ("rich.console", "rich.table", "rich.text"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["bench", "--show", str(file), "--out", str(tmp_path)]) == 0
    shown = capfd.readouterr().out
    assert "swiglu 6x32 forward+backward, fp32" in shown
    assert "liger: needs CUDA" in shown
    assert "needs met" not in shown  # this case has none
    assert main(["bench", "rope", "--show", str(file), "--out", str(tmp_path)]) == 1
    assert "swiglu" not in capfd.readouterr().out


def test_a_run_in_which_bastile_fails_ends_with_one(tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch) -> None:
    def broken() -> Any:
        raise ImportError("no library")

    monkeypatch.setitem(PEERS["bastile"], "swiglu", broken)
    monkeypatch.setitem(cases.SHAPES, "small", (Case("swiglu", (6, 32)),))
    arguments = ["bench", "swiglu", "--device", "cpu", "--shapes", "small", "--dtype", "fp32", "--against", "hf"]
    assert main([*arguments, "--rounds", "1", "--out", str(tmp_path)]) == 1
    assert (
        "Not measured:\n  swiglu 6x32 forward+backward, fp32: failed: ImportError: no library" in capfd.readouterr().out
    )


def test_mistakes_are_told_with_their_remedy(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "other.json").write_text("[]")
    for arguments, told in (
        (["sofmax"], "op: there is no 'sofmax'; give one or more of rms_norm, add_rms_norm"),
        (["--dtype", "fp8"], "--dtype: there is no 'fp8'; give one or more of float32, bfloat16, float16"),
        (["--against", "apex"], "--against: there is no 'apex'; give one or more of torch, hf"),
        (["--cases", "huge"], "--cases: there is no 'huge'; give one or more of limits, small"),
        (["--rounds", "0"], "--rounds: 0 is not at least 1"),
        (["--budget", "0"], "--budget is 0.0; a positive number is needed"),
        (["--device", "toaster"], "give cpu, cuda or cuda:N"),
        (["--show", str(tmp_path / "none.json")], "none.json cannot be read (No such file or directory)"),
        (["--show", str(tmp_path / "other.json")], "not a file that bench has written"),
    ):
        assert main(["bench", *arguments, "--out", str(tmp_path)]) == 2
        assert told in capsys.readouterr().err


def test_the_monitor_reads_clock_and_power_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import time\nfor i in range(1000): print(f'{1000 + i % 2 * 10}, 300.5', flush=True); time.sleep(0.01)"
    program = f"print('[N/A], [N/A]')\n{program}"
    monkeypatch.setattr(machine, "_query", lambda device, fields: [sys.executable, "-c", program])
    begin = time.monotonic()
    with machine.Monitor(torch.device("cuda")) as monitor:
        while not monitor.since(begin) and time.monotonic() < begin + 20:
            time.sleep(0.05)
        found = monitor.since(begin)
        assert monitor.since(time.monotonic() + 60) == {}
    assert 1000 <= found["sm_mhz"] <= 1010
    assert found["watts"] == 300.5
    assert monitor._process is not None
    assert monitor._process.returncode == -signal.SIGTERM


@needs_cuda
def test_a_graph_and_a_queue_agree() -> None:
    device = torch.device("cuda")
    rotation = timing.Rotation({"a": torch.randn(4096, 4096, device=device)}, (), device)

    def waits(t: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        result = t["a"] + 1
        result[0, 0].item()
        return (result,)

    graph = timing.clock_for(lambda t: (t["a"] + 1,), rotation, device)
    queue = timing._Queue(lambda t: (t["a"] + 1,), rotation, 1e-4)
    waiting = timing.clock_for(waits, rotation, device)
    assert (graph.way, queue.way, waiting.way) == ("graph", "queue", "queue")
    assert waiting.note.startswith("not capturable")
    samples = [(graph.sample(), queue.sample()) for _ in range(15)]
    by_graph, by_queue = map(min, zip(*samples, strict=True))  # of what nobody else's work was in the way of
    assert by_graph == pytest.approx(by_queue, rel=0.2)
    assert queue.note == ""
    waiting.sample()
    assert "did not stay ahead" in waiting.note


@needs_cuda
@pytest.mark.parametrize("op", OPS)
def test_every_operator_is_captured_on_cuda(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_GRAPH_BELOW", 10.0)  # seconds: however busy the machine is
    case = Case(op, TINY[op], backward=bool(OPERATORS[op].leaves))
    (result,) = run.run_cases([(case, "bf16")], ("bastile", "hf"), torch.device("cuda"), copy_speed=1e12, rounds=2)
    by_queue = op in (
        "fused_linear_cross_entropy",
        "linear_logprobs",
        "linear_divergence",
        "gated_mlp",
        "moe_experts",
        "swiglu_experts",
    )  # what large products are measured by
    for row in result["rows"]:
        assert row.get("way") == ("queue" if by_queue else "graph"), row
        # Of products as small as these the host is seldom ahead.
        assert row.get("note") is None or (by_queue and row["note"] == timing._BEHIND), row


def test_a_peak_counts_what_graphs_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's does not: between replays the memory of a graph's pool is free in its books."""

    def segment(pool: tuple[int, int], total: int, active: int, device: int = 0) -> dict[str, Any]:
        return {"segment_pool_id": pool, "total_size": total, "active_size": active, "device": device}

    segments = [segment((0, 0), 50, 30), segment((0, 2), 20, 5), segment((0, 2), 7, 0), segment((0, 4), 9, 0, device=1)]
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 40)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 80)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert timing.cuda_peak(torch.device("cuda", 0)) == 40 + 15 + 7
    assert timing.cuda_peak(torch.device("cuda", 1)) == 40 + 9
    # Graphs that were captured meanwhile are in PyTorch's peak, and in what they keep.
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 60)
    assert timing.cuda_peak(torch.device("cuda", 0)) == 60
