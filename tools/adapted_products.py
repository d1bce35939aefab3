"""What the operators of layers with adapters take on one GPU, beside the operators and products that they replace.

    python tools/adapted_products.py [--rank 16] [--json FILE]

Three tables, in microseconds, medians of nine CUDA graphs of twelve calls each, in turns, over tensors in rotation:

- a linear layer with its adapter (low_rank_linear): the frozen product alone; the thin product and the large one that
  is added to it; both as one;
- the gradient of an input (low_rank_dx) of layers of so many columns: their products alone; the thin one and theirs,
  added up; all as one; and theirs as one, without adapters;
- a gated unit's backward pass with adapters around it (low_rank_glu_backward): the unit's operator alone; that with
  its result, low_rank_backward of gate and of up, and the product for down's A; all as one."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable

import torch

from bastile.ops import low_rank
from bastile.ops._glu import unit_of

TURNS, CALLS, SETS = 9, 12, 3
#: Rows, columns and width of layers; rows and columns of units. Qwen3-8B's at 4 x 2048, Qwen3-0.6B's at 8 x 1024.
LAYERS = [
    (8192, 12288, 4096),
    (8192, 4096, 4096),
    (8192, 1024, 4096),
    (8192, 4096, 12288),
    (2048, 12288, 4096),
    (8192, 3072, 1024),
    (8192, 2048, 1024),
    (8192, 1024, 2048),
    (8192, 1024, 3072),
]
#: Rows, width and each layer's columns.
INPUTS = [
    (8192, 4096, 12288, 12288),
    (8192, 4096, 4096, 1024, 1024),
    (8192, 4096, 4096),
    (8192, 12288, 4096),
    (2048, 4096, 12288, 12288),
    (2048, 4096, 4096, 1024, 1024),
    (8192, 1024, 3072, 3072),
    (8192, 1024, 2048, 1024, 1024),
    (8192, 2048, 1024),
    (8192, 3072, 1024),
]
UNITS = [(8192, 12288), (2048, 12288), (512, 12288), (8192, 3072)]
Ways = dict[str, Callable[[int], object]]


def medians(ways: Ways, refresh: list[torch.Tensor]) -> dict[str, float]:
    """Microseconds of a call. refresh: what calls write over, and is drawn anew before each graph."""
    graphs = {}
    for name, way in ways.items():
        for k in range(SETS):
            way(k)
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for k in range(CALLS):
                way(k % SETS)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(TURNS):
        for name, graph in graphs.items():
            for tensor in refresh:
                tensor.normal_()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end) / CALLS * 1e3)
    return {name: round(statistics.median(taken), 1) for name, taken in times.items()}


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def of_layer(rows: int, columns: int, width: int, rank: int) -> dict[str, float]:
    x = [random(rows, width) for _ in range(SETS)]
    weight = [random(columns, width, scale=width**-0.5) for _ in range(SETS)]
    thin, b, y = random(rows, 3 * rank)[:, rank : 2 * rank], random(columns, rank), random(rows, columns)
    ways: Ways = {
        "frozen": lambda k: torch.mm(x[k], weight[k].t(), out=y),
        "two products": lambda k: y.addmm_(thin, b.t(), beta=0).addmm_(x[k], weight[k].t()),
        "as one": lambda k: low_rank.linear_into(x[k], weight[k], thin, b, None, y, 1.0),
    }
    return medians(ways, [])


def of_input(rows: int, width: int, *layers: int, rank: int) -> dict[str, float]:
    """rank: of each layer's adapter."""
    weights = [[random(n, width, scale=n**-0.5) for n in layers] for _ in range(SETS)]
    gradients = [[random(rows, n) for n in layers] for _ in range(SETS)]
    g, a, dx = random(rows, rank * len(layers)), random(rank * len(layers), width), random(rows, width)

    def products(k: int, adds: int) -> None:
        for dy, weight in zip(gradients[k], weights[k], strict=True):
            dx.addmm_(dy, weight, beta=adds)
            adds = 1

    def one_by_one(k: int) -> None:
        dx.addmm_(g, a, beta=0)
        products(k, 1)

    def as_one(k: int, *adapters: torch.Tensor) -> None:
        low_rank.input_gradient(gradients[k], weights[k], *adapters, into=dx)

    ways: Ways = {"frozen": lambda k: products(k, 0), "one by one": one_by_one, "as one": lambda k: as_one(k, g, a)}
    if len(layers) > 1:
        ways["frozen, as one"] = as_one
    return medians(ways, [])


def of_unit(rows: int, columns: int, rank: int) -> dict[str, float]:
    unit = unit_of("adapted_products", "silu")
    sets = [[random(rows, columns) for _ in range(3)] for _ in range(SETS)]
    thin, into, g_down = random(rows, 2 * rank), random(rows, 2 * rank), random(rows, rank)
    b = [random(columns, rank) for _ in range(2)]

    def apart(k: int) -> None:
        dy, gate, up = sets[k]
        unit.backward_inplace(dy, gate, up, True, True, True)
        for i, gradient in enumerate((gate, up)):
            mine = slice(i * rank, (i + 1) * rank)
            low_rank.backward_into(gradient, thin[:, mine], b[i], into[:, mine], 1.0)
        torch.mm(g_down.t(), dy, out_dtype=torch.float32)

    ways: Ways = {
        "the unit": lambda k: unit.backward_inplace(*sets[k], True, True, False),
        "one by one": apart,
        "as one": lambda k: low_rank.glu_backward(
            *unit.apart, 1.0, 1.0, *sets[k], thin, *b, g_down, None, into, False, True, False
        ),
    }
    return medians(ways, [tensor for each in sets for tensor in each])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=16, help="a multiple of 8, 32 at most (16)")
    parser.add_argument("--json", metavar="FILE", help="where the figures go, too")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device is there; these times are a GPU's")
    torch.manual_seed(0)
    found = []
    for title, shapes, measure in (("layer", LAYERS, of_layer), ("input", INPUTS, of_input), ("unit", UNITS, of_unit)):
        for shape in shapes:
            row = measure(*shape, rank=options.rank)  # type: ignore[operator]
            found.append({"of": title, "shape": shape, "rank": options.rank, **row})
            told = "  ".join(f"{name} {taken:8.1f}" for name, taken in row.items())
            print(f"{title:5}  {' x '.join(map(str, shape)):>30}  {told}", flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
