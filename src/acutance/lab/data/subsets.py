"""Fixed parts of a data set, by rule rather than by file: anybody who has the data has the same parts.

The rule counts the images of each class in the data set's order, from 0: an image's *rank* in its class.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

from acutance.errors import AcutanceError

# "val" is a slice of the training set to choose by, "train" the rest, "all" both; no choice may rest on "test".
SplitName = Literal["train", "val", "all", "test"]
HELD_OUT_EVERY = 10


def class_ranks(labels: Tensor) -> Tensor:
    """How many samples of the same class stand before each sample."""
    order = torch.argsort(labels, stable=True)
    counts = torch.bincount(labels)
    starts = torch.cumsum(counts, 0) - counts
    ranks = torch.empty_like(labels)
    ranks[order] = torch.arange(len(labels), device=labels.device) - starts[labels[order]]
    return ranks


def held_out(labels: Tensor, every: int = HELD_OUT_EVERY) -> Tensor:
    """True for the slice "val" of a training set: ranks every−1, 2·every−1, … of each class."""
    return class_ranks(labels) % every == every - 1


def fraction(labels: Tensor, part: float) -> Tensor:
    """The indices of a class-balanced part: the first ⌈part · size⌉ of each class, in ascending order.

    The parts are nested: 10 % lies within 50 %. Data sets stored in random order (CIFAR is) need no shuffling for this.
    """
    if not 0 < part <= 1:
        raise AcutanceError(f"a fraction must lie in (0, 1]; got {part}")
    exact = Fraction(part).limit_denominator(10_000)  # 0.1 means one tenth, not the binary number next to it
    wanted = -(-torch.bincount(labels) * exact.numerator // exact.denominator)  # the ceiling
    return (class_ranks(labels) < wanted[labels]).nonzero()[:, 0]
