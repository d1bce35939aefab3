"""FSDP2: one process a GPU, the model's weights, gradients and optimiser states spread over all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed


class Ranks:
    """This process among the others. Without any, rank 0 of 1."""

    def __init__(self, rank: int, size: int, rendezvous: str | None, device: torch.device):
        self.rank, self.size, self.device = rank, size, device
        if size > 1:
            backend = "nccl" if device.type == "cuda" else "gloo"
            distributed.init_process_group(
                backend,
                init_method=f"file://{rendezvous}",
                rank=rank,
                world_size=size,
                device_id=device if device.type == "cuda" else None,
            )

    def shard(self, model: Any) -> Any:
        """Each layer by itself. Embedding, last norm and head stay with the model as a whole, so that the head's weight
        is whole when the loss is computed."""
        if self.size > 1:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh(self.device.type, (self.size,))
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        return model

    def together(self) -> None:
        if self.size > 1:
            distributed.barrier()

    def joined(self, figures: dict[str, Any]) -> dict[str, Any]:
        """Rank 0's figures for all: losses are means, tokens are sums, memory is the largest rank's and each one's."""
        if self.size == 1:
            return figures
        everyone: list[Any] = [None] * self.size
        distributed.all_gather_object(everyone, figures)
        peaks = [one["peak_bytes"] for one in everyone]
        return {
            **figures,
            "losses": [sum(step) / self.size for step in zip(*(one["losses"] for one in everyone), strict=True)],
            "tokens_per_second": figures["tokens_per_second"] * self.size,
            "peak_bytes": None if None in peaks else max(peaks),
            "peak_bytes_of_ranks": peaks,
        }

    def end(self) -> None:
        if self.size > 1:
            distributed.barrier()
            distributed.destroy_process_group()
