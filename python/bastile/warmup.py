"""Compiling a model's kernels before the first step needs them.

GPU kernels are compiled for a model's exact shapes when first used (a fraction of a second each, kept on disk). Calling
`warmup_all_kernels(model)` before training moves that time to where it can be seen, and compiles several at once."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from bastile._library import compiling_ahead, kernel_counts
from bastile.models.recording import Call, Like, recorded
from bastile.ops import _varlen as varlen
from bastile.ops._common import FLOATS, is_hopper
from bastile.patching import _unwrapped, apply_to_model, get_patched_ops
from bastile.shapes import MODELS

_MOST_THREADS = 8
#: More tokens than the fused loss keeps logits of, and than operators count as few.
_MANY_TOKENS = 1 << 15
_LONG = 4096


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
    *,
    shapes: Sequence[tuple[int, int]] | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    log_probs: bool = False,
    chip: str | None = None,
) -> Warmup:
    """Compiles every kernel that a training step of the model needs, several at once, and reports the seconds. Which
    these are is found by running the step on a copy of the model whose tensors have no values and no memory: of
    token ids and labels, not of images. No memory of the GPU is taken, and nothing of the model is touched.

    Args:
        model_or_config: a model of any type whose forward takes input_ids and labels, wrapped or not (PEFT,
            torch.compile, DDP, FSDP), on any device, "meta" too; or a config; None: the default config of the type of
            each model that `bastile sweep` knows by name. Of a model it matters what it is patched with and what of it
            is trained, of a config what `apply` has patched; where nothing is patched, it is as if `apply` had patched
            all.
        dtype: of the weights; the model's own, bfloat16 for a config. Under torch.autocast, call this under it too.
        device: where the model will run; None: the current CUDA device.
        progress: draw a bar where `rich` is installed.
        threads: how many kernels to compile at once; None: as many as there are CPU cores, but at most 8.
        shapes: sequences and tokens of each, of the batches that there will be; None: few and many. Hardly a kernel
            depends on them.
        optimizer: makes an optimiser of parameters, such as `bastile.optim.AdamW`, whose kernels are compiled too.
        log_probs: also for losses of the tokens' log-probabilities, as trainers of preferences and rewards have them.
        chip: "sm_80", "sm_86", "sm_89", "sm_90", "sm_100" or "sm_120": compile for this one, which need not be there,
            into the cache on disk. NVRTC is needed, no GPU.

    Returns:
        What was done: the seconds of each operator, and how many kernels were compiled and how many on disk already.

    Raises:
        ValueError: for what is no supported model or config, an unknown chip, or no threads.
        RuntimeError: naming each operator that failed, after the others have been compiled; or the model whose step
            cannot run without values."""
    if threads is not None and threads < 1:
        raise ValueError(f"warmup_all_kernels: threads is {threads}; 1 or more is needed")
    if chip is not None and chip not in CHIPS:
        raise ValueError(f"warmup_all_kernels: chip is {chip!r}; one of {', '.join(CHIPS)} is needed")
    if chip is None and not torch.cuda.is_available():
        return Warmup(None, reason="there is no CUDA device; CPU kernels are compiled when Bastile is built")
    target = torch.device("cuda" if device is None else device)
    if target.type != "cuda":
        return Warmup(None, reason=f"{target} is not a CUDA device; only CUDA kernels are compiled at run time")
    if target.index is None:  # the current device is this thread's alone
        target = torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
    types, work = _work(model_or_config, dtype, target, shapes, optimizer, log_probs)
    if chip == "sm_90" if chip else is_hopper(target):
        work += _attention(model_or_config, dtype)
    return _warm(types, work, target, progress, threads, chip)


#: Those that kernels are compiled for.
CHIPS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


def _warm(
    types: Sequence[str],
    work: Sequence[Call],
    device: torch.device,
    progress: bool = False,
    threads: int | None = None,
    chip: str | None = None,
) -> Warmup:
    before, begin = kernel_counts(), time.perf_counter()
    ahead = partial(compiling_ahead, device.index or 0, int(chip.removeprefix("sm_")) if chip else 0)
    seconds = _run(work, ahead, progress, threads or min(_MOST_THREADS, os.cpu_count() or 1))
    total = time.perf_counter() - begin
    compiled, cached = (now - then for now, then in zip(kernel_counts(), before, strict=True))
    return Warmup(chip or str(device), seconds, "", total, compiled, cached, tuple(types))


def _work(
    model_or_config: Any,
    dtype: torch.dtype | None,
    device: torch.device,
    shapes: Sequence[tuple[int, int]] | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    log_probs: bool = False,
) -> tuple[list[str], list[Call]]:
    """The types of the models, and each call that their kernels need, once."""
    if dtype is not None and dtype not in FLOATS:
        raise ValueError(
            f"warmup_all_kernels: dtype is {dtype}; kernels serve torch.float32, torch.bfloat16 and torch.float16"
        )
    if isinstance(model_or_config, nn.Module):
        models: Iterable[nn.Module] = [_unwrapped(model_or_config)]
    elif model_or_config is None:
        from transformers import AutoConfig

        known = dict.fromkeys(shape["model_type"] for shape in MODELS.values())
        models = (_without_weights(AutoConfig.for_model(model_type), dtype) for model_type in known)
    else:
        models = [_without_weights(model_or_config, dtype)]
    types, work = [], {}
    for model in models:
        config: Any = getattr(model, "config", None)
        types.append(str(getattr(config, "model_type", type(model).__name__)))
        try:
            calls = recorded(model, device, dtype, shapes or _few_and_many(config), _patch, optimizer, log_probs)
        except _NotSupported:
            raise
        except Exception as error:
            raise RuntimeError(
                f"warmup_all_kernels: a step of {type(model).__name__} cannot run without values: "
                f"{type(error).__name__}: {error}"
            ) from error
        work.update(dict.fromkeys(calls))
    return types, list(work)


def _attention(model_or_config: Any, dtype: torch.dtype | None) -> list[Call]:
    """Those of batches with padding, or packed, which tensors without values do not tell of: causal, with the heads
    that the config names, and in a window where it has one."""
    config = getattr(model_or_config, "config", model_or_config)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(text, "num_attention_heads", None)
    if not isinstance(heads, int):
        return []
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    groups = getattr(text, "num_key_value_heads", None) or heads
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
    elif dtype is None:
        dtype = getattr(model_or_config, "dtype", None) or torch.bfloat16
    if not varlen.serves_heads(width, dtype) or heads % groups:
        return []

    def like(*shape: int, of: torch.dtype = dtype) -> Like:
        return Like.of(torch.empty(shape, dtype=of, device="meta"))

    q, k, cuts, lse = (
        like(64, heads, width),
        like(64, groups, width),
        like(2, 2, of=torch.int32),
        like(heads, 64, of=torch.float32),
    )
    windows = {0, int(bool(getattr(text, "sliding_window", None)))}  # one that has not all of these tokens in it
    return [
        call
        for window in sorted(windows)
        for call in (
            Call("segment_attention_forward", (q, k, k, cuts, 1.0, True, 0, window)),
            Call("segment_attention_backward", (q, q, k, k, cuts, q, lse, 1.0, True, 0, window)),
        )
    ]


def _without_weights(config: Any, dtype: torch.dtype | None) -> nn.Module:
    """A model of this config, of text alone or of images too."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            with torch.device("meta"):
                return auto.from_config(config, dtype=dtype or torch.bfloat16)
    raise _NotSupported(config)


