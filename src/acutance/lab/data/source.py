"""Reading a data set's files, and its splits.

Errors name the missing or damaged file, the expected layout and where to get the data. Splits go by an image's *rank*:
its number within its class, from 0, in the data set's order.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from acutance.errors import AcutanceError
from acutance.io.inputs import decode
from acutance.lab.data.seeds import generator

Image: TypeAlias = Any  # Pillow's, which is optional
Bytes = npt.NDArray[np.uint8]
# "val" is a slice of the training set for choices, "train" the rest, "all" both. Make no choice on "test".
SplitName = Literal["train", "val", "all", "test"]
HELD_OUT_EVERY = 10


@dataclass(frozen=True)
class Source:
    """Where a data set comes from, and how its folder looks."""

    name: str
    layout: str  # what is expected within the data folder
    get: str  # how to get it

    def missing(self, path: Path | str) -> AcutanceError:
        return AcutanceError(f"{self.name}: looked for {path}, which is not there; expected {self.layout}. {self.get}")

    def damaged(self, path: Path | str, why: object) -> AcutanceError:
        reason = " ".join(str(why).split())  # on one line
        return AcutanceError(f"{self.name}: {path} is damaged ({reason}); expected {self.layout}. {self.get}")

    def folder(self, path: Path) -> Path:
        """The path itself, if it is a folder."""
        if not path.is_dir():
            raise self.missing(path)
        return path

    @contextmanager
    def reading(self, path: Path, *errors: type[Exception]) -> Iterator[None]:
        """Turn these errors, and those of the system, into one that says the file is damaged or missing."""
        known: tuple[type[Exception], ...] = (OSError, *errors)
        try:
            yield
        except (FileNotFoundError, NotADirectoryError) as error:
            raise self.missing(path) from error
        except known as error:
            raise self.damaged(path, error) from error

    def image(self, content: Path | bytes, place: Path | str = "", *, colour: bool = True) -> Image:
        """An image from a file or from bytes, which errors call `place`; as RGB unless `colour` is false."""
        place = content if isinstance(content, Path) else place
        try:
            return decode(content, place=place, colour=colour)
        except AcutanceError as error:
            why = error.__cause__
            raise self.missing(place) if isinstance(why, FileNotFoundError) else self.damaged(place, why) from why


def channels_first(image: Image) -> Bytes:
    """The pixels as (channels, height, width)."""
    return np.ascontiguousarray(np.asarray(image, dtype=np.uint8).transpose(2, 0, 1))


def data_folder(kind: str, name: str, known: Iterable[str], data_dir: Path | str | None, split: str = "all") -> Path:
    """The data folder, after refusing an unknown name or split, or no folder."""
    if name not in known:
        raise AcutanceError(f"no {kind} {name!r}; there are {', '.join(sorted(known))}")
    if split not in get_args(SplitName):
        raise AcutanceError(f"no split {split!r}; there are train, val, all (train and val) and test")
    if data_dir is None:
        raise AcutanceError(f"{name} is read from a folder: name it with --data-dir (data_dir=)")
    return Path(data_dir)


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


def fraction(labels: Tensor, part: float, seed: int) -> Tensor:
    """The indices of a class-balanced part: ⌈part · size⌉ of each class, chosen by the seed, in ascending order.

    The parts of a seed are nested: 10 % lies within 50 %.
    """
    if not 0 < part <= 1:
        raise AcutanceError(f"a fraction must lie in (0, 1]; got {part}")
    exact = Fraction(part).limit_denominator(10_000)  # 0.1 means one tenth, not the binary number next to it
    wanted = -(-torch.bincount(labels) * exact.numerator // exact.denominator)  # the ceiling
    order = torch.randperm(len(labels), generator=generator("cpu", seed, len(labels)))
    chosen = class_ranks(labels[order]) < wanted[labels[order]]
    return order[chosen].sort().values
