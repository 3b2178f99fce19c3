"""The 19 corruptions of Hendrycks & Dietterich (https://arxiv.org/abs/1903.12261) at their five severities.

Images of up to 32×32 get CIFAR-C's severities, which are gentler; others get ImageNet-C's. Corruptions work on batches,
on any device, in one or three channels. Random draws depend on the seed, the corruption, the severity and the image's
index. Each function takes images x in [0, 1], and its results are clipped to that. They are not the published files of
CIFAR-10-C and CIFAR-100-C, whose draws nobody can repeat; `evaluate` can read those files.
"""

from collections.abc import Mapping
from functools import reduce
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from acutance.errors import AcutanceError, ShapeError
from acutance.files.atomic import atomic_write
from acutance.io.inputs import pillow
from acutance.lab.data.images import Images
from acutance.lab.robustness import filters
from acutance.lab.robustness.filters import Draws

SEVERITIES = (1, 2, 3, 4, 5)
AT_ONCE = 250  # images that share one draw; another number gives other draws
FROST_BRIGHTNESS, FROST_CONTRAST, FROST_ROUGHNESS, FROST_BLUE = (0.35, 0.85), 0.08, 0.9, (-0.09, 0.01, 0.07)
WATER, MUD = (175 / 255, 238 / 255, 238 / 255), (63 / 255, 42 / 255, 20 / 255)  # red, green and blue


def corrupt(images: Tensor, name: str, severity: int, *, seed: int = 0) -> Tensor:
    """Bytes (n, channels, height, width), corrupted."""
    parts = images.split(AT_ONCE)
    return torch.cat([corrupt_part(part, name, severity, seed, index) for index, part in enumerate(parts)])


