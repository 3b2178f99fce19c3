"""Stand-ins for data sets, made of what ships with the package, in the layouts of the real ones.

Handwritten digits stand in for ImageNet's photographs and, placed on a canvas, for ADE20K's scenes; the package's own
sources for WikiText-103. They exercise the readers and the whole path. They are no substitute for the data.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import numpy as np

from acutance.lab.data.decoding import Bytes, pillow
from acutance.lab.data.digits import digit_images

CLASSES = 3  # of the stand-in for ImageNet
PER_CLASS = 20
HELD_OUT_EVERY = 10
SCENES = {"training": 20, "validation": 4}  # ADE20K's held-out slice is every twentieth
SIDE = 20  # pixels of a scene
WORDS = {"train": 2000, "valid": 100, "test": 100}


def steps(kind: str, batch: int) -> int:
    """Steps in an epoch of a stand-in, so that a few steps can be told in epochs."""
    sizes = {"classification": 1440, "imagenet": CLASSES * PER_CLASS, "segmentation": SCENES["training"]}
    if kind == "language":
        return max(1, (WORDS["train"] // batch - 1) // 8)
    return max(1, sizes[kind] // batch)


def imagenet(folder: Path) -> Path:
    """Digits as colour images: train/<class>/ and val/<class>/."""
    return _once(folder / "imagenet", _write_imagenet)


def ade20k(folder: Path) -> Path:
    """Scenes of one digit each, whose pixels have its class; the background is a class of its own."""
    _once(folder / "ADEChallengeData2016", _write_ade20k)
    return folder


def wikitext(folder: Path) -> Path:
    """Words of the package's sources as wiki.train.tokens and the others."""
    _once(folder / "wikitext-103", _write_wikitext)
    return folder


def _once(folder: Path, write: Callable[[Path], None]) -> Path:
    """Write beside its place and move it there, so that other processes find it whole or not at all."""
    if not folder.is_dir():
        temporary = folder.with_name(f".{folder.name}-{os.getpid()}")
        shutil.rmtree(temporary, ignore_errors=True)
        write(temporary)
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
            shutil.rmtree(temporary)  # another process was quicker
    return folder


def _write_imagenet(folder: Path) -> None:
    for part, train, count in (("train", True, PER_CLASS), ("val", False, 5)):
        found = digit_images(train)
        for label in range(CLASSES):
            chosen = found.images[found.labels == label][:count, 0].numpy()
            for number, image in enumerate(chosen):
                _save(np.stack([image] * 3, -1), folder / part / f"digit{label}" / f"{number:03d}.png")


def _write_ade20k(folder: Path) -> None:
    random = np.random.default_rng(0)
    for part, count in SCENES.items():
        found = digit_images(part == "training")
        for number in range(count):
            image, label = _scene(found.images[number, 0].numpy(), int(found.labels[number]), random)
            _save(image, folder / "images" / part / f"{number:03d}.jpg")
            _save(label, folder / "annotations" / part / f"{number:03d}.png")


def _scene(digit: Bytes, label: int, random: np.random.Generator) -> tuple[Bytes, Bytes]:
    """A digit at a random place, and the classes of all pixels: 1 the background, digit d is d + 2; 0 is no class."""
    image, classes = np.full((SIDE, SIDE, 3), 40, np.uint8), np.ones((SIDE, SIDE), np.uint8)
    top, left = random.integers(0, SIDE - 8, 2)
    window = (slice(top, top + 8), slice(left, left + 8))
    image[window] = np.maximum(digit[..., None], 40)
    classes[window][digit > 0] = label + 2
    return image, classes


def _write_wikitext(folder: Path) -> None:
    sources = sorted((path for path in files("acutance.mitigations").iterdir() if path.name.endswith(".py")), key=str)
    lines = [" ".join(re.findall(r"\w+", line)) for path in sources for line in path.read_text("utf-8").splitlines()]
    words = " \n ".join(line for line in lines if line).split(" ")
    folder.mkdir(parents=True)
    start = 0
    for part, count in WORDS.items():
        (folder / f"wiki.{part}.tokens").write_text(" ".join(words[start : start + count]), encoding="utf-8")
        start += count


def _save(pixels: Bytes, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pillow().fromarray(pixels).save(path)
