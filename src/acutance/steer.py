"""Around `Eigen`: fold a steered model into a plain one, and see whether its spectrum does what its sign promises."""

from __future__ import annotations

import copy
import warnings
from typing import TypeVar

from torch import nn

from acutance import sites
from acutance.errors import AcutanceError, AcutanceWarning
from acutance.mitigations import Chain, Eigen, Mitigation, eigen_of
from acutance.spectral_theory import sharpening_bound

__all__ = ["check_spectrum", "fold", "sharpening_bound"]

Model = TypeVar("Model", bound=nn.Module)


def fold(model: Model) -> Model:
    """A copy of the model in which every `Eigen` has become plain W_V and W_proj.

    Same outputs, ordinary state-dict keys and the cost of a plain model; other mitigations it carries stay.
    """
    plain = copy.deepcopy(model)
    steered = [(site, eigen) for site in sites.find(plain) if (eigen := eigen_of(site.mitigation)) is not None]
    if not steered:
        raise AcutanceError(f"this {type(model).__name__} carries no eigen: there is nothing to fold")
    for site, eigen in steered:
        value, projection = (weight.detach().requires_grad_(eigen.theta.requires_grad) for weight in eigen.weights())
        site.swap(_without(site.mitigation, eigen))
        site.own_weights(value, projection)
    return plain


def check_spectrum(model: nn.Module, mu_min: float = 0.0) -> dict[int, float]:
    """Warn of layers with an `Eigen` whose eigenvalues lie beyond `sharpening_bound(mu_min)` and so smooth.

    Args:
        model: any model; layers without `Eigen` are not looked at.
        mu_min: the smallest eigenvalue of attention; 0 is where softmax over many tokens has it.

    Returns:
        The smallest eigenvalue of each layer that crosses the bound, by layer.
    """
    bound = sharpening_bound(mu_min)
    eigens = [module for module in model.modules() if isinstance(module, Eigen) and module.shape is not None]
    smallest = {eigen.shape.layer: eigen.eigenvalues().min().item() for eigen in eigens if eigen.shape is not None}
    crossing = {layer: value for layer, value in smallest.items() if value < bound}
    if crossing:
        listed = ", ".join(f"{layer} (λ = {value:.3g})" for layer, value in crossing.items())
        warnings.warn(
            f"eigenvalues below −2/(1 + μ_min) = {bound:.3g} smooth although they are negative: layers {listed}. "
            "spectrum='bounded' or 'clipped' keeps the bound",
            AcutanceWarning,
            stacklevel=2,
        )
    return crossing


def _without(mitigation: Mitigation | None, eigen: Eigen) -> Mitigation:
    parts = list(mitigation.parts) if isinstance(mitigation, Chain) else [mitigation]
    rest = [part for part in parts if part is not eigen and isinstance(part, Mitigation)]
    return rest[0] if len(rest) == 1 else Chain(rest) if rest else Mitigation()