def draw_once(images: Images, folder: Path, *, seed: int = 0) -> Path:
    """Write a test set's corruptions as files in CIFAR-C's layout, for many models. Existing files are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in CORRUPTIONS:
        if not (path := folder / f"{name}.npy").exists():
            drawn = [corrupt(images.images, name, severity, seed=seed) for severity in SEVERITIES]
            array = torch.cat(drawn).permute(0, 2, 3, 1).cpu().numpy()
            atomic_write(path, lambda place, array=array: np.save(place, array))  # type: ignore[misc]
    labels = images.labels.repeat(len(SEVERITIES)).cpu().numpy()
    atomic_write(folder / "labels.npy", lambda place: np.save(place, labels))
    return folder


@torch.no_grad()
def corrupt_part(images: Tensor, name: str, severity: int, seed: int, part: int) -> Tensor:
    """The same for the images from number `part` · AT_ONCE on."""
    check_names([name], [severity])
    if images.dtype != torch.uint8 or images.ndim != 4 or images.size(1) not in (1, 3):
        found = f"{tuple(images.shape)} {images.dtype}"
        raise ShapeError(f"corruptions take bytes (n, 1 or 3 channels, height, width), not {found}")
    function, *levels = benchmark(images)[1][name]
    draws = Draws(images.device, seed, list(CORRUPTIONS).index(name), severity, part)
    level = levels[severity - 1]
    result: Tensor = function(images.float() / 255, draws, *(level if isinstance(level, tuple) else (level,)))
    # Truncated to whole levels like the benchmark. The small offset keeps whole numbers despite rounding errors.
    return (result.clamp(0, 1) * 255 + 1e-3).floor().byte()


def benchmark(images: Tensor) -> tuple[str, Mapping[str, tuple[Any, ...]]]:
    """The benchmark whose severities images of this size get, and its functions."""
    return ("CIFAR-C", CIFAR_C) if max(images.shape[-2:]) <= CIFAR_SIDE else ("ImageNet-C", CORRUPTIONS)


def check_names(names: list[str], severities: list[int]) -> None:
    """Refuse corruptions and severities that do not exist."""
    if unknown := [name for name in names if name not in CORRUPTIONS]:
        raise AcutanceError(f"no corruption {', '.join(unknown)}; there are {', '.join(CORRUPTIONS)}")
    if wrong := [severity for severity in severities if severity not in SEVERITIES]:
        raise AcutanceError(f"severities are whole numbers from 1 to 5, not {', '.join(map(str, wrong))}")


def gaussian_noise(x: Tensor, draws: Draws, deviation: float) -> Tensor:
    """Noise with the same deviation everywhere."""
    return x + deviation * draws.normal(*x.shape)


def shot_noise(x: Tensor, draws: Draws, photons: float) -> Tensor:
    """Poisson noise: white counts as `photons` photons."""
    return draws.poisson(x * photons) / photons


def impulse_noise(x: Tensor, draws: Draws, share: float) -> Tensor:
    """Salt and pepper: this share of the values becomes black or white."""
    hit = draws.uniform(*x.shape) <= share
    return torch.where(hit, (draws.uniform(*x.shape) <= 0.5).to(x.dtype), x)


def speckle_noise(x: Tensor, draws: Draws, deviation: float) -> Tensor:
    """Noise in proportion to the value."""
    return x + deviation * x * draws.normal(*x.shape)


def gaussian_blur(x: Tensor, draws: Draws, sigma: float) -> Tensor:
    """A Gaussian with a deviation of `sigma` pixels."""
    return filters.gaussian(x, (sigma, sigma))


def defocus_blur(x: Tensor, draws: Draws, radius: float, soften: float) -> Tensor:
    """A point becomes a disk."""
    return filters.convolve(x, filters.disk(radius, soften), "mirror")


def glass_blur(x: Tensor, draws: Draws, sigma: float, reach: int, rounds: int) -> Tensor:
    """Pixels copied from their neighbourhood, between two Gaussian blurs."""
    soft = (filters.gaussian(x, (sigma, sigma)) * 255).floor() / 255
    height, width = x.shape[-2:]
    source = torch.arange(height * width, device=x.device).repeat(len(x), 1)
    # The benchmark's code intends to swap two pixels, but overwrites the first before reading it, so we copy as well.
    # Pixels go one by one, since a copy may be copied again.
    spots = [(i, j) for i in range(height - reach, reach, -1) for j in range(width - reach, reach, -1)]
    for _ in range(rounds):
        steps = draws.integers(2, len(spots), len(x), low=-reach, high=reach)
        for (i, j), down, right in zip(spots, steps[0], steps[1], strict=True):
            source[:, i * width + j] = source.gather(1, ((i + down) * width + j + right)[:, None])[:, 0]
    mixed = soft.flatten(2).gather(2, source[:, None].expand(-1, x.size(1), -1)).view_as(x)
    return filters.gaussian(mixed, (sigma, sigma))


def motion_blur(x: Tensor, draws: Draws, radius: int, sigma: float) -> Tensor:
    """Blur along a line within 45° of the horizontal."""
    return filters.streak(x, radius, sigma, draws.uniform(len(x), low=-45, high=45))


def zoom_blur(x: Tensor, draws: Draws, end: float, step: float) -> Tensor:
    """The mean of the image and its enlargements from 1 up to `end`."""
    factors = np.arange(1, end, step).tolist()  # as in the benchmark: rounding includes 1.11, but not 1.16 or 1.21
    height, width = x.shape[-2:]
    return sum((filters.zoomed(x, factor)[..., :height, :width] for factor in factors), x) / (len(factors) + 1)


def snow(
    x: Tensor, draws: Draws, mean: float, std: float, size: float, least: float, radius: int, sigma: float, keep: float
) -> Tensor:
    """Flakes of enlarged noise with motion blur, over a whitened image."""
    height, width = x.shape[-2:]
    flakes = filters.zoomed(mean + std * draws.normal(len(x), 1, height, width), size)
    flakes = torch.where(flakes < least, 0, flakes).clamp(0, 1)
    flakes = filters.streak(flakes, radius, sigma, draws.uniform(len(x), low=-135, high=-45))
    flakes = ((flakes * 255).round() / 255)[..., :height, :width]
    whitened = torch.maximum(x, 1.5 * filters.luminance(x) + 0.5)
    return keep * x + (1 - keep) * whitened + flakes + flakes.rot90(2, (-2, -1))


def frost(x: Tensor, draws: Draws, keep: float, amount: float) -> Tensor:
    """A bluish texture over the image. It is random, since we may not ship the benchmark's photographs of frost.

    Its brightness, contrast and spectrum (power falls as frequency^−1.8) are about those of the photographs.
    """
    height, width = x.shape[-2:]
    down, right = (torch.fft.fftfreq(side, device=x.device) for side in (height, width))
    frequency = (down[:, None] ** 2 + right**2).sqrt()
    frequency[0, 0] = torch.inf  # removes the mean: the brightness is drawn separately
    noise = torch.fft.ifft2(torch.fft.fft2(draws.normal(len(x), height, width)) * frequency**-FROST_ROUGHNESS).real
    noise = noise / noise.std((-2, -1), keepdim=True).clamp_min(1e-6)
    level = draws.uniform(len(x), 1, 1, low=FROST_BRIGHTNESS[0], high=FROST_BRIGHTNESS[1]) + FROST_CONTRAST * noise
    texture = level[:, None] + x.new_tensor(FROST_BLUE)[:, None, None]
    return keep * x + amount * _as_channels(texture.clamp(0, 1), x.size(1))


def fog(x: Tensor, draws: Draws, amount: float, decay: float) -> Tensor:
    """Add clouds, and scale the sum back to the image's brightness."""
    height, width = x.shape[-2:]
    clouds = plasma(draws, len(x), 1 << (max(height, width) - 1).bit_length(), decay)[:, None, :height, :width]
    brightest = x.amax((1, 2, 3), keepdim=True)
    return (x + amount * clouds) * brightest / (brightest + amount)


