"""Running cases: each contender is built, checked against the code that Bastile replaces, and measured. What fails is a
note in its row; the other rows go on."""

from __future__ import annotations

import gc
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import quantiles
from typing import Any

import torch

from bastile.bench import timing
from bastile.bench.cases import Case, Need
from bastile.bench.operators import OPERATORS, Operator, Random, Tensors
from bastile.peers.operators import CUDA_ONLY, PEERS

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
#: The name under which a case's limit runs among the contenders, where it is matrix products.
PRODUCTS = "products"
_ROUNDS = 7
#: How far results may differ from those of the replaced code, relative to their norm. Wide, for the two may round at
#: different steps, and some libraries add up dweight in bfloat16: this catches what computes something else. Accuracy
#: is for tests.
_AGREE = {"bf16": 0.1, "fp16": 0.05, "fp32": 3e-3}


class DeviceLost(Exception):
    """The device answers no more: nothing that follows would mean anything."""


@dataclass
class _Entry:
    """One contender of one case on its way to a row."""

    name: str
    row: dict[str, Any] = field(default_factory=dict)
    call: timing.Call | None = None
    clock: timing.Clock | None = None
    seconds: list[float] = field(default_factory=list)

    def attempt(self, what: str, device: torch.device, work: Callable[[], Any]) -> Any:
        """What the work returns; None where it fails, for whatever a foreign library raises."""
        try:
            return work()
        except Exception as error:
            self.fail(what, error, device)
            return None

    def fail(self, what: str, error: BaseException, device: torch.device) -> None:
        """Turns an exception into the row's note."""
        first = textwrap.shorten((str(error).strip().splitlines() or [""])[0], 160, placeholder=" …")
        missing = isinstance(error, ImportError) and self.name != "bastile"
        self.row["note"] = f"not installed: {first}" if missing else f"{what}: {type(error).__name__}: {first}"
        self.row["failed"] = not missing
        self.call = self.clock = None
        self.seconds.clear()
        if device.type == "cuda":
            try:
                torch.cuda.synchronize(device)
            except Exception as lost:
                raise DeviceLost(f"{self.name}, {self.row['note']}") from lost


def run_cases(
    cases: Iterable[tuple[Case, str]],
    contenders: Sequence[str],
    device: torch.device,
    *,
    copy_speed: float,
    rounds: int = _ROUNDS,
    budget: float | None = None,
    machine_since: Callable[[float], dict[str, float]] = lambda begin: {},
) -> Iterator[dict[str, Any]]:
    """Yields one result a case (with its type's name). A case that would start after `budget` seconds is skipped."""
    begin = time.monotonic()
    all_labels: dict[tuple[str, tuple[int, ...], bool, str], float] = {}
    for case, dtype in cases:
        result: dict[str, Any] = {
            "op": case.op,
            "shape": list(case.shape),
            "dtype": dtype,
            "backward": case.backward,
            "ignored": case.ignored,
            "measured": "host" if case.host else "device",
            "title": f"{case.name}, {dtype}" + (", host time" if case.host else ""),
            "floor": None,
            "rows": [],
            "needs": [],
        }
        if budget is not None and time.monotonic() - begin > budget:
            result["note"] = f"not started: the budget of {budget:.0f} s was used up"
            yield result
            continue
        started = time.monotonic()
        try:
            _run_case(case, dtype, contenders, device, copy_speed, rounds, result)
        except DeviceLost as lost:
            result["note"] = f"the device failed and the run ends here: {lost}"
            yield result
            return
        except Exception as error:  # such as too little memory for the inputs
            result["note"] = f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        ours = next((row.get("seconds") for row in result["rows"] if row["name"] == "bastile"), None)
        key = (case.op, case.shape, case.backward, dtype)
        if not case.ignored and ours is not None:
            all_labels[key] = ours
        if dtype in case.needs:
            result["needs"] = judge(case.needs[dtype], result, all_labels.get(key))
        result["took"] = time.monotonic() - started
        result |= machine_since(started)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        yield result


