"""Microseconds of attention within segments, Bastile's kernels and PyTorch's flash attention told of the same segments,
on one Hopper GPU: heads of published models, sequences as trainers put them side by side. Where all have one length, as
rows without padding, cuDNN's attention too, which is told of none.

    python tools/segment_attention.py [--only qwen3-8b]

Each pass as a CUDA graph over copies of its inputs that are more than the L2 holds, all contenders in turns, medians
of eleven. Prints a JSON object a case as it goes, with the relative errors of results and gradients against float64 of
the smaller cases."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from bastile.ops import _flash as flash
from bastile.ops import _varlen as ours
from bastile.ops._segments import within

DEVICE = torch.device("cuda")
ROUNDS, MOST_CHECKED = 11, 4096  # tokens
_SMALL, _LARGE = [265, 710, 995, 949], [733, 963, 728, 1642]


@dataclass(frozen=True)
class Case:
    """Heads of queries and of keys, their width, and the tokens of each sequence."""

    heads: int
    groups: int
    dim: int
    lengths: list[int]
    causal: bool = True
    window: int = 0

    @property
    def is_even(self) -> bool:
        return len({*self.lengths}) == 1


CASES = {
    "qwen3-0.6b, 4 rows of 265 to 995": Case(16, 8, 128, _SMALL),
    "qwen3-8b, 4 rows of 728 to 1642": Case(32, 8, 128, _LARGE),
    "qwen2.5-7b, 4 rows of 728 to 1642": Case(28, 4, 128, _LARGE),
    "llama-3.2-1b, 4 rows of 265 to 995": Case(32, 8, 64, _SMALL),
    "qwen2.5-0.5b, 4 rows of 265 to 995": Case(14, 2, 64, _SMALL),
    "gemma-3-4b, 4 rows of 265 to 995": Case(8, 4, 256, _SMALL),
    "gemma-3-1b, 4 rows of 265 to 995": Case(4, 1, 256, _SMALL),
    "qwen3-0.6b, 4096 packed, 8 sequences": Case(16, 8, 128, [500, 300, 900, 700, 100, 396, 800, 400]),
    "qwen3-8b, one row of 8192": Case(32, 8, 128, [8192]),
    "llama-3.2-1b, one row of 8192": Case(32, 8, 64, [8192]),
    "gemma-3-4b, one row of 8192": Case(8, 4, 256, [8192]),
    "qwen3-0.6b, one row of 512": Case(16, 8, 128, [512]),
    "qwen3-0.6b, 4 rows of 1024": Case(16, 8, 128, [1024] * 4),
    "qwen3-8b, one row of 512": Case(32, 8, 128, [512]),
    "qwen3-8b, one row of 2048": Case(32, 8, 128, [2048]),
    "qwen3-8b, 4 rows of 2048": Case(32, 8, 128, [2048] * 4),
    "llama-3.2-1b, 4 rows of 1024": Case(32, 8, 64, [1024] * 4),
    "qwen2.5-0.5b, 4 rows of 1024": Case(14, 2, 64, [1024] * 4),
    "gemma-3-4b, 4 rows of 1024": Case(8, 4, 256, [1024] * 4),
    "bert-base, 32 rows of 128": Case(12, 12, 64, [128] * 32, causal=False),
    "vit-base, 32 rows of 197": Case(12, 12, 64, [197] * 32, causal=False),
    "gemma-3-4b in windows of 1024, one row of 8192": Case(8, 4, 256, [8192], window=1024),
    "gemma-3-1b in windows of 512, 4 rows of 728 to 1642": Case(4, 1, 256, _LARGE, window=512),
    "gpt-oss-20b in windows of 128, 4 rows of 728 to 1642": Case(64, 8, 64, _LARGE, window=128),
    "mistral-7b in windows of 4096, one row of 8192": Case(32, 8, 128, [8192], window=4096),
    "phi-3-mini, 4 rows of 728 to 1642": Case(32, 32, 96, _LARGE),
    "stablelm-3b, 4 rows of 728 to 1642": Case(32, 32, 80, _LARGE),
    "modernbert-base in windows of 65, 16 rows of 32 to 512": Case(
        12, 12, 64, [*range(32, 544, 32)], causal=False, window=65
    ),
    "bert-base, 32 rows of 4 to 128": Case(12, 12, 64, [*range(4, 132, 4)], causal=False),
    "bert-large, 16 rows of 32 to 512": Case(16, 16, 64, [*range(32, 544, 32)], causal=False),
}


def passes(case: Case, given: list[Tensor], cuts: Tensor) -> dict[str, Callable[[], object]]:
    """By contender and pass."""
    q, k, v, dy = given
    scale, longest = case.dim**-0.5, 1 << (max(case.lengths) - 1).bit_length()
    shapes, how = [*cuts, longest, longest, 0.0, case.causal], flash.window_of(case.window, case.causal)
    said, rows = (None, len(case.lengths)) if case.is_even else (cuts, 0)
    last = case.causal, scale, case.window, rows
    y, lse = ours.forward(q, k, v, said, *last)
    theirs, their_lse, *random, _ = flash.forward(q, k, v, *shapes, False, scale=scale, **how)
    contenders: dict[str, Callable[[], object]] = {
        "flash forward": lambda: flash.forward(q, k, v, *shapes, False, scale=scale, **how),
        "forward": lambda: ours.forward(q, k, v, said, *last),
        "flash backward": lambda: flash.backward(dy, q, k, v, theirs, their_lse, *shapes, *random, scale=scale, **how),
        "backward": lambda: ours.backward(dy, q, k, v, said, y, lse, *last),
    }
    return contenders | (of_cudnn(case, given) if case.is_even and not case.window else {})


def of_cudnn(case: Case, given: list[Tensor]) -> dict[str, Callable[[], object]]:
    """As `passes`; nothing where cuDNN does not serve such heads."""
    q, k, v, dy = [t.unflatten(0, (len(case.lengths), -1)).transpose(1, 2) for t in given]
    scale = case.dim**-0.5

    def forward() -> tuple[Tensor, ...]:
        return flash.cudnn_forward(q, k, v, None, True, 0.0, case.causal, False, scale=scale)

    def backward() -> tuple[Tensor, ...]:
        return flash.cudnn_backward(dy, q, k, v, y, lse, *random, None, *cuts, 0.0, case.causal, scale=scale)

    try:
        y, lse, *cuts, seed, offset, _ = forward()
        random = seed, offset
        backward()
    except RuntimeError as error:
        print(f"cuDNN: {str(error).splitlines()[0]}", file=sys.stderr)
        return {}
    return {
        "cudnn forward": lambda: [forward()[0].transpose(1, 2).flatten(0, 1)],
        "cudnn backward": lambda: [t.transpose(1, 2).flatten(0, 1) for t in backward()],
    }


def exact(case: Case, given: list[Tensor], cuts: list[int]) -> list[Tensor]:
    """y, dq, dk and dv in float64."""
    q, k, v = [t.double().requires_grad_() for t in given[:3]]
    parts = []
    for begin, end in pairwise(cuts):
        own, *both = [t[begin:end].transpose(0, 1) for t in (q, k, v)]
        keys, values = [t.repeat_interleave(case.heads // case.groups, 0) for t in both]
        scores = own @ keys.mT * case.dim**-0.5
        at = torch.arange(scores.shape[-1], device=scores.device)
        seen = within(at[:, None] - at, case.window, case.causal)
        scores = scores.masked_fill(~seen, float("-inf"))
        parts.append((scores.softmax(-1) @ values).transpose(0, 1))
    y = torch.cat(parts)
    return [y.detach(), *torch.autograd.grad(y, (q, k, v), given[3].double())]


def graph_of(calls: list[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    for call in calls:
        call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def seconds(graph: torch.cuda.CUDAGraph, calls: int) -> float:
    begin, end = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / calls / 1e3


def run(name: str, case: Case) -> dict[str, object]:
    cuts = [0, *accumulate(case.lengths)]
    on_device = torch.tensor(cuts, dtype=torch.int32, device=DEVICE).expand(2, -1).contiguous()
    drawn = torch.Generator(DEVICE).manual_seed(0)
    sizes = [(cuts[-1], heads, case.dim) for heads in (case.heads, case.groups, case.groups, case.heads)]
    bytes_each = sum(2 * tokens * heads * dim for tokens, heads, dim in sizes)
    count = 2 + torch.cuda.get_device_properties(DEVICE).L2_cache_size // bytes_each
    copies = [
        [torch.randn(s, device=DEVICE, dtype=torch.bfloat16, generator=drawn) for s in sizes] for _ in range(count)
    ]
    made = [passes(case, given, on_device) for given in copies]
    graphs = {what: graph_of([each[what] for each in made]) for what in made[0]}
    rounds = [{what: seconds(graph, count) for what, graph in graphs.items()} for _ in range(ROUNDS + 1)][1:]
    row: dict[str, object] = {"title": name, **vars(case)}
    row["seconds"] = {what: statistics.median(each[what] for each in rounds) for what in graphs}
    if cuts[-1] <= MOST_CHECKED:
        want, first = exact(case, copies[0], cuts), made[0]
        for who in [name.removesuffix("forward") for name in first if name.endswith("forward")]:
            found = [first[f"{who}forward"]()[0], *first[f"{who}backward"]()]  # type: ignore[index, misc]
            errors = [float((f.double() - w).norm() / w.norm()) for f, w in zip(found, want, strict=True)]
            row[f"{who}errors"] = dict(zip(("y", "dq", "dk", "dv"), errors, strict=True))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose names begin so")
    options = parser.parse_args()
    for name, case in CASES.items():
        if name.startswith(options.only):
            row = run(name, case)
            print(json.dumps(row), flush=True)
            print(name, *[f"{k} {1e6 * v:.1f}" for k, v in row["seconds"].items()], file=sys.stderr)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
