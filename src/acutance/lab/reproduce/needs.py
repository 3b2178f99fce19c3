"""What is looked for before the first training: days of it must not end at data that was never there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from acutance.errors import AcutanceError
from acutance.lab.data import load_images, load_segmentation
from acutance.lab.data.folder import FolderSplit
from acutance.lab.data.images import ImageSplit
from acutance.lab.data.segmentation import Split
from acutance.lab.data.tokens import corpus_files
from acutance.lab.tasks.imagenet import load_imagenet
from acutance.lab.train.config import Config


def check_data(configs: Iterable[Config]) -> None:
    """Look for the data of all runs, each set once; refuse with a line for each that is missing or damaged.

    Folders are listed and small sets read; that every single image can be decoded is not looked at.
    """
    tasks = {_place(config.task): config.task for config in configs}
    complaints = []
    for task in tasks.values():
        try:
            CHECKS[task.kind](task)
        except AcutanceError as error:
            complaints.append(str(error))
    if complaints:
        raise AcutanceError("\n".join(dict.fromkeys(complaints)))


def _place(task: Any) -> tuple[Any, ...]:
    """Tasks of one place read the same data."""
    names = ("kind", "dataset", "corpus", "data_dir", "shards", "test_shards", "held_out_every", "train_on")
    return tuple(getattr(task, name, None) for name in names)


def _classification(task: Any) -> None:
    splits: tuple[ImageSplit, ...] = ("all", "test")
    for split in splits:
        load_images(task.dataset, task.data_dir, split)


def _imagenet(task: Any) -> None:
    splits: tuple[FolderSplit, ...] = ("val", "test")  # for "val" all of train/ is listed
    for split in splits:
        load_imagenet(task, split)


def _segmentation(task: Any) -> None:
    splits: tuple[Split, ...] = ("all", "test")
    for split in splits:
        load_segmentation(task.dataset, task.data_dir, split)


def _language(task: Any) -> None:
    corpus_files(task.corpus, task.data_dir)


CHECKS = {
    "classification": _classification,
    "imagenet": _imagenet,
    "segmentation": _segmentation,
    "language": _language,
}
