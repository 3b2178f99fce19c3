"""Parts of corruptions and attacks: random numbers, and filters and zooms of images (n, channels, height, width)."""

from math import ceil
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from acutance.lab.data.seeds import generator

# Pixels beyond the border: the last pixel repeated; the mirror image with the last pixel, or without it.
Border = Literal["edge", "symmetric", "mirror"]


class Draws:
    """Random numbers that depend on `numbers` alone. They are drawn on the CPU, so every device gets the same."""

    def __init__(self, device: torch.device | str, *numbers: int) -> None:
        self.device, self._generator = torch.device(device), generator("cpu", *numbers)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(self.device)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        return (low + (high - low) * torch.rand(shape, generator=self._generator)).to(self.device)

    def integers(self, *shape: int, low: int, high: int) -> Tensor:
        """From `low` to `high` − 1."""
        return torch.randint(low, high, shape, generator=self._generator).to(self.device)

    def poisson(self, rate: Tensor) -> Tensor:
        return torch.poisson(rate.cpu(), generator=self._generator).to(self.device)


def convolve(x: Tensor, kernel: Tensor, border: Border) -> Tensor:
    """Correlate every channel with the same kernel of odd height and width; the kernel is not flipped.

    Unlike torch's padding, the border may be wider than the image.
    """
    rows, columns = (_places(x.size(axis), kernel.size(axis) // 2, border, x.device) for axis in (-2, -1))
    wide = x[..., rows, :][..., columns]
    return F.conv2d(wide.flatten(0, 1)[:, None], kernel.to(x)[None, None]).view_as(x)


def _places(size: int, pad: int, border: Border, device: torch.device) -> Tensor:
    """The pixels at −pad … size + pad − 1."""
    places = torch.arange(-pad, size + pad, device=device)
    if border == "edge" or size == 1:
        return places.clamp(0, size - 1)
    period = 2 * size if border == "symmetric" else 2 * size - 2
    places = places.remainder(period)
    return torch.minimum(places, period - (1 if border == "symmetric" else 0) - places)


def gaussian(x: Tensor, sigma: tuple[float, float], border: Border = "edge", truncate: float = 4.0) -> Tensor:
    """A Gaussian blur along height and width, cut off at `truncate` deviations."""
    high, wide = (_bell(deviation, int(truncate * deviation + 0.5)) for deviation in sigma)
    return convolve(convolve(x, high[:, None], border), wide[None, :], border)


def _bell(sigma: float, radius: int) -> Tensor:
    places = torch.arange(-radius, radius + 1, dtype=torch.float64)
    weights = torch.exp(-(places**2) / (2 * sigma**2))
    return weights / weights.sum()


def disk(radius: float, soften: float) -> Tensor:
    """A disk with sum one, softened by a small Gaussian."""
    reach, soft = (8, 1) if radius <= 8 else (radius, 2)
    squares = torch.arange(-reach, reach + 1, dtype=torch.float64) ** 2
    inside = (squares[:, None] + squares <= radius**2).double()
    bell = _bell(soften, soft)
    plane = (inside / inside.sum())[None, None]
    return convolve(convolve(plane, bell[:, None], "mirror"), bell[None, :], "mirror")[0, 0]


def streak(x: Tensor, radius: int, sigma: float, degrees: Tensor) -> Tensor:
    """Motion blur: half a Gaussian along a line, with its own angle for each image."""
    weights = torch.exp(-(torch.arange(2 * radius + 1, dtype=torch.float64) ** 2) / (2 * sigma**2))
    weights /= weights.sum()
    angle, blurred, (height, width) = degrees.double().deg2rad(), torch.zeros_like(x), x.shape[-2:]
    for i, weight in enumerate(weights.tolist()):  # shifted by whole pixels; the edge is repeated
        down, right = (torch.ceil(i * part - 0.5).long()[:, None] for part in (angle.sin(), angle.cos()))
        rows = (torch.arange(height, device=x.device) + down).clamp(0, height - 1)
        columns = (torch.arange(width, device=x.device) + right).clamp(0, width - 1)
        places = (rows[:, :, None] * width + columns[:, None, :]).flatten(1)[:, None]
        blurred += weight * x.flatten(2).gather(2, places.expand(-1, x.size(1), -1)).view_as(x)
    return blurred


def zoomed(x: Tensor, factor: float) -> Tensor:
    """The middle of the images, enlarged bilinearly (corners aligned) to at least their size."""
    height, width = (ceil(side / factor) for side in x.shape[-2:])
    top, left = (x.size(-2) - height) // 2, (x.size(-1) - width) // 2
    middle = x[..., top : top + height, left : left + width]
    size = (round(height * factor), round(width * factor))
    return F.interpolate(middle, size, mode="bilinear", align_corners=True)


def luminance(x: Tensor) -> Tensor:
    """One channel, as bright as the three. Images of one channel stay as they are."""
    if x.size(1) == 1:
        return x
    return torch.einsum("nchw,c->nhw", x, x.new_tensor([0.299, 0.587, 0.114]))[:, None]
