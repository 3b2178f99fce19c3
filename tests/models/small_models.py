"""Small reference models with weights far from initialisation: nothing is uniform and nothing vanishes."""

import torch

from acutance.models import LanguageModel, Segmenter, ViT

SIZES = {"dim": 12, "depth": 3, "heads": 3}
VIT = {**SIZES, "image_size": 8, "patch_size": 4, "num_classes": 5}
LANGUAGE = {**SIZES, "vocabulary": 23, "hidden": 20, "cutoffs": (5, 9, 16)}
SEGMENTER = {**SIZES, "num_classes": 5, "image_size": 12, "patch_size": 4, "decoder_heads": 2, "drop_path": 0.0}
KINDS = {"vit": (ViT, VIT), "language": (LanguageModel, LANGUAGE), "segmenter": (Segmenter, SEGMENTER)}


def seeded(kind="vit", mitigation=None, spread=0.3, dtype=torch.float64, **options):
    torch.manual_seed(0)
    build, sizes = KINDS[kind]
    model = build(**{**sizes, **options}, mitigation=mitigation).to(dtype)
    for parameter in model.parameters():
        parameter.data += spread * torch.randn_like(parameter)
    return model


def images(height=8, width=8, batch=4, dtype=torch.float64):
    return torch.randn(batch, 3, height, width, dtype=dtype, generator=torch.Generator().manual_seed(0))


def words(rows=3, length=7, seed=0):
    return torch.randint(23, (rows, length), generator=torch.Generator().manual_seed(seed))


def inputs(kind, dtype=torch.float64):
    if kind == "language":
        return words(), words(seed=1)
    return (images(12, 12, 2, dtype) if kind == "segmenter" else images(dtype=dtype),)


def gradients(model, kind="vit", run=None):
    """The loss, and every parameter's gradient."""
    model.zero_grad()
    scores = (model if run is None else run)(*inputs(kind, next(model.parameters()).dtype))
    loss = (scores.float() if scores.dtype == torch.bfloat16 else scores).square().mean()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same(found, expected, tolerance=1e-12):
    torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=tolerance)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        error = (found[1][name] - gradient).norm()
        assert error <= tolerance * gradient.norm(), f"{name}: {error} of {gradient.norm()}"
