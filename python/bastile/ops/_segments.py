"""Which keys each query of a batch sees, in a few numbers: the sequences of its rows, which are segments of all its
tokens, and a window."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

#: Segments that a row with padding has behind it in the second pair of cuts (`of_padding`), and that it has without
#: causal.
_BEHIND_A_ROW, _OF_A_ROW = 4, 3


class Segments(NamedTuple):
    """Which keys each query of a batch sees.

    Args:
        cuts: int32 [M, N], M being 0 where each row is one sequence, or 2, or 4: pairs of rows with the cuts between
            segments of queries, and between those of keys, among the batch's tokens. The queries of a segment see the
            keys of the segment of the same number: in the first pair of four, and in an only one, those that are not
            behind themselves; in the second of four, and in the only one of `behind`, all.
        longest: at least as many tokens as any segment has.
        window: how many keys a query sees at most, itself among them; 0: all. Without causal: to either side.
        behind: whether padding stands behind sequences alone. Then the only pair is of what stands there.
        causal: whether no query sees what stands behind it. Where it does, there is one pair, or none.
    """

    cuts: Tensor
    longest: int
    window: int = 0
    behind: bool = False
    causal: bool = True


def of_whole_rows(length: int, window: int = 0, device: torch.device | None = None, *, causal: bool = True) -> Segments:
    """Of rows that are one sequence each; a window of as many tokens or more is none."""
    cuts = torch.empty(0, 1, dtype=torch.int32, device=device)
    return Segments(cuts, length, window if window < length else 0, causal=causal)


def of_padding(mask: Tensor, window: int = 0, *, causal: bool = True) -> Segments | None:
    """Segments of rows with padding.

    Args:
        mask: [B, S] on the CPU: of which tokens each row's sequence is, all others are padding.
        window: as in `Segments`; one of S or more is none.
        causal: as in `Segments`. If not, padding sees all of its row's sequence.

    Returns:
        Segments on the CPU, or None for what these cannot say: a row whose sequence is not in one piece, or that has
        none; padding behind sequences that are longer than a window, and without causal any beside a window.
    """
    mask = mask.bool()
    rows, length = mask.shape
    if bool(mask.all()):
        return of_whole_rows(length, window, causal=causal)
    count, first = mask.sum(1), mask.int().argmax(1)
    end = first + count
    at = torch.arange(length)
    in_one_piece = (at >= first[:, None]) & (at < end[:, None])
    if not bool(count.all()) or not torch.equal(in_one_piece, mask):
        return None
    window = window if window < length else 0
    before, after = bool(first.any()), bool((end < length).any())
    if window and (after or not causal):
        return None
    start = torch.arange(rows) * length
    first, end, following = start + first, start + end, start + length
    total = rows * length
    if not causal:  # (none | left) (row | real) (none | right)
        cuts = [torch.stack(each, 1).flatten() for each in ([start, start, following], [start, first, end])]
        return Segments(nn.functional.pad(torch.stack(cuts), [0, 1], value=total).int(), length, causal=False)
    pairs = []
    if before:  # (left | none) (none | left) (real | real) (right | none) (none | right)
        pairs += [[start, first, first, end, following], [start, start, first, end, end]]
    if after:  # (all but right | none) (none | left) (right | real) (none | right)
        pairs += [[start, end, end, following], [start, start, first, end]]
    cuts = [torch.stack(each, 1).flatten() for each in pairs]
    most = max(len(each) for each in cuts) + 1
    padded = [nn.functional.pad(each, [0, most - len(each)], value=total) for each in cuts]
    return Segments(torch.stack(padded).int(), length, window, behind=not before)


def of_sequences(ids: Tensor, window: int = 0, *, causal: bool = True) -> Segments:
    """Segments of sequences that stand one behind another in a row.

    Args:
        ids: [B, S] on the CPU: a number for each sequence of a row, the same for all of its tokens.
        window: as in `Segments`.
        causal: likewise.

    Returns:
        Segments on the CPU. Their number, and the longest, are rounded up to a power of two, so that few kinds come.
    """
    rows, length = ids.shape
    begins = torch.ones(rows, length, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    starts = [*begins.flatten().nonzero().flatten().tolist(), rows * length]
    longest = max((end - start for start, end in pairwise(starts)), default=0)
    count = 1 << (len(starts) - 2).bit_length()
    cuts = torch.tensor([starts + [rows * length] * (count + 1 - len(starts))], dtype=torch.int32)
    # Of segments of one token PyTorch's flash attention takes as many as there are tokens, and no empty ones.
    longest = max(min(length, 1 << (longest - 1).bit_length()), 2)
    return Segments(cuts.expand(2, -1).contiguous(), longest, window if window < longest else 0, causal=causal)


def with_more_behind(segments: Segments, rows: int, more: int) -> Segments:
    """What `of_padding` or `of_whole_rows` has made without causal, of rows that have more padding behind them: that
    sees its row's sequence, and within a window itself."""
    cuts, length, window, _, _ = segments
    longer = length + more
    start = torch.arange(rows, device=cuts.device, dtype=torch.int32) * longer
    if len(cuts):
        at = torch.arange(rows * _OF_A_ROW + 1, device=cuts.device, dtype=torch.int32)
        row, is_next = at // _OF_A_ROW, at % _OF_A_ROW == _OF_A_ROW - 1  # of queries the third is the next row's first
        return Segments(cuts + more * torch.stack([row + is_next, row]), longer, causal=False)
    # (row) (right), or as `of_padding` makes them of padding behind alone
    own = [[start, start + length]] * 2 if window else [[start, start, start + longer], [start, start, start + length]]
    cuts = torch.stack([torch.stack(each, 1).flatten() for each in own])
    return Segments(nn.functional.pad(cuts, [0, 1], value=rows * longer), longer, window, causal=False)


def seen(segments: Segments, rows: int, length: int) -> Tensor:
    """[rows, 1, S, S]: the mask that these segments stand for."""
    cuts, _, window, behind, is_causal = segments
    at = torch.arange(length, device=cuts.device)
    before = at[:, None] - at[None, :]
    causal = within(before, window, is_causal)
    if not len(cuts):
        return causal.expand(rows, 1, -1, -1)
    token = torch.arange(rows * length, device=cuts.device, dtype=cuts.dtype)
    of = [torch.searchsorted(each, token, right=True).view(rows, length) for each in cuts]
    same = [q[:, None, :, None] == k[:, None, None, :] for q, k in zip(of[::2], of[1::2], strict=True)]
    if behind:
        right = is_behind(segments, rows, length)[:, None, :, None]
        return torch.where(right, same[0], causal)
    return (same[0] & causal) | same[1] if len(same) > 1 else same[0] & causal


def within(before: Tensor, window: int, causal: bool) -> Tensor:
    """Whether a query sees a key of its own sequence that stands so many places before it."""
    seen_behind = before >= 0 if causal else before > -(window or math.inf)
    return seen_behind & (before < window) if window else seen_behind


def is_behind(segments: Segments, rows: int, length: int) -> Tensor:
    """[B, S]: which tokens stand behind their row's sequence."""
    end = segments.cuts[-2, 1 : rows * _BEHIND_A_ROW : _BEHIND_A_ROW]
    token = torch.arange(rows * length, device=end.device, dtype=end.dtype).view(rows, length)
    return token >= end[:, None]
