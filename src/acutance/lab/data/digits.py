"""1,797 handwritten digits, 8×8, that ship inside scikit-learn: real data without a download."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from acutance.errors import MissingExtraError
from acutance.lab.data.images import Images, channel_statistics

TEST_FRACTION = 5  # every fifth image of each class is a test image
LEVEL = 15  # 16 · 15 = 240 still fits a byte, and every level stays exact


@dataclass(frozen=True)
class Split:
    """Images (n, 1, 8, 8), roughly zero mean and unit variance, and their labels."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, size: int, generator: torch.Generator | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """All of it in batches; shuffled if a generator is given."""
        order = torch.arange(len(self)) if generator is None else torch.randperm(len(self), generator=generator)
        for chunk in order.split(size):
            yield self.images[chunk], self.labels[chunk]


def digits() -> tuple[Split, Split]:
    """The training and the test split, always the same one: class by class, every fifth image is a test image."""
    images, labels, test = _raw()
    mean, std = images[~test].mean(), images[~test].std()
    images = (images - mean) / std
    return Split(images[~test], labels[~test]), Split(images[test], labels[test])


def digit_images(train: bool) -> Images:
    """The same splits as bytes, as the other data sets have them: 17 levels of grey, 15 apart."""
    images, labels, test = _raw()
    pixels = (images * LEVEL).to(torch.uint8)
    mean, std = channel_statistics(pixels[~test])
    wanted = ~test if train else test
    return Images("digits", pixels[wanted], labels[wanted], tuple("0123456789"), mean, std)


def _raw() -> tuple[Tensor, Tensor, Tensor]:
    """Images from 0 to 16, labels, and which of them are test images."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingExtraError("the digits ship with scikit-learn: pip install 'acutance[train]'") from error
    raw = load_digits()
    images = torch.tensor(raw.images, dtype=torch.float32)[:, None]
    labels = torch.tensor(raw.target)
    test = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(10):
        test[np.flatnonzero(raw.target == label)[::TEST_FRACTION]] = True
    return images, labels, test
