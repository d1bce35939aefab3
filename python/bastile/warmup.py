"""Compiling a model's kernels before the first step needs them.

GPU kernels are compiled for a model's exact shapes when first used (a fraction of a second each, kept on disk). Calling
`warmup_all_kernels(model)` before training moves that time to where it can be seen."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from bastile.models.table import FAMILIES, Family
from bastile.ops.fused_linear_cross_entropy import fused_linear_cross_entropy
from bastile.ops.qk_norm_rope import qk_norm_rope
from bastile.ops.rms_norm import add_rms_norm, rms_norm
from bastile.ops.rope import rope
from bastile.ops.swiglu import swiglu

_ROWS = 8  # kernels are specialised by the width of a row, not by the number of rows


@dataclass(frozen=True)
class Warmup:
    """What warmup_all_kernels did. device is None where it did nothing; reason then says why."""

    device: str | None
    seconds: dict[str, float] = field(default_factory=dict)  # by operator, and shape where it runs at several
    reason: str = ""

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())


def warmup_all_kernels(
    model_or_config: Any = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> Warmup:
    """Runs every operator forward and backward once, on a few rows of the model's shapes, and reports the seconds.

    model_or_config: a model, a PEFT or compiled one too, or its config; None: the default config of each supported
    family. dtype: the model's own, bfloat16 for a config. progress: draw a bar where `rich` is installed."""
    if not torch.cuda.is_available():
        return Warmup(None, reason="no CUDA device: CPU kernels are compiled when Bastile is built")
    target = torch.device("cuda" if device is None else device)
    if target.type != "cuda":
        return Warmup(None, reason=f"{target} is not a CUDA device: only CUDA kernels are compiled at run time")
    work = [item for config, kind in _configs(model_or_config, dtype) for item in _work(config, kind, target)]
    seconds: dict[str, float] = {}
    with _bar(len(work) if progress else 0) as advance, torch.enable_grad():
        for name, run in work:
            torch.cuda.synchronize(target)
            begin = time.perf_counter()
            run()
            torch.cuda.synchronize(target)
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - begin
            advance(name)
    return Warmup(str(target), seconds)


def _configs(model_or_config: Any, dtype: torch.dtype | None) -> list[tuple[Any, torch.dtype]]:
    if model_or_config is None:
        from transformers import AutoConfig

        return [(AutoConfig.for_model(model_type), dtype or torch.bfloat16) for model_type in FAMILIES]
    config = getattr(model_or_config, "config", model_or_config)
    if getattr(config, "model_type", None) not in FAMILIES:
        raise ValueError(
            f"warmup_all_kernels: {type(model_or_config).__name__} is no supported model or config; supported model "
            f"types are: {', '.join(sorted(FAMILIES))}"
        )
    own = getattr(model_or_config, "dtype", None)
    return [(config, dtype or (own if isinstance(own, torch.dtype) else None) or torch.bfloat16)]


def _work(config: Any, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Callable[[], None]]]:
    """Each operator at each shape this config's model calls it with."""
    family: Family = FAMILIES[config.model_type]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    def new(*shape: int, grad: bool = True, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(shape, device=device, dtype=kind, requires_grad=grad)

    def norm(width: int) -> None:
        rms_norm(new(_ROWS, width), new(width), 1e-6, casting=family.norm_casting).sum().backward()

    def add_and_norm() -> None:
        x, residual, weight = new(_ROWS, config.hidden_size), new(_ROWS, config.hidden_size), new(config.hidden_size)
        y, total = add_rms_norm(x, residual, weight, 1e-6, casting=family.norm_casting)
        (y.sum() + total.sum()).backward()

    def activation() -> None:
        swiglu(new(_ROWS, config.intermediate_size), new(_ROWS, config.intermediate_size)).sum().backward()

    def heads() -> list[torch.Tensor]:
        # As attention passes them: views of [B, S, heads, D].
        return [
            new(1, _ROWS, count, head_dim).transpose(1, 2)
            for count in (config.num_attention_heads, config.num_key_value_heads)
        ]

    def tables() -> list[torch.Tensor]:
        return [new(1, _ROWS, head_dim, grad=False) for _ in range(2)]

    def rotate() -> None:
        q, k = rope(*heads(), *tables(), interleaved=family.rotary_interleaved)
        (q.sum() + k.sum()).backward()

    def norm_and_rotate() -> None:
        weights = new(head_dim), new(head_dim)
        options: Any = {"casting": family.norm_casting, "interleaved": family.rotary_interleaved}
        q, k = qk_norm_rope(*heads(), *weights, *tables(), 1e-6, **options)
        (q.sum() + k.sum()).backward()

    def loss() -> None:
        target = new(_ROWS, grad=False, kind=torch.int64)
        hidden, weight = new(_ROWS, config.hidden_size), new(config.vocab_size, config.hidden_size)
        fused_linear_cross_entropy(hidden, weight, target).backward()

    for width in sorted({config.hidden_size} | ({head_dim} if family.q_norm else set())):
        yield f"rms_norm {width}", lambda width=width: norm(width)
    for name, run in (
        ("swiglu", activation),
        ("rope", rotate),
        ("fused_linear_cross_entropy", loss),
        ("qk_norm_rope", norm_and_rotate),
        ("add_rms_norm", add_and_norm),
    ):
        if name in family.operators:
            yield name, run


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
