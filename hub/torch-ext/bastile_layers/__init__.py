"""Bastile's norm and MLP as layers that Hugging Face's `kernels` can put into models."""

from . import layers

__all__ = ["layers"]
