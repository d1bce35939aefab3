"""Methods of other packages' classes that are known, by their code or otherwise: what is put in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bastile.guards import stand_in_for, stock_of
from bastile.models.forms import bare, is_known


class KnownMethod:
    """One method of a class. Where it is another, it stays."""

    def __init__(
        self,
        name: str,
        known: frozenset[str] | Callable[[Any], bool],
        make: Callable[[Any, KnownMethod], Any],
    ) -> None:
        """known: the fingerprints of its code, or what says of a method whether it is the one. make: of the original
        and this, what is to be called in its place. While this is not in force it calls the original: what others have
        put around it stays when it is taken out."""
        self.name, self.make = name, make
        self._is_known = known if callable(known) else lambda method: is_known(bare(method), known)
        self._is_put = False

    def put_into(self, cls: Any) -> None:
        self._is_put = True
        there = vars(cls).get(self.name)
        if there is not None and stock_of(there) is there and self._is_known(there):
            made = self.make(there, self)
            stand_in_for(there, made)
            setattr(cls, self.name, made)

    def take_out_of(self, cls: Any) -> None:
        self._is_put = False
        there = vars(cls).get(self.name)
        if there is not None and stock_of(there) is not there:
            setattr(cls, self.name, stock_of(there))

    @property
    def is_in_force(self) -> bool:
        return self._is_put and not torch.compiler.is_compiling()
