"""The tokens of a batch without its padding, in one row, and back."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bastile.models.chunks import sent
from bastile.models.mixers import CUTS, IDS
from bastile.ops._segments import of_sequences
from bastile.ops._valid_rows import gather, scatter

#: Of a batch, what may be left: side by side longer causal rows attend at two thirds of the rate that they have by
#: themselves (docs/masked_attention.md); shorter ones hardly notice, and of each new length they would need graphs.
_LARGEST_PART, _LONG_PART, _LONG = 1.0, 0.9, 1024
#: Numbers of tokens are made few: eight between two powers of two, and four where each has graphs of its own.
STEPS, STEPS_OF_GRAPHS, _LEAST_STEP = 16, 8, 64


class SideBySide:
    """The tokens of a batch that are no padding, side by side, and behind them some again, which make their number one
    of few: a sequence of its own, or several, none longer than the batch was."""

    def __init__(
        self,
        mask: torch.Tensor,
        device: torch.device,
        steps: Callable[[int], int] = lambda _: STEPS,
        tells: bool = False,
        causal: bool = True,
    ) -> None:
        """mask: [B, S] of bools, on the host, some of them true. steps: as of `few`, for so many tokens. tells: whether
        others than attentions are to be told where sequences are. causal: whether no token sees what is behind it."""
        self.rows, self.length = mask.shape
        tokens = mask.flatten().nonzero().flatten()
        self.count = len(tokens)
        self.to = few(self.count + 1, steps(self.count))
        behind = torch.arange(self.to - self.count)
        sequences = torch.cat([tokens // self.length, self.rows + behind // self.length])
        is_one = causal and bool((sequences[: self.count] == sequences[0]).all())
        self._causal = causal
        #: Which sequence each token is of, [1, T]. Of an only one, what is behind it is a part that nobody sees: None.
        self.sequences = None if is_one else sequences[None]
        positions = torch.cat([tokens % self.length, behind % self.length])
        again = tokens[behind % self.count]
        cuts = of_sequences(sequences[None]).cuts[0] if tells and not is_one else positions[:0]
        parts = [positions, tokens, again, cuts, sequences if len(cuts) else cuts]
        positions, self._tokens, self._again, cuts, ids = sent(torch.cat(parts), device).split([*map(len, parts)])
        self.positions = positions.unsqueeze(0)
        #: What is to tell others than attentions where sequences are.
        self.told = {IDS: ids[None].int(), CUTS: cuts.int()} if len(cuts) else {}

    def pays(self) -> bool:
        part = _LONG_PART if self._causal and self.length > _LONG else _LARGEST_PART
        return self.to <= part * self.rows * self.length

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """[B or 1, S, ...] as [1, T, ...]. Behind come the first tokens again, for whose sake no layer meets anything
        new, as zeros might be; what says of which tokens images are says of none there."""
        whole = tensor.expand(self.rows, *tensor.shape[1:]).flatten(0, 1)
        behind = whole.detach().index_select(0, self._again)
        if tensor.dtype is torch.bool:
            behind.zero_()
        return torch.cat([gather(whole, self._tokens), behind])[None]

    def back(self, hidden: torch.Tensor) -> torch.Tensor:
        """[1, T, H] as [B, S, H]."""
        tokens = self._tokens.to(hidden.device)  # another, where a model lies on several
        spread = scatter(hidden[0, : self.count], tokens, self.rows * self.length)
        return spread.unflatten(0, (self.rows, self.length))


def few(count: int, steps: int = STEPS) -> int:
    """At least so many tokens; more by at most the next power of two over `steps`, or what is missing to 64."""
    step = max(_LEAST_STEP, (1 << (count - 1).bit_length()) // steps)
    return -(-count // step) * step
