"""Colour, geometry and compression. Images are in [0, 1]; whoever calls cuts the result to that."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from acutance.lab.data.decoding import pillow
from acutance.lab.robustness import filters
from acutance.lab.robustness.draws import Draws


def brightness(x: Tensor, draws: Draws, more: float) -> Tensor:
    """V of HSV, the largest channel, raised; hue and saturation stay."""
    value = x.amax(1, keepdim=True)
    raised = (value + more).clamp(0, 1)
    return torch.where(value > 0, x * raised / value.clamp_min(1e-12), raised)


def saturate(x: Tensor, draws: Draws, times: float, more: float) -> Tensor:
    """S of HSV scaled and raised; one channel has none, and stays. Grey counts as a red, as HSV has it (hue 0)."""
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
    """Closer to each channel's mean."""
    mean = x.mean((2, 3), keepdim=True)
    return (x - mean) * times + mean


def elastic(x: Tensor, draws: Draws, strength: float) -> Tensor:
    """Every pixel read from a place a little off, neighbours alike."""
    height, width = x.shape[-2:]
    farthest = 0.005 * height
    noise = draws.uniform(2, len(x), height, width, low=-farthest, high=farthest)
    right, down = strength * filters.gaussian(noise, (0.01 * height, 0.01 * width), "symmetric", truncate=3.0)
    rows = torch.arange(height, device=x.device)[:, None] + down
    columns = torch.arange(width, device=x.device) + right
    places = torch.stack([(2 * columns + 1) / width - 1, (2 * rows + 1) / height - 1], -1)
    return F.grid_sample(x, places, padding_mode="reflection", align_corners=False)


def pixelate(x: Tensor, draws: Draws, scale: float) -> Tensor:
    """Means over boxes, each shown as one large pixel."""
    height, width = x.shape[-2:]
    rows, columns = (_boxes(side, max(1, int(side * scale))).to(x) for side in (height, width))
    # Whole levels after each direction, halves upwards, as Pillow has them.
    narrow = (255 * x @ columns.T + 0.5 + 1e-4).floor()
    small = (rows @ narrow + 0.5 + 1e-4).floor() / 255
    return small[..., _nearest(height, len(rows)), :][..., _nearest(width, len(columns))]


def _nearest(size: int, count: int) -> Tensor:
    """Which of `count` boxes each of `size` pixels lies in, adding up steps as Pillow does: so ties fall as there."""
    step = count / size
    return torch.from_numpy(np.cumsum([step / 2] + [step] * (size - 1))).long()


def _boxes(size: int, count: int) -> Tensor:
    """The matrix (count, size) of means over the pixels whose middles lie in each box."""
    width, places = size / count, torch.arange(size, dtype=torch.float64)
    middles = (torch.arange(count, dtype=torch.float64) + 0.5)[:, None] * width
    offset = (places - middles + 0.5) * (1 / width)  # rounded as by Pillow, so that ties fall as there
    inside = ((offset > -0.5) & (offset <= 0.5)).double()
    return inside / inside.sum(1, keepdim=True)


def jpeg(x: Tensor, draws: Draws, quality: int) -> Tensor:
    """Compressed and read back, by Pillow."""
    library = pillow()
    levels = (x * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    read = []
    for picture in levels:
        buffer = BytesIO()
        library.fromarray(picture.squeeze(-1) if picture.shape[-1] == 1 else picture).save(
            buffer, "JPEG", quality=quality
        )
        with library.open(buffer) as opened:
            read.append(np.asarray(opened).reshape(picture.shape))
    return torch.from_numpy(np.stack(read)).permute(0, 3, 1, 2).to(x) / 255
