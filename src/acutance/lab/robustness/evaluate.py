"""How much accuracy is left on corrupted and on adversarial images."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from acutance.errors import AcutanceError, NonFiniteError, ShapeError
from acutance.lab.data.images import Images
from acutance.lab.robustness.attacks import FGSM, PGD, Attack, as_attack
from acutance.lab.robustness.corruptions import AT_ONCE, CORRUPTIONS, SEVERITIES, check_names, corrupt_part
from acutance.lab.robustness.draws import Draws
from acutance.lab.robustness.published import Published
from acutance.lab.robustness.table import CLEAN, RobustnessTable, cell_name
from acutance.measure.walk import track
from acutance.sites.structure import evaluating
from acutance.version import __version__

# The images in [0, 1] of part 0, 1, …, AT_ONCE of them each.
Part = Callable[[int], Tensor]


class Source(Protocol):
    """Where corrupted images come from."""

    @property
    def description(self) -> str:
        """What goes into the table."""

    def part(self, name: str, severity: int, part: int) -> Tensor:
        """Images `part` · AT_ONCE and following."""


class Drawn:
    """Corruptions made here."""

    description = "drawn, at ImageNet-C's severities"

    def __init__(self, images: Images, seed: int) -> None:
        self._images, self._seed = images.images, seed

    def part(self, name: str, severity: int, part: int) -> Tensor:
        """Images `part` · AT_ONCE and following."""
        return corrupt_part(_part(self._images, part), name, severity, self._seed, part)


class Normalised(nn.Module):
    """The model for images in [0, 1]: the data set's mean and deviation are taken out first."""

    def __init__(self, model: nn.Module, images: Images, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self._dtype = model, dtype
        device = images.images.device
        self._mean, self._std = (torch.tensor(x, device=device)[:, None, None] for x in (images.mean, images.std))

    def forward(self, images: Tensor) -> Tensor:
        """Class scores."""
        scores: Tensor = self.model(((images - self._mean) / self._std).to(self._dtype))
        return scores


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

    Args:
        model: gives class scores (n, classes) of images (n, channels, height, width) normalised by the data set's mean
            and deviation. It is used on its own device, in evaluation mode.
        images: what is corrupted and attacked, usually a test set.
        corruptions: names from `CORRUPTIONS`; none of them, `()`, is allowed.
        severities: from 1 to 5.
        attacks: `FGSM`, `PGD` or how they are written, such as "pgd:8:20".
        seed: of everything that is drawn.
        path: written after each cell; what it already holds of the same model, images and settings is not done again.
        corrupted_dir: read CIFAR-10-C's or CIFAR-100-C's files from here rather than drawing corruptions.
        progress: show a bar.
        context: more to be kept with the table.
    """
    check_names(list(corruptions), list(severities))
    images = images.to(next((weight.device for weight in model.parameters()), torch.device("cpu")))
    source: Source = Drawn(images, seed) if corrupted_dir is None else Published(Path(corrupted_dir), images)
    dtype = next((weight.dtype for weight in model.parameters() if weight.is_floating_point()), torch.float32)
    known = {**_context(model, images, source.description, seed, dtype), **(context or {})}
    table = _begun(path, known)
    wrapped = Normalised(model, images, dtype)
    cells = _cells(wrapped, images, source, corruptions, severities, [as_attack(attack) for attack in attacks], seed)
    missing = [name for name in cells if name not in table.cells]
    with ExitStack() as stack, evaluating(model):
        for name in track(missing, "robustness" if progress else None, stack):
            table = RobustnessTable({**table.cells, name: _accuracy(wrapped, images, cells[name])}, known)
            if path is not None:
                table.save(path)
    return table


def _cells(
    model: nn.Module,
    images: Images,
    source: Source,
    corruptions: Sequence[str],
    severities: Sequence[int],
    attacks: Sequence[Attack],
    seed: int,
) -> dict[str, Part]:
    """By the cell's name, the images in [0, 1] on which it is measured."""

    def clean(part: int) -> Tensor:
        return _part(images.images, part).float() / 255

    def corrupted(name: str, severity: int) -> Part:
        return lambda part: source.part(name, severity, part).float() / 255

    def attacked(attack: Attack) -> Part:
        def part_of(part: int) -> Tensor:
            return attack(model, clean(part), _part(images.labels, part), Draws(images.images.device, seed, part))

        return part_of

    cells: dict[str, Part] = {CLEAN: clean}
    cells |= {cell_name(name, level): corrupted(name, level) for name in corruptions for level in severities}
    return cells | {attack.name: attacked(attack) for attack in attacks}


def _accuracy(model: nn.Module, images: Images, part_of: Part) -> float:
    right = 0
    for part in range(-(-len(images) // AT_ONCE)):
        labels = _part(images.labels, part)
        right += int((_scores(model, part_of(part), len(images.classes)).argmax(-1) == labels).sum())
    return 100 * right / len(images)


def _scores(model: nn.Module, images: Tensor, classes: int) -> Tensor:
    scores: Any = model(images)
    if not isinstance(scores, Tensor) or scores.shape != (len(images), classes):
        found = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise ShapeError(
            f"the model gave {found} for {len(images)} images of {classes} classes: wrap it so that it gives scores "
            "(images, classes)"
        )
    if not bool(scores.isfinite().all()):
        raise NonFiniteError("the model's scores are not finite: accuracy would mean nothing")
    return scores


def _part(rows: Tensor, part: int) -> Tensor:
    return rows[part * AT_ONCE : (part + 1) * AT_ONCE]


def _begun(path: str | os.PathLike[str] | None, context: Mapping[str, Any]) -> RobustnessTable:
    """The table at `path`, if it is of the same things."""
    if path is None or not Path(path).exists():
        return RobustnessTable({}, context)
    found = RobustnessTable.load(path)
    differing = [key for key in {**context, **found.context} if context.get(key) != found.context.get(key)]
    if differing:
        shown = "; ".join(f"{key}: there {found.context.get(key)}, here {context.get(key)}" for key in differing)
        raise AcutanceError(f"{path} was measured otherwise ({shown}): name another file with --json, or remove it")
    return found


def _context(model: nn.Module, images: Images, corruptions: str, seed: int, dtype: torch.dtype) -> dict[str, Any]:
    """All that the numbers depend on."""
    device = images.images.device
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "model": type(model).__name__,
        "weights": weights_digest(model),
        "data": images.name,
        "images": len(images),
        "pixels": _digest([images.images, images.labels]),
        "corruptions": corruptions,
        "seed": seed,
        "device": gpu,
        "dtype": str(dtype).removeprefix("torch."),
        "versions": {"acutance": __version__, "torch": torch.__version__, "numpy": np.__version__},
    }


def weights_digest(model: nn.Module) -> str:
    """By which a table knows the weights it was measured with."""
    return _digest(model.state_dict().values())


def _digest(tensors: Any) -> str:
    """The first letters of a SHA-256 over the bytes."""
    digest = hashlib.sha256()
    for tensor in _tensors(tensors):
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def _tensors(values: Any) -> Iterator[Tensor]:
    return (value for value in values if isinstance(value, Tensor))
