"""Accuracy on corrupted and adversarial images: the table, and its measurement."""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Self, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from acutance.errors import AcutanceError, NonFiniteError, ShapeError
from acutance.lab.data.imagenet import IMAGENET_MEAN, IMAGENET_STD, Crops
from acutance.lab.data.images import Images, load_images
from acutance.lab.data.source import SplitName
from acutance.lab.data.stream import evaluation_batches
from acutance.lab.robustness.attacks import FGSM, PGD, Attack, as_attack
from acutance.lab.robustness.corruptions import AT_ONCE, CORRUPTIONS, SEVERITIES, benchmark, check_names, corrupt_part
from acutance.lab.robustness.filters import Draws
from acutance.lab.tasks.classification import ClassificationConfig
from acutance.lab.tasks.imagenet import ImageNetConfig, load_imagenet
from acutance.measure.walk import track
from acutance.report.tables import FittedTable, Result, markdown
from acutance.sites.structure import evaluating
from acutance.version import __version__

CLEAN = "clean"
ACCURACY = "accuracy in %, by severity"
DECODED_AT_ONCE = 256


def table_name(split: str = "test", weights: str = "last", corrupted_dir: Path | None = None) -> str:
    """The file's name: robustness.json for the last weights and drawn corruptions of the test set, else longer."""
    others = [split] * (split != "test") + [weights] * (weights != "last")
    others += [] if corrupted_dir is None else [corrupted_dir.resolve().name]
    return "-".join(["robustness", *others]) + ".json"


@dataclass(frozen=True)
class RobustnessTable(Result):
    """Top-1 accuracies in percent, by cell (`clean`, `fog:3`, `fgsm:1`), and what they were measured on."""

    FORMAT = "acutance-robustness/1"
    cells: Mapping[str, float]
    context: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, cell: str) -> float:
        if cell not in self.cells:
            raise KeyError(f"no cell {cell!r} in this table; it holds {', '.join(self.cells) or 'nothing'}")
        return self.cells[cell]

    @property
    def corruptions(self) -> list[str]:
        """The corruptions measured at any severity, in the benchmark's order."""
        measured = {cell.partition(":")[0] for cell in self.cells}
        return [name for name in CORRUPTIONS if name in measured]

    @property
    def severities(self) -> list[int]:
        """The severities measured for any corruption."""
        return [s for s in SEVERITIES if any(f"{name}:{s}" in self.cells for name in CORRUPTIONS)]

    @property
    def attacks(self) -> dict[str, float]:
        return {cell: value for cell, value in self.cells.items() if cell.partition(":")[0] in ("fgsm", "pgd")}

    def mean(self, *, corruption: str | None = None, severity: int | None = None) -> float | None:
        """The plain mean of a row, a column or all corruptions. None unless every cell of it was measured."""
        names = self.corruptions if corruption is None else [corruption]
        levels = self.severities if severity is None else [severity]
        values = [self.cells.get(f"{name}:{level}") for name in names for level in levels]
        known = [value for value in values if value is not None]
        return fmean(known) if known and len(known) == len(values) else None

    def summary(self) -> dict[str, float]:
        """Clean and attacked accuracy, and all complete means of corruptions, by name."""
        found: dict[str, float | None] = {CLEAN: self.cells.get(CLEAN), **self.attacks}
        found |= {name: self.mean(corruption=name) for name in self.corruptions}
        found |= {f"severity {level}": self.mean(severity=level) for level in self.severities}
        found["mean of corruptions"] = self.mean()
        return {name: value for name, value in found.items() if value is not None}

    def table(self) -> FittedTable:
        return FittedTable(self.title, self.rows(), self.caption, keys=(ACCURACY,), left=(ACCURACY,))

    def markdown(self) -> str:
        rows = self.rows()
        lines = markdown([*rows[0]], [[*row.values()] for row in rows], numbers=True) if rows else ""
        return f"**{self.title}**\n\n{lines}\n{self.caption}\n"

    def rows(self) -> list[dict[str, str]]:
        """Clean and attacked accuracy (without a severity), the corruptions, and their mean."""
        levels = self.severities
        clean = {CLEAN: self.cells[CLEAN]} if CLEAN in self.cells else {}
        found: dict[str, list[Any]] = {name: [""] * len(levels) + [v] for name, v in {**clean, **self.attacks}.items()}
        for name in self.corruptions:
            found[name] = [*(self.cells.get(f"{name}:{s}") for s in levels), self.mean(corruption=name)]
        if self.corruptions:
            found["mean of corruptions"] = [*(self.mean(severity=level) for level in levels), self.mean()]
        header = (ACCURACY, *map(str, levels), "mean" if levels else "all")
        texts = {
            name: [v if isinstance(v, str) else "–" if v is None else f"{v:.2f}" for v in values]
            for name, values in found.items()
        }
        return [dict(zip(header, (name, *cells), strict=True)) for name, cells in texts.items()]

    @property
    def title(self) -> str:
        return str(self.context.get("name", self.context.get("model", "model")))

    @property
    def caption(self) -> str:
        """One line about the measurement and its data."""
        wanted = ("data", "images", "corruptions", "seed", "device", "dtype")
        parts = [f"{key}: {self.context[key]}" for key in wanted if key in self.context]
        return "; ".join(["top-1 accuracy; attacks are L∞, ε in levels of 255", *parts])

    def content(self) -> dict[str, Any]:
        return {"cells": dict(self.cells)}

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> Self:
        return cls({str(k): float(v) for k, v in body["cells"].items()}, dict(body["context"]))


