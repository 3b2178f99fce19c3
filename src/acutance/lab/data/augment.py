"""Augmentation of batches on the device. Random numbers are drawn first, so that the rest can be compiled.

Rows 2j and 2j + 1 are mixed with each other. The order is random anyway, and a pair stays within one process.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from acutance.errors import AcutanceError, ShapeError
from acutance.lab.data.rand_augment import OPERATIONS, pick, rand_augment, rand_draws

SMALLEST, LARGEST = 0.02, 1 / 3  # of the area
FLATTEST = 0.3  # height / width lies between this and its inverse
ATTEMPTS = 10
MASK = 0xFFFFFFFF  # 32 bits
GOLDEN = 0x9E3779B9 - 2**32  # the golden ratio's bits; any number that tells two uses of a hash apart would do


@dataclass(frozen=True)
class AugmentConfig:
    """What happens to a batch on the device, in this order. Everything is off unless asked for."""

    crop_pad: int = 0  # black pixels added around an image before a window of the old size is cut out at random
    flip: float = 0.0  # probability of a mirror image
    rand_layers: int = 0  # RandAugment: operations per image
    rand_magnitude: float = 9.0  # of 10
    rand_magnitude_std: float = 0.5
    rand_probability: float = 0.5  # of each operation
    erase: float = 0.0  # probability that a rectangle becomes noise
    mixup: float = 0.0  # α of Beta(α, α); 0 turns it off
    cutmix: float = 0.0  # α of Beta(α, α); 0 turns it off
    switch: float = 0.5  # probability of cutmix if both are on
    mix_probability: float = 1.0  # that a batch is mixed at all
    smoothing: float = 0.0  # of the labels

    def __post_init__(self) -> None:
        for name in ("flip", "rand_probability", "erase", "switch", "mix_probability", "smoothing"):
            if not 0 <= getattr(self, name) <= 1:
                raise AcutanceError(f"augment.{name} must lie in 0 to 1; got {getattr(self, name)}")
        for name in ("crop_pad", "rand_layers", "rand_magnitude_std", "mixup", "cutmix"):
            if getattr(self, name) < 0:
                raise AcutanceError(f"augment.{name} must not be negative; got {getattr(self, name)}")

    @property
    def mixes(self) -> bool:
        """Whether images are mixed in pairs, so that each process needs an even number of rows."""
        return self.mixup > 0 or self.cutmix > 0


# rand-m9-mstd0.5-inc1 and the rest of https://arxiv.org/abs/2012.12877, without the random resized crop (see imagenet).
DEIT = AugmentConfig(flip=0.5, rand_layers=2, erase=0.25, mixup=0.8, cutmix=1.0, smoothing=0.1)
# For images up to 32×32, DeiT's code replaces that crop by a window of the padded image.
DEIT_SMALL_IMAGES = replace(DEIT, crop_pad=4)


class Draws(NamedTuple):
    """The random numbers of a batch, a row per image; `Augment` turns them into operations and rectangles."""

    crop: Tensor  # (batch, 2): 0 to 2 · crop_pad, down and right
    flip: Tensor  # (batch,): 0 to 1
    operation: Tensor  # (batch, layers): a number in OPERATIONS
    applied: Tensor  # (batch, layers): 0 to 1
    noise: Tensor  # (batch, layers): normal, of the magnitude
    sign: Tensor  # (batch, layers): 0 or 1
    erase: Tensor  # (batch, 5, attempts), 0 to 1: area, aspect, top, left, whether at all
    erase_seed: Tensor  # (batch,): 32 bits
    # (batch, 3 or 4), 0 to 1: mixup or CutMix, the centre of a rectangle and, unless it is certain, whether to mix at
    # all. As in DeiT, all rows share one draw.
    mix: Tensor
    keep: Tensor  # (batch, 2): from mixup's and CutMix's Beta

    def rows(self, chosen: slice) -> "Draws":
        """The draws of these rows. They give what augmenting the whole batch would give in these rows."""
        return Draws(*(part[chosen] for part in self))


class Augment:
    """The augmentation of a configuration; `mean` and `std` are per channel, in units of [0, 1].

    Calls can be compiled with `fullgraph=True`.
    """

    def __init__(
        self, config: AugmentConfig, *, classes: int, mean: Sequence[float], std: Sequence[float], device: Any = "cpu"
    ) -> None:
        self.config, self.classes = config, classes
        self.mean, self.std = (torch.tensor(part, dtype=torch.float32, device=device) for part in (mean, std))
        self.fill = (self.mean * 255).round()
        self._mix_draws = 3 + (config.mix_probability < 1)
        # An α of 0 becomes 1: its draw is not used.
        self._betas = torch.tensor([[config.mixup or 1.0] * 2, [config.cutmix or 1.0] * 2], device=device)

    def draw(self, count: int, generator: torch.Generator) -> Draws:
        """Draw for a whole global batch, on the generator's device and without waiting for it."""
        to: dict[str, Any] = {"generator": generator, "device": generator.device}
        layers = (count, self.config.rand_layers)
        return Draws(
            torch.randint(2 * self.config.crop_pad + 1, (count, 2), **to),
            torch.rand(count, **to),
            torch.randint(len(OPERATIONS), layers, **to),
            torch.rand(layers, **to),
            torch.randn(layers, **to),
            torch.randint(2, layers, **to),
            torch.rand(5, count, ATTEMPTS, **to).transpose(0, 1),
            torch.randint(MASK, (count,), **to),
            torch.rand(self._mix_draws, **to).expand(count, self._mix_draws),
            # What torch.distributions.Beta does; that takes no generator.
            torch._sample_dirichlet(self._betas, generator)[:, 0].expand(count, 2),
        )

    def __call__(self, images: Tensor, labels: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """Bytes (batch, channels, height, width) and labels (batch,) to normalised images and soft targets."""
        config, (height, width) = self.config, images.shape[-2:]
        values = images.float()
        if config.crop_pad:
            values = random_crop(values, config.crop_pad, draws.crop)
        if config.flip:
            values = flip(values, draws.flip < config.flip)
        if config.rand_layers:
            strength = config.rand_magnitude, config.rand_magnitude_std, config.rand_probability
            plan = rand_draws(draws.operation, draws.applied, draws.noise, draws.sign, *strength)
            values = rand_augment(values, plan, self.fill)
        values = self.plain(values)
        if config.erase:
            values = random_erasing(values, erase_boxes(draws.erase, config.erase, height, width), draws.erase_seed)
        targets = soft_targets(labels, self.classes, config.smoothing)
        if not config.mixes:
            return values, targets
        keep, cut, boxes = mix_plan(draws.mix[:, :3], draws.keep, config, height, width)
        if config.mix_probability < 1:
            mixed = draws.mix[:, 3] < config.mix_probability
            keep, cut = torch.where(mixed, keep, 1.0), cut & mixed
        return mix(values, targets, keep, cut, boxes)

    def plain(self, images: Tensor) -> Tensor:
        """Images for evaluation: normalised, and nothing else."""
        return normalise(images.float(), self.mean, self.std)


def normalise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """From 0…255 to zero mean and unit deviation; `mean` and `std` (channels,) are in units of [0, 1]."""
    return (images / 255 - mean[:, None, None]) / std[:, None, None]


def random_crop(images: Tensor, pad: int, offsets: Tensor) -> Tensor:
    """Windows of the old size out of images with `pad` black pixels around; `offsets` (batch, 2) are down and right."""
    height, width = images.shape[-2:]
    rows = torch.arange(height, device=images.device) + offsets[:, :1] - pad
    columns = torch.arange(width, device=images.device) + offsets[:, 1:] - pad
    index = rows.clamp(0, height - 1)[:, :, None] * width + columns.clamp(0, width - 1)[:, None, :]
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
    return pick(images, index) * inside[:, None].to(images.dtype)


def flip(images: Tensor, chosen: Tensor) -> Tensor:
    """Mirror images, left and right, where `chosen` (batch,) is true."""
    return torch.where(chosen[:, None, None, None], images.flip(-1), images)


def erase_boxes(place: Tensor, probability: float, height: int, width: int) -> Tensor:
    """Top, bottom, left and right (batch, 4) of the first of ten rectangles that fits; zeros if nothing is erased."""
    size, shape, down, right, whether = place.unbind(1)
    area = (SMALLEST + (LARGEST - SMALLEST) * size) * (height * width)
    aspect = torch.exp((2 * shape - 1) * math.log(1 / FLATTEST))
    tall, wide = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()
    fits = (tall < height) & (wide < width)
    first = fits.int().argmax(1, keepdim=True)
    tall, wide = tall.gather(1, first)[:, 0], wide.gather(1, first)[:, 0]
    top, left = (down[:, 0] * (height - tall + 1)).floor(), (right[:, 0] * (width - wide + 1)).floor()
    erased = fits.any(1) & (whether[:, 0] < probability)
    return (torch.stack([top, top + tall, left, left + wide], 1) * erased[:, None]).long()


def random_erasing(images: Tensor, boxes: Tensor, seeds: Tensor) -> Tensor:
    """Normal noise in each normalised image's rectangle (https://arxiv.org/abs/1708.04896, "pixel" in DeiT's code)."""
    return torch.where(_inside(images, boxes), normal_noise(seeds, images), images)


def normal_noise(seeds: Tensor, like: Tensor) -> Tensor:
    """Normal numbers in the shape of `like`, each row a function of its seed (batch,) alone.

    Some rows of a batch therefore get the same noise as in the whole batch, and no generator is needed.
    """
    places = torch.arange(math.prod(like.shape[1:]), device=like.device, dtype=torch.int32)
    first = _scramble(_scramble(seeds.int())[:, None] ^ places)
    second = _scramble(first ^ GOLDEN)
    radius = (-2 * torch.log(((first.long() & MASK) + 1).to(like.dtype) / (MASK + 2))).sqrt()  # Box and Muller's
    angle = (second.long() & MASK).to(like.dtype) * (2 * math.pi / (MASK + 1))
    return (radius * torch.cos(angle)).view_as(like)


def _scramble(x: Tensor) -> Tensor:
    """A hash of 32 bits (the constants are Wellons'), in int32, which a GPU multiplies in one instruction.

    Products keep the lowest bits; a shift to the right brings in the sign, which is masked.
    """
    x = (x ^ (x >> 16 & 0xFFFF)) * 0x7FEB352D
    x = (x ^ (x >> 15 & 0x1FFFF)) * (0x846CA68B - 2**32)
    return x ^ (x >> 16 & 0xFFFF)


def mix_plan(
    place: Tensor, betas: Tensor, config: AugmentConfig, height: int, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """How much of itself each row keeps, whether the rest is a rectangle, and which one (top, bottom, left, right)."""
    choice, *centre = place.unbind(1)
    blended, kept = betas.unbind(1)
    cut = choice < (0.0 if config.cutmix <= 0 else 1.0 if config.mixup <= 0 else config.switch)
    ends = []
    for at, side in zip(centre, (height, width), strict=True):
        long = (side * (1 - kept).sqrt()).floor()
        middle = (at * side).floor()
        ends.append((middle - (long / 2).floor()).clamp(0, side))
        ends.append((middle + ((long + 1) / 2).floor()).clamp(0, side))
    top, bottom, left, right = ends
    area = (bottom - top) * (right - left)  # the border may have cut the rectangle smaller
    return torch.where(cut, 1 - area / (height * width), blended), cut, torch.stack(ends, 1).long()


def mix(images: Tensor, targets: Tensor, keep: Tensor, cut: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Rows 2j and 2j + 1 blended (https://arxiv.org/abs/1710.09412) or cut into each other (https://arxiv.org/abs/1905.04899).

    The soft targets (batch, classes) are blended by the same weights `keep` (batch,).
    """
    if len(images) % 2:
        raise ShapeError(f"images are mixed in pairs: a batch, and each share of it, must be even; got {len(images)}")
    others, weight = _partners(images), keep[:, None, None, None]
    pasted = torch.where(_inside(images, boxes), others, images)
    mixed = torch.where(cut[:, None, None, None], pasted, weight * images + (1 - weight) * others)
    return mixed, keep[:, None] * targets + (1 - keep[:, None]) * _partners(targets)


def _inside(images: Tensor, boxes: Tensor) -> Tensor:
    """True within each image's rectangle: (batch, 1, height, width)."""
    top, bottom, left, right = boxes[:, :, None].unbind(1)
    rows, columns = (torch.arange(side, device=images.device) for side in images.shape[-2:])
    return (((rows >= top) & (rows < bottom))[:, :, None] & ((columns >= left) & (columns < right))[:, None])[:, None]


def _partners(rows: Tensor) -> Tensor:
    """Each row's neighbour: 1, 0, 3, 2, …"""
    return rows.reshape(-1, 2, *rows.shape[1:]).flip(1).reshape(rows.shape)


def soft_targets(labels: Tensor, classes: int, smoothing: float) -> Tensor:
    """Labels as distributions (batch, classes): `smoothing` of the weight spread evenly over all classes."""
    return F.one_hot(labels, classes).float() * (1 - smoothing) + smoothing / classes