def _run_case(
    case: Case,
    dtype: str,
    contenders: Sequence[str],
    device: torch.device,
    copy_speed: float,
    rounds: int,
    result: dict[str, Any],
) -> None:
    operator = OPERATORS[case.op]
    torch.manual_seed(20261120)
    pristine = operator.inputs(case, Random(DTYPES[dtype], device))
    rotation = timing.Rotation(pristine, operator.leaves, device)
    cost = operator.cost(case, DTYPES[dtype].itemsize)
    result["model"] = operator.model
    entries = [_Entry(name) for name in contenders if case.op in PEERS[name]]
    reference: tuple[torch.Tensor, ...] | None = None
    try:
        if case.op in PEERS["hf"]:
            reference = _call(PEERS["hf"][case.op](), operator, case.backward)(rotation.sets[0])
        else:
            result["unchecked"] = "results not checked: each contender draws its own"
    except Exception as error:  # Transformers is missing, or it needs more memory than there is
        result["unchecked"] = f"results not checked: the replaced code failed ({type(error).__name__})"
    for entry in entries:
        _prepare(entry, case, operator, rotation, device, reference, _AGREE[dtype])
    reference = None
    if case.host:
        _time_host(entries, rotation.sets[0], device, rounds)
    else:
        if cost.flops:
            assert operator.products is not None
            limit = _Entry(PRODUCTS)
            limit.call = limit.attempt("failed", device, partial(operator.products, case, pristine))
            entries.append(limit)
        # Calls with large products last milliseconds, on either side of where a graph pays: all by the same clock.
        _time_device(entries, rotation, device, rounds, capture=not cost.flops)
    for entry in entries:
        if entry.seconds:
            several = entry.seconds if len(entry.seconds) > 1 else 2 * entry.seconds
            low, middle, high = quantiles(several, n=4, method="inclusive")
            entry.row |= {"seconds": middle, "spread": (high - low) / 2 / middle, "samples": entry.seconds}
    rows = {entry.name: {"name": entry.name, **entry.row} for entry in entries}
    if not case.host:
        by_products = rows.pop(PRODUCTS, {})
        least = by_products.get("seconds") if cost.flops else cost.moved / copy_speed
        result["floor"] = {"seconds": least, "moved": cost.moved, "flops": cost.flops}
        if "note" in by_products:
            result["floor"]["note"] = by_products["note"]
        for row in rows.values():
            if "seconds" in row:
                row["rate"] = (cost.flops or cost.moved) / row["seconds"]
                row["share"] = least / row["seconds"] if least else None
    result["rows"] = list(rows.values())


def _prepare(
    entry: _Entry,
    case: Case,
    operator: Operator,
    rotation: timing.Rotation,
    device: torch.device,
    reference: tuple[torch.Tensor, ...] | None,
    agree: float,
) -> None:
    """Builds the contender, runs it once, checks it, takes its memory."""
    if device.type != "cuda" and entry.name in CUDA_ONLY:
        entry.row["note"] = "needs CUDA"
        return
    tensors = rotation.sets[0]

    def run() -> None:
        entry.call = call = _call(PEERS[entry.name][case.op](), operator, case.backward)
        rotation.restore()
        timing.synchronize(device)
        begin = time.perf_counter()
        results = call(tensors)
        timing.synchronize(device)
        entry.row["first_call"] = time.perf_counter() - begin  # imports done; compiling and tuning included
        difference = _difference(results, reference) if reference is not None else 0.0
        if not difference <= agree:  # NaN too
            entry.row |= {"note": f"wrong results: differ from the replaced code's by {difference:.1e}", "failed": True}
            entry.call = None
        elif not case.host:
            del results
            rotation.restore()
            entry.row["extra_bytes"] = timing.extra_bytes(lambda: call(tensors), device)

    entry.attempt("failed", device, run)