def plasma(draws: Draws, count: int, size: int, decay: float) -> Tensor:
    """Clouds (count, size, size) from 0 to 1, by the diamond-square rule on a torus; `size` is a power of two."""
    heights = torch.zeros(count, size, size, device=draws.device)
    step, height = size, 1.0

    def rough(mean: Tensor) -> Tensor:
        return mean + height * draws.uniform(*mean.shape, low=-1, high=1)

    while step >= 2:
        half = step // 2
        corners = heights[:, ::step, ::step]
        above, left = corners + corners.roll(-1, 2), corners + corners.roll(-1, 1)
        middles = rough((left + left.roll(-1, 2)) / 4)
        heights[:, half::step, half::step] = middles
        heights[:, ::step, half::step] = rough((middles + middles.roll(1, 1) + above) / 4)
        heights[:, half::step, ::step] = rough((middles + middles.roll(1, 2) + left) / 4)
        step, height = half, height / decay**2
    lowest, highest = heights.amin((1, 2), keepdim=True), heights.amax((1, 2), keepdim=True)
    return (heights - lowest) / (highest - lowest).clamp_min(1e-12)


def spatter(
    x: Tensor, draws: Draws, mean: float, std: float, sigma: float, least: float, strength: float, mud: bool
) -> Tensor:
    """Drops of water with shaded rims, or opaque mud."""
    height, width = x.shape[-2:]
    liquid = filters.gaussian(mean + std * draws.normal(len(x), 1, height, width), (sigma, sigma))
    colour = _as_channels(x.new_tensor(MUD if mud else WATER)[None, :, None, None], x.size(1))
    if mud:
        cover = filters.gaussian((liquid > least).to(x.dtype), (strength, strength))
        cover = torch.where(cover < 0.8, 0, cover)
        return x * (1 - cover) + cover * colour
    liquid = (torch.where(liquid < least, 0, liquid) * 255).floor().clamp(0, 255)
    glint = liquid * _shading(liquid)
    glint = strength * glint / glint.amax((1, 2, 3), keepdim=True).clamp_min(1e-6)
    return x + glint * colour


