"""The `stream` hook in our own models, against the same model written out."""

import pytest
import torch

from acutance import mitigate
from acutance.mitigations import Mitigation
from acutance.models import LanguageModel, ViT

VISION = {"image_size": 8, "patch_size": 4, "dim": 12, "depth": 3, "heads": 3, "num_classes": 5}
LANGUAGE = {"vocabulary": 23, "dim": 12, "depth": 3, "heads": 3, "hidden": 16, "cutoffs": (), "dropout": 0.0}


class Halfway(Mitigation):
    """The block's output, moved halfway back to its input, plus a tenth of the mean value."""

    def stream(self, x_in, x_out, call):
        assert call.residual is x_in
        return (x_in + x_out) / 2 + call.v.mean() / 10


def models(kind):
    torch.manual_seed(0)
    if kind == "vit":
        return ViT(**VISION, layer_scale=0.5).double(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    return LanguageModel(**LANGUAGE).double(), torch.randint(23, (2, 6))


def by_formula(model, x):
    v0 = None
    for block in model.blocks:
        after, v0 = block(x, v0)
        normed = x if block.post_norm else block.norm1(x)
        v = block.attn.qkv(normed)[..., -block.attn.qkv.in_features :]
        x = (x + after) / 2 + v.mean() / 10
    return x


@pytest.mark.parametrize("kind", ["vit", "language"])
@pytest.mark.parametrize("run", ["eager", "checkpointed", "compiled"])
def test_the_stream_is_changed_after_every_block_with_its_gradients(kind, run):
    model, inputs = models(kind)
    weights = list(model.parameters())
    plain_run, model.run_blocks = model.run_blocks, lambda x: by_formula(model, x)
    expected = model.forward_features(inputs)
    wanted = torch.autograd.grad(expected.square().sum(), weights, allow_unused=True)
    model.run_blocks = plain_run
    with mitigate(model, Halfway()):
        model.set_grad_checkpointing(run == "checkpointed")
        features = model.forward_features
        if run == "compiled":
            features = torch.compile(features, backend="aot_eager", fullgraph=True)
        out = features(inputs)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
        found = torch.autograd.grad(out.square().sum(), weights, allow_unused=True)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
