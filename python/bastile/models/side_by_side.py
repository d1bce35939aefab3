"""The tokens of a batch without its padding, in one row, and back."""

from __future__ import annotations

from collections import Counter

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
#: A number goes as a larger one that has come before, up to so many times as large, until the tokens that this has
#: added are so many times its own: then it has a graph of its own. To capture one takes as long as three (8 billion
#: parameters) to twenty (0.6) times the tokens of a step.
_RAISED, _ADDED = 2.0, 8


class SideBySide:
    """The tokens of a batch that are no padding, side by side, and behind them some again, which make their number one
    of few: a sequence of its own, or several, none longer than the batch was."""

    def __init__(
        self,
        mask: torch.Tensor,
        device: torch.device,
        to: int | None = None,
        tells: bool = False,
        causal: bool = True,
        longest: int = 0,
    ) -> None:
        """mask: [B, S] of bools, on the host, some of them true. to: how many tokens are to go through the layers, more
        than these; None: as `few` says. tells: whether others than attentions are to be told where sequences are.
        causal: whether no token sees what is behind it. longest: as many tokens as attentions are to be told that a
        sequence has at least."""
        self.rows, self.length = mask.shape
        self.longest = longest
        tokens = mask.flatten().nonzero().flatten()
        self.count = len(tokens)
        self.to = few(self.count + 1) if to is None else to
        behind = torch.arange(self.to - self.count)
        sequences = torch.cat([tokens // self.length, self.rows + behind // self.length])
        is_one = causal and bool((sequences[: self.count] == sequences[0]).all())
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


def pays(to: int, rows: int, length: int, causal: bool) -> bool:
    """Whether so many tokens take less than a batch of so many rows of this length."""
    part = _LONG_PART if causal and length > _LONG else _LARGEST_PART
    return to <= part * rows * length


class Numbers:
    """Of tokens, in layers that have a graph of each. One that is rare goes as the next larger one that there is: that
    takes more tokens, and a graph of its own time to capture, and memory. The longest sequence is as long as any that
    has come, for the same reason."""

    def __init__(self) -> None:
        self._went: set[int] = set()
        self._added: Counter[int] = Counter()  # by number: tokens, as those of larger ones
        self._longest = 0

    def of(self, to: int, most: float) -> int:
        """As which so many tokens go; as no more than `most`."""
        if to not in self._went:
            larger = min((n for n in self._went if to < n <= min(most, _RAISED * to)), default=to)
            self._added[to] += larger - to
            if self._added[to] <= _ADDED * to:
                to = larger
        self._went.add(to)
        return to

    def longest(self, length: int) -> int:
        """At least as many tokens as a sequence has, of a batch of rows of this length."""
        self._longest = max(self._longest, 1 << (length - 1).bit_length())
        return self._longest


def few(count: int, steps: int = STEPS) -> int:
    """At least so many tokens; more by at most the next power of two over `steps`, or what is missing to 64."""
    step = max(_LEAST_STEP, (1 << (count - 1).bit_length()) // steps)
    return -(-count // step) * step
