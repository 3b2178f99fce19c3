"""Position embeddings for another image size."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from acutance.errors import ShapeError


def resize_position_embedding(
    pos_embed: Tensor, grid: tuple[int, int], prefix_tokens: int, mode: Literal["bicubic", "bilinear"] = "bicubic"
) -> Tensor:
    """Interpolate the patch part of a position embedding; the prefix part is kept.

    Args:
        pos_embed: (1, prefix_tokens + side², dim), made for a square grid.
        grid: patches down and across wanted now.
        prefix_tokens: leading entries that belong to no patch.
        mode: bicubic and antialiased, as timm's ViTs do it, or plainly bilinear, as the public Segmenter does.
    """
    patches = pos_embed.shape[1] - prefix_tokens if pos_embed.ndim == 3 else -1
    side = math.isqrt(max(patches, 0))
    if pos_embed.ndim != 3 or side == 0 or side * side != patches:
        raise ShapeError(
            f"position embedding {tuple(pos_embed.shape)} with {prefix_tokens} prefix tokens is not "
            "(1, prefix + side², dim): check class_token, distilled and registers"
        )
    if (side, side) == tuple(grid):
        return pos_embed
    prefix, image = pos_embed[:, :prefix_tokens], pos_embed[:, prefix_tokens:]
    image = image.reshape(len(image), side, side, -1).permute(0, 3, 1, 2)
    # in half precision this is coarse, and missing on some devices
    exact = image.to(torch.promote_types(image.dtype, torch.float32))
    resized = torch.nn.functional.interpolate(exact, size=tuple(grid), mode=mode, antialias=mode == "bicubic")
    resized = resized.to(pos_embed.dtype)
    return torch.cat([prefix, resized.flatten(2).transpose(1, 2)], dim=1)
