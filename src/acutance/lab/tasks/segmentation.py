"""Semantic segmentation with a Segmenter: crops to train on, sliding windows and mean IoU to evaluate."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from acutance.diagnose import quality
from acutance.distributed import gather, rank_and_world_size
from acutance.errors import AcutanceError
from acutance.lab.data.augment import normalise
from acutance.lab.data.imagenet import IMAGENET_MEAN, IMAGENET_STD
from acutance.lab.data.seeds import epoch_order
from acutance.lab.data.segmentation import IGNORED, SegmentationCrops, SegmentationSet, load_segmentation
from acutance.lab.data.stream import training_batches
from acutance.lab.tasks.base import BatchSlice, ImageTask, incidental, load_and_install, refuse_other_classes
from acutance.models import SegmenterConfig
from acutance.models.segmenter import Segmenter

View = tuple[float, bool]  # a scale, and whether the image is flipped
SINGLE: tuple[View, ...] = ((1.0, False),)
MULTI: tuple[View, ...] = tuple((s, flip) for s in (0.5, 0.75, 1.0, 1.25, 1.5, 1.75) for flip in (False, True))
LONGEST = 4  # the long side of a resized image is at most this many times `short_side`


@dataclass(frozen=True)
class WindowConfig:
    """How whole images are read; the defaults are ADE20K's."""

    short_side: int = 512  # pixels to which an image's short side is resized at scale 1
    size: int = 512  # pixels per side of a window
    stride: int = 480
    at_once: int = incidental(4)  # windows in a forward pass

    def __post_init__(self) -> None:
        if min(self.short_side, self.size, self.stride, self.at_once) < 1 or self.stride > self.size:
            why = "all of these must be 1 or more, and windows that move by more than their size leave pixels out"
            raise AcutanceError(f"{self}: {why}")


def view_sizes(size: tuple[int, int], scale: float, config: WindowConfig) -> tuple[tuple[int, int], tuple[int, int]]:
    """Height and width that an image is resized to at a scale, and then again if that is smaller than a window.

    The public code resizes in these two steps, so small scales see less detail.
    """
    short = int(scale * config.short_side)  # truncated first, as in the public code
    factor = min(short / min(size), int(scale * LONGEST * config.short_side) / max(size))
    scaled = max(int(size[0] * factor + 0.5), 1), max(int(size[1] * factor + 0.5), 1)
    if min(scaled) >= config.size:
        return scaled, scaled
    grown = config.size / min(scaled)
    long = max(config.size, int(max(scaled) * grown))  # rounding may leave a square one pixel short
    return scaled, ((config.size, long) if scaled[0] < scaled[1] else (long, config.size))


