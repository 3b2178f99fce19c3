"""Snow, frost, fog and what splashes onto the lens. Images are in [0, 1]; whoever calls cuts the result to that."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor
from torch.nn import functional as F

from acutance.lab.robustness import filters
from acutance.lab.robustness.draws import Draws

# Of frost.
BRIGHTNESS, CONTRAST, ROUGHNESS = (0.35, 0.85), 0.08, 0.9
BLUE = (-0.09, 0.01, 0.07)
# Red, green and blue of what is splashed.
WATER, MUD = (175 / 255, 238 / 255, 238 / 255), (63 / 255, 42 / 255, 20 / 255)


def snow(
    x: Tensor,
    draws: Draws,
    mean: float,
    deviation: float,
    size: float,
    least: float,
    radius: int,
    sigma: float,
    keep: float,
) -> Tensor:
    """Flakes of enlarged noise in flight, over an image that is whitened."""
    height, width = x.shape[-2:]
    flakes = filters.zoomed(mean + deviation * draws.normal(len(x), 1, height, width), size)
    flakes = torch.where(flakes < least, 0, flakes).clamp(0, 1)
    flakes = filters.streak(flakes, radius, sigma, draws.uniform(len(x), low=-135, high=-45))
    flakes = ((flakes * 255).round() / 255)[..., :height, :width]
    whitened = torch.maximum(x, 1.5 * filters.luminance(x) + 0.5)
    return keep * x + (1 - keep) * whitened + flakes + flakes.rot90(2, (-2, -1))


def frost(x: Tensor, draws: Draws, keep: float, amount: float) -> Tensor:
    """A bluish texture laid over the image: drawn, as the benchmark's photographs of frost are not ours to ship.

    Its brightness, contrast and spectrum (power falling as frequency^−1.8) are about those of the photographs.
    """
    height, width = x.shape[-2:]
    down, right = (torch.fft.fftfreq(side, device=x.device) for side in (height, width))
    frequency = (down[:, None] ** 2 + right**2).sqrt()
    frequency[0, 0] = torch.inf  # no mean: the brightness is drawn by itself
    noise = torch.fft.ifft2(torch.fft.fft2(draws.normal(len(x), height, width)) * frequency**-ROUGHNESS).real
    noise = noise / noise.std((-2, -1), keepdim=True).clamp_min(1e-6)
    level = draws.uniform(len(x), 1, 1, low=BRIGHTNESS[0], high=BRIGHTNESS[1]) + CONTRAST * noise
    texture = level[:, None] + x.new_tensor(BLUE)[:, None, None]
    return keep * x + amount * _as_channels(texture.clamp(0, 1), x.size(1))


def fog(x: Tensor, draws: Draws, amount: float, decay: float) -> Tensor:
    """Clouds on top, the sum scaled back to the brightness the image had."""
    height, width = x.shape[-2:]
    clouds = plasma(draws, len(x), 1 << (max(height, width) - 1).bit_length(), decay)[:, None, :height, :width]
    brightest = x.amax((1, 2, 3), keepdim=True)
    return (x + amount * clouds) * brightest / (brightest + amount)


def plasma(draws: Draws, count: int, size: int, decay: float) -> Tensor:
    """Clouds (count, size, size) from 0 to 1, by the diamond-square rule on a torus; `size` is a power of two."""
    heights = torch.zeros(count, size, size, device=draws.device)
    step, height = size, 1.0
    while step >= 2:
        half = step // 2
        corners = heights[:, ::step, ::step]
        pairs = corners + corners.roll(-1, 1)
        middles = (pairs + pairs.roll(-1, 2)) / 4 + height * _noise_like(corners, draws)
        above, left = corners + corners.roll(-1, 2), corners + corners.roll(-1, 1)
        heights[:, half::step, half::step] = middles
        heights[:, ::step, half::step] = (middles + middles.roll(1, 1) + above) / 4 + height * _noise_like(above, draws)
        heights[:, half::step, ::step] = (middles + middles.roll(1, 2) + left) / 4 + height * _noise_like(left, draws)
        step, height = half, height / decay**2
    lowest, highest = heights.amin((1, 2), keepdim=True), heights.amax((1, 2), keepdim=True)
    return (heights - lowest) / (highest - lowest).clamp_min(1e-12)


def spatter(
    x: Tensor, draws: Draws, mean: float, deviation: float, sigma: float, least: float, strength: float, mud: bool
) -> Tensor:
    """Drops of water, shaded at their rims, or opaque mud."""
    height, width = x.shape[-2:]
    liquid = filters.gaussian(mean + deviation * draws.normal(len(x), 1, height, width), (sigma, sigma))
    if mud:
        cover = filters.gaussian((liquid > least).to(x.dtype), (strength, strength))
        cover = torch.where(cover < 0.8, 0, cover)
        return x * (1 - cover) + cover * _colour(x, MUD)
    liquid = (torch.where(liquid < least, 0, liquid) * 255).floor().clamp(0, 255)
    glint = liquid * _shading(liquid)
    glint = strength * glint / glint.amax((1, 2, 3), keepdim=True).clamp_min(1e-6)
    return x + glint * _colour(x, WATER)


def _shading(liquid: Tensor) -> Tensor:
    """Relief of the distance to the rims, in levels of 255."""
    box = torch.full((3, 3), 1 / 9)
    relief = torch.tensor([[-2.0, -1, 0], [-1, 1, 1], [0, 1, 2]])
    far = filters.convolve(_distance(_rims(liquid)), box, "mirror")
    shaded = filters.convolve(_equalised(far.floor()), relief, "mirror").clamp(0, 255)
    return filters.convolve(shaded, box, "mirror").round()


def _rims(liquid: Tensor) -> Tensor:
    """Canny's strong edges: the crests of the gradient, where it is steep. Weak ones are not followed."""
    sobel = torch.tensor([[-1.0, 0, 1], [-2, 0, 2], [-1, 0, 1]])
    across, down = filters.convolve(liquid, sobel, "edge"), filters.convolve(liquid, sobel.T, "edge")
    steep = across.abs() + down.abs()
    around = F.pad(steep, (1, 1, 1, 1))
    height, width = liquid.shape[-2:]

    def crest(i: int, j: int) -> Tensor:
        before = around[..., 1 - i : 1 - i + height, 1 - j : 1 - j + width]
        after = around[..., 1 + i : 1 + i + height, 1 + j : 1 + j + width]
        return (steep > before) & (steep >= after)

    level, upright = down.abs() < 0.4142 * across.abs(), down.abs() > 2.4142 * across.abs()
    slanted = torch.where(across * down > 0, crest(1, 1), crest(1, -1))
    return torch.where(level, crest(0, 1), torch.where(upright, crest(1, 0), slanted)) & (steep > 150)


