"""Images in tar files as webdataset writes them, for storage that dislikes millions of small files.

Each sample is two neighbouring members, `<key>.jpg` and `<key>.cls` (the label in digits). The tar files are not
unpacked: their headers are read once, and samples from where they lie.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from acutance import distributed as processes
from acutance.lab.data.decoding import decode
from acutance.lab.data.folder import HELD_OUT_EVERY, FolderSplit, choose
from acutance.lab.data.seeds import epoch_order
from acutance.lab.data.shard_index import SHARDS, ShardIndex, index_of

if TYPE_CHECKING:
    from PIL.Image import Image

SHARDS_AT_ONCE = 16  # images are shuffled among so many shards, which are read side by side
READERS = 8


class WebShards:
    """All images of a set of shards.

    Args:
        pattern: a path with {000..146} or * in its name.
        split: "train" and "val" are parts of these shards (one image in `every` of each class, in the order of the
            shards, is val), "all", "test" and None all of them.
        every: how thin the slice is.
        classes: how many there are, numbered from 0; None takes the highest label seen.
    """

    def __init__(
        self,
        pattern: str,
        split: FolderSplit | None = None,
        *,
        every: int = HELD_OUT_EVERY,
        classes: int | None = None,
    ) -> None:
        self.paths = list(expand(pattern))
        found = _indices(self.paths)
        labels = torch.tensor(list(chain.from_iterable(index.labels for index in found)))
        if classes is not None:
            _refuse_other_labels(pattern, labels, classes)
        chosen = choose(labels, split, every, pattern)
        self.labels = labels[chosen]
        self.classes = tuple(str(label) for label in range(classes or int(labels.max()) + 1))
        # Arrays, not a million objects: those would be copied into every worker that only looks at them.
        shards = torch.arange(len(found)).repeat_interleave(torch.tensor([len(index.keys) for index in found]))
        self._shards = shards[chosen]
        self._offsets = torch.tensor(list(chain.from_iterable(index.offsets for index in found)))[chosen]
        self._sizes = torch.tensor(list(chain.from_iterable(index.sizes for index in found)))[chosen]
        self._keys = np.array([key.encode() for index in found for key in index.keys])[chosen.numpy()]

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> Image:
        """The image at an index, as RGB."""
        path = self.paths[int(self._shards[index])]
        try:
            with path.open("rb") as file:
                file.seek(int(self._offsets[index]))
                content = file.read(int(self._sizes[index]))
        except OSError as error:
            raise SHARDS.damaged(path, error) from error
        return decode(content, f"{path}:{self._keys[index].decode()}", SHARDS)

    def order(self, seed: int, epoch: int) -> Tensor:
        """The order of an epoch: shards in random order, their images shuffled within groups of 16 shards."""
        place = torch.argsort(epoch_order(len(self.paths), seed, epoch))
        shuffled = epoch_order(len(self), seed, epoch)
        group = place[self._shards[shuffled]] // SHARDS_AT_ONCE
        return shuffled[torch.argsort(group, stable=True)]


def expand(pattern: str) -> Iterator[Path]:
    """The paths that a pattern names; all of them must be there. Hidden files are not among them."""
    numbers = re.search(r"\{(\d+)\.\.(\d+)\}", pattern)
    if numbers:
        first, last = numbers.groups()
        for number in range(int(first), int(last) + 1):
            yield from expand(pattern[: numbers.start()] + str(number).zfill(len(first)) + pattern[numbers.end() :])
        return
    path = Path(pattern)
    if "*" in path.name:
        paths = sorted(found for found in path.parent.glob(path.name) if not found.name.startswith("."))
    else:
        paths = [path] * path.is_file()
    if not paths:
        raise SHARDS.missing(path)
    yield from paths


def _indices(paths: Sequence[Path]) -> list[ShardIndex]:
    """Of each shard. Processes begin at different ones, and find what another has indexed meanwhile."""
    rank, world = processes.rank_and_world_size()
    first = rank * len(paths) // world
    turn = [*range(first, len(paths)), *range(first)]
    with ThreadPoolExecutor(READERS) as readers:
        found = dict(zip(turn, readers.map(lambda number: index_of(paths[number]), turn), strict=True))
    return [found[number] for number in range(len(paths))]


def _refuse_other_labels(pattern: str, labels: Tensor, classes: int) -> None:
    """A label beyond the last class would be an error deep within the loss, on a GPU one that names nothing."""
    low, high = int(labels.min()), int(labels.max())
    if high < classes:
        return
    hint = (
        "they seem to count from 1: take 1 from each" if low > 0 and high == classes else "set task.model.num_classes"
    )
    raise SHARDS.damaged(
        pattern, f"labels from {low} to {high} for {classes} classes, which are numbered 0 to {classes - 1}; {hint}"
    )
