"""What would be noted of a kind of step that differs from a noted one in the sizes of its tensors alone.

Whether it was right shows when it is replayed: each layer's arguments are compared with what it was captured for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from bastile.graphs.arguments import Signature
from bastile.graphs.runs import Note


class _Differs(Exception):
    pass


def foreseen(note: Note, given: Any, now: Any, hidden: Signature) -> Note | None:
    """given: the structure of what the noted step's first layer got beside the hidden states, key[0] of its kind; now,
    hidden: the new one's, with its hidden states. None: they differ in more, or a later layer gets what the first did
    not and nothing there was like."""
    first = note.calls[0].hidden
    if note.read:
        return None
    try:
        places: dict[int, Signature] = {}
        _compare(given, now, places)
        sizes: dict[Signature, Signature | None] = {}
        for place, new in places.items():
            if sizes.setdefault(note.others[place], new) != new:
                sizes[note.others[place]] = None  # of several, so of none
        others = [places.get(place) or _of(old, sizes) for place, old in enumerate(note.others)]
        structures: dict[int, Any] = {}  # one object for what was one
        calls = []
        for call in note.calls:
            if call.hidden != first:
                return None
            at = id(call.structure)
            if at not in structures:
                structures[at] = _resized(call.structure, others)
            calls.append(replace(call, structure=structures[at], hidden=hidden))
    except _Differs:
        return None
    return replace(note, calls=calls, others=others)


def _of(old: Signature, sizes: dict[Signature, Signature | None]) -> Signature:
    found = sizes.get(old)
    if found is None:
        raise _Differs
    return found


def _compare(old: Any, new: Any, places: dict[int, Signature]) -> None:
    """Fills in what is at each place now."""
    if type(old) is not type(new):
        raise _Differs
    if not isinstance(old, tuple):
        if old != new:
            raise _Differs
    elif old and new and old[0] is new[0] is torch.Tensor:
        (_, place, before, leads), (_, place_now, now, leads_now) = old, new
        if place != place_now or len(before[0]) != len(now[0]) or before[2:] != now[2:] or leads != leads_now:
            raise _Differs
        places[place] = now
    elif len(old) != len(new):
        raise _Differs
    else:
        for one, other in zip(old, new, strict=True):
            _compare(one, other, places)


def _resized(structure: Any, others: list[Signature]) -> Any:
    if not isinstance(structure, tuple):
        return structure
    if structure and structure[0] is torch.Tensor:
        return torch.Tensor, structure[1], others[structure[1]], structure[3]
    return tuple([_resized(each, others) for each in structure])
