"""Training must see the same gradients however it is run: checkpointed, compiled, in bfloat16."""

import warnings
from functools import partial

import pytest
import torch
from small_models import assert_same, gradients, images, seeded
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

import acutance as ac
from acutance.errors import AcutanceError
from acutance.mitigations import Eigen, eigen
from acutance.mitigations.eigen import weights_together

NEUTRENO = "neutreno:0.6"
BASES = [f"eigen:negative,basis={basis}" for basis in ("qr", "polar", "cayley", "householder", "inverse")]


def test_reentrant_checkpointing_that_would_lose_gradients_is_refused():
    model = seeded(mitigation=NEUTRENO)
    blocks, wrap = model.blocks, partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT)
    model.blocks = nn.ModuleList(map(wrap, blocks))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(("cls_token", "pos_embed", "patch_embed")))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own hint that the inputs need no gradient
        with pytest.raises(AcutanceError, match="set_grad_checkpointing"):
            model(images())
        model.blocks = blocks
        model.set_grad_checkpointing()
        model(images()).sum().backward()  # the model's own checkpointing trains
        assert model.blocks[0].attn.qkv.weight.grad is not None
        model.requires_grad_(False)(images())  # nothing to train, nothing to refuse
        with torch.no_grad():
            model.requires_grad_(True)(images())


@pytest.mark.parametrize(
    ("kind", "mitigation", "checkpointing"),
    [
        ("vit", "neutreno:0.6,learn=head+featscale", True),
        ("vit", "eigen:positive,basis=cayley,spectrum=bounded+attnscale", False),
        *(("vit", basis, False) for basis in (BASES[0], BASES[1], BASES[3])),
        ("language", "neutreno:0.4", False),
    ],
)
def test_compiled_whole_graph_has_the_same_gradients(kind, mitigation, checkpointing):
    model = seeded(kind, mitigation, depth=2).eval()
    expected = gradients(model, kind)
    model.set_grad_checkpointing(checkpointing)
    torch._dynamo.reset()
    run = torch.compile(model, backend="aot_eager", fullgraph=kind == "vit")  # clusters of words are left out
    assert_same(gradients(model, kind, run), expected, 1e-10)


@pytest.mark.parametrize("mitigation", BASES[:4])  # the orthogonal ones
def test_half_precision_rounds_only_the_finished_weights(mitigation):
    mitigated = seeded(mitigation=mitigation, dtype=torch.float32).blocks[0].attn.mitigation
    exact = mitigated.weights()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(map(torch.equal, weights_together([mitigated])[0], exact))
    model = seeded(mitigation=mitigation, dtype=torch.bfloat16)
    value, projection = model.blocks[0].attn.mitigation.weights()
    assert value.dtype == projection.dtype == torch.bfloat16
    torch.testing.assert_close(value.float() @ value.float().mT, torch.eye(12), rtol=0, atol=0.01)
    assert model(images(dtype=torch.bfloat16)).isfinite().all()


@pytest.mark.parametrize("gain", [None, 0.1])
@pytest.mark.parametrize(("stream", "expected"), [("float32", torch.float32), ("autocast", torch.bfloat16)])
def test_the_stream_has_the_dtype_that_was_chosen(stream, expected, gain):
    model, seen = seeded(mitigation=NEUTRENO, dtype=torch.float32, stream=stream, layer_scale=gain), []
    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, outputs: seen.append((inputs[0].dtype, outputs[0].dtype)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(images(dtype=torch.float32)).sum().backward()
    assert set(seen) == {(expected, expected)}
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    exact = [gradients(seeded(mitigation=NEUTRENO, stream=chosen)) for chosen in (stream, "float32")]
    assert_same(*exact, tolerance=0)  # without autocast it makes no difference


@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_basis_is_computed_once_per_forward_for_all_layers(monkeypatch, checkpointing):
    batches, basis = [], eigen.BASES["polar"]
    counted = type(basis)(lambda theta: batches.append(len(theta)) or basis.map(theta), basis.preimage)
    model = seeded(mitigation=BASES[1])
    model.set_grad_checkpointing(checkpointing)
    monkeypatch.setitem(eigen.BASES, "polar", counted)
    gradients(model)
    assert batches == [3]  # W_V and W_proj share it, and no recomputation repeats it
    batches.clear()
    model.blocks[0](torch.zeros(1, 5, 12, dtype=torch.float64), None)  # a block by itself makes its own
    assert batches == [1]


def test_layers_of_different_kinds_are_computed_apart():
    model = seeded()
    for site, chosen in zip(ac.sites.find(model), [Eigen("negative"), None, Eigen("positive", "polar")], strict=True):
        if chosen is not None:
            site.install(chosen.for_layer(site.shape(pretrained=True)).double())
    found = [torch.linalg.eigvals(site.projection_weight() @ site.value_weight()).real for site in ac.sites.find(model)]
    assert (found[0] < 0).all()
    assert (found[2] > 0).all()
    torch.testing.assert_close(model(images()), ac.fold(model)(images()), rtol=1e-12, atol=1e-12)