def evaluate(
    model: nn.Module,
    images: Images,
    *,
    corruptions: Sequence[str] = tuple(CORRUPTIONS),
    severities: Sequence[int] = SEVERITIES,
    attacks: Sequence[str | Attack] = (FGSM(), PGD()),
    seed: int = 0,
    path: str | os.PathLike[str] | None = None,
    corrupted_dir: str | os.PathLike[str] | None = None,
    progress: bool = False,
    context: Mapping[str, Any] | None = None,
) -> RobustnessTable:
    """Top-1 accuracy on clean, corrupted and adversarial images.

    `model` gives class scores (n, classes) for images (n, channels, height, width) normalised by the data set's mean
    and deviation. It is used on its own device, in evaluation mode. `attacks` may be text, such as "pgd:8:20". The
    table is written to `path` after each cell. Cells that `path` already has for the same model, images and settings
    are not measured again. `corrupted_dir` has the files of CIFAR-10-C or CIFAR-100-C, which replace drawn corruptions.
    """
    check_names(list(corruptions), list(severities))
    images = images.to(next((weight.device for weight in model.parameters()), torch.device("cpu")))
    device = images.images.device
    dtype = next((weight.dtype for weight in model.parameters() if weight.is_floating_point()), torch.float32)

    def drawn(name: str, severity: int, part: int) -> Tensor:
        return corrupt_part(_part(images.images, part), name, severity, seed, part)

    source: Callable[[str, int, int], Tensor] = drawn
    described = f"drawn, at {benchmark(images.images)[0]}'s severities"
    if corrupted_dir is not None:
        source, described = _published(Path(corrupted_dir), images), f"the files in {Path(corrupted_dir).name}"
    known = {  # all that the numbers depend on
        "model": type(model).__name__,
        "weights": weights_digest(model),
        "data": images.name,
        "images": len(images),
        "pixels": digest_of([images.images, images.labels]),
        "corruptions": described,
        "seed": seed,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "versions": {"acutance": __version__, "torch": torch.__version__, "numpy": np.__version__},
        **(context or {}),
    }
    table = RobustnessTable({}, known).resumed(path, "was measured differently")
    mean, std = (torch.tensor(values, device=device)[:, None, None] for values in (images.mean, images.std))

    def scores(shown: Tensor) -> Any:
        return model(((shown - mean) / std).to(dtype))

    def attacked(attack: Attack, part: int) -> Tensor:
        clean, labels = _part(images.images, part).float() / 255, _part(images.labels, part)
        return attack(scores, clean, labels, Draws(device, seed, part))

    # By the cell's name, the function that gives the images of a part: bytes, or attacked images in [0, 1].
    cells: dict[str, Callable[[int], Tensor]] = {CLEAN: partial(_part, images.images)}
    cells |= {f"{name}:{level}": partial(source, name, level) for name in corruptions for level in severities}
    cells |= {attack.name: partial(attacked, attack) for attack in map(as_attack, attacks)}
    missing = [name for name in cells if name not in table.cells]
    with ExitStack() as stack, evaluating(model):
        for name in track(missing, "robustness" if progress else None, stack):
            table = RobustnessTable({**table.cells, name: _accuracy(scores, images, cells[name])}, known)
            if path is not None:
                table.save(path)
    return table


def _part(rows: Tensor, part: int) -> Tensor:
    return rows[part * AT_ONCE : (part + 1) * AT_ONCE]