def _distance(rims: Tensor, farthest: int = 20) -> Tensor:
    """To the nearest rim in pixels, up to `farthest`: along columns first, then along rows (exact)."""
    beyond = float(2 * farthest**2)
    squares = torch.where(rims, 0.0, beyond)
    for axis in (-2, -1):
        wide = F.pad(squares, (0, 0, farthest, farthest) if axis == -2 else (farthest, farthest), value=beyond)
        size = squares.size(axis)
        moved = (wide.narrow(axis, farthest + i, size) + i**2 for i in range(-farthest, farthest + 1))
        squares = reduce(torch.minimum, moved)
    return squares.sqrt().clamp(max=farthest)


def _equalised(levels: Tensor) -> Tensor:
    """Each plane's histogram made flat; a plane of one level stays as it is."""
    flat = levels.flatten(1).long()
    counts = torch.zeros(len(flat), 256, device=flat.device).scatter_add_(1, flat, torch.ones_like(flat).float())
    lowest = flat.amin(1, keepdim=True)
    others = flat.size(1) - counts.gather(1, lowest)  # pixels above the lowest level
    below = counts.cumsum(1).gather(1, flat) - counts.gather(1, lowest)
    return torch.where(others > 0, (below * 255 / others.clamp_min(1)).round(), flat).view_as(levels)


def _noise_like(x: Tensor, draws: Draws) -> Tensor:
    return draws.uniform(*x.shape, low=-1, high=1)


def _colour(x: Tensor, rgb: tuple[float, float, float]) -> Tensor:
    return _as_channels(x.new_tensor(rgb)[None, :, None, None], x.size(1))


def _as_channels(rgb: Tensor, channels: int) -> Tensor:
    return rgb if channels == 3 else filters.luminance(rgb)
