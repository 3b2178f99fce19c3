"""Eigen in timm's models: H = V Λ Vᵀ written out, functions and gradients of all parameters."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from timm_zoo import assert_parity, create, gradients, images, loss_of
from torch.func import functional_call

import acutance as ac
from acutance.errors import AcutanceError, ShapeError
from mitigations.eigen_formulas import basis_of
from parity.parity_formula import with_plain_weights
from sites.tiny_models import left_alone, mitigated

# BEiT reads the weight itself, and keeps the values' bias beside it.
NAMES = ["vit_tiny_patch16_224", "beit_base_patch16_224", "eva02_tiny_patch14_224", "vit_small_patch16_dinov3"]


def steered(name, basis="polar"):
    model = create(name)
    return model, mitigated(model, f"eigen:negative,basis={basis}"), create(name)


def written_out(plain, model, basis="polar"):
    """The plain model, with W_V = Vᵀ and W_proj = V Λ put where timm has them."""
    own = {path: p.detach().clone().requires_grad_() for path, p in model.named_parameters()}
    state = with_plain_weights(own, "qkv.weight", "proj.weight", partial(basis_of, basis))
    output = functional_call(plain, {path: x for path, x in state.items() if "mitigation" not in path}, (images(),))
    return output.detach(), gradients(own, loss_of(output))


@pytest.mark.parametrize("basis", ["polar", "cayley"])
@pytest.mark.parametrize("name", NAMES)
def test_function_and_gradients_are_those_of_the_formula(name, basis):
    model, _, plain = steered(name, basis)
    assert_parity(model, written_out(plain, model, basis), tolerance=1e-9)


def test_however_it_runs():
    model, _, plain = steered("beit_base_patch16_224")
    expected = written_out(plain, model)
    torch.compiler.reset()
    assert_parity(model, expected, torch.compile(model, backend="aot_eager", fullgraph=True), tolerance=1e-9)
    model.train().set_grad_checkpointing()
    assert_parity(model, expected, tolerance=1e-9)


@pytest.mark.parametrize("name", [*NAMES, "swin_tiny_patch4_window7_224", "pvt_v2_b0"])
def test_it_goes_stays_and_comes_back(tmp_path, name):
    model, handle, plain = steered(name)
    output = model(images())
    assert not torch.allclose(output, plain(images()))
    folded = ac.fold(model)
    torch.testing.assert_close(folded(images()), output, rtol=0, atol=1e-10)
    classes = [type(module) for module in plain.modules()]
    assert [type(module) for module in folded.modules()] == classes
    file = ac.save(model, tmp_path / "model.safetensors")
    again = ac.load(file, create(name))
    assert torch.equal(again(images()), output)
    without = create(name)
    missing, unexpected = without.load_state_dict(load_file(file), strict=False)
    assert not missing
    assert all(".mitigation." in path for path in unexpected)
    torch.testing.assert_close(without(images()), output, rtol=0, atol=1e-10)
    handle.remove()
    assert [type(module) for module in model.modules()] == classes
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)
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
    with left_alone(model), pytest.raises(error, match=reason):
        ac.mitigate(model, "eigen:negative")
