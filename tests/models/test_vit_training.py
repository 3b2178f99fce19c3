"""Training must see the same gradients however it is run: checkpointed, compiled or in bfloat16."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from acutance.errors import AcutanceError
from acutance.models import ViT

TINY = {"image_size": 8, "patch_size": 4, "dim": 12, "depth": 4, "heads": 3, "num_classes": 5}
MITIGATIONS = [None, "neutreno:0.6", "neutreno:0.6,learn=head+featscale", "attnscale"]


def images(dtype=torch.float64):
    return torch.randn(4, 3, 8, 8, dtype=dtype, generator=torch.Generator().manual_seed(0))


def seeded(mitigation="neutreno:0.6", dtype=torch.float64, **options):
    torch.manual_seed(0)
    model = ViT(**{**TINY, **options}, mitigation=mitigation).to(dtype)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model


def loss_of(scores):
    return scores.float().square().mean() if scores.dtype == torch.bfloat16 else scores.square().mean()


def gradients(model, run=None):
    model.zero_grad()
    run = model if run is None else run
    loss = loss_of(run(images(next(model.parameters()).dtype)))
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same(found, expected, tolerance=1e-12):
    torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=tolerance)
    for name, gradient in expected[1].items():
        torch.testing.assert_close(
            found[1][name], gradient, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("mitigation", MITIGATIONS)
def test_gradient_checkpointing_changes_nothing(mitigation):
    model = seeded(mitigation)
    expected = gradients(model)
    model.set_grad_checkpointing()
    assert_same(gradients(model), expected)
    calls = []
    model.blocks[2].register_forward_pre_hook(lambda *_: calls.append(1))
    gradients(model)
    assert len(calls) == 2  # forward, and again in the backward pass
    model.set_grad_checkpointing(False)
    gradients(model)
    assert len(calls) == 3


def test_checkpointing_repeats_the_same_dropout():
    model = seeded(dropout=0.2, drop_path=0.3)
    torch.manual_seed(5)
    expected = gradients(model)
    model.set_grad_checkpointing()
    torch.manual_seed(5)
    assert_same(gradients(model), expected)


class Reentrant(nn.Module):
    """What checkpoint wrappers of training libraries make of a block."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x, v0):
        return checkpoint(self.block, x, v0, use_reentrant=True)


def make_reentrant(model):
    wrapped = copy.deepcopy(model)
    wrapped.blocks = nn.ModuleList(Reentrant(block) for block in wrapped.blocks)
    return wrapped


@pytest.mark.parametrize("mitigation", MITIGATIONS)
def test_reentrant_checkpointing_is_exact_because_v0_is_positional(mitigation):
    model = seeded(mitigation)
    wrapped = make_reentrant(model)
    loss, found = gradients(wrapped)
    assert_same((loss, {name.replace(".block.", "."): g for name, g in found.items()}), gradients(model))


def test_reentrant_checkpointing_that_would_lose_gradients_is_refused():
    model = make_reentrant(seeded())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(("cls_token", "pos_embed", "patch_embed")))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own hint that the inputs need no gradient
        with pytest.raises(AcutanceError, match="set_grad_checkpointing"):
            model(images())
        model.requires_grad_(False)(images())  # nothing to train, nothing to refuse
        with torch.no_grad():
            model.requires_grad_(True)(images())


def test_frozen_embeddings_train_under_the_models_own_checkpointing():
    model = seeded()
    for part in (model.cls_token, model.pos_embed, *model.patch_embed.parameters()):
        part.requires_grad_(False)
    model(images()).square().mean().backward()
    expected = model.blocks[0].attn.qkv.weight.grad.clone()
    model.zero_grad()
    model.set_grad_checkpointing()
    model(images()).square().mean().backward()
    torch.testing.assert_close(model.blocks[0].attn.qkv.weight.grad, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("mitigation", "checkpointing"),
    [("neutreno:0.6", False), ("neutreno:0.6,learn=head+featscale", True), ("attnscale", False)],
)
def test_compiled_whole_graph_has_the_same_gradients(mitigation, checkpointing):
    model = seeded(mitigation, depth=2)
    expected = gradients(model)
    model.set_grad_checkpointing(checkpointing)
    torch._dynamo.reset()
    assert_same(gradients(model, torch.compile(model, backend="aot_eager", fullgraph=True)), expected)


@pytest.mark.parametrize("mitigation", MITIGATIONS)
def test_bfloat16_autocast_stays_within_its_precision(mitigation):
    """bfloat16 carries 8 bits, so one rounding is 0.4 %; a dozen in a row must stay under 3 % in norm.

    A single parameter's gradient may be a small difference of large terms and keep their rounding: 5 % of its own
    norm, and half a percent of the norm of all.
    """
    model = seeded(mitigation, dtype=torch.float32)
    scores = model(images(torch.float32)).detach()
    loss, exact = gradients(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded_scores = model(images(torch.float32)).detach()
        rounded_loss, rounded = gradients(model)
    assert rounded_scores.dtype == torch.bfloat16
    assert (rounded_scores.float() - scores).norm() < 0.03 * scores.norm()
    assert abs(rounded_loss - loss) < 0.03 * loss
    norms = {name: gradient.norm() for name, gradient in exact.items()}
    errors = {name: (rounded[name] - gradient).norm() for name, gradient in exact.items()}
    total = torch.stack(list(norms.values())).norm()
    assert torch.stack(list(errors.values())).norm() < 0.03 * total
    beyond = {name: error for name, error in errors.items() if error > 0.05 * norms[name] + 0.005 * total}
    assert not beyond


@pytest.mark.parametrize(("stream", "expected"), [("float32", torch.float32), ("autocast", torch.bfloat16)])
def test_the_stream_has_the_dtype_that_was_chosen(stream, expected):
    model = seeded("neutreno:0.6", dtype=torch.float32, stream=stream)
    seen = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, outputs: seen.append((inputs[0].dtype, outputs[0].dtype)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(images(torch.float32)).sum().backward()
    assert set(seen) == {(expected, expected)}
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("option", [{"norm": "post"}, {"layer_scale": 0.1}])
def test_what_gives_float32_tokens_is_refused(option):
    with pytest.raises(AcutanceError, match="give float32 tokens"):
        seeded("neutreno:0.6", stream="autocast", **option)


def test_without_autocast_the_stream_makes_no_difference():
    assert_same(gradients(seeded("neutreno:0.6", stream="autocast")), gradients(seeded("neutreno:0.6")), tolerance=0)


@pytest.mark.parametrize("mitigation", MITIGATIONS)
def test_float64_is_float64_all_the_way(mitigation):
    model = seeded(mitigation)
    records = []
    for block in model.blocks:
        block.attn.observer = records.append
    assert model(images()).dtype == torch.float64
    assert {t.dtype for r in records for t in (r.A.q, r.values, r.output, r.branch)} == {torch.float64}
