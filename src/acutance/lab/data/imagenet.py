"""ImageNet as a tree of folders or as shards, and the crops that DeiT trains and evaluates on.

Shards are tar files as webdataset writes them. Each sample is two neighbouring members, `<key>.jpg` and `<key>.cls`
(the label in digits). The tar files are not unpacked. Their headers are read once, and each sample is read at its
offset. The index of `part-0.tar` is kept beside it as `.part-0.tar.index.json`, if the folder is writable.
"""

import json
import math
import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import numpy as np
import torch
from torch import Tensor

from acutance import distributed as processes
from acutance.errors import AcutanceError
from acutance.files.atomic import atomic_write, read_json
from acutance.io.inputs import pillow
from acutance.lab.data.seeds import epoch_order
from acutance.lab.data.source import Bytes, Image, Source, SplitName, channels_first, held_out

IMAGENET = Source(
    "ImageNet",
    "train/ and val/ with a folder of images per class (train/n01440764/*.JPEG)",
    "Get ILSVRC2012 from https://image-net.org (registration needed) and sort the validation images into class folders",
)
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm"}
HELD_OUT_EVERY = 100  # one image in a hundred of each class: about 12,800 of ImageNet's
AREA = (0.08, 1.0)  # of the image
ASPECT = (3 / 4, 4 / 3)  # width over height
RESIZE_OVER_CROP = 256 / 224  # evaluation scales the short side to 256 and cuts out the middle 224
SHARDS_AT_ONCE = 16  # images are shuffled within groups of this many shards
READERS = 8
MOST_CLASSES = 10**6
LONGEST_LABEL = 16  # characters: digits and white space
FORMAT = "acutance-shard/2"
SHARDS = Source(
    "webdataset shards",
    "uncompressed tar files with <key>.jpg and <key>.cls for each image",
    "Name them as in /data/imagenet-train-{000000..000146}.tar (or with *); `pip install webdataset` has the tools "
    "to write them",
)
Entry = tuple[str, int, int, int]  # an image's key, offset, size and label


class ImageFolder:
    """Images in `root/train/<class>/` and `root/val/<class>/`, decoded only when asked for.

    "test" is the folder val/; "val" is one image in `every` of each class of train/, by file name. None takes `root`
    itself as a folder of classes. A label is a folder's position by name, so val/ must have the same folders as train/.
    Hidden files and folders are skipped.
    """

    def __init__(self, root: Path | str, split: SplitName | None, *, every: int = HELD_OUT_EVERY) -> None:
        root = Path(root)
        folder = IMAGENET.folder(root if split is None else root / ("val" if split == "test" else "train"))
        folders = _visible(folder, _is_class)
        self.classes = tuple(path.name for path in folders)
        images = (_visible(kind, lambda path: path.suffix.lower() in SUFFIXES) for kind in folders)
        found = [(path, label) for label, paths in enumerate(images) for path in paths]
        if not found:
            raise IMAGENET.missing(folder / "<class>" / "<image>")
        if split == "test" and (root / "train").is_dir():  # elsewhere the training images are in shards
            _refuse_other_classes(folder, set(self.classes), root / "train")
        labels = torch.tensor([label for _, label in found])
        chosen = choose(labels, split, every, folder)
        self.paths = [found[i][0] for i in chosen.tolist()]
        self.labels = labels[chosen]

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int) -> Image:
        return IMAGENET.image(self.paths[index])

    def order(self, seed: int, epoch: int) -> Tensor:
        return epoch_order(len(self), seed, epoch)


def choose(labels: Tensor, split: SplitName | None, every: int, place: Path | str) -> Tensor:
    """The indices that belong to a split of a training set (all of them for None, "all" and "test")."""
    if split not in ("train", "val"):
        return torch.arange(len(labels))
    held = held_out(labels, every)
    if not bool(held.any()):  # then there is nothing to score during training
        raise AcutanceError(f"{place}: no class has {every} images to hold one out for val; lower task.held_out_every")
    return (held if split == "val" else ~held).nonzero()[:, 0]


