"""Fashion-MNIST in the idx format, compressed or not (https://arxiv.org/abs/1708.07747)."""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np
import torch

from acutance.lab.data.images import Images, channel_statistics
from acutance.lab.data.source import Source

FASHION_MNIST = Source(
    "Fashion-MNIST",
    "fashion-mnist/ with {train,t10k}-images-idx3-ubyte and {train,t10k}-labels-idx1-ubyte, with or without .gz",
    "Get the four files from https://github.com/zalandoresearch/fashion-mnist (or Debian's dataset-fashion-mnist)",
)
CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
UNSIGNED_BYTES = 8  # the type code; the other idx types are not used here
HEADER = 4


def fashion_mnist(data_dir: Path, train: bool) -> Images:
    """The training set or the test set, 28×28 in one channel."""
    folder = FASHION_MNIST.folder(data_dir / "fashion-mnist")
    part = "train" if train else "t10k"
    pixels = _read(folder / f"{part}-images-idx3-ubyte", 3)
    labels_path = folder / f"{part}-labels-idx1-ubyte"
    labels = _read(labels_path, 1).long()
    if len(labels) != len(pixels):
        raise FASHION_MNIST.damaged(labels_path, f"{len(labels)} labels for {len(pixels)} images")
    if len(labels) and int(labels.max()) >= len(CLASSES):
        raise FASHION_MNIST.damaged(labels_path, f"a label {int(labels.max())} for {len(CLASSES)} classes")
    known = pixels if train else _read(folder / "train-images-idx3-ubyte", 3)
    mean, std = channel_statistics(known[:, None])
    return Images("fashion_mnist", pixels[:, None], labels, CLASSES, mean, std)


def _read(path: Path, dimensions: int) -> torch.Tensor:
    """An idx file: two zeros, the type, the number of dimensions, their sizes (big-endian), then the bytes."""
    content, path = _bytes(path)
    if content[:HEADER] != bytes((0, 0, UNSIGNED_BYTES, dimensions)):
        raise FASHION_MNIST.damaged(path, f"no idx file of bytes in {dimensions} dimensions")
    body = HEADER * (1 + dimensions)
    if len(content) < body:
        raise FASHION_MNIST.damaged(path, "its header is cut off")
    shape = struct.unpack(f">{dimensions}I", content[HEADER:body])
    if len(content) - body != np.prod(shape, dtype=np.int64):
        raise FASHION_MNIST.damaged(path, f"{len(content) - body} bytes for a shape of {shape}")
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=body).reshape(shape).copy())


def _bytes(path: Path) -> tuple[bytes, Path]:
    packed = path.with_name(path.name + ".gz")
    if path.exists() or not packed.exists():
        return FASHION_MNIST.bytes(path), path
    try:
        return gzip.decompress(FASHION_MNIST.bytes(packed)), packed
    except (OSError, EOFError, zlib.error) as error:
        raise FASHION_MNIST.damaged(packed, error) from error
