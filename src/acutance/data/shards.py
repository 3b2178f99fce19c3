"""Images in tar files as webdataset writes them, for storage that dislikes millions of small files.

Each sample is two neighbouring members, `<key>.jpg` and `<key>.cls` (the label in digits). The tar files are not
unpacked: their headers are read once, and samples from where they lie.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from acutance.data.decoding import decode
from acutance.data.folder import HELD_OUT_EVERY, SUFFIXES, FolderSplit, choose
from acutance.data.seeds import epoch_order
from acutance.data.source import Source

if TYPE_CHECKING:
    from PIL.Image import Image

SHARDS = Source(
    "webdataset shards",
    "uncompressed tar files with <key>.jpg and <key>.cls for each image",
    "Name them as in /data/imagenet-train-{000000..000146}.tar (or with *); `pip install webdataset` has the tools "
    "to write them",
)
SHARDS_AT_ONCE = 16  # images are shuffled among so many shards, which are read side by side
READERS = 8


@dataclass(frozen=True)
class _Member:
    shard: int
    key: str
    offset: int
    size: int
    label: int


class WebShards:
    """All images of a set of shards.

    Args:
        pattern: a path with {000..146} or * in its name.
        split: "train" and "val" are parts of these shards (one image in `every` of each class, in the order of the
            shards, is val), "all", "test" and None all of them.
        every: how thin the slice is.
        classes: how many there are; None takes the highest label seen.
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
        with ThreadPoolExecutor(READERS) as readers:
            listed = readers.map(lambda item: _index(*item), enumerate(self.paths))
            members = [member for shard in listed for member in shard]
        labels = torch.tensor([member.label for member in members], dtype=torch.long)
        chosen = choose(labels, split, every, pattern)
        self._members = [members[i] for i in chosen.tolist()]
        self._shards = torch.tensor([member.shard for member in self._members])
        self.labels = labels[chosen]
        self.classes = tuple(str(label) for label in range(classes or int(labels.max()) + 1))

    def __len__(self) -> int:
        return len(self._members)

    def read(self, index: int) -> Image:
        """The image at an index, as RGB."""
        member = self._members[index]
        path = self.paths[member.shard]
        try:
            with path.open("rb") as file:
                file.seek(member.offset)
                content = file.read(member.size)
        except OSError as error:
            raise SHARDS.damaged(path, error) from error
        return decode(content, f"{path}:{member.key}", SHARDS)

    def order(self, seed: int, epoch: int) -> Tensor:
        """The order of an epoch: shards in random order, their images shuffled within groups of 16 shards."""
        place = torch.argsort(epoch_order(len(self.paths), seed, epoch))
        shuffled = epoch_order(len(self), seed, epoch)
        group = place[self._shards[shuffled]] // SHARDS_AT_ONCE
        return shuffled[torch.argsort(group, stable=True)]


def expand(pattern: str) -> Iterator[Path]:
    """The paths that a pattern names; all of them must be there."""
    numbers = re.search(r"\{(\d+)\.\.(\d+)\}", pattern)
    if numbers:
        first, last = numbers.groups()
        for number in range(int(first), int(last) + 1):
            yield from expand(pattern[: numbers.start()] + str(number).zfill(len(first)) + pattern[numbers.end() :])
        return
    path = Path(pattern)
    paths = sorted(path.parent.glob(path.name)) if "*" in path.name else [path] * path.is_file()
    if not paths:
        raise SHARDS.missing(path)
    yield from paths


def _index(shard: int, path: Path) -> list[_Member]:
    """Where each image of a shard lies, and its label."""
    images: dict[str, tarfile.TarInfo] = {}
    labels: dict[str, int] = {}
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                key, suffix = _split_name(member.name)
                if f".{suffix}".lower() in SUFFIXES:
                    images[key] = member
                elif suffix == "cls":
                    content = archive.extractfile(member)
                    labels[key] = int(content.read()) if content else -1
    except (tarfile.TarError, OSError, ValueError) as error:
        raise SHARDS.damaged(path, error) from error
    unmatched = sorted(images.keys() ^ labels.keys())
    if unmatched or not images:
        raise SHARDS.damaged(path, f"{unmatched[0]!r} has no image or no .cls" if unmatched else "no images in it")
    if min(labels.values()) < 0:
        raise SHARDS.damaged(path, "a label is negative")
    return [_Member(shard, key, m.offset_data, m.size, labels[key]) for key, m in images.items()]


def _split_name(name: str) -> tuple[str, str]:
    """Folder and name up to the first dot, and what follows it: webdataset's key and extension."""
    folder, slash, file = name.rpartition("/")
    key, _, suffix = file.partition(".")
    return folder + slash + key, suffix
