"""Models of the papers by name; every option of `ViTConfig` can be overridden."""

from __future__ import annotations

from typing import Any

from acutance.models.vit import ViT


def deit_tiny(**overrides: Any) -> ViT:
    """DeiT-tiny/16 for 224×224 (https://arxiv.org/abs/2012.12877): 5,717,416 parameters."""
    return _deit(dim=192, heads=3, overrides=overrides)


def deit_small(**overrides: Any) -> ViT:
    """DeiT-small/16 for 224×224 (https://arxiv.org/abs/2012.12877): 22,050,664 parameters."""
    return _deit(dim=384, heads=6, overrides=overrides)


def deit_base(**overrides: Any) -> ViT:
    """DeiT-base/16 for 224×224 (https://arxiv.org/abs/2012.12877): 86,567,656 parameters."""
    return _deit(dim=768, heads=12, overrides=overrides)


def vit_tiny_cifar(**overrides: Any) -> ViT:
    """DeiT-tiny's body on 32×32 images in 4×4 patches, 100 classes."""
    return deit_tiny(**{"image_size": 32, "patch_size": 4, "num_classes": 100, **overrides})


def vit_tiny_plus(**overrides: Any) -> ViT:
    """ViT-Ti⁺: `vit_tiny_cifar` with H = V ψ² Vᵀ, V by QR, which smooths (https://arxiv.org/abs/2401.04301).

    To train faster, with the same H within reach: `eigen:positive,basis=polar`, see `vit_tiny_minus`.
    """
    return vit_tiny_cifar(**{"mitigation": "eigen:positive", **overrides})


def vit_tiny_minus(**overrides: Any) -> ViT:
    """ViT-Ti⁻: `vit_tiny_cifar` with H = −V ψ² Vᵀ, V by QR, which sharpens (https://arxiv.org/abs/2401.04301).

    QR is the paper's, and the slowest basis on a GPU. Faster ones reach the same H: `eigen:negative,basis=polar` with
    CUDA graphs, `eigen:negative,basis=householder` without.
    """
    return vit_tiny_cifar(**{"mitigation": "eigen:negative", **overrides})


def vit_digits(**overrides: Any) -> ViT:
    """A ViT for the embedded 8×8 digits in 2×2 patches: 16 patches and a class token."""
    body = {"image_size": 8, "patch_size": 2, "in_chans": 1, "dim": 48, "depth": 12, "heads": 3, "num_classes": 10}
    return ViT(**{**body, **overrides})


def _deit(dim: int, heads: int, overrides: dict[str, Any]) -> ViT:
    body = {"image_size": 224, "patch_size": 16, "dim": dim, "depth": 12, "heads": heads, "num_classes": 1000}
    return ViT(**{**body, **overrides})
