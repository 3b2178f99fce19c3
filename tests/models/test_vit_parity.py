"""The ViT against a second, plain implementation: outputs and the gradient of every parameter."""

import pytest
import torch
from plain_vit import plain_vit

from acutance.models import ViT

SIZES = {"image_size": 8, "patch_size": 4, "dim": 12, "heads": 3, "num_classes": 7, "depth": 5}


def spread_out(model):
    """Weights far from initialisation, so that attention is not uniform and nothing vanishes."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.data = 0.3 * noise + (parameter.ndim == 1) * 0.5
    return model


def assert_equals_plain(model, *, tolerance, **plain_options):
    model = spread_out(model.double())
    images = torch.randn(3, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    state = {name: tensor.clone().requires_grad_() for name, tensor in model.state_dict().items()}
    scores, expected = model(images), plain_vit(state, images, patch=4, heads=3, **plain_options)
    torch.testing.assert_close(scores, expected, rtol=tolerance, atol=tolerance)
    direction = torch.randn(scores.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    (scores * direction).sum().backward()
    (expected * direction).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        wanted = state[name].grad
        if torch.count_nonzero(wanted) == 0:
            pytest.fail(f"{name} has no gradient in the plain model: the comparison would prove nothing")
        torch.testing.assert_close(
            parameter.grad, wanted, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("strength", [0.0, 0.6, -0.3])
def test_neutreno_equals_the_plain_model(strength):
    assert_equals_plain(ViT(**SIZES, mitigation=f"neutreno:{strength}"), tolerance=1e-10, strength=strength)


@pytest.mark.parametrize("learn", ["layer", "head"])
def test_learnt_neutreno_equals_the_plain_model(learn):
    assert_equals_plain(ViT(**SIZES, mitigation=f"neutreno:0.6,learn={learn}"), tolerance=1e-10)


@pytest.mark.parametrize("kernel", ["symmetric", "rbf", "linear", "polynomial"])
def test_other_attention_equals_the_plain_model(kernel):
    assert_equals_plain(
        ViT(**SIZES, attention=kernel, mitigation="neutreno:0.6"), tolerance=1e-9, kernel=kernel, strength=0.6
    )


@pytest.mark.parametrize("options", [{"class_token": False}, {"layer_scale": 0.1}])
def test_other_bodies_equal_the_plain_model(options):
    assert_equals_plain(ViT(**SIZES, **options), tolerance=1e-10)