def _call(function: Callable[..., Any], operator: Operator, backward: bool) -> timing.Call:
    """The contender as one call on a set of inputs: outputs, and gradients where they are wanted."""
    arguments, leaves = operator.arguments, operator.leaves

    def call(tensors: Tensors) -> tuple[torch.Tensor, ...]:
        outputs = function(*[tensors[name] for name in arguments])
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        if not backward:
            return tuple(o.detach() for o in outputs)
        upstream = [tensors[f"upstream {i}"] for i in range(len(outputs))]
        gradients = torch.autograd.grad(outputs, [tensors[name] for name in leaves], upstream)
        return (*[o.detach() for o in outputs], *gradients)

    return call


def _difference(results: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> float:
    """The largest relative difference, in the norm, of any output or gradient; NaN where one holds a NaN."""
    worst = 0.0
    for got, want in zip(results, reference, strict=True):
        norm = torch.linalg.vector_norm(want, dtype=torch.float32)
        off = (torch.linalg.vector_norm(got.float() - want.float()) / norm.clamp(min=1e-30)).item()
        worst = off if not off <= worst else worst
        if worst != worst:
            break
    return worst


def _time_device(
    entries: Sequence[_Entry], rotation: timing.Rotation, device: torch.device, rounds: int, *, capture: bool
) -> None:
    def warmed_up(call: timing.Call) -> timing.Clock:
        rotation.restore()
        return timing.clock_for(call, rotation, device, capture=capture)

    for entry in entries:
        if entry.call is not None:
            entry.clock = entry.attempt("failed in warm-up", device, partial(warmed_up, entry.call))
    for turn in range(rounds + 1):  # the first round warms the device up and does not count
        for entry in entries:
            if entry.clock is not None:
                seconds = entry.attempt("failed while timed", device, entry.clock.sample)
                entry.seconds += [seconds] if turn and seconds is not None else []
    for entry in entries:
        if entry.clock is not None:
            entry.row["way"] = entry.clock.way
            if entry.clock.note:
                entry.row["note"] = entry.clock.note
        entry.call = entry.clock = None  # gives back what a graph holds


def _time_host(entries: Sequence[_Entry], tensors: Tensors, device: torch.device, rounds: int) -> None:
    for turn in range(2 * rounds + 1):  # blocks are short: more of them than rounds on the device
        for entry in entries:
            if entry.call is not None:
                block = partial(timing.host_seconds, entry.call, tensors, device)
                seconds = entry.attempt("failed while timed", device, block)
                if turn and seconds is not None:
                    entry.seconds.append(seconds)
                    entry.row["way"] = "host"


# ---- needs -----------------------------------------------------------------------------------------------------------


def judge(need: Need, result: dict[str, Any], all_labels: float | None) -> list[dict[str, Any]]:
    """Each requirement with what it allows and what was found; `met` is None where that is not known."""
    rows = {row["name"]: row for row in result["rows"]}
    ours = rows.get("bastile", {})
    verdicts = []

    def require(text: str, limit: float, value: float | None, base: float | None) -> None:
        found = value / base if value is not None and base else None
        met = None if found is None else found <= limit
        verdicts.append({"text": text, "limit": limit, "found": found, "met": met})

    time_, memory = ours.get("seconds"), ours.get("extra_bytes")
    if need.limit is not None:
        require("time / limit", need.limit, time_, (result["floor"] or {}).get("seconds"))
    for peer, ratio in need.peers.items():
        require(f"time / {peer}", ratio, time_, rows.get(peer, {}).get("seconds"))
    if need.all_labels is not None:
        require("time / none ignored", need.all_labels, time_, all_labels)
    if need.mib is not None:
        require("extra MiB", need.mib, memory, 1 << 20)
    if need.memory_of is not None:
        peer, ratio = need.memory_of
        require(f"extra memory / {peer}", ratio, memory, rows.get(peer, {}).get("extra_bytes"))
    return verdicts
