"""Where the images of a tar file lie, found once: the headers of a million images take a minute and more to read.

The index of `part-0.tar` is kept beside it as `.part-0.tar.index.json`, where one may write there. It holds the size
and the time of the tar file it was made of; one of another size or time is read anew.
"""

from __future__ import annotations

import json
import tarfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from acutance.errors import AcutanceError
from acutance.files.atomic import atomic_write, read_json
from acutance.lab.data.folder import SUFFIXES
from acutance.lab.data.source import Source

FORMAT = "acutance-shard/1"
SHARDS = Source(
    "webdataset shards",
    "uncompressed tar files with <key>.jpg and <key>.cls for each image",
    "Name them as in /data/imagenet-train-{000000..000146}.tar (or with *); `pip install webdataset` has the tools "
    "to write them",
)


@dataclass(frozen=True)
class ShardIndex:
    """The images of a tar file, in its order."""

    keys: list[str]
    offsets: list[int]
    sizes: list[int]
    labels: list[int]

    def __post_init__(self) -> None:
        if not len(self.keys) == len(self.offsets) == len(self.sizes) == len(self.labels):
            raise ValueError("lists of different lengths")


def index_of(path: Path) -> ShardIndex:
    """What was found before, if the tar file is still the same; else its headers are read, and the result is kept."""
    try:
        status = path.stat()
    except OSError as error:
        raise SHARDS.damaged(path, error) from error
    made_of = [status.st_size, status.st_mtime_ns]
    kept = path.with_name(f".{path.name}.index.json")
    with suppress(OSError, AcutanceError):  # none yet, or not a whole one
        of, index = read_json(kept, FORMAT, lambda body: (body["of"], ShardIndex(**body["index"])))
        if of == made_of:
            return index
    found = _read_headers(path)
    with suppress(OSError):  # a folder of others: then it is read at every start
        body = {"format": FORMAT, "of": made_of, "index": asdict(found)}
        atomic_write(kept, json.dumps(body, separators=(",", ":")).encode())
    return found


def _read_headers(path: Path) -> ShardIndex:
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
    members = images.values()
    return ShardIndex(
        list(images),
        [member.offset_data for member in members],
        [member.size for member in members],
        [labels[key] for key in images],
    )


def _split_name(name: str) -> tuple[str, str]:
    """Folder and name up to the first dot, and what follows it: webdataset's key and extension."""
    folder, slash, file = name.rpartition("/")
    key, _, suffix = file.partition(".")
    return folder + slash + key, suffix
