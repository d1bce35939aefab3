"""Loads libbastile and registers its operators with PyTorch: the one place that knows where the library is."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

import torch


def _path() -> Path:
    override = os.environ.get("BASTILE_LIBRARY")
    # Beside this file; where the package is installed as editable (pip install -e), in the folder that it is built in.
    path = Path(override or str(files("bastile") / "libbastile.so"))
    if not path.exists():
        raise ImportError(
            f"bastile: the compiled library is not at {path}. Install the package (pip install .), "
            "or set BASTILE_LIBRARY to a libbastile.so"
        )
    return path


def _library_folders() -> list[Path]:
    """Where pip puts NVIDIA's libraries, so that NVRTC and cuBLASLt are found without any path being set."""
    folders = [Path(torch.__file__).parent / "lib"]
    for entry in sys.path:
        nvidia = Path(entry or ".") / "nvidia"
        if nvidia.is_dir():
            folders += sorted(nvidia.glob("*/lib"))
    return folders


def _load() -> ctypes.CDLL:
    library = ctypes.CDLL(str(_path()))
    library.bst_last_error.restype = ctypes.c_char_p
    library.bst_version.restype = ctypes.c_char_p
    library.bst_add_library_path.argtypes = [ctypes.c_char_p]
    library.bst_torch_register.argtypes = [ctypes.c_char_p]
    library.bst_torch_describe.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t]
    library.bst_torch_result_types.argtypes = [ctypes.c_int, *[ctypes.POINTER(ctypes.c_int64)] * 2]
    library.bst_torch_compile_ahead.argtypes = [ctypes.c_int, ctypes.c_int]
    library.bst_kernel_counts.argtypes = [ctypes.POINTER(ctypes.c_int64)] * 2
    library.bst_kernel_counts.restype = None
    library.bst_set_autotune.argtypes = [ctypes.c_int]
    library.bst_autotune_clear.argtypes = []
    for folder in _library_folders():
        library.bst_add_library_path(os.fsencode(folder))
    if library.bst_torch_register(os.fsencode(Path(torch.__file__).parent / "lib")):
        raise ImportError(f"bastile: {library.bst_last_error().decode()}")
    return library


library = _load()
_emulates = bool(library.bst_torch_emulates())


def version() -> str:
    """The library's version."""
    return library.bst_version().decode()


def powers_of_two(t: torch.Tensor) -> bool:
    """Whether what kernels note of rows like these is in powers of two, not of e: of 16-bit types on a GPU."""
    return t.dtype is not torch.float32 and (t.is_cuda or _emulates)


def kernel_counts() -> tuple[int, int]:
    """How many CUDA kernels this process has compiled, and how many it has read from the cache."""
    compiled, cached = ctypes.c_int64(), ctypes.c_int64()
    library.bst_kernel_counts(compiled, cached)
    return compiled.value, cached.value


@contextmanager
def compiling_ahead(device: int, arch: int = 0) -> Iterator[None]:
    """Within, operators that this thread calls with CPU tensors compile what they would launch on this CUDA device, or
    on a chip such as 90, and compute nothing."""
    if library.bst_torch_compile_ahead(device, arch):
        raise ValueError(f"bastile: {library.bst_last_error().decode()}")
    try:
        yield
    finally:
        library.bst_torch_compile_ahead(-1, 0)
