"""RandAugment with DeiT's operations and magnitudes (https://arxiv.org/abs/1909.13719, rand-m9-mstd0.5-inc1).

Each layer applies one affine map, one table look-up and one blend to the whole batch. Where an image's operation is of
another kind, it gets the exact identity. The arithmetic is Pillow's, value for value. Images are (batch, channels,
height, width) floats that hold whole numbers from 0 to 255.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

OPERATIONS = (
    "auto_contrast", "equalise", "invert", "rotate", "posterise", "solarise", "solarise_add", "colour", "contrast",
    "brightness", "sharpness", "shear_x", "shear_y", "translate_x", "translate_y",
)  # fmt: skip
NUMBER = {name: number for number, name in enumerate(OPERATIONS)}
NOTHING = len(OPERATIONS)
HIGHEST = 10.0  # magnitudes run from 0 to 10


class RandDraws(NamedTuple):
    """What RandAugment does, each (batch, layers)."""

    operation: Tensor  # a number in OPERATIONS, or NOTHING
    magnitude: Tensor  # 0 to 10
    sign: Tensor  # 1 or −1


def rand_draws(
    operation: Tensor, applied: Tensor, noise: Tensor, sign: Tensor, magnitude: float, std: float, probability: float
) -> RandDraws:
    """Operations applied with a probability, at normally distributed magnitudes, from raw random numbers."""
    chosen = torch.where(applied < probability, operation, NOTHING)
    return RandDraws(chosen, (magnitude + std * noise).clamp(0, HIGHEST), 1.0 - 2.0 * sign)


def rand_augment(images: Tensor, draws: RandDraws, fill: Tensor) -> Tensor:
    """Apply each image's operations. Affine maps fill the outside with `fill` (channels,): in DeiT the rounded mean."""
    for layer in range(draws.operation.shape[1]):
        operation, magnitude, sign = (part[:, layer] for part in draws)
        share = magnitude / HIGHEST
        images = warp(images, _matrices(operation, share * sign, images), fill)
        factor = 1 + 0.9 * share * sign
        tables = _tables(images, operation, share[:, None, None], factor[:, None, None])
        images = tables.gather(2, images.flatten(2).long()).view_as(images)
        colour, sharpness = _is(operation, "colour"), _is(operation, "sharpness")
        degenerate = torch.where(colour[:, None, None, None], _grey(images), _smooth(images))
        images = _blend(degenerate, images, torch.where(colour | sharpness, factor, 1.0)[:, None, None, None])
    return images


def _is(operation: Tensor, name: str) -> Tensor:
    return operation == NUMBER[name]


def _matrices(operation: Tensor, level: Tensor, images: Tensor) -> Tensor:
    """The affine map of each image (batch, 2, 3), up to 30°, a shear of 0.3 and a shift of 0.45 of the side."""
    height, width = images.shape[-2:]

    def only(name: str, amount: Tensor) -> Tensor:
        return torch.where(_is(operation, name), amount, 0.0)

    angle = only("rotate", -level * math.radians(30))
    cosine, sine = angle.cos(), angle.sin()
    x, y = width / 2, height / 2  # the centre of the rotation
    shift_x = only("translate_x", level * (0.45 * width)) + (1 - cosine) * x - sine * y
    shift_y = only("translate_y", level * (0.45 * height)) + (1 - cosine) * y + sine * x
    shear_x, shear_y = only("shear_x", level * 0.3), only("shear_y", level * 0.3)
    return torch.stack((cosine, sine + shear_x, shift_x, shear_y - sine, cosine, shift_y), 1).view(-1, 2, 3)


def warp(images: Tensor, matrices: Tensor, fill: Tensor) -> Tensor:
    """Affine maps with bicubic interpolation, as Pillow's `transform` makes them; identities change nothing.

    `matrices` (batch, 2, 3) take the centre of a new pixel (x, y, 1) to a place in the old image.
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
    return _cubic([_cubic([pick(images, line + column) for column in columns], dx) for line in lines], dy)


def _cubic(v: list[Tensor], t: Tensor) -> Tensor:
    """Pillow's cubic (a = −1), in the form that leaves constants exactly as they are."""
    return v[1] + t * ((v[2] - v[0]) + t * ((2 * (v[0] - v[1]) + v[2] - v[3]) + t * (v[1] - v[0] + v[3] - v[2])))


