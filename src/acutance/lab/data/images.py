"""Images that fit into memory, held as bytes: scikit-learn's digits, CIFAR-10, CIFAR-100 and Fashion-MNIST."""

import gzip
import io
import pickle
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from acutance.errors import ShapeError, import_extra
from acutance.lab.data.source import Source, SplitName, class_ranks, data_folder, held_out

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
FASHION_MNIST = Source(
    "Fashion-MNIST",
    "fashion-mnist/ with {train,t10k}-images-idx3-ubyte and {train,t10k}-labels-idx1-ubyte, with or without .gz",
    "Get the four files from https://github.com/zalandoresearch/fashion-mnist (or Debian's dataset-fashion-mnist)",
)
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FASHION_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
Part = tuple[Tensor, Tensor, tuple[str, ...]]  # images, labels and the names of the classes


@dataclass(frozen=True)
class Images:
    """Labelled images of one size; `mean` and `std` are those of the whole training set, in units of [0, 1]."""

    name: str
    images: Tensor  # uint8 (n, channels, height, width)
    labels: Tensor  # int64 (n,)
    classes: tuple[str, ...]
    mean: tuple[float, ...]  # per channel
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or self.images.dtype != torch.uint8 or len(self.images) != len(self.labels):
            raise ShapeError(
                f"{self.name}: images must be uint8 (n, channels, height, width), one label each; got "
                f"{tuple(self.images.shape)} {self.images.dtype} and labels {tuple(self.labels.shape)}"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str) -> Self:
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))

    def subset(self, indices: Tensor) -> Self:
        """The images at these indices; mean and std stay those of the whole training set."""
        indices = indices.to(self.images.device)
        return replace(self, images=self.images[indices], labels=self.labels[indices])


def load_images(name: str, data_dir: Path | str | None, split: SplitName) -> Images:
    """One of `IMAGE_SETS` from the folder in which it has its usual layout; "digits" needs no folder.

    "val" is every tenth image of each class of the training set.
    """
    folder = data_folder("image data set", name, IMAGE_SETS, "." if name == "digits" else data_dir, split)
    read = IMAGE_SETS[name]
    pixels, labels, classes = read(folder, split != "test")
    known = read(folder, True)[0] if split == "test" else pixels  # a test set is normalised by the training set
    images = Images(name, pixels, labels, classes, *_channel_statistics(known))
    if split in ("all", "test"):
        return images
    held = held_out(labels)
    return images.subset((held if split == "val" else ~held).nonzero()[:, 0])


def _channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of bytes, in units of [0, 1]."""
    channels, values = images.transpose(0, 1).flatten(1), torch.arange(256, dtype=torch.float64) / 255
    shares = torch.stack([channel.bincount(minlength=256).double() / len(channel) for channel in channels])
    mean = (shares * values).sum(1)
    std = (shares * (values - mean[:, None]) ** 2).sum(1).sqrt()
    return tuple(mean.tolist()), tuple(std.tolist())


@dataclass(frozen=True)
class Split:
    """Images (n, 1, 8, 8), roughly zero mean and unit variance, and their labels."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All of it in order."""
        return zip(self.images.split(size), self.labels.split(size), strict=True)


def digits() -> tuple[Split, Split]:
    """The 1,797 digits of scikit-learn, normalised, for training and test (every fifth image of each class)."""
    (train, train_labels, _), (test, test_labels, _) = (_digits(Path(), part) for part in (True, False))
    levels = train / 15
    mean, std = levels.mean(), levels.std()
    return Split((levels - mean) / std, train_labels), Split((test / 15 - mean) / std, test_labels)


def _digits(data_dir: Path, train: bool) -> Part:
    missing = "the digits ship with scikit-learn: pip install 'acutance[train]'"
    raw = import_extra("sklearn.datasets", missing).load_digits()
    labels = torch.tensor(raw.target)
    wanted = (class_ranks(labels) % 5 != 0) == train
    # 17 levels of grey: 16 · 15 = 240 still fits a byte, and every level stays exact.
    return torch.tensor(raw.images[:, None] * 15, dtype=torch.uint8)[wanted], labels[wanted], tuple("0123456789")


def _cifar10(data_dir: Path, train: bool) -> Part:
    folder = CIFAR10.folder(data_dir / "cifar-10-batches-py")
    files = [f"data_batch_{i}" for i in range(1, 6)] if train else ["test_batch"]
    return _cifar(CIFAR10, [folder / file for file in files], "labels", CIFAR10_CLASSES)


