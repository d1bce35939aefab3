"""Tokenised examples: how a command hands them to its training processes, and how these make batches of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence

IGNORED = -100  # the label of a token that is not to be learned


class Examples(torch.utils.data.Dataset):
    """Sequences of token ids with their labels, end to end in two tensors, so that a file of them is read at once."""

    def __init__(self, ids: torch.Tensor, labels: torch.Tensor, ends: torch.Tensor) -> None:
        self.ids, self.labels, self.ends = ids, labels, ends

    @classmethod
    def of_text(cls, ids: torch.Tensor, length: int) -> Examples:
        """Text cut into sequences of one length; what is left at its end is not used."""
        count = len(ids) // length
        ids = ids[: count * length]
        return cls(ids, ids, torch.arange(1, count + 1) * length)

    @classmethod
    def of_sequences(cls, sequences: Iterable[tuple[list[int], list[int]]]) -> Examples:
        """Of (ids, labels), each pair of one length."""
        pairs = list(sequences)
        ids = torch.tensor([token for sequence, _ in pairs for token in sequence])
        labels = torch.tensor([label for _, sequence in pairs for label in sequence])
        return cls(ids, labels, torch.tensor([len(sequence) for sequence, _ in pairs]).cumsum(0))

    @classmethod
    def load(cls, path: Path | str) -> Examples:
        return cls(**torch.load(path, weights_only=True))

    def save(self, path: Path) -> None:
        torch.save({"ids": self.ids, "labels": self.labels, "ends": self.ends}, path)

    def digest(self) -> str:
        """Of all that they hold."""
        digest = hashlib.sha256()
        for tensor in (self.ids, self.labels, self.ends):
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        begin, end = int(self.ends[index - 1]) if index else 0, int(self.ends[index])
        return {"input_ids": self.ids[begin:end], "labels": self.labels[begin:end]}


def batch(examples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Examples as one batch, padded at the right where their lengths differ. Only then is there a mask: without one,
    attention may take its causal path."""
    lengths = torch.tensor([len(example["input_ids"]) for example in examples])
    made = {
        "input_ids": pad_sequence([example["input_ids"] for example in examples], batch_first=True),
        "labels": pad_sequence([example["labels"] for example in examples], batch_first=True, padding_value=IGNORED),
    }
    if len(lengths.unique()) > 1:
        made["attention_mask"] = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    return made
