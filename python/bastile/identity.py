"""Which object it is, as a number."""

from __future__ import annotations

from collections.abc import Callable

#: As unique as `id`, and of use for thousands of objects in each step: CPython tells every audit hook of each call of
#: `id`, and releases of filelock, which PyTorch needs, put in such a hook, in Python.
identity: Callable[[object], int] = object.__hash__