def _cifar100(data_dir: Path, train: bool) -> Part:
    folder = CIFAR100.folder(data_dir / "cifar-100-python")
    (names,) = _fields(CIFAR100, folder / "meta", "fine_label_names")
    classes = tuple(name.decode() if isinstance(name, bytes) else str(name) for name in names)
    return _cifar(CIFAR100, [folder / ("train" if train else "test")], "fine_labels", classes)


def _cifar(source: Source, paths: Sequence[Path], label_key: str, classes: tuple[str, ...]) -> Part:
    """The pickles of https://www.cs.toronto.edu/~kriz/cifar.html, one after the other."""
    parts = []
    for path in paths:
        pixels, numbers = _fields(source, path, "data", label_key)
        labels = np.asarray(numbers)
        if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[1:] != (3 * 32 * 32,):
            found = getattr(pixels, "shape", type(pixels).__name__)
            raise source.damaged(path, f"its pixels are {found}, not bytes (n, {3 * 32 * 32})")
        _check_labels(source, path, labels, len(pixels), len(classes))
        parts.append((torch.from_numpy(pixels).view(-1, 3, 32, 32), torch.from_numpy(labels.astype(np.int64))))
    images, numbers = zip(*parts, strict=True)
    return torch.cat(images), torch.cat(numbers), classes


def _fields(source: Source, path: Path, *names: str) -> list[Any]:
    """Fields of a pickle, whose names were stored as bytes (Python 2) or as text."""
    with source.reading(path, pickle.UnpicklingError):
        content = load_plain(path.read_bytes())
    known = content if isinstance(content, dict) else {}
    fields = {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in known.items()}
    if missing := [name for name in names if name not in fields]:
        raise source.damaged(path, f"it has no {missing[0]!r}")
    return [fields[name] for name in names]


def _check_labels(source: Source, path: Path, labels: Any, images: int, classes: int) -> None:
    if labels.shape != (images,) or labels.dtype.kind not in "iu":
        raise source.damaged(path, f"{images} images, but labels of shape {labels.shape}")
    if len(labels) and not (labels.min() >= 0 and labels.max() < classes):
        raise source.damaged(path, f"labels from {labels.min()} to {labels.max()} for {classes} classes")


def _fashion_mnist(data_dir: Path, train: bool) -> Part:
    """28×28 in one channel (https://arxiv.org/abs/1708.07747)."""
    folder = FASHION_MNIST.folder(data_dir / "fashion-mnist")
    part = "train" if train else "t10k"
    pixels, _ = _idx(folder / f"{part}-images-idx3-ubyte", 3)
    labels, path = _idx(folder / f"{part}-labels-idx1-ubyte", 1)
    _check_labels(FASHION_MNIST, path, labels, len(pixels), len(FASHION_CLASSES))
    return torch.from_numpy(pixels)[:, None], torch.from_numpy(labels).long(), FASHION_CLASSES


def _idx(path: Path, dimensions: int) -> tuple[Any, Path]:
    """An idx file: two zeros, the type (8: bytes), the number of dimensions, their sizes (big-endian), the bytes."""
    packed = path.with_name(path.name + ".gz")
    path = packed if packed.exists() and not path.exists() else path
    with FASHION_MNIST.reading(path, EOFError, zlib.error, struct.error, ValueError):
        content = gzip.decompress(path.read_bytes()) if path == packed else path.read_bytes()
        if content[:4] != bytes((0, 0, 8, dimensions)):
            raise ValueError(f"no idx file of bytes in {dimensions} dimensions")
        shape = struct.unpack_from(f">{dimensions}I", content, 4)
        return np.frombuffer(content, np.uint8, offset=4 * (1 + dimensions)).reshape(shape).copy(), path


# Each reads the training set (True) or the test set (False) from a folder.
IMAGE_SETS: Mapping[str, Callable[[Path, bool], Part]] = {
    "digits": _digits,
    "cifar10": _cifar10,
    "cifar100": _cifar100,
    "fashion_mnist": _fashion_mnist,
}


def _encode(text: str, encoding: str) -> bytes:
    """Protocols 0 to 2 store bytes as text in Latin-1."""
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"bytes encoded as {encoding!r}")
    return text.encode("latin1")


# What pickled arrays call, by the names of NumPy 1 and 2. None of these can run other code.
ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _encode,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0] for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): np.empty(1).__reduce_ex__(5)[0] for core in ("core", "_core")},
}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no data needs; it was not run")
        return ALLOWED[module, name]


def load_plain(content: bytes) -> Any:
    """What a pickle holds, with Python 2's strings as bytes; `UnpicklingError` if it is damaged or asks for code."""
    try:
        return _PlainUnpickler(io.BytesIO(content), encoding="bytes").load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # a damaged pickle may raise nearly anything
        raise pickle.UnpicklingError(f"not a whole pickle: {error}") from error