def _shading(liquid: Tensor) -> Tensor:
    """Relief of the distance to the rims, in levels of 255."""
    box = torch.full((3, 3), 1 / 9)
    relief = torch.tensor([[-2.0, -1, 0], [-1, 1, 1], [0, 1, 2]])
    far = filters.convolve(_distance(_rims(liquid)), box, "mirror")
    shaded = filters.convolve(_equalised(far.floor()), relief, "mirror").clamp(0, 255)
    return filters.convolve(shaded, box, "mirror").round()


def _rims(liquid: Tensor) -> Tensor:
    """Canny's strong edges: ridges of the gradient that are steep. Weak edges are not followed."""
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
    """The exact distance to the nearest rim in pixels, at most `farthest`: along columns first, then along rows."""
    beyond = float(2 * farthest**2)
    squares = torch.where(rims, 0.0, beyond)
    for axis in (-2, -1):
        wide = F.pad(squares, (0, 0, farthest, farthest) if axis == -2 else (farthest, farthest), value=beyond)
        moved = (wide.narrow(axis, farthest + i, squares.size(axis)) + i**2 for i in range(-farthest, farthest + 1))
        squares = reduce(torch.minimum, [*moved])
    return squares.sqrt().clamp(max=farthest)


def _equalised(levels: Tensor) -> Tensor:
    """Each plane with its histogram equalised. A plane of one level stays as it is."""
    flat = levels.flatten(1).long()
    counts = torch.zeros(len(flat), 256, device=flat.device).scatter_add_(1, flat, torch.ones_like(flat).float())
    lowest = flat.amin(1, keepdim=True)
    others = flat.size(1) - counts.gather(1, lowest)  # pixels above the lowest level
    below = counts.cumsum(1).gather(1, flat) - counts.gather(1, lowest)
    return torch.where(others > 0, (below * 255 / others.clamp_min(1)).round(), flat).view_as(levels)


def _as_channels(rgb: Tensor, channels: int) -> Tensor:
    return rgb if channels == 3 else filters.luminance(rgb)


def brightness(x: Tensor, draws: Draws, more: float) -> Tensor:
    """Raise V of HSV, the largest channel. Hue and saturation stay."""
    value = x.amax(1, keepdim=True)
    raised = (value + more).clamp(0, 1)
    return torch.where(value > 0, x * raised / value.clamp_min(1e-12), raised)


def saturate(x: Tensor, draws: Draws, times: float, more: float) -> Tensor:
    """Scale and raise S of HSV. Grey counts as red (hue 0). Images of one channel have no saturation, and stay."""
    if x.size(1) == 1:
        return x
    value = x.amax(1, keepdim=True)
    missing = value - x  # 0 in the largest channel, V·S in the smallest
    saturation = missing.amax(1, keepdim=True) / value.clamp_min(1e-12)
    wanted = (saturation * times + more).clamp(0, 1)
    red = value * x.new_tensor([0.0, 1, 1])[:, None, None]
    pure = torch.where(saturation > 0, missing / saturation.clamp_min(1e-12), red)
    return value - wanted * pure


def contrast(x: Tensor, draws: Draws, times: float) -> Tensor:
    """Scale the distance from each channel's mean."""
    mean = x.mean((2, 3), keepdim=True)
    return (x - mean) * times + mean


def elastic_transform(x: Tensor, draws: Draws, strength: float) -> Tensor:
    """Read every pixel from a place nearby, shifted smoothly over the image."""
    height, width = x.shape[-2:]
    return _elastic(x, draws, 0.005 * height, (0.01 * height, 0.01 * width), strength)


def _elastic(x: Tensor, draws: Draws, farthest: float, sigma: tuple[float, float], strength: float) -> Tensor:
    height, width = x.shape[-2:]
    noise = draws.uniform(2, len(x), height, width, low=-farthest, high=farthest)
    right, down = strength * filters.gaussian(noise, sigma, "symmetric", truncate=3.0)
    rows = torch.arange(height, device=x.device)[:, None] + down
    columns = torch.arange(width, device=x.device) + right
    places = torch.stack([(2 * columns + 1) / width - 1, (2 * rows + 1) / height - 1], -1)
    return F.grid_sample(x, places, padding_mode="reflection", align_corners=False)


