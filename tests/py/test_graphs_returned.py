"""What layers return beside their hidden states, at which most models do not look."""

from contextlib import contextmanager

import pytest
import torch
import transformers
from torch import nn

import bastile
from bastile.graphs.between import Between
from graphing import DEVICE, allow_graphs, assert_alike
from test_graphs_stacks import built


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    allow_graphs(monkeypatch)
    yield
    bastile.reset()


SWIN = {
    "image_size": 32,
    "patch_size": 4,
    "embed_dim": 16,
    "depths": [1, 2, 1],
    "num_heads": [2, 2, 4],
    "window_size": 4,
}


def of_squares(model, step):
    drawn = torch.Generator().manual_seed(step)
    batch = {"pixel_values": torch.randn(2, 3, 64, 64, generator=drawn), "labels": torch.tensor([0, 1])}
    return {key: value.to(DEVICE) for key, value in batch.items()}


@pytest.mark.parametrize("checkpoints", [False, True])
def test_what_layers_return_beside_and_nobody_looks_at(checkpoints):
    """Swin's stages return features for those who ask for them, of other sizes from one to the next."""
    model = built("SwinForImageClassification", drop_path_rate=0.0, **SWIN)
    if checkpoints:
        model.gradient_checkpointing_enable()
    assert_alike(model, 3, batches=of_squares)


def features_of(model, batch):
    return model(**batch, output_hidden_states=True).reshaped_hidden_states


def test_what_layers_return_beside_and_the_loss_looks_at():
    """As a segmentation's does: such steps run without graphs, from the first one on."""

    class Features(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = built("SwinForImageClassification", drop_path_rate=0.0, **SWIN)

        def forward(self, **batch):
            loss = sum(state.square().mean() for state in features_of(self.model, batch))
            return transformers.modeling_outputs.SequenceClassifierOutput(loss=loss)

    run = assert_alike(Features(), 0, batches=of_squares)
    assert run.aside == {"layers that return more than a tensor": 4}


@contextmanager
def keeping_what_stages_return(kept):
    """What the encoder gets of each beside the hidden states."""
    cls = transformers.models.swin.modeling_swin.SwinStage
    call = cls.__call__

    def kept_call(layer, *args, **kwargs):
        output = call(layer, *args, **kwargs)
        kept.append(output[1])
        return output

    cls.__call__ = kept_call
    try:
        yield
    finally:
        cls.__call__ = call


def test_what_layers_return_beside_looked_at_once_they_are_graphs():
    """By somebody who has not before: the layer runs itself for it, and its gradients come through it."""
    found = []
    for graphs in (False, True):
        bastile.apply(cuda_graphs=graphs)
        model = built("SwinForImageClassification", drop_path_rate=0.0, **SWIN)
        for step in range(3):
            kept = []
            with keeping_what_stages_return(kept):
                loss = model(**of_squares(model, step)).loss
            if step == 2:
                if graphs:  # what stands for CUDA's graphs calls stages too
                    kept = [each for each in kept if type(each) is Between]
                loss = loss + (kept[1] * torch.linspace(-1, 1, kept[1].shape[-1], device=DEVICE)).sum()
            del kept
            model.zero_grad()
            loss.backward()
        found.append([p.grad for p in model.parameters()])
    for got, want in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