def _published(folder: Path, images: Images) -> Callable[[str, int, int], Tensor]:
    """Read `<corruption>.npy` (5 · n, height, width, channels), severity by severity, and `labels.npy`, memory-mapped.

    `images` are the clean test set in its own order, or its first images.
    """
    if not np.array_equal(_mapped(folder / "labels.npy")[: len(images)], images.labels.cpu().numpy()):
        raise AcutanceError(
            f"{folder}/labels.npy does not begin with the labels of {images.name}: the images differ, or their order"
        )

    def read(name: str, severity: int, part: int) -> Tensor:
        array, shape = _mapped(folder / f"{name}.npy"), tuple(images.images.shape[1:])
        count = len(array) // len(SEVERITIES)
        if array.dtype != np.uint8 or array.ndim != 4 or len(array) % len(SEVERITIES) or count < len(images):
            wanted = f"bytes (5 · n, height, width, channels) with n at least {len(images)}"
            raise AcutanceError(f"{folder}/{name}.npy holds {array.shape} {array.dtype}; expected {wanted}")
        first = (severity - 1) * count
        rows = slice(first + part * AT_ONCE, first + min((part + 1) * AT_ONCE, len(images)))
        chosen = torch.from_numpy(np.array(array[rows])).permute(0, 3, 1, 2)
        if chosen.shape[1:] != shape:
            found = tuple(chosen.shape[1:])
            raise AcutanceError(f"{folder}/{name}.npy has images of {found}, {images.name} of {shape}")
        return chosen.to(images.images.device)

    return read


def _mapped(path: Path) -> NDArray[Any]:
    if not path.is_file():
        raise AcutanceError(
            f"there is no {path}; expected an unpacked CIFAR-10-C (https://zenodo.org/records/2535967) or "
            "CIFAR-100-C (https://zenodo.org/records/3555552)"
        )
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise AcutanceError(f"{path} is damaged or not a plain array: {error}") from error
    return array


def _accuracy(model: Callable[[Tensor], Any], images: Images, part_of: Callable[[int], Tensor]) -> float:
    right, classes = 0, len(images.classes)
    for part in range(-(-len(images) // AT_ONCE)):
        shown, labels = part_of(part), _part(images.labels, part)
        scores = model(shown if shown.is_floating_point() else shown.float() / 255)
        if not isinstance(scores, Tensor) or scores.shape != (len(labels), classes):
            found = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            wanted = f"{len(labels)} images of {classes} classes: wrap it so that it gives scores (images, classes)"
            raise ShapeError(f"the model gave {found} for {wanted}")
        if not bool(scores.isfinite().all()):
            raise NonFiniteError("the model's scores are not finite: accuracy would mean nothing")
        right += int((scores.argmax(-1) == labels).sum())
    return 100 * right / len(images)


def weights_digest(model: nn.Module) -> str:
    """Identifies the weights that a table was measured with."""
    return digest_of(value for value in model.state_dict().values() if isinstance(value, Tensor))


def digest_of(tensors: Iterable[Tensor]) -> str:
    """The first hexadecimal digits of a SHA-256 over the bytes."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def images_of(task: Any, split: str, *, data_dir: Path | str | None = None, limit: int | None = None) -> Images:
    """A split of a task's images; for ImageNet, the centre crops of evaluation (7.5 GB at 224×224).

    `limit` takes the first images of a set in random order. For ImageNet it takes them evenly over the classes.
    """
    if not isinstance(task, ClassificationConfig | ImageNetConfig):
        raise AcutanceError(f"a run of {task.kind} is no classifier of images: only those can be corrupted or attacked")
    if split not in get_args(SplitName):
        raise AcutanceError(f"no split {split!r}; there are {', '.join(get_args(SplitName))}")
    chosen = task if data_dir is None else replace(task, data_dir=str(data_dir))
    if isinstance(chosen, ImageNetConfig):
        return _imagenet(chosen, cast(SplitName, split), limit)
    images = load_images(chosen.dataset, chosen.data_dir, cast(SplitName, split))
    return images if limit is None else images.subset(torch.arange(min(limit, len(images))))


def _imagenet(task: ImageNetConfig, split: SplitName, limit: int | None) -> Images:
    found = load_imagenet(task, split)
    count, size = min(limit or len(found), len(found)), task.model.image_size
    indices = torch.arange(count) * len(found) // count
    pixels = torch.empty(count, 3, size, size, dtype=torch.uint8)  # filled in place: it may be half of the memory
    read: dict[str, Any] = {"batch_size": DECODED_AT_ONCE, "indices": indices.tolist(), "workers": task.workers}
    batches = evaluation_batches(Crops(found, size), **read)
    for part, (images, _) in zip(pixels.split(DECODED_AT_ONCE), batches, strict=True):
        part.copy_(images)
    return Images("imagenet", pixels, found.labels[indices], found.classes, IMAGENET_MEAN, IMAGENET_STD)
