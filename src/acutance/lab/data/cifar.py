"""CIFAR-10 and CIFAR-100 as their authors publish them: Python pickles (https://www.cs.toronto.edu/~kriz/cifar.html)."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from acutance.lab.data.images import Images, channel_statistics
from acutance.lab.data.pickles import load_plain
from acutance.lab.data.source import Source

SIDE = 32
CIFAR10 = Source(
    "CIFAR-10",
    "cifar-10-batches-py/ with data_batch_1 to data_batch_5 and test_batch",
    "Get https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz and unpack it there",
)
CIFAR100 = Source(
    "CIFAR-100",
    "cifar-100-python/ with train, test and meta",
    "Get https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz and unpack it there",
)
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
TRAIN_BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))


def cifar10(data_dir: Path, train: bool) -> Images:
    """The training set or the test set."""
    folder = CIFAR10.folder(data_dir / "cifar-10-batches-py")
    files = TRAIN_BATCHES if train else ("test_batch",)
    return _images("cifar10", CIFAR10, folder, files, TRAIN_BATCHES, b"labels", CIFAR10_CLASSES)


def cifar100(data_dir: Path, train: bool) -> Images:
    """The training set or the test set, with the 100 fine labels."""
    folder = CIFAR100.folder(data_dir / "cifar-100-python")
    names = _field(CIFAR100, folder / "meta", b"fine_label_names")
    classes = tuple(name.decode() if isinstance(name, bytes) else str(name) for name in names)
    return _images("cifar100", CIFAR100, folder, ["train" if train else "test"], ["train"], b"fine_labels", classes)


def _images(
    name: str,
    source: Source,
    folder: Path,
    files: Sequence[str],
    train_files: Sequence[str],
    label_key: bytes,
    classes: tuple[str, ...],
) -> Images:
    pixels, labels = _read(source, folder, files, label_key, len(classes))
    # A test set is normalised by the training set.
    known = pixels if files == train_files else _read(source, folder, train_files, label_key, len(classes))[0]
    mean, std = channel_statistics(known)
    return Images(name, pixels, labels, classes, mean, std)


def _read(
    source: Source, folder: Path, files: Sequence[str], label_key: bytes, classes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [_read_file(source, folder / file, label_key, classes) for file in files]
    pixels = np.concatenate([part[0] for part in parts]).reshape(-1, 3, SIDE, SIDE)
    labels = np.concatenate([part[1] for part in parts])
    return torch.from_numpy(pixels), torch.from_numpy(labels)


def _read_file(source: Source, path: Path, label_key: bytes, classes: int) -> tuple[Any, Any]:
    content = _content(source, path)
    pixels = _of(source, path, content, b"data")
    labels = np.asarray(_of(source, path, content, label_key))
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[1:] != (3 * SIDE * SIDE,):
        shape = getattr(pixels, "shape", type(pixels).__name__)
        raise source.damaged(path, f"its pixels are {shape}, not bytes (n, {3 * SIDE * SIDE})")
    if labels.shape != (len(pixels),) or labels.dtype.kind not in "iu":
        raise source.damaged(path, f"{len(pixels)} images, but labels of shape {labels.shape}")
    if len(labels) and not (labels.min() >= 0 and labels.max() < classes):
        raise source.damaged(path, f"labels from {labels.min()} to {labels.max()} for {classes} classes")
    return pixels, labels.astype(np.int64)


def _content(source: Source, path: Path) -> Any:
    try:
        return load_plain(source.bytes(path))
    except pickle.UnpicklingError as error:
        raise source.damaged(path, error) from error


def _of(source: Source, path: Path, content: Any, key: bytes) -> Any:
    """A field, whether its name was stored as bytes (Python 2) or as text."""
    if isinstance(content, dict):
        for name in (key, key.decode()):
            if name in content:
                return content[name]
    raise source.damaged(path, f"it has no {key.decode()!r}")


def _field(source: Source, path: Path, key: bytes) -> Any:
    return _of(source, path, _content(source, path), key)