class _NotSupported(ValueError):
    def __init__(self, what: Any) -> None:
        super().__init__(
            f"warmup_all_kernels: {type(what).__name__} is no supported model or config: a causal language model is "
            f"needed in which bastile knows code (`bastile support` lists it)"
        )


def _few_and_many(config: Any) -> list[tuple[int, int]]:
    """Few tokens, in one sequence and in two; and more than operators treat as few, in sequences that the model
    takes."""
    longest = getattr(config, "max_position_embeddings", None) or _LONG
    length = min(longest, _LONG)
    return [(1, 8), (2, 8), (_MANY_TOKENS // length, length)]


def _patch(model: nn.Module) -> None:
    """As it is, or with all that could be."""
    if get_patched_ops(model):
        return
    try:
        apply_to_model(model)
    except ValueError as error:
        raise _NotSupported(model) from error


def _run(
    work: Sequence[Call], ahead: Callable[[], AbstractContextManager[None]], progress: bool, threads: int
) -> dict[str, float]:
    """Makes the calls, in several threads, each within `ahead`, and returns the seconds of each title."""

    def timed(call: Call) -> float:
        begin = time.perf_counter()
        with ahead():
            call.run()
        return time.perf_counter() - begin

    seconds = dict.fromkeys((call.title for call in work), 0.0)
    failed: dict[str, BaseException] = {}
    pool = ThreadPoolExecutor(threads, "bastile-warmup")
    try:
        with _bar(len(work) if progress else 0) as advance:
            running: dict[Future[float], Call] = {pool.submit(timed, call): call for call in work}
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
