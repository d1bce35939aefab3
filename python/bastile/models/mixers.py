"""Convolutions and recurrences of layers, through which a token sees others, told where sequences begin in a row of
several: they hand what they are told (`seq_idx`, `cu_seq_lens_q`) to functions that Bastile has replaced, of which the
code of Transformers' own cannot keep sequences apart."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from bastile.guards import function_of, is_ours
from bastile.models.forms import is_known
from bastile.models.rebind import wrapped_cell
from bastile.models.sites import calls

#: The arguments of a model that say which sequence each token is of, [B, S], and where sequences begin and end.
IDS, CUTS = "seq_idx", "cu_seq_lens_q"
#: What any such module's code calls, and no other's.
_LEAVES_OUT = "apply_mask_to_padding_states"
#: Forwards that hand them on, in Transformers 5.17 and later.
_HAND_ON = frozenset(
    {
        *("756183999aab", "6be15fdbd199", "55bd47f5230b"),  # Qwen3.5's
        *("402fc4b9b6f1", "8f5f5ffd14d4", "da78970e989f"),  # Qwen3-Next's
        *("44f5d5f4ae7c", "7eae23563771", "b9666127807a"),  # OLMo-Hybrid's
        *("953467a422e5", "0b6a9835cfcb", "b70c7db60b74"),  # LFM2's
        *("f9b7c5540426", "aba91480bec5", "5332a93c32ca"),  # Mamba-2's
    }
)
#: To these, as far as a release, or a model, has them.
_TO = ("causal_conv1d_fn", "torch_chunk_gated_delta_rule", "mamba2_chunk_scan", "mamba2_split_conv1d_scan_combined")


class Mixers:
    """Those of some layers."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._all = [module for each in layers for module in each.modules() if _leaves_out(type(module).forward)]
        self._running: dict[Any, Any] = {}  # by a module's forward, what does its work
        #: Whether their code hands on what they are told.
        self.hand_on = hand_on({type(module) for module in self._all})

    def __bool__(self) -> bool:
        return bool(self._all)

    @property
    def parts(self) -> frozenset[nn.Module]:
        """Modules in them that hold weights and are not called: those of convolutions."""
        return frozenset(part for each in self._all for part in each.children() if isinstance(part, nn.Conv1d))

    def can_be_told(self) -> bool:
        """Whether what they hand it to is, as of now, what keeps sequences apart."""
        return self.hand_on and all(map(self._tells, {_forward(module) for module in self._all}))

    def _tells(self, forward: Any) -> bool:
        running = self._running.get(forward)
        if running is None:
            running = self._running[forward] = _running(forward)
        scope = running.__globals__
        return all(is_ours(scope.get(name)) for name in _TO if name in running.__code__.co_names)


def hand_on(classes: Iterable[type]) -> bool:
    """Whether the code of all those among some classes of modules hands on what they are told."""
    forwards = [cls.forward for cls in classes]  # type: ignore[attr-defined]
    return all(is_known(inspect.unwrap(each), _HAND_ON) for each in forwards if _leaves_out(each))


#: By the first layer, the layers, and theirs: PEFT may put others beside them later, but none in their place.
_known: weakref.WeakKeyDictionary[nn.Module, tuple[int, Mixers]] = weakref.WeakKeyDictionary()


def mixers_of(layers: Sequence[nn.Module]) -> Mixers:
    """Those of a backbone's layers, looked for once."""
    if not layers:
        return Mixers(())
    count, found = _known.get(layers[0], (0, None))
    if found is None or count != len(layers):
        found = Mixers(layers)
        _known[layers[0]] = len(layers), found
    return found


def _forward(module: nn.Module) -> Any:
    own = vars(module).get("forward")
    return type(module).forward if own is None else function_of(own)


def _running(forward: Any) -> Any:
    """Within its wrappers; a copy for one model alone has functions of its own."""
    cell = wrapped_cell(forward) if hasattr(forward, "__wrapped__") else None
    return forward if cell is None else cell.cell_contents


def _leaves_out(forward: Any) -> bool:
    return calls(forward, _LEAVES_OUT)
