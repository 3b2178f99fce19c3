"""Fixed parts of a data set, by rule rather than by file: anybody who has the data has the same parts.

The rule counts, in the order of the data set, the images of each class from 0 (an image's *rank* in its class).
"""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

from acutance.errors import AcutanceError

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
    """True for the slice of the training set on which choices are made: ranks every−1, 2·every−1, … of each class."""
    return class_ranks(labels) % every == every - 1


def fraction(labels: Tensor, part: float) -> Tensor:
    """The indices of a fixed, class-balanced part: of each class, the first ⌈part · size⌉ of it, in ascending order.

    The parts are nested: 10 % lies within 50 %. Data sets stored in random order (CIFAR is) need no shuffling for this.
    """
    if not 0 < part <= 1:
        raise AcutanceError(f"a fraction must lie in (0, 1]; got {part}")
    exact = Fraction(part).limit_denominator(10_000)  # 0.1 means one tenth, not the binary number next to it
    sizes = torch.bincount(labels)
    wanted = -(-sizes * exact.numerator // exact.denominator)  # the ceiling
    return (class_ranks(labels) < wanted[labels]).nonzero()[:, 0]
