"""Who Bastile is measured against, here and nowhere else: `operators` has the contenders of one operator (`bastile
bench`), `models` the implementations of whole models (`bastile sweep`)."""

from __future__ import annotations

import importlib.metadata
import platform

import torch

#: What decides how fast a contender is.
PACKAGES = ("torch", "transformers", "triton", "liger-kernel", "quack-kernels", "nvidia-cutlass-dsl")


def versions() -> dict[str, str]:
    """Of what is installed."""
    import bastile

    found = {"bastile": bastile.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found
