"""torchvision beside a PyTorch without CUDA: to be imported before Transformers, which imports it where it is there.

PyPI has torchvision for CUDA's PyTorch alone. Beside another its compiled library does not load, and two operators are
missing that its Python code names when it is imported. No model of the tests calls them."""

import importlib.util

import torch

if torch.version.cuda is None and importlib.util.find_spec("torchvision") is not None:
    try:
        import torchvision
    except RuntimeError:
        _library = torch.library.Library("torchvision", "FRAGMENT")
        for _name in ("nms", "qnms"):
            _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision  # noqa: F401