def elastic_with_affine(x: Tensor, draws: Draws, strength: float, sigma: float, shift: float) -> Tensor:
    """CIFAR-C's version: an affine map that moves three points by up to `shift`, then pixels moved by up to `strength`.

    All three are in units of the image's side.
    """
    height, width = x.shape[-2:]
    down, right = height // 2, width // 2
    third = min(height, width) // 3
    corners = [(down + third, right + third), (down + third, right - third), (down - third, right - third)]
    # CIFAR-C's code mistakes these points for (x, y).
    before = torch.tensor([[*corner, 1] for corner in corners], dtype=torch.float64)
    moves = draws.uniform(len(x), 3, 2, low=-shift * height, high=shift * height).cpu().double()
    forth = torch.linalg.solve(before, before[:, :2] + moves).mT  # (n, 2, 3)
    whole = torch.cat([forth, forth.new_tensor([[[0.0, 0, 1]]]).expand(len(x), 1, 3)], 1)
    back = torch.linalg.inv(whole)[:, :2].to(x)
    sides = (torch.arange(side, device=x.device, dtype=x.dtype) for side in (height, width))
    rows, columns = torch.meshgrid(*sides, indexing="ij")
    source = torch.einsum("nij,jhw->nhwi", back, torch.stack([columns, rows, torch.ones_like(rows)]))
    sizes = x.new_tensor([width - 1, height - 1])
    x = F.grid_sample(x, 2 * source / sizes - 1, padding_mode="reflection", align_corners=True)
    return x if strength == 0 else _elastic(x, draws, 1.0, (sigma * height, sigma * height), strength * height)


def pixelate(x: Tensor, draws: Draws, scale: float) -> Tensor:
    """Means over boxes, each shown as one large pixel."""
    (rows, nearest_row), (columns, nearest_column) = (_boxes(side, max(1, int(side * scale))) for side in x.shape[-2:])
    # Rounded to whole levels after each direction, halves up, as in Pillow.
    narrow = (255 * x @ columns.to(x).T + 0.5 + 1e-4).floor()
    small = (rows.to(x) @ narrow + 0.5 + 1e-4).floor() / 255
    return small[..., nearest_row, :][..., nearest_column]


def _boxes(size: int, count: int) -> tuple[Tensor, Tensor]:
    """The matrix (count, size) that averages the pixels whose centres lie in each box, and the box of each pixel.

    Rounding follows Pillow, so that ties come out the same.
    """
    width, places = size / count, torch.arange(size, dtype=torch.float64)
    middles = (torch.arange(count, dtype=torch.float64) + 0.5)[:, None] * width
    offset = (places - middles + 0.5) * (1 / width)
    inside = ((offset > -0.5) & (offset <= 0.5)).double()
    step = count / size
    nearest = torch.from_numpy(np.cumsum([step / 2] + [step] * (size - 1))).long()
    return inside / inside.sum(1, keepdim=True), nearest


