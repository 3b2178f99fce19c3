"""Samples of a task's data on which models are read: chosen at random, the same for all models and seeds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from acutance.lab.data import load_images, load_segmentation
from acutance.lab.data.augment import normalise
from acutance.lab.data.seeds import generator
from acutance.lab.data.tokens import load_corpus
from acutance.lab.tasks.imagenet import ImageNetTask
from acutance.lab.tasks.segmentation import normalised
from acutance.lab.train.config import Config

AT_ONCE = 50  # samples in a batch


def samples(config: Config, split: str, count: int) -> list[Tensor]:
    """Batches in the form the task's model takes, as for evaluation; the split is "train" or "test"."""
    return list(_read(config.task, split, count).split(AT_ONCE))


def tested_on(config: Config, count: int, data_dir: Path | None) -> Tensor:
    """So many of the test set as one tensor; the data may have moved."""
    return _read(config.task if data_dir is None else replace(config.task, data_dir=str(data_dir)), "test", count)


def name_of(config: Config) -> str:
    """What the samples are of."""
    task = config.task
    return str(getattr(task, "dataset", getattr(task, "corpus", task.kind)))


def chosen(available: int, count: int) -> Tensor:
    """So many different indices, or all there are, in ascending order."""
    return torch.randperm(available, generator=generator("cpu", 0))[:count].sort().values


def _read(task: Any, split: str, count: int) -> Tensor:
    return READERS[task.kind](task, split, count)


def _classification(task: Any, split: Any, count: int) -> Tensor:
    images = load_images(task.dataset, task.data_dir, split)
    some = images.subset(chosen(len(images), count))
    return normalise(some.images.float(), torch.tensor(images.mean), torch.tensor(images.std))


def _imagenet(task: Any, split: Any, count: int) -> Tensor:
    reader = ImageNetTask(task, seed=0, device=torch.device("cpu"))
    return torch.cat(list(reader.inputs(split, chosen(reader.size(split), count).tolist())))


def _segmentation(task: Any, split: Any, count: int) -> Tensor:
    """The middle of each image, as large as a training crop."""
    images, size = load_segmentation(task.dataset, task.data_dir, split), task.model.image_size
    middles = []
    for index in chosen(len(images), count).tolist():
        image = images[index][0]
        top, left = (max(extent - size, 0) // 2 for extent in image.shape[1:])
        middle = normalised(image[:, top : top + size, left : left + size])
        middles.append(F.pad(middle, (0, size - middle.shape[2], 0, size - middle.shape[1])))
    return torch.stack(middles)


def _language(task: Any, split: Any, count: int) -> Tensor:
    corpus = load_corpus(task.corpus, task.data_dir)
    text = {"train": corpus.train, "test": corpus.test}[split]
    starts = chosen(len(text) - task.length, count)
    return text[starts[:, None] + torch.arange(task.length)]


READERS = {
    "classification": _classification,
    "imagenet": _imagenet,
    "segmentation": _segmentation,
    "language": _language,
}
