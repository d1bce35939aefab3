"""What linear layers of one input take on one GPU in a call for one token of each of a few rows: a product a layer, by
cuBLAS, and all in one launch (bst_low_rank_layers). With adapters: what these add by launches behind that one
(bst_low_rank_add), and within it.

    python tools/few_rows.py [--only "8b"] [--rank 16]

Microseconds within a CUDA graph, medians of nine, over copies of the weights that are more than the L2 holds; random
weights of Qwen3's shapes in bfloat16. Prints a JSON object for each case and number of rows, with the weights' bytes at
4.27 TB/s (an H200's copies), and the relative errors of each result against float64, ours and cuBLAS'."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable

import torch

from bastile.ops.low_rank import add_to, fill_layers

ROUNDS, LEAST_CALLS, LEAST_BYTES, BYTES_A_SECOND = 9, 56, 300e6, 4.27e12
SCALE = 2.0  # of adapters
#: The width, and each layer's columns.
CASES = {
    "0.6b qkv": (1024, (2048, 1024, 1024)),
    "0.6b gate up": (1024, (3072, 3072)),
    "0.6b down": (3072, (1024,)),
    "0.6b o": (2048, (1024,)),
    "1.7b gate up": (2048, (6144, 6144)),
    "8b qkv": (4096, (4096, 1024, 1024)),
    "8b gate up": (4096, (12288, 12288)),
    "8b down": (12288, (4096,)),
    "8b o": (4096, (4096,)),
}
ROWS = (1, 8, 16, 32)


def microseconds(call: Callable[[int], object], calls: int) -> float:
    """Of each of so many, which are told their number."""
    call(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i)
    times = []
    for _ in range(3 + ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times[3:])


#: A weight, and its adapter's a and b, if it has one.
Layer = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def together(rows: torch.Tensor, layers: list[Layer], *, within: bool = True) -> list[torch.Tensor]:
    """within: what adapters add is added within the launch; else behind it."""
    results = [rows.new_empty(rows.shape[0], weight.shape[0]) for weight, *_ in layers]
    adapters = [(a, b, SCALE) if within else (None, None, 0.0) for _, a, b in layers]
    fill_layers(rows, [(w, None, y, of) for (w, *_), y, of in zip(layers, results, adapters, strict=True)])
    if not within:
        given = [(y, a, b) for y, (_, a, b) in zip(results, layers, strict=True)]
        add_to(rows, given, [SCALE] * len(given))
    return results


def layer_of(width: int, columns: int, rank: int) -> Layer:
    weight = torch.randn(columns, width, device="cuda", dtype=torch.bfloat16) / width**0.5
    if not rank:
        return weight, None, None
    return weight, torch.randn(rank, width, device="cuda") / width**0.5, torch.randn(columns, rank, device="cuda")


def exact(x: torch.Tensor, layer: Layer) -> torch.Tensor:
    weight, a, b = layer
    y = x.double() @ weight.double().t()
    return y if a is None or b is None else y + SCALE * (x.double() @ a.double().t() @ b.double().t())


def measure(name: str, rows: int, rank: int) -> dict[str, object]:
    width, columns = CASES[name]
    size = 2 * width * sum(columns)
    copies = max(2, int(LEAST_BYTES / size))
    calls = copies * max(1, LEAST_CALLS // copies)
    layers = [[layer_of(width, n, rank) for n in columns] for _ in range(copies)]
    x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    ways: dict[str, Callable[[int], list[torch.Tensor]]] = {
        "cublas": lambda i: [x.mm(weight.t()) for weight, *_ in layers[i % copies]],
        "ours": lambda i: together(x, layers[i % copies]),
    }
    if rank:
        ways = {"behind": lambda i: together(x, layers[i % copies], within=False), "ours": ways["ours"]}
    right = [exact(x, layer) for layer in layers[0]]
    found: dict[str, object] = {
        "case": name,
        "rows": rows,
        "rank": rank,
        "bytes_us": round(1e6 * size / BYTES_A_SECOND, 2),
    }
    for way, call in ways.items():
        found[f"{way}_us"] = round(microseconds(call, calls), 2)
        pairs = zip(call(0), right, strict=True)
        found[f"{way}_errors"] = [round(float((y.double() - its).norm() / its.norm()), 6) for y, its in pairs]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose names begin so")
    parser.add_argument("--rank", type=int, default=0, help="of adapters in float32 that each layer has; 0: none")
    options = parser.parse_args()
    for name in CASES:
        for rows in ROWS if name.startswith(options.only) else ():
            print(json.dumps(measure(name, rows, options.rank)), flush=True)


if __name__ == "__main__":
    with torch.no_grad():
        main()
