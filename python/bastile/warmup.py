"""Compiling a model's kernels before the first step needs them.

GPU kernels are compiled for a model's exact shapes when first used (a fraction of a second each, kept on disk). Calling
`warmup_all_kernels(model)` before training moves that time to where it can be seen, and compiles several at once."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from bastile._library import kernel_counts
from bastile.models.anatomy import Anatomy, anatomy
from bastile.models.kernels import Call, Types, calls
from bastile.ops._common import FLOATS
from bastile.patching import _unwrapped, get_patched_ops
from bastile.shapes import MODELS

_MOST_THREADS = 8


@dataclass(frozen=True)
class Warmup:
    """What warmup_all_kernels did. device is None where it did nothing; reason then says why."""

    device: str | None
    seconds: dict[str, float] = field(default_factory=dict)  # of each operator at each width; they overlap in time
    reason: str = ""
    total_seconds: float = 0.0  # from the first kernel's begin to the last one's end
    compiled: int = 0  # kernels
    cached: int = 0  # kernels that had been compiled before and were read from the disk
    model_types: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.device is None:
            return f"Nothing was compiled: {self.reason}"
        whose = ", ".join(self.model_types)
        if not self.compiled + self.cached:
            return f"Nothing was compiled: this process has all kernels of {whose} already"
        done = f"{self.compiled} kernel{'' if self.compiled == 1 else 's'} of {whose} compiled"
        if self.cached:
            done += f" and {self.cached} read from the cache"
        return f"{done} in {self.total_seconds:.1f} s"


def warmup_all_kernels(
    model_or_config: Any = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
    threads: int | None = None,
) -> Warmup:
    """Compiles every kernel that a training step of the model needs, several at once, and reports the seconds. Memory
    for a few rows is enough, and nothing of the model is touched.

    Args:
        model_or_config: a model, wrapped or not (PEFT, torch.compile, DDP, FSDP), or its config; None: the default
            config of the type of each model that `bastile sweep` knows by name. Of a model it matters what it is
            patched with and what of it is trained, of a config what `apply` has patched; where nothing is patched, it
            is as if `apply` had patched all.
        dtype: of the weights; the model's own, bfloat16 for a config. Under torch.autocast, call this under it too.
        device: where the model will run; None: the current CUDA device.
        progress: draw a bar where `rich` is installed.
        threads: how many kernels to compile at once; None: as many as there are CPU cores, but at most 8.

    Returns:
        What was done: the seconds of each operator, and how many kernels were compiled and how many on disk already.

    Raises:
        ValueError: for what is no supported model or config, a type without kernels, or no threads.
        RuntimeError: naming each operator that failed, after the others have been compiled."""
    if threads is not None and threads < 1:
        raise ValueError(f"warmup_all_kernels: threads is {threads}; 1 or more is needed")
    if not torch.cuda.is_available():
        return Warmup(None, reason="there is no CUDA device; CPU kernels are compiled when Bastile is built")
    target = torch.device("cuda" if device is None else device)
    if target.type != "cuda":
        return Warmup(None, reason=f"{target} is not a CUDA device; only CUDA kernels are compiled at run time")
    if target.index is None:  # the current device is this thread's alone
        target = torch.device("cuda", torch.cuda.current_device())
    return _warm(model_or_config, dtype, target, progress, threads)


def _warm(
    model_or_config: Any, dtype: torch.dtype | None, device: torch.device, progress: bool, threads: int | None
) -> Warmup:
    families, work = _work(model_or_config, dtype, device)
    before, begin = kernel_counts(), time.perf_counter()
    seconds = _run(work, device, progress, threads or min(_MOST_THREADS, os.cpu_count() or 1))
    total = time.perf_counter() - begin
    compiled, cached = (now - then for now, then in zip(kernel_counts(), before, strict=True))
    return Warmup(str(device), seconds, "", total, compiled, cached, tuple(family.model_type for family in families))


def _work(model_or_config: Any, dtype: torch.dtype | None, device: torch.device) -> tuple[list[Anatomy], list[Call]]:
    """The families, and each call that their kernels need, once."""
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    if model_or_config is None:
        from transformers import AutoConfig

        known = dict.fromkeys(shape["model_type"] for shape in MODELS.values())
        configs: list[Any] = [AutoConfig.for_model(model_type) for model_type in known]
        model, own = None, None
    else:
        model = _unwrapped(model_or_config) if isinstance(model_or_config, nn.Module) else None
        configs = [model_or_config if model is None else getattr(model, "config", None)]
        own = getattr(model, "dtype", None)
    families = []
    for config in configs:
        family = anatomy(str(getattr(config, "model_type", None)))
        if family is None:
            raise ValueError(
                f"warmup_all_kernels: {type(model_or_config).__name__} is no supported model or config: a causal "
                f"language model is needed whose layers have a form that bastile knows (`bastile support` lists them)"
            )
        families.append(family)
    stream = dtype or own or torch.bfloat16
    if stream not in FLOATS:
        raise ValueError(
            f"warmup_all_kernels: dtype is {stream}; kernels serve torch.float32, torch.bfloat16 and torch.float16"
        )
    types = Types(stream, dtype, autocast)
    work = [
        call
        for family, config in zip(families, configs, strict=True)
        for call in calls(config, family, _operators(family, model), types, model)
    ]
    return families, list(dict.fromkeys(work))


def _operators(family: Anatomy, model: nn.Module | None) -> list[str]:
    """Those in force, or all that could be."""
    patched = set(get_patched_ops(model))
    names = [op for op in family.operators if patched & {op, f"{op}_{family.model_type}"}]
    return names or list(family.operators)


def _run(work: Sequence[Call], device: torch.device, progress: bool, threads: int) -> dict[str, float]:
    """Makes the calls, each thread on a stream of its own, and returns the seconds of each title."""
    seconds = dict.fromkeys((call.title for call in work), 0.0)
    failed: dict[str, BaseException] = {}
    pool = ThreadPoolExecutor(threads, "bastile-warmup", _use_own_stream, (device,))
    try:
        with _bar(len(work) if progress else 0) as advance:
            running: dict[Future[float], Call] = {pool.submit(_timed, call, device): call for call in work}
            for done in as_completed(running):
                title = running[done].title
                error = done.exception()
                if error is None:
                    seconds[title] += done.result()
                else:
                    failed.setdefault(title, error)
                advance(title)
    finally:
        pool.shutdown(cancel_futures=True)
    if failed:
        reasons = "; ".join(f"{title}: {error}" for title, error in failed.items())
        raise RuntimeError(f"warmup_all_kernels: {reasons}") from next(iter(failed.values()))
    return seconds


def _use_own_stream(device: torch.device) -> None:
    """In a new thread: so that no call waits for what another has queued."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))


def _timed(call: Call, device: torch.device) -> float:
    begin = time.perf_counter()
    call.run(device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter() - begin


@contextmanager
def _bar(total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar of that many steps; none for 0, or where rich is not installed."""
    try:
        from rich.progress import Progress
    except ImportError:
        total = 0
    if total == 0:
        yield lambda name: None
        return
    with Progress(transient=True) as progress:
        task = progress.add_task("Bastile: compiling kernels", total=total)
        yield lambda name: progress.update(task, advance=1, description=f"Bastile: {name}")
