"""ImageNet as a tree of folders, one per class, and what makes training samples of such images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from acutance.errors import AcutanceError
from acutance.lab.data.decoding import Bytes, centre_crop, channels_first, decode, random_resized_crop
from acutance.lab.data.seeds import epoch_order
from acutance.lab.data.source import Source
from acutance.lab.data.subsets import SplitName, held_out

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGENET = Source(
    "ImageNet",
    "train/ and val/ with a folder of images per class (train/n01440764/*.JPEG)",
    "Get ILSVRC2012 from https://image-net.org (registration needed) and sort the validation images into class folders",
)
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm"}
HELD_OUT_EVERY = 100  # one image in a hundred of each class: about 12,800 of ImageNet's


class ReadableImages(Protocol):
    """Images read one at a time."""

    labels: Tensor

    def read(self, index: int) -> Image: ...


class ImageFolder:
    """Images in `root/train/<class>/` and `root/val/<class>/`; nothing is decoded before it is asked for.

    Args:
        root: the folder.
        split: "test" is the folder val/; "val" is one image in `every` of each class of train/, by file name, "train"
            the rest, "all" both. None takes `root` itself as a folder of classes.
        every: how thin the slice is.

    A label is the place of a folder among the others, so val/ must have the folders of train/. Hidden ones are skipped.
    """

    def __init__(self, root: Path | str, split: SplitName | None, *, every: int = HELD_OUT_EVERY) -> None:
        root = Path(root)
        folder = IMAGENET.folder(root if split is None else root / ("val" if split == "test" else "train"))
        folders = _class_folders(folder)
        self.classes = tuple(path.name for path in folders)
        found = [(path, label) for label, kind in enumerate(folders) for path in _visible(kind) if _is_image(path)]
        if not found:
            raise IMAGENET.missing(folder / "<class>" / "<image>")
        if split == "test" and (root / "train").is_dir():  # elsewhere the training images are in shards
            _refuse_other_classes(folder, set(self.classes), {path.name for path in _class_folders(root / "train")})
        labels = torch.tensor([label for _, label in found])
        chosen = choose(labels, split, every, folder)
        self.paths = [found[i][0] for i in chosen.tolist()]
        self.labels = labels[chosen]

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int) -> Image:
        """The image at an index, as RGB."""
        return decode(self.paths[index], self.paths[index], IMAGENET)

    def order(self, seed: int, epoch: int) -> Tensor:
        """The order in which an epoch visits the images."""
        return epoch_order(len(self), seed, epoch)


@dataclass(frozen=True)
class Crops:
    """Bytes (3, size, size) of images with their labels: DeiT's random resized crop, or the middle for evaluation.

    The rest of DeiT's augmentation, mirror images included, happens in batches on the device.
    """

    images: ReadableImages
    size: int = 224

    def __len__(self) -> int:
        return len(self.images.labels)

    def sample(self, index: int, random: np.random.Generator | None) -> tuple[Bytes, int]:
        """One image and its label."""
        image = self.images.read(index)
        cut = centre_crop(image, self.size) if random is None else random_resized_crop(image, self.size, random)
        return channels_first(cut), int(self.images.labels[index])


def choose(labels: Tensor, split: SplitName | None, every: int, place: Path | str) -> Tensor:
    """The indices that belong to a split of a training set (all of them for None, "all" and "test")."""
    if split not in ("train", "val"):
        return torch.arange(len(labels))
    held = held_out(labels, every)
    refuse_empty_slice(held, every, place)
    return (held if split == "val" else ~held).nonzero()[:, 0]


def refuse_empty_slice(held: Tensor, every: int, place: object) -> None:
    """Without a held-out image there is nothing to score during training."""
    if not bool(held.any()):
        raise AcutanceError(f"{place}: no class has {every} images to hold one out for val; lower task.held_out_every")


def _class_folders(folder: Path) -> list[Path]:
    return [path for path in _visible(folder) if path.is_dir()]


def _visible(folder: Path) -> Iterator[Path]:
    """Not what systems and tools leave behind: .cache/, ._n01440764_18.JPEG."""
    return (path for path in sorted(folder.iterdir()) if not path.name.startswith("."))


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES


def _refuse_other_classes(folder: Path, found: set[str], expected: set[str]) -> None:
    """One folder more or less would move the labels of all that follow it, and every score would be wrong."""
    for names, what in ((sorted(expected - found), "missing"), (sorted(found - expected), "not in train/")):
        if names:
            which = f"{names[0]} is" if len(names) == 1 else f"{names[0]} and {len(names) - 1} more are"
            raise IMAGENET.damaged(folder, f"its class folders are not those of train/: {which} {what}")
