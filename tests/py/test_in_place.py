"""What an operator returns may be written to, as what PyTorch's own layers return: Longformer divides its queries, and
Wav2Vec2-BERT masks what a linear layer returns."""

import pytest
import torch
import transformers

import bastile
from bastile.ops.autocast_linear import autocast_linear
from bastile.ops.causal_conv1d import causal_conv1d
from bastile.ops.dropout import dropout
from bastile.ops.gated_delta_rule import gated_delta_rule
from bastile.ops.gated_mlp import gated_mlp, gated_mlp_of_halves
from bastile.ops.gated_rms_norm import gated_rms_norm
from bastile.ops.glu import glu
from bastile.ops.lora import Adapted, adapted_gated_mlp, adapted_linears, adapted_mlp
from bastile.ops.norm import add_layer_norm, layer_norm
from bastile.ops.projections import projections
from bastile.ops.qk_norm_rope import qk_norm_rope
from bastile.ops.rms_norm import add_rms_norm, rms_norm, rms_norm_add
from bastile.ops.rope import rope
from conftest import gradients
from every_operator import H, T, random, tables


def weight(*shape):
    return random(*shape).requires_grad_()


def adapted(rows, columns):
    return Adapted(random(rows, columns), None, weight(2, columns), weight(rows, 2), 0.5)


def attention(f, x, *more):
    return f(x[:, None], x[:, None].cos(), *more, *tables())


#: Each of [2, T, H], whose numbers nobody else has.
CALLS = {
    "rms_norm": lambda x: rms_norm(x, weight(H)),
    "add_rms_norm": lambda x: add_rms_norm(x, x.cos(), weight(H))[0],
    "rms_norm_add": lambda x: rms_norm_add(x, x.cos(), weight(H)),
    "layer_norm": lambda x: layer_norm(x, weight(H), weight(H)),
    "add_layer_norm": lambda x: add_layer_norm(x, x.cos(), weight(H), weight(H))[0],
    "gated_rms_norm": lambda x: gated_rms_norm(x, x.cos(), weight(H), gate_first=True, group=4),
    "glu": lambda x: glu(x, x.cos()),
    "gated_mlp": lambda x: gated_mlp(x, weight(16, H), weight(16, H), weight(H, 16)),
    "gated_mlp_of_halves": lambda x: gated_mlp_of_halves(x, weight(32, H), weight(H, 16)),
    "projections": lambda x: projections(x, weight(3, H), weight(5, H)),
    "autocast_linear": lambda x: autocast_linear(x, weight(5, H)),
    "autocast_linear, bias": lambda x: autocast_linear(x, weight(5, H), weight(5)),
    "autocast_linear, strides": lambda x: autocast_linear(x.transpose(0, 1), weight(5, H), weight(5)),
    "adapted_linears": lambda x: adapted_linears(x, [adapted(6, H), adapted(5, H)]),
    "adapted_gated_mlp": lambda x: adapted_gated_mlp(x, adapted(16, H), adapted(16, H), adapted(H, 16)),
    "adapted_mlp": lambda x: adapted_mlp(x, adapted(16, H), adapted(H, 16)),
    "dropout": lambda x: dropout(x, 0.5, seed=torch.tensor([1 << 40, -3])),
    "rope": lambda x: attention(rope, x),
    "qk_norm_rope": lambda x: attention(qk_norm_rope, x, weight(H), weight(H)),
    "causal_conv1d": lambda x: causal_conv1d(x.transpose(1, 2), weight(H, 3), weight(H), "silu"),
    "gated_delta_rule": lambda x: gated_delta_rule(
        x.sin()[:, :, None], x.cos()[:, :, None], x[:, :, None], -x[:, :, :1].square(), x[:, :, 1:2].sigmoid()
    )[0],
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_results_that_are_written_to(name, autocast):
    """Gradients are those of a product beside the result."""

    def run(change):
        x = random(2, T, H).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found = CALLS[name](x)
        found = found if isinstance(found, tuple) else (found,)
        sum(change(y).float().square().sum() for y in found).backward()
        return x.grad

    want, got = [run(change) for change in (lambda y: y.mul(3.0), lambda y: y.mul_(3.0))]
    assert torch.equal(got, want)


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


def longformer():
    model = transformers.LongformerForSequenceClassification(
        transformers.LongformerConfig(
            **SMALL, vocab_size=97, attention_window=4, max_position_embeddings=64, hidden_dropout_prob=0.0
        )
    )
    ids = torch.arange(20).view(2, 10) + 3
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor([0, 1])}


def wav2vec2_bert():
    model = transformers.Wav2Vec2BertForSequenceClassification(
        transformers.Wav2Vec2BertConfig(
            **SMALL, feature_projection_input_dim=16, mask_time_prob=0.0, layerdrop=0.0, position_embeddings_type=None
        )
    )
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 7:] = 0
    return model, {"input_features": random(2, 12, 16), "attention_mask": mask, "labels": torch.tensor([0, 1])}


@pytest.mark.parametrize("made", [longformer, wav2vec2_bert])
def test_models_that_write_to_results(made):
    """Under autocast, with float32 weights, as a Trainer with bf16=True trains them."""
    torch.manual_seed(0)
    model, batch = made()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.train()
    found = []
    for apply in (lambda: None, bastile.apply):
        apply()
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        found.append((loss, gradients(model)))
    (want, want_gradients), (got, got_gradients) = found
    ran = {line.operator for line in bastile.report() if line.ran}
    assert "autocast_linear" in ran
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-3)
    for name, gradient in got_gradients.items():
        assert (gradient - want_gradients[name]).norm() <= 0.05 * want_gradients[name].norm() + 1e-3, name
