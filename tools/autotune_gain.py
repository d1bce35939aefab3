"""What autotuning gains: the fused output head and loss with the algorithms that Bastile takes by itself, and with
those that measurements speak for, in turns.

    python tools/autotune_gain.py --out FILE.json [model ...]

Forward and backward in bfloat16, on a GPU, queued: at these sizes the device is what is waited for, but for the
smallest, in which the host's time shows. The choices are made before anything is timed, in the cache's folder: with
BASTILE_CACHE set to an empty one they are new. `ratio` is the tuned median over the default's, `ratio_min` the same of
the fastest sample: a gain is in both."""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

import bastile
from bastile.bench.timing import between_events
from bastile.ops.fused_linear_cross_entropy import fused_linear_cross_entropy

#: Hidden size and vocabulary: the bench's models, and some of other shapes.
MODELS = {
    "qwen3-8b": (4096, 151936),
    "qwen3-0.6b": (1024, 151936),
    "gpt-oss": (2880, 201088),
    "smollm2-135m": (576, 49152),
    "phi-3-mini": (3072, 32064),
    "gemma-2-2b": (2304, 256000),
}
ROWS = (512, 4096)
ROUNDS, CALLS = 9, 3


def head(rows: int, hidden: int, vocabulary: int) -> Callable[[], object]:
    generator = torch.Generator("cuda").manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator)

    x, weight = normal(rows, hidden).requires_grad_(), normal(vocabulary, hidden).mul_(0.02).requires_grad_()
    target = torch.randint(vocabulary, (rows,), device="cuda", generator=generator)
    return lambda: torch.autograd.grad(fused_linear_cross_entropy(x, weight, target), (x, weight))


def microseconds(call: Callable[[], object]) -> float:
    return 1e6 / CALLS * between_events(lambda: [call() for _ in range(CALLS)])


def measure(call: Callable[[], object]) -> dict[str, float]:
    samples: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(ROUNDS + 1):
        for tuned, taken in samples.items():
            bastile.set_autotune(tuned)
            time = microseconds(call)
            if turn:  # the first makes the choices, and warms up
                taken.append(time)
    bastile.set_autotune(None)
    default, tuned_us = statistics.median(samples[False]), statistics.median(samples[True])
    fastest = min(samples[True]) / min(samples[False])
    return {"default_us": default, "tuned_us": tuned_us, "ratio": tuned_us / default, "ratio_min": fastest}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="model", help=f"of {', '.join(MODELS)}; all by default")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    unknown = set(options.models) - MODELS.keys()
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: one of {', '.join(MODELS)} is needed")
    found = []
    for name in options.models or MODELS:
        for rows in ROWS:
            case = {"case": f"{name} loss {rows} fwd+bwd"} | measure(head(rows, *MODELS[name]))
            print("{case:30s} {default_us:10.1f} {tuned_us:10.1f} us {ratio:6.3f} {ratio_min:6.3f}".format(**case))
            found.append(case)
            options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
