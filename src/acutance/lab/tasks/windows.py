"""Segmentation of whole images through square windows, at one scale or at several with flips, and mean IoU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from acutance.distributed import gather, rank_and_world_size
from acutance.errors import AcutanceError
from acutance.lab.data.segmentation import IGNORED
from acutance.lab.tasks.base import incidental

View = tuple[float, bool]  # a scale, and whether the image is flipped
SINGLE: tuple[View, ...] = ((1.0, False),)
MULTI: tuple[View, ...] = tuple((s, flip) for s in (0.5, 0.75, 1.0, 1.25, 1.5, 1.75) for flip in (False, True))
LONGEST = 4  # times the short side: the most that an image's long side may have after resizing


@dataclass(frozen=True)
class WindowConfig:
    """How whole images are read; the defaults are ADE20K's."""

    short_side: int = 512  # pixels that images are resized to have there at scale 1
    size: int = 512  # pixels a side of a window
    stride: int = 480
    at_once: int = incidental(4)  # windows in a forward pass

    def __post_init__(self) -> None:
        if min(self.short_side, self.size, self.stride, self.at_once) < 1 or self.stride > self.size:
            raise AcutanceError(
                f"{self}: all of these start at 1, and windows that move on by more than their size leave pixels out"
            )


def corners(extent: int, config: WindowConfig) -> list[int]:
    """Where windows start along one side; the last one ends with the image."""
    last = extent - config.size
    return [*range(0, last, config.stride), last]


def view_sizes(size: tuple[int, int], scale: float, config: WindowConfig) -> tuple[tuple[int, int], tuple[int, int]]:
    """Height and width that an image is resized to at a scale, and then again where that is less than a window.

    The public code does it in these two steps, so that small scales see less detail.
    """
    short = int(scale * config.short_side)  # whole numbers first, as there
    factor = min(short / min(size), int(scale * LONGEST * config.short_side) / max(size))
    scaled = max(int(size[0] * factor + 0.5), 1), max(int(size[1] * factor + 0.5), 1)
    if min(scaled) >= config.size:
        return scaled, scaled
    grown = config.size / min(scaled)
    long = max(config.size, int(max(scaled) * grown))  # of a square it may come out one short by rounding
    return scaled, ((config.size, long) if scaled[0] < scaled[1] else (long, config.size))


def forward_passes(size: tuple[int, int], views: Sequence[View], config: WindowConfig) -> int:
    """How often `probabilities` calls the model on an image of this size."""
    total = 0
    for scale, _ in views:
        height, width = view_sizes(size, scale, config)[1]
        total += -(-len(corners(height, config)) * len(corners(width, config)) // config.at_once)
    return total


def probabilities(model: nn.Module, image: Tensor, views: Sequence[View], config: WindowConfig) -> Tensor:
    """Every pixel's class probabilities (classes, height, width), the mean over views of a normalised image.

    In each view, scores of overlapping windows are averaged and brought to the image's size before the softmax.
    """
    size = (image.shape[1], image.shape[2])
    total = image.new_zeros(())
    for scale, flip in views:
        view = image
        for step in view_sizes(size, scale, config):
            view = _resized(view, step)
        scores = _merged(model, view.flip(-1) if flip else view, config)
        scores = _resized(scores.flip(-1) if flip else scores, size)
        total = total + scores.softmax(0)
    return total / len(views)


def confusion(predicted: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Pixels by true and predicted class, (classes, classes); those labelled 255 are left out."""
    counts = labels != IGNORED
    both = labels[counts] * classes + predicted[counts]
    return both.bincount(minlength=classes**2).view(classes, classes)


def scores(matrix: Tensor) -> dict[str, float]:
    """Mean IoU over the classes that occur in labels or predictions, accuracy per class and per pixel, in percent."""
    matrix = matrix.double()
    hit, true, guessed = matrix.diagonal(), matrix.sum(1), matrix.sum(0)
    union = true + guessed - hit
    return {
        "miou": 100 * float((hit / union)[union > 0].mean()),
        "mean_accuracy": 100 * float((hit / true)[true > 0].mean()),
        "pixel_accuracy": 100 * float(hit.sum() / true.sum()),
    }


@torch.no_grad()
def segmented(
    model: nn.Module, read: Callable[[int], Tensor], count: int, views: Sequence[View], config: WindowConfig
) -> Iterator[tuple[int, Tensor]]:
    """This process's images of `read(0)` … `read(count - 1)` by index, each with its predicted classes.

    A sharded model needs every process in every forward pass, and images differ in how many they take. A process that
    is done with its image therefore runs the model on zeros until the others are done.
    """
    rank, world = rank_and_world_size()
    for first in range(0, count, world):
        mine = first + rank < count
        image = read(min(first + rank, count - 1))
        passes = forward_passes((image.shape[1], image.shape[2]), views, config) if mine else 0
        most = max(gather(passes))
        found = probabilities(model, image, views, config).argmax(0) if mine else None
        for _ in range(most - passes):
            model(image.new_zeros(config.at_once, image.shape[0], config.size, config.size))
        if found is not None:
            yield first + rank, found


def _merged(model: nn.Module, view: Tensor, config: WindowConfig) -> Tensor:
    """Scores of all windows, averaged where they overlap."""
    places = [(top, left) for top in corners(view.shape[1], config) for left in corners(view.shape[2], config)]
    total = view.new_zeros(())
    covered = view.new_zeros(view.shape[1:])
    for first in range(0, len(places), config.at_once):
        group = places[first : first + config.at_once]
        found = model(torch.stack([_cut(view, place, config) for place in group]))
        found = found.to(torch.promote_types(found.dtype, torch.float32))
        if not first:
            total = found.new_zeros(found.shape[1], *view.shape[1:])
        for place, window in zip(group, found, strict=True):
            _cut(total, place, config).add_(window)
            _cut(covered, place, config).add_(1)
    return total / covered


def _resized(image: Tensor, size: tuple[int, int]) -> Tensor:
    """(channels, height, width), bilinear and without a filter, as the public code has it."""
    if tuple(image.shape[1:]) == size:
        return image
    return F.interpolate(image[None], size, mode="bilinear", align_corners=False)[0]


def _cut(image: Tensor, place: tuple[int, int], config: WindowConfig) -> Tensor:
    return image[..., place[0] : place[0] + config.size, place[1] : place[1] + config.size]
