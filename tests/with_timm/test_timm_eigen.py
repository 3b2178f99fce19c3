"""Eigen in timm's models: H = V Λ Vᵀ written out, functions and gradients of all parameters."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from timm_zoo import create, gradients, images
from torch.func import functional_call

import acutance as ac
from acutance.errors import AcutanceError, ShapeError

# BEiT reads the weight itself, and keeps the values' bias beside it.
NAMES = ["vit_tiny_patch16_224", "beit_base_patch16_224", "eva02_tiny_patch14_224", "vit_small_patch16_dinov3"]


def steered(name, basis="polar"):
    model = create(name)
    plain = copy.deepcopy(model)
    handle = ac.mitigate(model, f"eigen:negative,basis={basis}")
    generator = torch.Generator().manual_seed(3)
    for path, parameter in model.named_parameters():
        if ".mitigation." in path:
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model, handle, plain


def loss_of(output):
    return (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)).sum()


def orthogonal(basis, theta):
    """Two of the bases: the others are those of any model."""
    if basis == "polar":
        u, _, vh = torch.linalg.svd(theta)
        return u @ vh
    identity, skew = torch.eye(len(theta), dtype=theta.dtype), (theta - theta.T) / 2
    return torch.linalg.solve(identity + skew, identity - skew)


def written_out(plain, model, basis="polar"):
    """The plain model, with W_V = Vᵀ and W_proj = V Λ put where timm has them."""
    own = {path: p.detach().clone().requires_grad_() for path, p in model.named_parameters()}
    weights = {path: own[path] for path, _ in plain.named_parameters() if path in own}
    for i in range(len(plain.blocks)):
        attn = f"blocks.{i}.attn"
        v = orthogonal(basis, own[f"{attn}.mitigation.theta"])
        kept = own[f"{attn}.qkv.parametrizations.weight.original0"]
        weights[f"{attn}.qkv.weight"] = torch.cat([kept, v.T])
        weights[f"{attn}.proj.weight"] = v * -own[f"{attn}.mitigation.psi"].square()
    output = functional_call(plain, weights, (images(),))
    found = torch.autograd.grad(loss_of(output), list(own.values()), allow_unused=True, materialize_grads=True)
    return output.detach(), dict(zip(own, found, strict=True))


def assert_is(model, expected, run=None):
    output = (model if run is None else run)(images())
    found = gradients(model, loss_of(output))
    torch.testing.assert_close(output.detach(), expected[0], rtol=0, atol=1e-9)
    for path, gradient in expected[1].items():
        assert (found[path] - gradient).norm() <= 1e-8 * (1 + gradient.norm()), path


@pytest.mark.parametrize("basis", ["polar", "cayley"])
@pytest.mark.parametrize("name", NAMES)
def test_function_and_gradients_are_those_of_the_formula(name, basis):
    model, _, plain = steered(name, basis)
    assert_is(model, written_out(plain, model, basis))


def test_however_it_runs():
    model, _, plain = steered("beit_base_patch16_224")
    expected = written_out(plain, model)
    torch.compiler.reset()
    assert_is(model, expected, torch.compile(model, backend="aot_eager", fullgraph=True))
    model.train().set_grad_checkpointing()
    assert_is(model, expected)


@pytest.mark.parametrize("name", [*NAMES, "swin_tiny_patch4_window7_224", "pvt_v2_b0"])
def test_it_goes_stays_and_comes_back(tmp_path, name):
    model, handle, plain = steered(name)
    output = model(images())
    assert not torch.allclose(output, plain(images()))
    folded = ac.fold(model)
    torch.testing.assert_close(folded(images()), output, rtol=0, atol=1e-10)
    assert [type(module) for module in folded.modules()] == [type(module) for module in plain.modules()]
    file = ac.save(model, tmp_path / "model.safetensors")
    again = ac.load(file, create(name))
    assert torch.equal(again(images()), output)
    without = create(name)
    missing, unexpected = without.load_state_dict(load_file(file), strict=False)
    assert not missing
    assert all(".mitigation." in path for path in unexpected)
    torch.testing.assert_close(without(images()), output, rtol=0, atol=1e-10)
    handle.remove()
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
    for (path, one), (other_path, other) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert path == other_path
        assert torch.equal(one, other), path
    assert torch.equal(model(images()), plain(images()))


@pytest.mark.parametrize(
    ("name", "error", "reason"),
    [
        ("cait_xxs24_224", AcutanceError, "mixing of heads stands between"),
        ("vit_tiny_patch16_224 scale norms", AcutanceError, "LayerNorm before W_proj stands between"),
        ("naflexvit_base_patch16_gap", AcutanceError, "a gate before W_proj stands between"),
        ("vit_small_patch16_rope_224 grouped", ShapeError, "a value head for every query head"),
    ],
)
def test_what_is_refused_is_left_as_it_was(name, error, reason):
    model = create(name)
    state, classes = copy.deepcopy(model.state_dict()), [type(module) for module in model.modules()]
    with pytest.raises(error, match=reason):
        ac.mitigate(model, "eigen:negative")
    assert [type(module) for module in model.modules()] == classes
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[path]) for path, tensor in model.state_dict().items())