def jpeg_compression(x: Tensor, draws: Draws, quality: int) -> Tensor:
    """Compressed and read back, by Pillow."""
    library, read = pillow(), []
    for picture in (x * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy():
        buffer = BytesIO()
        library.fromarray(picture.squeeze(-1) if len(x[0]) == 1 else picture).save(buffer, "JPEG", quality=quality)
        with library.open(buffer) as opened:
            read.append(np.asarray(opened).reshape(picture.shape))
    return torch.from_numpy(np.stack(read)).permute(0, 3, 1, 2).to(x) / 255


# Each function, then its further arguments by severity. The order decides what is drawn.
CORRUPTIONS: Mapping[str, tuple[Any, ...]] = {
    "gaussian_noise": (gaussian_noise, 0.08, 0.12, 0.18, 0.26, 0.38),
    "shot_noise": (shot_noise, 60, 25, 12, 5, 3),
    "impulse_noise": (impulse_noise, 0.03, 0.06, 0.09, 0.17, 0.27),
    "defocus_blur": (defocus_blur, (3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
    "glass_blur": (glass_blur, (0.7, 1, 2), (0.9, 2, 1), (1.0, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
    "motion_blur": (motion_blur, (10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
    "zoom_blur": (zoom_blur, (1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)),
    "snow": (
        snow,
        (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
        (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
        (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    ),
    "frost": (frost, (1.0, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)),
    "fog": (fog, (1.5, 2.0), (2.0, 2.0), (2.5, 1.7), (2.5, 1.5), (3.0, 1.4)),
    "brightness": (brightness, 0.1, 0.2, 0.3, 0.4, 0.5),
    "contrast": (contrast, 0.4, 0.3, 0.2, 0.1, 0.05),
    "elastic_transform": (elastic_transform, 12.5, 16.25, 21.25, 25.0, 30.0),
    "pixelate": (pixelate, 0.6, 0.5, 0.4, 0.3, 0.25),
    "jpeg_compression": (jpeg_compression, 25, 18, 15, 10, 7),
    "speckle_noise": (speckle_noise, 0.15, 0.2, 0.35, 0.45, 0.6),
    "gaussian_blur": (gaussian_blur, 1, 2, 3, 4, 6),
    "spatter": (
        spatter,
        (0.65, 0.3, 4, 0.69, 0.6, False),
        (0.65, 0.3, 3, 0.68, 0.6, False),
        (0.65, 0.3, 2, 0.68, 0.5, False),
        (0.65, 0.3, 1, 0.65, 1.5, True),
        (0.67, 0.4, 1, 0.65, 1.5, True),
    ),
    "saturate": (saturate, (0.3, 0.0), (0.1, 0.0), (2.0, 0.0), (5.0, 0.1), (20.0, 0.2)),
}

CIFAR_SIDE = 32
# The same at CIFAR-C's severities, in the same order.
CIFAR_C: Mapping[str, tuple[Any, ...]] = {
    "gaussian_noise": (gaussian_noise, 0.04, 0.06, 0.08, 0.09, 0.10),
    "shot_noise": (shot_noise, 500, 250, 100, 75, 50),
    "impulse_noise": (impulse_noise, 0.01, 0.02, 0.03, 0.05, 0.07),
    "defocus_blur": (defocus_blur, (0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
    "glass_blur": (glass_blur, (0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
    "motion_blur": (motion_blur, (6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
    "zoom_blur": (zoom_blur, (1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),
    "snow": (
        snow,
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ),
    "frost": (frost, (1.0, 0.2), (1.0, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),
    "fog": (fog, (0.2, 3.0), (0.5, 3.0), (0.75, 2.5), (1.0, 2.0), (1.5, 1.75)),
    "brightness": (brightness, 0.05, 0.1, 0.15, 0.2, 0.3),
    "contrast": (contrast, 0.75, 0.5, 0.4, 0.3, 0.15),
    "elastic_transform": (
        elastic_with_affine, (0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03),
    ),
    "pixelate": (pixelate, 0.95, 0.9, 0.85, 0.75, 0.65),
    "jpeg_compression": (jpeg_compression, 80, 65, 58, 50, 40),
    "speckle_noise": (speckle_noise, 0.06, 0.1, 0.12, 0.16, 0.2),
    "gaussian_blur": (gaussian_blur, 0.4, 0.6, 0.7, 0.8, 1),
    "spatter": (
        spatter,
        (0.62, 0.1, 0.7, 0.7, 0.5, False),
        (0.65, 0.1, 0.8, 0.7, 0.5, False),
        (0.65, 0.3, 1, 0.69, 0.5, False),
        (0.65, 0.1, 0.7, 0.69, 0.6, True),
        (0.65, 0.1, 0.5, 0.68, 0.6, True),
    ),
    "saturate": (saturate, (0.3, 0.0), (0.1, 0.0), (1.5, 0.0), (2.0, 0.1), (2.5, 0.2)),
}  # fmt: skip
