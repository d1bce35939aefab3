"""Measured choices of algorithms for matrix products: switching measurements on, and forgetting what they led to."""

from __future__ import annotations

from bastile._library import library


def set_autotune(on: bool | None) -> None:
    """Whether the matrix products of the output head and its loss take the algorithm that measurements on this machine
    speak for. None: as the variable BASTILE_AUTOTUNE says (1: yes), which is also how a process begins; else algorithms
    are a pure function of shape and chip. It holds for calls that begin from now on, in every thread.

    The first product of its kind measures, and waits for the device; its choice is kept on disk for this chip, driver
    and version. Anything but the default is chosen only where it was clearly faster. It may sum in another order.

    Raises:
        ValueError: for anything but True, False and None.
    """
    if on not in (True, False, None):
        raise ValueError(f"set_autotune: on is {on!r}; True, False or None is needed")
    library.bst_set_autotune(-1 if on is None else int(on))


def clear_autotune_cache() -> int:
    """Forgets every measured choice, on disk too, and returns how many there were. Compiled kernels stay. Other
    processes keep the choices that they have read, until they end."""
    return library.bst_autotune_clear()
