"""Folders of images."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from acutance.errors import AcutanceError
from acutance.io.loading.batches import Batches
from acutance.lab.data.decoding import pillow

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}


class ImageBatches(Batches):
    """Image files, decoded when their batch is asked for."""

    def __init__(
        self,
        files: Sequence[Path],
        batch: int,
        description: str,
        *,
        preprocess: Callable[[Sequence[Image.Image]], Any],
        dtype: torch.dtype,
    ) -> None:
        super().__init__(files, batch, description)
        self._preprocess, self._dtype = preprocess, dtype

    def make(self, samples: Sequence[Path]) -> Any:
        """Decode, and prepare as the model wants it."""
        return self._cast(self._preprocess([_decoded(file) for file in samples]))

    def _cast(self, batch: Any) -> Any:
        if isinstance(batch, Mapping):
            return {name: self._cast(value) for name, value in batch.items()}
        return batch.to(self._dtype) if isinstance(batch, Tensor) and batch.is_floating_point() else batch


def image_batches(
    folder: str | Path,
    preprocess: Callable[[Sequence[Image.Image]], Any],
    *,
    batch: int = 32,
    limit: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> ImageBatches:
    """The images of a folder and its subfolders in batches, in the order of their paths.

    Args:
        folder: where to look.
        preprocess: makes what the model takes from a list of RGB images, e.g. `centre_crop(…)`.
        batch: images per batch.
        limit: stop after this many images.
        dtype: what floating-point tensors are turned into.
    """
    pillow()
    root = Path(folder)
    if not root.is_dir():
        raise AcutanceError(f"there is no folder of images {root}")
    found = sorted(file for file in root.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())[:limit]
    if not found:
        raise AcutanceError(f"there is no image in {root} or its subfolders; looked for {', '.join(sorted(SUFFIXES))}")
    description = f"{len(found)} images from {root.resolve().name}"
    return ImageBatches(found, batch, description, preprocess=preprocess, dtype=dtype)


def centre_crop(
    size: tuple[int, int],
    mean: Sequence[float],
    std: Sequence[float],
    *,
    fraction: float = 1.0,
    interpolation: str = "bicubic",
    mode: Literal["center", "squash"] = "center",
) -> Callable[[Sequence[Image.Image]], Tensor]:
    """Evaluation's preprocessing without torchvision: resize, crop the middle, normalise per channel.

    Args:
        size: height and width of what the model sees.
        mean: per channel; one channel makes grey images.
        std: per channel.
        fraction: of the resized image's side that the crop keeps, e.g. 224/256.
        interpolation: bilinear, bicubic or another of PIL's resampling names.
        mode: `center` keeps the proportions when resizing, `squash` does not.
    """
    resampling = pillow().Resampling[interpolation.upper()]
    scaled = [math.floor(side / fraction) for side in size]
    shift, scale = (torch.tensor(list(numbers)).view(-1, 1, 1) for numbers in (mean, std))

    def prepare(image: Image.Image) -> Tensor:
        image = image.convert("RGB" if len(mean) == 3 else "L")
        height, width = scaled if mode == "squash" else _proportional(image, scaled)
        image = image.resize((width, height), resampling)
        top, left = round((height - size[0]) / 2), round((width - size[1]) / 2)
        image = image.crop((left, top, left + size[1], top + size[0]))
        pixels = torch.from_numpy(np.array(image, dtype=np.float32) / 255).reshape(*size, len(mean))
        return (pixels.permute(2, 0, 1) - shift) / scale

    return lambda images: torch.stack([prepare(image) for image in images])


def _proportional(image: Image.Image, sides: Sequence[int]) -> tuple[int, int]:
    """The smallest height and width of the image's proportions that hold `sides`."""
    width, height = image.size
    whole = int if sides[0] == sides[1] else round  # torchvision rounds down, timm's own resizing does not
    if width / height < sides[1] / sides[0]:
        return whole(sides[1] * height / width), sides[1]
    return sides[0], whole(sides[0] * width / height)


def _decoded(file: Path) -> Image.Image:
    library = pillow()
    try:
        with library.open(file) as image:
            rgb: Image.Image = image.convert("RGB")
            return rgb
    except (OSError, ValueError, SyntaxError, library.DecompressionBombError) as error:
        raise AcutanceError(f"{file} cannot be read as an image: {error}") from error
