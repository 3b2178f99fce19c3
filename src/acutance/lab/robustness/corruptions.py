"""The 19 corruptions of Hendrycks & Dietterich (https://arxiv.org/abs/1903.12261) at ImageNet-C's five severities.

Batch-wise on any device, for images of any size in one or three channels. What is drawn is a function of the seed, the
corruption, the severity and the image's place among the images. These are not the published files: those of CIFAR-10-C
and CIFAR-100-C have gentler severities, and are read by `published`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from acutance.errors import AcutanceError, ShapeError
from acutance.lab.robustness import blur, digital, noise, weather
from acutance.lab.robustness.draws import Draws

SEVERITIES = (1, 2, 3, 4, 5)
AT_ONCE = 250  # images that are drawn for together; another number gives other draws


@dataclass(frozen=True)
class Corruption:
    """A function of images in [0, 1] and draws, with its further arguments by severity."""

    function: Callable[..., Tensor]
    levels: tuple[tuple[Any, ...], ...]


def _one(function: Callable[..., Tensor], *levels: float) -> Corruption:
    return Corruption(function, tuple((level,) for level in levels))


CORRUPTIONS: Mapping[str, Corruption] = {
    "gaussian_noise": _one(noise.gaussian, 0.08, 0.12, 0.18, 0.26, 0.38),
    "shot_noise": _one(noise.shot, 60, 25, 12, 5, 3),
    "impulse_noise": _one(noise.impulse, 0.03, 0.06, 0.09, 0.17, 0.27),
    "defocus_blur": Corruption(blur.defocus, ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5))),
    "glass_blur": Corruption(blur.glass, ((0.7, 1, 2), (0.9, 2, 1), (1.0, 2, 3), (1.1, 3, 2), (1.5, 4, 2))),
    "motion_blur": Corruption(blur.motion, ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15))),
    "zoom_blur": Corruption(blur.zoom, ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03))),
    "snow": Corruption(
        weather.snow,
        (
            (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
            (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
            (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
            (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
            (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
        ),
    ),
    "frost": Corruption(weather.frost, ((1.0, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75))),
    "fog": Corruption(weather.fog, ((1.5, 2.0), (2.0, 2.0), (2.5, 1.7), (2.5, 1.5), (3.0, 1.4))),
    "brightness": _one(digital.brightness, 0.1, 0.2, 0.3, 0.4, 0.5),
    "contrast": _one(digital.contrast, 0.4, 0.3, 0.2, 0.1, 0.05),
    "elastic_transform": _one(digital.elastic, 12.5, 16.25, 21.25, 25.0, 30.0),
    "pixelate": _one(digital.pixelate, 0.6, 0.5, 0.4, 0.3, 0.25),
    "jpeg_compression": _one(digital.jpeg, 25, 18, 15, 10, 7),
    "speckle_noise": _one(noise.speckle, 0.15, 0.2, 0.35, 0.45, 0.6),
    "gaussian_blur": _one(blur.gaussian, 1, 2, 3, 4, 6),
    "spatter": Corruption(
        weather.spatter,
        (
            (0.65, 0.3, 4, 0.69, 0.6, False),
            (0.65, 0.3, 3, 0.68, 0.6, False),
            (0.65, 0.3, 2, 0.68, 0.5, False),
            (0.65, 0.3, 1, 0.65, 1.5, True),
            (0.67, 0.4, 1, 0.65, 1.5, True),
        ),
    ),
    "saturate": Corruption(digital.saturate, ((0.3, 0.0), (0.1, 0.0), (2.0, 0.0), (5.0, 0.1), (20.0, 0.2))),
}


def corrupt(images: Tensor, name: str, severity: int, *, seed: int = 0) -> Tensor:
    """Bytes (n, channels, height, width), corrupted."""
    parts = images.split(AT_ONCE)
    return torch.cat([corrupt_part(part, name, severity, seed, index) for index, part in enumerate(parts)])


@torch.no_grad()
def corrupt_part(images: Tensor, name: str, severity: int, seed: int, part: int) -> Tensor:
    """The same for images `part` · AT_ONCE and following, AT_ONCE of them or, at the end, fewer."""
    check_names([name], [severity])
    if images.dtype != torch.uint8 or images.ndim != 4 or images.size(1) not in (1, 3):
        raise ShapeError(
            f"corruptions take bytes (n, 1 or 3 channels, height, width), not {tuple(images.shape)} {images.dtype}"
        )
    kind = CORRUPTIONS[name]
    draws = Draws(images.device, seed, list(CORRUPTIONS).index(name), severity, part)
    result = kind.function(images.float() / 255, draws, *kind.levels[severity - 1])
    # Cut to whole levels as the benchmark cuts, not rounded; a little up, for what is a whole number but for rounding.
    return (result.clamp(0, 1) * 255 + 1e-3).floor().byte()


def check_names(names: list[str], severities: list[int]) -> None:
    """Refuse what does not exist, by name."""
    unknown = [name for name in names if name not in CORRUPTIONS]
    if unknown:
        raise AcutanceError(f"no corruption {', '.join(unknown)}; there are {', '.join(CORRUPTIONS)}")
    if wrong := [severity for severity in severities if severity not in SEVERITIES]:
        raise AcutanceError(f"severities are whole numbers from 1 to 5, not {', '.join(map(str, wrong))}")
