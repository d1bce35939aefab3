"""How fast the output head's losses are with the vocabulary parted over GPUs, over one GPU's rate on its part alone.

    python tools/vocabulary_parallel.py [--tokens 4096 8192 16384] [--vocabulary 151936] [--hidden 4096] [--check]

One process a GPU that is there, joined by NCCL. Each computes its part of the vocabulary, in turns: alone (an ordinary
loss of as large a vocabulary, all GPUs at once), and as a part. GPU time of a forward and backward pass, the median of
ten; rate: the first over the second. --check: losses and gradients against one GPU's of the whole, in bfloat16."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable

import torch
from torch import distributed

from bastile.bench.timing import between_events
from bastile.ops.fused_linear_cross_entropy import fused_linear_cross_entropy
from bastile.ops.linear_logprobs import linear_logprobs
from bastile.ops.vocabulary_parallel import VocabularyShard

TURNS = 10
Run = Callable[[VocabularyShard | None], torch.Tensor]


def runs(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> dict[str, Run]:
    def loss(shard: VocabularyShard | None) -> torch.Tensor:
        t = target if shard is not None else target % weight.shape[0]
        return fused_linear_cross_entropy(hidden, weight, t, shard=shard, valid_rows=t.numel())

    def log_probs(shard: VocabularyShard | None) -> torch.Tensor:
        t = target if shard is not None else target % weight.shape[0]
        made = linear_logprobs(hidden, weight, t, outputs=("entropy",), shard=shard, valid_rows=t.numel())
        assert made.entropy is not None
        return made.log_probs.mean() + 0.01 * made.entropy.mean()

    return {"loss, mean": loss, "log_probs, entropy": log_probs}


def measure(tokens: int, vocabulary: int, width: int, rank: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    shard = VocabularyShard.even(vocabulary)
    rows = min(-(-vocabulary // distributed.get_world_size()), vocabulary - shard.start)
    hidden = torch.randn(tokens, width, device="cuda", generator=generator).bfloat16().requires_grad_()
    target = torch.randint(0, vocabulary, (tokens,), device="cuda", generator=generator)
    weight = (torch.randn(rows, width, device="cuda", generator=generator) * width**-0.5).bfloat16().requires_grad_()
    for name, run in runs(hidden, weight, target).items():
        times: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(TURNS + 2):
            for parted in (False, True):
                distributed.barrier()
                hidden.grad = weight.grad = None
                taken = 1e3 * between_events(lambda run=run, parted=parted: run(shard if parted else None).backward())
                if turn > 1:
                    times[parted].append(taken)
        mine = torch.tensor([statistics.median(times[False]), statistics.median(times[True])], device="cuda")
        distributed.all_reduce(mine, distributed.ReduceOp.MAX)
        alone, parted = mine.tolist()
        if rank == 0:
            print(f"{name}, {tokens} tokens: {alone:.2f} ms alone, {parted:.2f} parted, rate {alone / parted:.3f}")


def check(tokens: int, vocabulary: int, width: int, rank: int) -> None:
    """Against one GPU's, each process for its own part; errors over the largest number."""
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(tokens, width, device="cuda", generator=generator)
    whole = torch.randn(vocabulary, width, device="cuda", generator=generator) * width**-0.5
    target = torch.randint(0, vocabulary, (tokens,), device="cuda", generator=generator)
    shard = VocabularyShard.even(vocabulary)
    part = slice(shard.start, shard.start + -(-vocabulary // distributed.get_world_size()))
    for dtype in (torch.float32, torch.bfloat16):
        results = []
        for parted in (False, True):
            x = hidden.to(dtype, copy=True).requires_grad_()
            w = (whole[part] if parted else whole).to(dtype, copy=True).requires_grad_()
            for run in runs(x, w, target).values():
                total = run(shard if parted else None)
                total.backward()
                dweight = w.grad if parted else w.grad[part]
                results.append((total.detach(), x.grad.float(), dweight.float()))
                x.grad = w.grad = None
        for name, one, parts in zip(("loss", "log_probs"), results[:2], results[2:], strict=True):
            off = [float((a - b).abs().max() / a.abs().max()) for a, b in zip(one, parts, strict=True)]
            print(f"check, process {rank}, {dtype}, {name}: loss, dhidden, dweight off by", *[f"{e:.1e}" for e in off])


def process(rank: int, folder: str, options: argparse.Namespace) -> None:
    torch.cuda.set_device(rank)
    count = torch.cuda.device_count()
    distributed.init_process_group("nccl", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=count)
    if options.check:
        check(1000, 10007, 512, rank)
    for tokens in options.tokens:
        measure(tokens, options.vocabulary, options.hidden, rank)
    distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="*", default=[4096, 8192, 16384])
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if torch.cuda.device_count() < 2:
        raise SystemExit("vocabulary_parallel: two GPUs are needed")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(process, (folder, options), nprocs=torch.cuda.device_count())


if __name__ == "__main__":
    main()
