"""RandAugment's operations written with Pillow, one image at a time: the oracle of the batched ones."""

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

FILL = (124, 116, 104)
EXACT = (
    "auto_contrast", "equalise", "invert", "posterise", "solarise", "solarise_add", "colour", "contrast", "brightness",
    "sharpness",
)  # fmt: skip
INTERPOLATED = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")


def to_pillow(image: Tensor) -> Image.Image:
    pixels = image.permute(1, 2, 0).numpy().astype(np.uint8)
    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)


def from_pillow(image: Image.Image) -> Tensor:
    pixels = torch.from_numpy(np.asarray(image).copy())
    return (pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)).float()


def affine(image: Image.Image, matrix: tuple[float, ...]) -> Image.Image:
    fill = FILL if image.mode == "RGB" else FILL[0]
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC, fillcolor=fill)


def posterise(image: Image.Image, bits: int) -> Image.Image:
    # Pillow refuses 0 bits since version 13; before, and in DeiT's day, that was black.
    return ImageOps.posterize(image, bits) if bits else image.point(lambda value: 0)


def solarise_add(image: Image.Image, amount: int) -> Image.Image:
    table = [min(255, i + amount) if i < 128 else i for i in range(256)]
    return image.point(table * len(image.getbands()))


def apply(name: str, image: Image.Image, magnitude: float, sign: float) -> Image.Image:
    """An operation at a magnitude from 0 to 10, the arguments as timm's "increasing" set has them."""
    share = magnitude / 10
    level = share * sign
    factor = max(0.1, 1 + 0.9 * level)
    width, height = image.size
    fill = FILL if image.mode == "RGB" else FILL[0]
    operations = {
        "auto_contrast": lambda: ImageOps.autocontrast(image),
        "equalise": lambda: ImageOps.equalize(image),
        "invert": lambda: ImageOps.invert(image),
        "posterise": lambda: posterise(image, 4 - int(share * 4)),
        "solarise": lambda: ImageOps.solarize(image, 256 - int(share * 256)),
        "solarise_add": lambda: solarise_add(image, int(share * 110)),
        "colour": lambda: ImageEnhance.Color(image).enhance(factor),
        "contrast": lambda: ImageEnhance.Contrast(image).enhance(factor),
        "brightness": lambda: ImageEnhance.Brightness(image).enhance(factor),
        "sharpness": lambda: ImageEnhance.Sharpness(image).enhance(factor),
        "rotate": lambda: image.rotate(30 * level, Image.Resampling.BICUBIC, fillcolor=fill),
        "shear_x": lambda: affine(image, (1, 0.3 * level, 0, 0, 1, 0)),
        "shear_y": lambda: affine(image, (1, 0, 0, 0.3 * level, 1, 0)),
        "translate_x": lambda: affine(image, (1, 0, 0.45 * level * width, 0, 1, 0)),
        "translate_y": lambda: affine(image, (1, 0, 0, 0, 1, 0.45 * level * height)),
    }
    return operations[name]()
