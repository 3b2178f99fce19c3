"""Images that fit into memory: held as bytes on the device, augmented there in batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from acutance.errors import AcutanceError, ShapeError
from acutance.lab.data.subsets import held_out

ImageSplit = Literal["train", "val", "all", "test"]


@dataclass(frozen=True)
class Images:
    """Labelled images of one size; `mean` and `std` are those of the whole training set, in units of [0, 1]."""

    name: str
    images: Tensor  # uint8 (n, channels, height, width)
    labels: Tensor  # int64 (n,)
    classes: tuple[str, ...]
    mean: tuple[float, ...]  # per channel
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or self.images.dtype != torch.uint8 or len(self.images) != len(self.labels):
            raise ShapeError(
                f"{self.name}: images must be uint8 (n, channels, height, width), one label each; got "
                f"{tuple(self.images.shape)} {self.images.dtype} and labels {tuple(self.labels.shape)}"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str) -> Images:
        """The same images on a device."""
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))

    def subset(self, indices: Tensor) -> Images:
        """The images at these indices, in their order; mean and std stay those of the whole training set."""
        indices = indices.to(self.images.device)
        return replace(self, images=self.images[indices], labels=self.labels[indices])


def channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of (n, channels, height, width) bytes, in units of [0, 1]."""
    channels = images.transpose(0, 1).flatten(1)
    values = torch.arange(256, dtype=torch.float64) / 255
    counts = torch.stack([torch.bincount(channel, minlength=256) for channel in channels])
    shares = counts.double() / channels.shape[1]
    mean = (shares * values).sum(1)
    std = (shares * (values - mean[:, None]) ** 2).sum(1).sqrt()
    return tuple(mean.tolist()), tuple(std.tolist())


def load_images(name: str, data_dir: Path | str | None, split: ImageSplit) -> Images:
    """A data set by its name; "digits" needs no folder.

    Args:
        name: one of `IMAGE_SETS`.
        data_dir: the folder in which the data set has its usual layout.
        split: "train" is the training set without the held-out slice "val" (every tenth image of each class), "all" is
            both, "test" the test set, which no choice may rest on.
    """
    if name not in IMAGE_SETS:
        raise AcutanceError(f"no image data set {name!r}; there are {', '.join(sorted(IMAGE_SETS))}")
    if split not in ("train", "val", "all", "test"):
        raise AcutanceError(f"no split {split!r}; there are train, val, all (train and val) and test")
    if data_dir is None and name != "digits":
        raise AcutanceError(f"{name} is read from a folder: name it with --data-dir (data_dir=)")
    read = IMAGE_SETS[name]
    images = read(Path(data_dir or "."), split != "test")
    if split in ("all", "test"):
        return images
    held = held_out(images.labels)
    return images.subset((held if split == "val" else ~held).nonzero()[:, 0])


def _read_digits(data_dir: Path, train: bool) -> Images:
    from acutance.lab.data.digits import digit_images

    return digit_images(train)


def _read_cifar10(data_dir: Path, train: bool) -> Images:
    from acutance.lab.data.cifar import cifar10

    return cifar10(data_dir, train)


def _read_cifar100(data_dir: Path, train: bool) -> Images:
    from acutance.lab.data.cifar import cifar100

    return cifar100(data_dir, train)


def _read_fashion_mnist(data_dir: Path, train: bool) -> Images:
    from acutance.lab.data.idx import fashion_mnist

    return fashion_mnist(data_dir, train)


# Read the training set (True) or the test set (False) from a folder.
IMAGE_SETS: Mapping[str, Callable[[Path, bool], Images]] = {
    "digits": _read_digits,
    "cifar10": _read_cifar10,
    "cifar100": _read_cifar100,
    "fashion_mnist": _read_fashion_mnist,
}
