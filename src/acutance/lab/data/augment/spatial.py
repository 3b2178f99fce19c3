"""Moving pixels: crops, mirror images, and affine maps as Pillow computes them.

Images here are (batch, channels, height, width) floats that hold whole numbers from 0 to 255.
"""

from __future__ import annotations

import torch
from torch import Tensor


def random_crop(images: Tensor, pad: int, offsets: Tensor) -> Tensor:
    """Windows of the old size out of images with `pad` black pixels around them.

    Args:
        images: (batch, channels, height, width), of any dtype.
        pad: pixels on each side.
        offsets: whole numbers (batch, 2), from 0 to 2·pad: how far down and right each window starts.
    """
    height, width = images.shape[-2:]
    rows = torch.arange(height, device=images.device) + offsets[:, :1] - pad
    columns = torch.arange(width, device=images.device) + offsets[:, 1:] - pad
    index = rows.clamp(0, height - 1)[:, :, None] * width + columns.clamp(0, width - 1)[:, None, :]
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
    return _take(images, index.flatten(1)).view_as(images) * inside[:, None].to(images.dtype)


def flip(images: Tensor, chosen: Tensor) -> Tensor:
    """Mirror images, left and right, where `chosen` (batch,) is true."""
    return torch.where(chosen[:, None, None, None], images.flip(-1), images)


def warp(images: Tensor, matrices: Tensor, fill: Tensor) -> Tensor:
    """Affine maps with bicubic interpolation, as Pillow's `transform` makes them; identities change nothing.

    Args:
        images: (batch, channels, height, width).
        matrices: (batch, 2, 3), from the centre of a new pixel (x, y, 1) to a place in the old image.
        fill: (channels,), the colour of pixels that come from outside.
    """
    height, width = images.shape[-2:]
    x = torch.arange(width, device=images.device) + 0.5
    y = torch.arange(height, device=images.device) + 0.5
    a, b, c = matrices[:, 0, :, None, None].unbind(1)
    d, e, f = matrices[:, 1, :, None, None].unbind(1)
    old_x = a * x + b * y[:, None] + c
    old_y = d * x + e * y[:, None] + f
    inside = (old_x >= 0) & (old_x < width) & (old_y >= 0) & (old_y < height)
    new = _bicubic(images, old_x.clamp(0, width) - 0.5, old_y.clamp(0, height) - 0.5)
    return torch.where(inside[:, None], new.clamp(0, 255).floor(), fill[:, None, None])


def _bicubic(images: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The cubic through 4×4 pixels, borders repeated, at (batch, height, width) places."""
    height, width = images.shape[-2:]
    left, top = x.floor(), y.floor()
    columns = [(left.long() + i).clamp(0, width - 1) for i in (-1, 0, 1, 2)]
    lines = [(top.long() + i).clamp(0, height - 1) * width for i in (-1, 0, 1, 2)]
    dx, dy = (x - left)[:, None], (y - top)[:, None]
    rows = [
        _cubic([_take(images, (line + column).flatten(1)).view_as(images) for column in columns], dx) for line in lines
    ]
    return _cubic(rows, dy)


def _cubic(v: list[Tensor], t: Tensor) -> Tensor:
    """Pillow's cubic (a = −1), in the form that leaves constants exactly as they are."""
    return v[1] + t * ((v[2] - v[0]) + t * ((2 * (v[0] - v[1]) + v[2] - v[3]) + t * (v[1] - v[0] + v[3] - v[2])))


def _take(images: Tensor, index: Tensor) -> Tensor:
    """Pixels at flat places (batch, n), the same in every channel: (batch, channels, n)."""
    return images.flatten(2).gather(2, index[:, None].expand(-1, images.shape[1], -1))
