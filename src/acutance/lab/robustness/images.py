"""The images of a classifier's run, as corruptions and attacks take them: bytes, in memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_args

import torch

from acutance.errors import AcutanceError
from acutance.lab.data.folder import IMAGENET_MEAN, IMAGENET_STD, Crops
from acutance.lab.data.images import Images, load_images
from acutance.lab.data.stream import evaluation_batches
from acutance.lab.data.subsets import SplitName
from acutance.lab.tasks.classification import ClassificationConfig
from acutance.lab.tasks.imagenet import ImageNetConfig, load_imagenet

DECODED_AT_ONCE = 256


def images_of(task: Any, split: str, *, data_dir: Path | str | None = None, limit: int | None = None) -> Images:
    """A split of a task's images; of ImageNet's, what evaluation cuts out of them (7.5 GB at 224×224).

    Args:
        task: the configuration of a classifier of images.
        split: "test", or "train", "val" or "all" of the training set.
        data_dir: where the data is now, if it moved.
        limit: how many at most: the first of a set in random order; ImageNet's are taken evenly over the classes.
    """
    refuse_others(task)
    if split not in get_args(SplitName):
        raise AcutanceError(f"no split {split!r}; there are {', '.join(get_args(SplitName))}")
    chosen = task if data_dir is None else replace(task, data_dir=str(data_dir))
    if isinstance(chosen, ImageNetConfig):
        return _imagenet(chosen, cast(SplitName, split), limit)
    images = load_images(chosen.dataset, chosen.data_dir, cast(SplitName, split))
    return images if limit is None else images.subset(torch.arange(min(limit, len(images))))


def refuse_others(task: Any) -> None:
    """Only classifiers of images are corrupted and attacked here."""
    if not isinstance(task, ClassificationConfig | ImageNetConfig):
        raise AcutanceError(f"a run of {task.kind} is no classifier of images: only those have corruptions and attacks")


def _imagenet(task: ImageNetConfig, split: SplitName, limit: int | None) -> Images:
    found = load_imagenet(task, split)
    count = len(found) if limit is None else min(limit, len(found))
    indices = torch.arange(count) * len(found) // count
    size = task.model.image_size
    pixels = torch.empty(count, 3, size, size, dtype=torch.uint8)  # filled in place: it may be half of the memory
    batches = evaluation_batches(
        Crops(found, size), batch_size=DECODED_AT_ONCE, indices=indices.tolist(), workers=task.workers
    )
    for part, (images, _) in zip(pixels.split(DECODED_AT_ONCE), batches, strict=True):
        part.copy_(images)
    return Images("imagenet", pixels, found.labels[indices], found.classes, IMAGENET_MEAN, IMAGENET_STD)