def pick(images: Tensor, index: Tensor) -> Tensor:
    """For each pixel, the pixel at a flat index of the same image; `index` is (batch, height, width)."""
    places = index.flatten(1)[:, None].expand(-1, images.shape[1], -1)
    return images.flatten(2).gather(2, places).view_as(images)


def _tables(images: Tensor, operation: Tensor, share: Tensor, factor: Tensor) -> Tensor:
    """The new value of each of 256 values (batch, channels, 256); other operations get the identity."""
    values = torch.arange(256, device=images.device, dtype=images.dtype)[None, None]
    dropped = 8 - (4 - (share * 4).floor()).long()  # bits
    pixels = images.shape[-2] * images.shape[-1]
    total = _grey(images).long().sum((1, 2, 3))
    mean = (2 * total + pixels).div(2 * pixels, rounding_mode="floor").to(images.dtype)[:, None, None]
    choices = {
        "auto_contrast": _auto_contrast(images, values),
        "equalise": _equalise(images, values),
        "invert": 255 - values,
        "posterise": (values.long() >> dropped << dropped).to(images.dtype),
        "solarise": torch.where(values < 256 - (share * 256).floor(), values, 255 - values),
        "solarise_add": torch.where(values < 128, (values + (share * 110).floor()).clamp(max=255), values),
        "contrast": _blend(mean, values, factor),
        "brightness": _blend(torch.zeros_like(values), values, factor),
    }
    table = values.expand(*images.shape[:2], -1)
    for name, choice in choices.items():
        table = torch.where(_is(operation, name)[:, None, None], choice, table)
    return table


def _auto_contrast(images: Tensor, values: Tensor) -> Tensor:
    """Each channel stretched from 0 to 255."""
    flat = images.flatten(2)
    # Pillow's table is made in double precision, and truncated.
    low, high = flat.amin(2, keepdim=True).double(), flat.amax(2, keepdim=True).double()
    scale = torch.full_like(low, 255).div((high - low).clamp(min=1))  # 255 / x would multiply by 1 / x, rounded
    stretched = (values.double() * scale + -low * scale).clamp(0, 255).floor()
    return torch.where(high > low, stretched, values.double()).to(images.dtype)


def _equalise(images: Tensor, values: Tensor) -> Tensor:
    """Each channel's histogram made flat."""
    flat = images.flatten(2).long()
    # In 32 bits inductor makes the histogram itself. In 64 it would write each pixel's index and summand for ATen.
    histogram = torch.zeros(*flat.shape[:2], 256, dtype=torch.int32, device=images.device)
    histogram.scatter_add_(2, flat, torch.ones_like(flat, dtype=torch.int32))
    of_highest = histogram.gather(2, flat.amax(2, keepdim=True))
    step = (flat.shape[2] - of_highest).div(255, rounding_mode="floor")
    below = histogram.cumsum(2, dtype=torch.int32) - histogram
    safe = step.clamp(min=1)
    table = (safe // 2 + below).div(safe, rounding_mode="floor").clamp(max=255).to(images.dtype)
    return torch.where(step > 0, table, values)


def _grey(images: Tensor) -> Tensor:
    """Pillow's luma (batch, 1, height, width); a single channel stays. Exact in float32: nothing exceeds 2²⁴."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images[:, :1], images[:, 1:2], images[:, 2:]
    return ((19595 * red + 38470 * green + 7471 * blue + 32768) / 65536).floor()


def _blend(degenerate: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    """The degenerate at factor 0, the image at 1, extrapolated beyond; clipped and truncated like Pillow's `blend`."""
    return (degenerate + factor * (images - degenerate)).clamp(0, 255).floor()


def _smooth(images: Tensor) -> Tensor:
    """Pillow's SMOOTH: 3×3, the centre five times as heavy; the border stays as it is."""
    rows = images[..., :-2, :] + images[..., 1:-1, :] + images[..., 2:, :]
    total = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * images[..., 1:-1, 1:-1]
    result = images.clone()
    result[..., 1:-1, 1:-1] = (total / 13 + 0.5).floor()
    return result
