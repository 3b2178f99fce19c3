"""A small ViT and images for it, and what it hands to its first block."""

import torch

from acutance.models import ViT


def small_vit(depth=3, **options):
    torch.manual_seed(0)
    sizes = {"image_size": 8, "patch_size": 2, "in_chans": 1, "dim": 24, "heads": 2, "num_classes": 4}
    return ViT(depth=depth, **sizes | options)


def small_images(count=7):
    return torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def embedded(model, images):
    seen = []
    with model.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0])):
        model(images)
    return seen[0]