def _visible(folder: Path, wanted: Callable[[Path], bool]) -> list[Path]:
    """What is wanted, sorted, without hidden files that tools leave behind: .cache/, ._n01440764_18.JPEG."""
    return [path for path in sorted(folder.iterdir()) if not path.name.startswith(".") and wanted(path)]


def _is_class(path: Path) -> bool:
    """Refuses a broken link: it may have been a class, and without it all later classes would have other labels."""
    if path.is_symlink() and not path.exists():
        raise IMAGENET.damaged(path, "it is a broken link")
    return path.is_dir()


def _refuse_other_classes(folder: Path, found: set[str], train: Path) -> None:
    """An extra or missing folder would shift the labels of all later classes, and every score would be wrong."""
    expected = {path.name for path in _visible(train, _is_class)}
    for names, what in ((sorted(expected - found), "missing"), (sorted(found - expected), "not in train/")):
        if names:
            which = f"{names[0]} is" if len(names) == 1 else f"{names[0]} and {len(names) - 1} more are"
            raise IMAGENET.damaged(folder, f"its class folders are not those of train/: {which} {what}")


def random_resized_crop(image: Image, size: int, random: np.random.Generator) -> Image:
    """A random part of the image, bicubically scaled to size × size (https://arxiv.org/abs/1409.4842)."""
    left, top, width, height = random_part(image.width, image.height, random)
    # Cut first: `resize(box=…)` would let pixels from outside into the border.
    part = image.crop((left, top, left + width, top + height))
    return part.resize((size, size), pillow().Resampling.BICUBIC)


def random_part(width: int, height: int, random: np.random.Generator) -> tuple[int, int, int, int]:
    """Left, top, width and height of a part with a random area and aspect. If ten do not fit, a part in the middle."""
    for _ in range(10):
        area = random.uniform(*AREA) * width * height
        aspect = math.exp(random.uniform(math.log(ASPECT[0]), math.log(ASPECT[1])))
        wide, tall = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < wide <= width and 0 < tall <= height:
            return int(random.integers(width - wide + 1)), int(random.integers(height - tall + 1)), wide, tall
    aspect = min(max(width / height, ASPECT[0]), ASPECT[1])
    wide, tall = min(width, round(height * aspect)), min(height, round(width / aspect))
    return (width - wide) // 2, (height - tall) // 2, wide, tall


def centre_crop(image: Image, size: int) -> Image:
    """Scale the image's short side to 256/224 of `size` (bicubic), then cut out the middle size × size."""
    short = int(size * RESIZE_OVER_CROP)
    width, height = image.size
    scaled = (short, int(short * height / width)) if width <= height else (int(short * width / height), short)
    left, top = round((scaled[0] - size) / 2), round((scaled[1] - size) / 2)
    return image.resize(scaled, pillow().Resampling.BICUBIC).crop((left, top, left + size, top + size))


