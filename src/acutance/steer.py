"""Around `Eigen`: fold a steered model into a plain one, and see whether its spectrum does what its sign promises."""

from __future__ import annotations

import copy
import warnings
from typing import TypeVar

import torch
from torch import nn

from acutance import sites
from acutance.errors import AcutanceError, AcutanceWarning
from acutance.explain.weights import layer_spectrum
from acutance.mitigations import Chain, Eigen, Mitigation, eigen_of
from acutance.spectral_theory import layer_smooths, sharpening_bound

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
    """Warn of layers with an `Eigen` that have eigenvalues beyond `sharpening_bound(mu_min)`.

    For such an eigenvalue μ = 1 beats μ_min; the warning says whether the layer smooths by that. The spectrum is
    that of the effective H, as `explain` has it: the pre-norm's weight and LayerScale are folded in.

    Args:
        model: any model `acutance.sites.find` knows; layers without `Eigen` are not looked at.
        mu_min: the smallest eigenvalue of attention; 0 is where softmax over many tokens has it.

    Returns:
        The smallest eigenvalue (real part) of each layer that crosses the bound, by layer.
    """
    bound = sharpening_bound(mu_min)
    steered = [site for site in sites.find(model) if eigen_of(site.mitigation) is not None]
    spectra = {site.layer: torch.from_numpy(layer_spectrum(site, whole=True).spectrum) for site in steered}
    crossing = {layer: low for layer, lam in spectra.items() if (low := lam.real.min().item()) < bound}
    if crossing:
        listed = ", ".join(f"{layer} (λ = {low:.3g})" for layer, low in crossing.items())
        smoothing = ", ".join(str(layer) for layer in crossing if layer_smooths(spectra[layer], mu_min))
        warnings.warn(
            f"layers {listed} cross the bound −2/(1 + μ_min) = {bound:.3g}: for that eigenvalue μ = 1 beats μ_min. "
            f"Of these, smoothing as a whole: {smoothing or 'none'}. "
            "spectrum='bounded' or 'clipped' keeps Λ in [−1, 0]",
            AcutanceWarning,
            stacklevel=2,
        )
    return crossing


def _without(mitigation: Mitigation | None, eigen: Eigen) -> Mitigation:
    parts = list(mitigation.parts) if isinstance(mitigation, Chain) else [mitigation]
    rest = [part for part in parts if part is not eigen and isinstance(part, Mitigation)]
    return rest[0] if len(rest) == 1 else Chain(rest) if rest else Mitigation()
