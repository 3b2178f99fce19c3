"""Images in tar files as webdataset writes them, for storage that dislikes millions of small files.

Each sample is two neighbouring members, `<key>.jpg` and `<key>.cls` (the label in digits). The tar files are not
unpacked: their headers are read once, and samples from where they lie. The index of `part-0.tar` is kept beside it as
`.part-0.tar.index.json`, where one may write there, with the size and the time of the tar file it was made of.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from acutance import distributed as processes
from acutance.errors import AcutanceError
from acutance.files.atomic import atomic_write, read_json
from acutance.lab.data.decoding import decode
from acutance.lab.data.folder import HELD_OUT_EVERY, SUFFIXES, choose
from acutance.lab.data.seeds import epoch_order
from acutance.lab.data.source import Source
from acutance.lab.data.subsets import SplitName

if TYPE_CHECKING:
    from PIL.Image import Image

SHARDS_AT_ONCE = 16  # images are shuffled among so many shards, which are read side by side
READERS = 8
FORMAT = "acutance-shard/2"
SHARDS = Source(
    "webdataset shards",
    "uncompressed tar files with <key>.jpg and <key>.cls for each image",
    "Name them as in /data/imagenet-train-{000000..000146}.tar (or with *); `pip install webdataset` has the tools "
    "to write them",
)
Entry = tuple[str, int, int, int]  # an image's key, offset, size and label


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
        self, pattern: str, split: SplitName | None = None, *, every: int = HELD_OUT_EVERY, classes: int | None = None
    ) -> None:
        self.paths = list(expand(pattern))
        indices = _indices(self.paths)
        # Arrays, not a million objects: those would be copied into every worker that only looks at them.
        keys, *numbers = zip(*(entry for index in indices for entry in index), strict=True)
        offsets, sizes, labels = (torch.tensor(column) for column in numbers)
        if classes is not None:
            _refuse_other_labels(pattern, labels, classes)
        chosen = choose(labels, split, every, pattern)
        shards = torch.arange(len(indices)).repeat_interleave(torch.tensor([len(index) for index in indices]))
        self.labels, self._offsets, self._sizes = labels[chosen], offsets[chosen], sizes[chosen]
        self._shards, self._keys = shards[chosen], np.array([key.encode() for key in keys])[chosen.numpy()]
        self.classes = tuple(str(label) for label in range(classes or int(labels.max()) + 1))

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
    """The paths that a pattern names; all of them must be there. Hidden files are skipped."""
    if numbers := re.search(r"\{(\d+)\.\.(\d+)\}", pattern):
        first, last = numbers.groups()
        for number in range(int(first), int(last) + 1):
            yield from expand(pattern[: numbers.start()] + str(number).zfill(len(first)) + pattern[numbers.end() :])
        return
    path = Path(pattern)
    found = path.parent.glob(path.name) if "*" in path.name else [path] * path.is_file()
    paths = sorted(file for file in found if not file.name.startswith("."))
    if not paths:
        raise SHARDS.missing(path)
    yield from paths


def _indices(paths: Sequence[Path]) -> list[list[Entry]]:
    """Of each shard. Processes begin at different ones, and find what another has indexed meanwhile."""
    rank, world = processes.rank_and_world_size()
    first = rank * len(paths) // world
    turn = [*range(first, len(paths)), *range(first)]
    with ThreadPoolExecutor(READERS) as readers:
        found = dict(zip(turn, readers.map(lambda number: _index(paths[number]), turn), strict=True))
    return [found[number] for number in range(len(paths))]


def _index(path: Path) -> list[Entry]:
    """The kept index, if the tar file is still the same; else its headers are read, and the result is kept."""
    try:
        status = path.stat()
    except OSError as error:
        raise SHARDS.damaged(path, error) from error
    made_of = [status.st_size, status.st_mtime_ns]
    kept = path.with_name(f".{path.name}.index.json")
    with suppress(OSError, AcutanceError):  # none yet, or not a whole one
        of, index = read_json(kept, FORMAT, lambda body: (body["of"], [(k, o, s, n) for k, o, s, n in body["index"]]))
        if of == made_of:
            return index
    found = _read_headers(path)
    with suppress(OSError):  # a read-only folder: then headers are read at every start
        body = {"format": FORMAT, "of": made_of, "index": found}
        atomic_write(kept, json.dumps(body, separators=(",", ":")).encode())
    return found


def _read_headers(path: Path) -> list[Entry]:
    images: dict[str, tarfile.TarInfo] = {}
    labels: dict[str, int] = {}
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                folder, slash, file = member.name.rpartition("/")
                name, _, suffix = file.partition(".")  # webdataset's key ends at the first dot
                key = folder + slash + name
                if f".{suffix}".lower() in SUFFIXES:
                    images[key] = member
                elif suffix == "cls":
                    content = archive.extractfile(member)
                    labels[key] = int(content.read()) if content else -1
    except (tarfile.TarError, OSError, ValueError) as error:
        raise SHARDS.damaged(path, error) from error
    if unmatched := sorted(images.keys() ^ labels.keys()):
        raise SHARDS.damaged(path, f"{unmatched[0]!r} has no image or no .cls")
    if not images or min(labels.values()) < 0:
        raise SHARDS.damaged(path, "a label is negative" if images else "no images in it")
    return [(key, member.offset_data, member.size, labels[key]) for key, member in images.items()]


def _refuse_other_labels(pattern: str, labels: Tensor, classes: int) -> None:
    """A label beyond the last class would be an error deep within the loss, on a GPU one that names nothing."""
    low, high = int(labels.min()), int(labels.max())
    if high >= classes:
        from_1 = low > 0 and high == classes
        hint = "they seem to count from 1: take 1 from each" if from_1 else "set task.model.num_classes"
        labelled = f"labels from {low} to {high} for {classes} classes, which are numbered 0 to {classes - 1}"
        raise SHARDS.damaged(pattern, f"{labelled}; {hint}")
