"""Segmenter's training augmentation (https://arxiv.org/abs/2105.05633): scale, crop, flip, photometric distortion.

It runs in worker processes, because the images of ADE20K differ in size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from acutance.lab.data.decoding import Bytes, channels_first, pillow
from acutance.lab.data.segmentation import IGNORED, SegmentationSet

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
class SegmentationCrops:
    """Random crops (3, crop, crop) with their classes (crop, crop), for `stream.training_batches`.

    A ratio of 1 scales an image to the longest and the shortest side in `scale`, proportions kept; Segmenter's is
    (2048, 512) for ADE20K. Images smaller than a crop are padded with the mean colour, which is 0 once normalised.
    """

    images: SegmentationSet
    crop: int
    scale: tuple[int, int] = (2048, 512)

    def __len__(self) -> int:
        return len(self.images)

    def sample(self, index: int, random: np.random.Generator | None) -> tuple[Bytes, Labels]:
        """One crop; evaluation has no crops, but slides over the whole image."""
        if random is None:
            raise ValueError("crops are random: read the whole images of the data set for evaluation")
        image, label = self.images.read(index)
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
    """To the largest size whose longer and shorter side are within `sides`; bilinear, the classes by nearest pixel."""
    height, width = label.shape
    # Whole numbers first, as the public code has them.
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
    """Cut off to 0…255 and to whole numbers."""
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
