"""Adversarial images within ε of the true ones, in the largest change of any value (L∞).

ε and step sizes are in levels of 255. Images are in [0, 1] and stay there; a model normalises them itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from acutance.errors import AcutanceError, NonFiniteError
from acutance.lab.robustness.draws import Draws


@dataclass(frozen=True)
class FGSM:
    """One step of size ε along the sign of the gradient: x + ε sign ∇L (https://arxiv.org/abs/1412.6572)."""

    epsilon: float = 1.0

    def __post_init__(self) -> None:
        _check_epsilon(self.epsilon)

    @property
    def name(self) -> str:
        """As it is written on the command line."""
        return f"fgsm:{self.epsilon:g}"

    def __call__(self, model: nn.Module, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        """The changed images; nothing is drawn."""
        low, high = _box(images, self.epsilon)
        step = self.epsilon / 255 * loss_gradient(model, images, labels).sign()
        return (images + step).clamp(low, high)


@dataclass(frozen=True)
class PGD:
    """Steps along the sign of the gradient from a random start, each put back within ε (https://arxiv.org/abs/1706.06083).

    `step_size` is 2.5 ε / steps by default: far enough to reach every corner, small enough to turn back.
    """

    epsilon: float = 1.0
    steps: int = 20
    step_size: float | None = None

    def __post_init__(self) -> None:
        _check_epsilon(self.epsilon)
        if self.steps < 1:
            raise AcutanceError(f"PGD takes 1 step or more, not {self.steps}")
        if not (isfinite(self.size) and self.size >= 0):
            raise AcutanceError(f"a step's size is a number from 0 on, in levels of 255, not {self.size}")

    @property
    def size(self) -> float:
        """Of a step, in levels of 255."""
        return 2.5 * self.epsilon / self.steps if self.step_size is None else self.step_size

    @property
    def name(self) -> str:
        """As it is written on the command line."""
        return f"pgd:{self.epsilon:g}:{self.steps}:{self.size:g}"

    def __call__(self, model: nn.Module, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        """The images after the last step."""
        low, high = _box(images, self.epsilon)
        start = draws.uniform(*images.shape, low=-1, high=1).to(images.dtype)
        changed = (images + self.epsilon / 255 * start).clamp(low, high)
        for _ in range(self.steps):
            changed = changed + self.size / 255 * loss_gradient(model, changed, labels).sign()
            changed = changed.clamp(low, high)
        return changed


Attack = FGSM | PGD
# How each is made, and what reads its numbers.
KINDS: Mapping[str, tuple[Callable[..., Attack], tuple[Callable[[str], float], ...]]] = {
    "fgsm": (FGSM, (float,)),
    "pgd": (PGD, (float, int, float)),
}


def as_attack(spec: str | Attack) -> Attack:
    """From "fgsm:ε" or "pgd:ε", "pgd:ε:steps", "pgd:ε:steps:step size", with ε in levels of 255."""
    if not isinstance(spec, str):
        return spec
    name, *given = spec.split(":")
    if name in KINDS and len(given) <= len(KINDS[name][1]):
        build, types = KINDS[name]
        try:
            return build(*(read(text) for read, text in zip(types, given, strict=False)))
        except ValueError:
            pass  # said below
    raise AcutanceError(f"no attack {spec!r}; write fgsm:8, pgd:8, pgd:8:20 (steps) or pgd:8:20:1 (and their size)")


def loss_gradient(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Of the summed cross-entropy by the images, each of which has its own part in the sum; parameters get none."""
    with torch.enable_grad():
        variable = images.detach().requires_grad_()
        loss = F.cross_entropy(model(variable).float(), labels, reduction="sum")
        gradient: Tensor = torch.autograd.grad(loss, variable)[0]
    if not bool(gradient.isfinite().all()):
        raise NonFiniteError("the gradient by the images is not finite: the model cannot be attacked like this")
    return gradient


def _box(images: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """What is within ε and within [0, 1]."""
    return (images - epsilon / 255).clamp_min(0), (images + epsilon / 255).clamp_max(1)


def _check_epsilon(epsilon: float) -> None:
    if not (isfinite(epsilon) and epsilon >= 0):
        raise AcutanceError(f"ε is a number from 0 on, in levels of 255, not {epsilon}")
