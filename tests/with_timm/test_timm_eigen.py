import pytest
import torch
from timm_zoo import assert_parity, create, images
from torch.func import functional_call

import acutance as ac
from acutance.errors import AcutanceError, ShapeError
from mitigations.steered import assert_it_goes_stays_and_comes_back
from parity.parity_formula import with_plain_weights
from sites.tiny_models import leaves_of, left_alone, mitigated, with_gradients

# BEiT reads the weight itself, and keeps the values' bias beside it.
NAMES = ["vit_tiny_patch16_224", "beit_base_patch16_224", "eva02_tiny_patch14_224", "vit_small_patch16_dinov3"]


def steered(name, basis="polar"):
    """The model, and its output and gradients with W_V = Vᵀ and W_proj = V Λ put where timm has them."""
    model, plain = create(name), create(name)
    mitigated(model, f"eigen:negative,basis={basis}")
    leaves = leaves_of(model)
    state = with_plain_weights(leaves, "attn.qkv.weight", "attn.proj.weight", basis)
    output = functional_call(plain, {path: x for path, x in state.items() if "mitigation" not in path}, (images(),))
    return model, with_gradients(output, leaves)


@pytest.mark.parametrize("basis", ["polar", "cayley"])
@pytest.mark.parametrize("name", NAMES)
def test_function_and_gradients_are_those_of_the_formula(name, basis):
    model, expected = steered(name, basis)
    assert_parity(model, expected, tolerance=1e-9)


def test_however_it_runs():
    model, expected = steered("beit_base_patch16_224")
    torch.compiler.reset()
    assert_parity(model, expected, torch.compile(model, backend="aot_eager", fullgraph=True), tolerance=1e-9)
    model.train().set_grad_checkpointing()
    assert_parity(model, expected, tolerance=1e-9)


@pytest.mark.parametrize("name", [*NAMES, "swin_tiny_patch4_window7_224", "pvt_v2_b0"])
def test_it_goes_stays_and_comes_back(tmp_path, name):
    file = tmp_path / "model.safetensors"
    assert_it_goes_stays_and_comes_back(lambda: create(name), lambda model: model(images()), file)


@pytest.mark.parametrize(
    ("name", "error", "reason"),
    [
        ("cait_xxs24_224", AcutanceError, "mixing of heads stands between"),
        ("vit_tiny_patch16_224 scale norms", AcutanceError, "a gate of Attention before W_proj stands between"),
        ("naflexvit_base_patch16_gap", AcutanceError, "a gate of EvaAttention before W_proj stands between"),
        ("vit_small_patch16_rope_224 grouped", ShapeError, "a value head for every query head"),
    ],
)
def test_what_is_refused_is_left_as_it_was(name, error, reason):
    model = create(name)
    with left_alone(model), pytest.raises(error, match=reason):
        ac.mitigate(model, "eigen:negative")