def forward_passes(size: tuple[int, int], views: Sequence[View], config: WindowConfig) -> int:
    """How often `probabilities` calls the model on an image of this size."""
    windows = [len(_places(view_sizes(size, scale, config)[1], config)) for scale, _ in views]
    return sum(-(-count // config.at_once) for count in windows)


def probabilities(model: nn.Module, image: Tensor, views: Sequence[View], config: WindowConfig) -> Tensor:
    """Every pixel's class probabilities (classes, height, width): the mean over views of a normalised image.

    In each view, the scores of overlapping windows are averaged and resized to the image before the softmax.
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
    """The number of pixels by true and predicted class, (classes, classes), without those labelled 255."""
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
    """This process's share of the images `read(0)` … `read(count - 1)`: each index with the predicted classes.

    A sharded model needs every process in every forward pass, so a process that is done early runs it on zeros.
    """
    rank, world = rank_and_world_size()
    for first in range(0, count, world):
        image = read(min(first + rank, count - 1))
        passes = forward_passes((image.shape[1], image.shape[2]), views, config)
        most = max(gather(passes))
        found = probabilities(model, image, views, config).argmax(0)
        for _ in range(most - passes):
            model(image.new_zeros(config.at_once, image.shape[0], config.size, config.size))
        if first + rank < count:
            yield first + rank, found


def _places(size: Sequence[int], config: WindowConfig) -> list[tuple[int, int]]:
    """Top and left of all windows; the last windows end at the image's border."""
    top, left = ([*range(0, side - config.size, config.stride), side - config.size] for side in size)
    return list(product(top, left))


def _merged(model: nn.Module, view: Tensor, config: WindowConfig) -> Tensor:
    """Scores of all windows, averaged where they overlap."""
    places = _places(view.shape[1:], config)
    total, covered = view.new_zeros(()), view.new_zeros(view.shape[1:])
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
    """Bilinear, without antialiasing, as in the public code."""
    return F.interpolate(image[None], size, mode="bilinear", align_corners=False)[0]


def _cut(image: Tensor, place: tuple[int, int], config: WindowConfig) -> Tensor:
    return image[..., place[0] : place[0] + config.size, place[1] : place[1] + config.size]


@dataclass(frozen=True)
class SegmentationConfig:
    """Which images, which model, and how whole images are read. The mitigation is the model's.

    Training crops have the model's `image_size`, and are cut from images of 0.5 to 2 times `windows.short_side`.
    """

    kind: ClassVar[str] = "segmentation"
    dataset: str
    model: SegmenterConfig
    data_dir: str | None = incidental(None)
    train_on: Literal["train", "all"] = "train"  # all includes the slice "val": for a last run, after all choices
    windows: WindowConfig = field(default_factory=WindowConfig)
    multi_scale: bool = True  # on the test set, also score several scales and flips, which takes many times as long
    encoder_weights: str | None = None  # of a classifier, e.g. DeiT's; a file that acutance.io.load_checkpoint reads
    workers: int = incidental(0)  # processes that decode and crop; 0 does it in this one


ADE20K = SegmentationConfig(dataset="ade20k", model=SegmenterConfig(num_classes=150))
CAMVID = SegmentationConfig(  # images of 360 × 480
    dataset="camvid",
    model=SegmenterConfig(num_classes=11, image_size=352),
    windows=WindowConfig(short_side=360, size=352, stride=320),
)


class SegmentationTask(ImageTask[SegmentationConfig]):
    """Cross-entropy over the pixels that count; mean IoU in percent."""

    headline: ClassVar[str] = "miou"
    monitored_part: ClassVar[str | None] = "encoder"
    probe_samples: ClassVar[int] = 4

    def __init__(self, config: SegmentationConfig, *, seed: int, device: torch.device) -> None:
        super().__init__(config, seed=seed, device=device)
        self._train = self._images(config.train_on)
        refuse_other_classes(config.dataset, len(self._train.classes), config.model.num_classes)

    def _load(self, split: str) -> SegmentationSet:
        return load_segmentation(self.config.dataset, self.config.data_dir, cast(Any, split))

    def build_model(self) -> nn.Module:
        """The mitigation is installed in encoder and decoder."""
        chosen = self.config.model
        model = Segmenter(**replace(chosen, mitigation=None).to_dict())
        load_and_install(model.encoder, self.config.encoder_weights, chosen.mitigation)
        load_and_install(model.decoder, None, chosen.mitigation)
        return model

    def batches(self, batch_size: int, first_step: int, part: BatchSlice) -> Iterator[tuple[Tensor, Tensor]]:
        """Crops (rows, 3, size, size), normalised, and their classes (rows, size, size)."""
        short = self.config.windows.short_side
        crops = SegmentationCrops(self._train, self.config.model.image_size, scale=(LONGEST * short, short))
        how: dict[str, Any] = {"workers": self.config.workers, "device": self.device, "first_step": first_step}
        order, rows = partial(epoch_order, len(crops), self.seed), part.rows(batch_size)
        made = training_batches(crops, order, batch_size=batch_size, seed=self.seed, rows=rows, **how)
        return ((normalised(images), labels) for images, labels in made)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean over the labelled pixels of this slice; the public code also averages in each process."""
        images, labels = batch
        total = F.cross_entropy(model(images), labels, ignore_index=IGNORED, reduction="sum")
        mean: Tensor = total / (labels != IGNORED).sum().clamp(min=1)
        return mean

    def inputs(self, split: str, indices: Sequence[int]) -> Tensor:
        """The middle of each image, as large as a training crop."""
        return self.labelled(split, indices)[0]

    def labelled(self, split: str, indices: Sequence[int]) -> tuple[Tensor, ...]:
        size, middles = self.config.model.image_size, []
        for image, labels in (self._images(split)[index] for index in indices):
            top, left = (max(extent - size, 0) // 2 for extent in labels.shape)
            middle, own = (part[..., top : top + size, left : left + size] for part in (image, labels))
            margin = (0, size - own.shape[1], 0, size - own.shape[0])
            own = F.pad(own.masked_fill(own == IGNORED, quality.IGNORED), margin, value=quality.IGNORED)
            middles.append((F.pad(normalised(middle), margin), own))
        return tuple(torch.stack(part).to(self.device) for part in zip(*middles, strict=True))

    @classmethod
    def evaluated_by(cls, split: str) -> tuple[str, ...]:
        everywhere = "dataset", "windows.short_side", "windows.size", "windows.stride"
        return (*everywhere, "multi_scale") if split == "test" else everywhere

    def evaluate(self, model: nn.Module, *, split: str = "val") -> dict[str, float]:
        """Mean IoU and accuracies with sliding windows; on "test" also with several scales and flips, as `miou_ms`."""
        images = self._images(split)
        model.eval()
        found = self._scores(model, images, SINGLE)
        if split == "test" and self.config.multi_scale:
            found |= {f"{name}_ms": value for name, value in self._scores(model, images, MULTI).items()}
        return found

    def _scores(self, model: nn.Module, images: SegmentationSet, views: Sequence[View]) -> dict[str, float]:
        classes = self.config.model.num_classes
        total = torch.zeros(classes, classes, dtype=torch.int64)

        def read(index: int) -> Tensor:
            return normalised(images[index][0].to(self.device))

        for index, predicted in segmented(model, read, len(images), views, self.config.windows):
            total += confusion(predicted.cpu(), images[index][1], classes)
        return scores(torch.stack(gather(total)).sum(0))


def normalised(images: Tensor) -> Tensor:
    """Images (…, 3, height, width) from 0 … 255, normalised as encoders pretrained on ImageNet expect."""
    mean, std = (torch.tensor(values, device=images.device) for values in (IMAGENET_MEAN, IMAGENET_STD))
    return normalise(images.float(), mean, std)
