"""Reading an image file, and DeiT's two ways of cutting an image to size; in worker processes, with Pillow."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from acutance.errors import MissingExtraError
from acutance.lab.data.source import Source

if TYPE_CHECKING:
    from PIL.Image import Image

Bytes = npt.NDArray[np.uint8]
AREA = (0.08, 1.0)  # of the image
ASPECT = (3 / 4, 4 / 3)  # width over height
RESIZE_OVER_CROP = 256 / 224  # evaluation scales the short side to 256 and cuts out the middle 224


def pillow() -> Any:
    """Pillow's `Image` module, or how to get it."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("images are read by Pillow: pip install pillow") from error
    return Image


def decode(content: Path | bytes, place: Path | str, source: Source, *, colour: bool = True) -> Image:
    """An image from a file or from bytes, as RGB unless `colour` is false; `place` is named if it is damaged."""
    try:
        with pillow().open(io.BytesIO(content) if isinstance(content, bytes) else content) as image:
            image.load()
            result: Image = image.convert("RGB") if colour else image.copy()
            return result
    except FileNotFoundError as error:
        raise source.missing(place) from error
    # Pillow raises SyntaxError for broken PNGs and ValueError or its own errors for absurd sizes.
    except (OSError, SyntaxError, ValueError, pillow().DecompressionBombError) as error:
        raise source.damaged(place, error) from error


def channels_first(image: Image) -> Bytes:
    """The pixels as (channels, height, width)."""
    return np.ascontiguousarray(np.asarray(image, dtype=np.uint8).transpose(2, 0, 1))


def random_resized_crop(image: Image, size: int, random: np.random.Generator) -> Image:
    """A random part of the image, bicubically scaled to size × size (https://arxiv.org/abs/1409.4842)."""
    left, top, width, height = random_part(*image.size, random)
    # Cut first: `resize(box=…)` would let pixels from outside into the border.
    part = image.crop((left, top, left + width, top + height))
    return part.resize((size, size), pillow().Resampling.BICUBIC)


def random_part(width: int, height: int, random: np.random.Generator) -> tuple[int, int, int, int]:
    """Left, top, width and height of a part with a random area and aspect; if ten do not fit, one in the middle."""
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
    """The middle size × size of the image, bicubically scaled to a short side of 256/224 of that."""
    short = int(size * RESIZE_OVER_CROP)
    width, height = image.size
    scaled = (short, int(short * height / width)) if width <= height else (int(short * width / height), short)
    left, top = round((scaled[0] - size) / 2), round((scaled[1] - size) / 2)
    return image.resize(scaled, pillow().Resampling.BICUBIC).crop((left, top, left + size, top + size))
