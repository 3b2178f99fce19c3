"""Changes of colour that look at one value at a time: tables of 256 entries, one per image and channel.

A batch in which every image wants something else is then one look-up. The arithmetic is Pillow's, value for value.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEVELS = 256


def look_up(images: Tensor, tables: Tensor) -> Tensor:
    """Each pixel replaced by its entry in the (batch, channels, 256) tables of its image and channel."""
    return tables.gather(2, images.flatten(2).long()).view_as(images)


def identity(images: Tensor) -> Tensor:
    """The tables (1, 1, 256) that change nothing."""
    return torch.arange(LEVELS, device=images.device, dtype=images.dtype)[None, None]


def invert(images: Tensor) -> Tensor:
    """255 − value."""
    return LEVELS - 1 - identity(images)


def posterise(images: Tensor, bits: Tensor) -> Tensor:
    """Only the `bits` (batch,) highest bits are kept."""
    dropped = 8 - bits.long()[:, None, None]
    return (identity(images).long() >> dropped << dropped).to(images.dtype)


def solarise(images: Tensor, threshold: Tensor) -> Tensor:
    """Values from a threshold (batch,) on are inverted."""
    values = identity(images)
    return torch.where(values < threshold[:, None, None], values, LEVELS - 1 - values)


def solarise_add(images: Tensor, amount: Tensor) -> Tensor:
    """An amount (batch,) is added to values below 128."""
    values = identity(images)
    return torch.where(values < LEVELS // 2, (values + amount[:, None, None]).clamp(max=LEVELS - 1), values)


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    """A blend with black."""
    return blend(torch.zeros_like(identity(images)), identity(images), factor[:, None, None])


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    """A blend with the mean of the image's greys, rounded."""
    pixels = images.shape[-2] * images.shape[-1]
    total = grey(images).long().sum((1, 2, 3))
    mean = (2 * total + pixels).div(2 * pixels, rounding_mode="floor").to(images.dtype)
    return blend(mean[:, None, None], identity(images), factor[:, None, None])


def auto_contrast(images: Tensor) -> Tensor:
    """Each channel stretched from 0 to 255."""
    flat = images.flatten(2)
    # Pillow's table is made in double precision, and truncated.
    low, high = flat.amin(2, keepdim=True).double(), flat.amax(2, keepdim=True).double()
    scale = torch.full_like(low, 255).div((high - low).clamp(min=1))  # 255 / x would multiply by 1 / x, rounded
    values = identity(images).double()
    stretched = (values * scale + -low * scale).clamp(0, 255).floor()
    return torch.where(high > low, stretched, values).to(images.dtype)


def equalise(images: Tensor) -> Tensor:
    """Each channel's histogram made flat."""
    flat = images.flatten(2).long()
    # In 32 bits inductor makes the histogram itself; in 64 it would write index and summand of every pixel for ATen.
    histogram = torch.zeros(*flat.shape[:2], LEVELS, dtype=torch.int32, device=images.device)
    histogram.scatter_add_(2, flat, torch.ones_like(flat, dtype=torch.int32))
    of_highest = histogram.gather(2, flat.amax(2, keepdim=True))
    step = (flat.shape[2] - of_highest).div(255, rounding_mode="floor")
    below = histogram.cumsum(2, dtype=torch.int32) - histogram
    safe = step.clamp(min=1)
    table = (safe // 2 + below).div(safe, rounding_mode="floor").clamp(max=255).to(images.dtype)
    return torch.where(step > 0, table, identity(images))


def grey(images: Tensor) -> Tensor:
    """Pillow's luma (batch, 1, height, width); one channel is its own. Exact in float32: nothing passes 2²⁴."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images[:, :1], images[:, 1:2], images[:, 2:]
    return ((19595 * red + 38470 * green + 7471 * blue + 32768) / 65536).floor()


def blend(degenerate: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    """From the degenerate (0) over the image (1) and beyond, cut off to whole numbers as Pillow's `blend` does."""
    return (degenerate + factor * (images - degenerate)).clamp(0, 255).floor()


def smooth(images: Tensor) -> Tensor:
    """Pillow's SMOOTH: 3×3, the centre five times as heavy; the border stays as it is."""
    inner = images[..., 1:-1, 1:-1]
    rows = images[..., :-2, :] + images[..., 1:-1, :] + images[..., 2:, :]
    total = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * inner
    result = images.clone()
    result[..., 1:-1, 1:-1] = (total / 13 + 0.5).floor()
    return result