class WebShards:
    """Images in shards, whose pattern may hold {000..146} or *.

    "val" is one image in `every` of each class, in the order of the shards; "test" and None are all images. Labels run
    from 0 to `classes` − 1; None takes the highest label that occurs as the last.
    """

    def __init__(
        self, pattern: str, split: SplitName | None = None, *, every: int = HELD_OUT_EVERY, classes: int | None = None
    ) -> None:
        self.paths = list(expand(pattern))
        indices = _indices(self.paths)
        # Arrays, not a million objects: a worker that only reads an object copies its memory.
        entries = ((key, shard, *place) for shard, index in enumerate(indices) for key, *place in index)
        keys, *columns = zip(*entries, strict=True)
        *places, labels = torch.tensor(columns)  # shard, offset, size
        low, high = int(labels.min()), int(labels.max())
        if classes is not None and high >= classes:  # the loss would fail, and on a GPU it would not say why
            from_1 = low > 0 and high == classes
            hint = "they seem to count from 1: take 1 from each" if from_1 else "set task.model.num_classes"
            labelled = f"labels from {low} to {high} for {classes} classes, which are numbered 0 to {classes - 1}"
            raise SHARDS.damaged(pattern, f"{labelled}; {hint}")
        chosen = choose(labels, split, every, pattern)
        self.labels, self._places = labels[chosen], torch.stack(places, 1)[chosen]
        self._keys = np.array([key.encode() for key in keys])[chosen.numpy()]
        self.classes = tuple(str(label) for label in range(classes or high + 1))

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> Image:
        shard, offset, size = self._places[index].tolist()
        path = self.paths[shard]
        with SHARDS.reading(path), path.open("rb") as file:
            file.seek(offset)
            content = file.read(size)
        return SHARDS.image(content, f"{path}:{self._keys[index].decode()}")

    def order(self, seed: int, epoch: int) -> Tensor:
        """The order of an epoch: shards in random order, their images shuffled within groups of 16 shards."""
        place = torch.argsort(epoch_order(len(self.paths), seed, epoch))
        shuffled = epoch_order(len(self), seed, epoch)
        group = place[self._places[shuffled, 0]] // SHARDS_AT_ONCE
        return shuffled[torch.argsort(group, stable=True)]


@dataclass(frozen=True)
class Crops:
    """Bytes (3, size, size) of images with their labels: DeiT's random resized crop, or the middle for evaluation.

    The rest of DeiT's augmentation, mirror images included, happens in batches on the device.
    """

    images: ImageFolder | WebShards
    size: int = 224

    def __len__(self) -> int:
        return len(self.images.labels)

    def sample(self, index: int, random: np.random.Generator | None) -> tuple[Bytes, int]:
        image = self.images.read(index)
        cut = centre_crop(image, self.size) if random is None else random_resized_crop(image, self.size, random)
        return channels_first(cut), int(self.images.labels[index])


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
    """The index of each shard. Processes start at different shards and use what others have written meanwhile."""
    rank, world = processes.rank_and_world_size()
    first = rank * len(paths) // world
    turn = [*paths[first:], *paths[:first]]
    with ThreadPoolExecutor(READERS) as readers:
        found = dict(zip(turn, readers.map(_index, turn), strict=True))
    return [found[path] for path in paths]


def _index(path: Path) -> list[Entry]:
    """The saved index, if the tar file has not changed since. Otherwise its headers are read and the result saved."""
    with SHARDS.reading(path):
        status = path.stat()
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
    errors = tarfile.TarError, ValueError, RecursionError, MemoryError  # the last two: endless chains of headers
    with SHARDS.reading(path, *errors), tarfile.open(path, "r:") as archive:
        for member in archive:
            folder, slash, file = member.name.rpartition("/")
            name, _, suffix = file.partition(".")  # webdataset's key ends at the first dot
            key = folder + slash + name
            is_image = f".{suffix}".lower() in SUFFIXES
            if (is_image or suffix == "cls") and (not member.isreg() or member.issparse()):
                raise ValueError(f"{member.name!r} is a link or another kind of member, not a plain file")
            if is_image:
                images[key] = member
            elif suffix == "cls":
                labels[key] = _label(archive, member)
    if unmatched := sorted(images.keys() ^ labels.keys()):
        raise SHARDS.damaged(path, f"{unmatched[0]!r} has no image or no .cls")
    if not images:
        raise SHARDS.damaged(path, "no images in it")
    return [(key, member.offset_data, member.size, labels[key]) for key, member in images.items()]


def _label(archive: tarfile.TarFile, member: tarfile.TarInfo) -> int:
    """The number of a class. It has a limit, since lists of that length are made from it."""
    content = cast(IO[bytes], archive.extractfile(member)).read(LONGEST_LABEL + 1)
    label = int(content) if len(content) <= LONGEST_LABEL else MOST_CLASSES
    if not 0 <= label < MOST_CLASSES:
        raise ValueError(f"{member.name!r} holds {content!r}, not a number from 0 to {MOST_CLASSES - 1}")
    return label
