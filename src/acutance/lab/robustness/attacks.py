"""Adversarial images: no value is more than ε from the true image's (L∞).

ε and step sizes are in levels of 255. Images are in [0, 1] and stay there; a model normalises them itself.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from acutance.errors import AcutanceError, NonFiniteError
from acutance.lab.robustness.filters import Draws

Model = Callable[[Tensor], Tensor]  # class scores of images in [0, 1]


@dataclass(frozen=True)
class FGSM:
    """One step of size ε along the sign of the gradient: x + ε sign ∇L (https://arxiv.org/abs/1412.6572)."""

    epsilon: float = 1.0

    def __post_init__(self) -> None:
        _check("ε", self.epsilon)

    @property
    def name(self) -> str:  # as it is written on the command line
        return f"fgsm:{self.epsilon:g}"

    def __call__(self, model: Model, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        return _step(model, images, labels, self.epsilon, *_box(images, self.epsilon))


@dataclass(frozen=True)
class PGD:
    """Steps along the sign of the gradient from a random start, each clipped to ε (https://arxiv.org/abs/1706.06083).

    `step_size` is 2.5 ε / steps by default: large enough to reach every corner, small enough to turn back.
    """

    epsilon: float = 1.0
    steps: int = 20
    step_size: float | None = None

    def __post_init__(self) -> None:
        _check("ε", self.epsilon)
        if self.steps < 1:
            raise AcutanceError(f"PGD takes 1 step or more, not {self.steps}")
        _check("a step's size", self.size)

    @property
    def size(self) -> float:
        return 2.5 * self.epsilon / self.steps if self.step_size is None else self.step_size

    @property
    def name(self) -> str:
        return f"pgd:{self.epsilon:g}:{self.steps}:{self.size:g}"

    def __call__(self, model: Model, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        low, high = _box(images, self.epsilon)
        start = draws.uniform(*images.shape, low=-1, high=1).to(images.dtype)
        changed = (images + self.epsilon / 255 * start).clamp(low, high)
        for _ in range(self.steps):
            changed = _step(model, changed, labels, self.size, low, high)
        return changed


Attack = FGSM | PGD
# Each attack's class, and the types of its numbers.
KINDS: Mapping[str, Sequence[Callable[..., Any]]] = {"fgsm": (FGSM, float), "pgd": (PGD, float, int, float)}


def as_attack(spec: str | Attack) -> Attack:
    """From "fgsm:ε" or "pgd:ε", "pgd:ε:steps", "pgd:ε:steps:step size", with ε in levels of 255."""
    if not isinstance(spec, str):
        return spec
    name, *given = spec.split(":")
    try:
        build, *readers = KINDS[name]
        attack: Attack = build(*(readers[place](text) for place, text in enumerate(given)))
        return attack
    except (LookupError, ValueError) as error:
        advice = "write fgsm:8, pgd:8, pgd:8:20 (steps) or pgd:8:20:1 (and their size)"
        raise AcutanceError(f"no attack {spec!r}; {advice}") from error


def loss_gradient(model: Model, images: Tensor, labels: Tensor) -> Tensor:
    """The gradient of the summed cross-entropy with respect to the images. Parameters get no gradient."""
    with torch.enable_grad():
        variable = images.detach().requires_grad_()
        loss = F.cross_entropy(model(variable).float(), labels, reduction="sum")
        gradient: Tensor = torch.autograd.grad(loss, variable)[0]
    if not bool(gradient.isfinite().all()):
        raise NonFiniteError("the gradient with respect to the images is not finite: the model cannot be attacked")
    return gradient


def _step(model: Model, images: Tensor, labels: Tensor, size: float, low: Tensor, high: Tensor) -> Tensor:
    return (images + size / 255 * loss_gradient(model, images, labels).sign()).clamp(low, high)


def _box(images: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The lowest and highest values within ε and within [0, 1]."""
    return (images - epsilon / 255).clamp_min(0), (images + epsilon / 255).clamp_max(1)


def _check(what: str, levels: float) -> None:
    if not (isfinite(levels) and levels >= 0):
        raise AcutanceError(f"{what} must be a number of 0 or more, in levels of 255, not {levels}")
