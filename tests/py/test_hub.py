"""Hugging Face's `kernels` puts Bastile's layers into a model, from a folder in its layout.

Which release of `kernels` Transformers accepts changes with its own; where the two do not fit, only what `kernels` does
alone is tested."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP
from transformers.utils.import_utils import is_kernels_available

import bastile
from bastile.guards import untouched
from conftest import assert_same_up_to_rounding, gradients, tiny_batch, tiny_model

kernels = pytest.importorskip("kernels", reason="the package kernels is not installed")
HUB = Path(__file__).resolve().parents[2] / "hub"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def built(tmp_path: Path, calls: dict[str, int]) -> Iterator[Path]:
    """What kernel-builder makes of a kernel without compiled parts: its files and their metadata, for each backend.

    The layers import what they call when they are loaded, and that is while `calls` counts."""
    for backend in ("cpu", "cuda"):
        folder = tmp_path / "build" / f"torch-{backend}"
        shutil.copytree(HUB / "torch-ext" / "bastile_layers", folder, ignore=shutil.ignore_patterns("__pycache__"))
        # A digest that nothing signs is read but not checked; the id is a name for the module.
        metadata = {"name": "bastile-layers", "id": f"_bastile_layers_{tmp_path.name}_{backend}", "version": 0}
        metadata |= {"license": "MIT", "backend": {"type": backend}, "python-depends": []}
        metadata["digest"] = {"algorithm": "sha256", "files": {}}
        (folder / "metadata.json").write_text(json.dumps(metadata))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("_bastile_layers")]:
        del sys.modules[name]


def mapping(built: Path, *names: str) -> dict[str, Any]:
    return {name: {DEVICE: kernels.LocalLayerRepository(built, layer_name=name)} for name in names}


def test_build_toml_names_what_is_there() -> None:
    tomllib = pytest.importorskip("tomllib", reason="in the standard library from Python 3.11 on")
    build = tomllib.loads((HUB / "build.toml").read_text())
    module = build["general"]["name"].replace("-", "_")
    assert (HUB / "torch-ext" / module / "__init__.py").exists()
    assert build["torch-noarch"] == {}


def test_kernels_puts_norm_and_mlp_into_a_model(built: Path, calls: dict[str, int]) -> None:
    """Forward and backward: the same losses and gradients as stock, through our operators."""
    model = tiny_model().to(DEVICE)
    batch = {name: tensor.to(DEVICE) for name, tensor in tiny_batch(model).items()}
    stock = model(**batch).loss
    stock.backward()
    wanted = gradients(model)
    norm = type(model.model.norm)
    kernels.replace_kernel_forward_from_hub(Qwen3MLP, "SwiGLUMLP")
    named = vars(norm).get("kernel_layer_name")
    kernels.replace_kernel_forward_from_hub(norm, "RMSNorm")
    try:
        with kernels.use_kernel_mapping(mapping(built, "RMSNorm", "SwiGLUMLP"), inherit_mapping=False):
            kernels.kernelize(model, mode=kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE, device=DEVICE)
    finally:
        for cls in (Qwen3MLP, norm) if named is None else (Qwen3MLP,):
            del cls.kernel_layer_name, cls.kernel_condition
    loss = model(**batch).loss
    loss.backward()
    assert calls == {"rms_norm": 9, "swiglu": 2}  # two a layer and two in its attention, and the last
    assert_same_up_to_rounding(loss, stock, model, "loss")
    for name, gradient in gradients(model).items():
        assert_same_up_to_rounding(gradient, wanted[name], model, name)


@pytest.mark.skipif(not is_kernels_available(), reason="this Transformers wants another release of kernels")
def test_transformers_own_hook_selects_the_norm(built: Path, calls: dict[str, int]) -> None:
    from transformers import KernelConfig

    model = tiny_model().to(DEVICE)
    batch = {name: tensor.to(DEVICE) for name, tensor in tiny_batch(model).items()}
    stock = model(**batch).loss
    if DEVICE == "cuda":
        model.set_use_kernels(True, KernelConfig({"RMSNorm": {"cuda": f"{built}:RMSNorm"}}, use_local_kernel=True))
    else:  # KernelConfig admits no CPU; a registered mapping does
        with kernels.use_kernel_mapping(mapping(built, "RMSNorm"), inherit_mapping=False):
            model.set_use_kernels(True)
    assert model.use_kernels
    assert_same_up_to_rounding(model(**batch).loss, stock, model, "loss")
    assert calls == {"rms_norm": 9}


def test_a_class_outside_the_table_runs_its_own_code(built: Path, calls: dict[str, int]) -> None:
    """Another family's norm may round elsewhere, though it has the same name."""

    class OtherRMSNorm(nn.Module):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return hidden_states + 1

    kernels.replace_kernel_forward_from_hub(OtherRMSNorm, "RMSNorm")
    module = OtherRMSNorm()
    with kernels.use_kernel_mapping(mapping(built, "RMSNorm"), inherit_mapping=False):
        kernels.kernelize(module, mode=kernels.Mode.TRAINING, device=DEVICE)
    assert "forward" in vars(module)
    assert torch.equal(module(torch.zeros(3)), torch.ones(3))
    assert calls == {}


def test_apply_serves_models_beside_kernels() -> None:
    """With `kernels`, Transformers' rotary function is a module, and activations carry their class's own forward."""
    model = tiny_model().to(DEVICE)
    batch = {name: tensor.to(DEVICE) for name, tensor in tiny_batch(model).items()}
    stock = model(**batch).loss
    with kernels.use_kernel_mapping({}, inherit_mapping=False):
        kernels.kernelize(model, mode=kernels.Mode.TRAINING, device=DEVICE)
    assert bastile.apply() == bastile.get_patched_ops()
    loss = model(**batch).loss
    assert type(loss.grad_fn).__name__ == "_LinearCrossEntropyBackward"
    assert_same_up_to_rounding(loss, stock, model, "loss")
    assert untouched(model.model.layers[0].mlp.act_fn)
