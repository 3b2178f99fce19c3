"""Around `Eigen`: fold a steered model into a plain one, and see whether its spectrum does what its sign promises."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import nn

from acutance import sites
from acutance.errors import AcutanceError, AcutanceWarning
from acutance.explain.competitors import competitors, visible_keys
from acutance.explain.verdict import format_complex
from acutance.explain.weights import layer_spectrum
from acutance.measure import evaluating, feed
from acutance.mitigations import Chain, Eigen, Mitigation, eigen_of
from acutance.operator import AttentionRecord
from acutance.spectral_theory import furthest_beyond, layer_smooths, sharpening_bound

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


def check_spectrum(model: nn.Module, mu_min: float = 0.0, *, batch: Any = None) -> dict[int, complex]:
    """Warn of layers with an `Eigen` that have eigenvalues beyond the bound, where μ = 1 beats μ_min.

    For real λ that is λ < `sharpening_bound(mu_min)`, for complex ones see `spectral_theory.beyond_bound`. The warning
    says whether the layer smooths by that. The spectrum is that of the effective H, as `explain` has it: the
    pre-norm's weight and LayerScale are folded in.

    Args:
        model: any model `acutance.sites.find` knows; layers without `Eigen` are not looked at.
        mu_min: the smallest eigenvalue of attention, in every layer; 0 is assumed, about where softmax over many
            tokens has it. Sharp attention over few tokens has it higher, which leaves less room.
        batch: data for the model, as `measure` takes them. Then each layer's μ_min is read there, the largest of any
            sample and head, which is the strictest.

    Returns:
        The eigenvalue furthest beyond the bound of each layer that crosses it, by layer.
    """
    steered = [site for site in sites.find(model) if eigen_of(site.mitigation) is not None]
    mu = {site.layer: mu_min for site in steered}
    if batch is not None and steered:
        mu |= _mu_min(model, steered, batch)
    spectra = {site.layer: torch.from_numpy(layer_spectrum(site, whole=True).spectrum) for site in steered}
    crossing = {n: lam for n in spectra if (lam := furthest_beyond(spectra[n], mu[n])) is not None}
    if crossing:
        listed = ", ".join(
            f"{n} (λ = {format_complex(lam)}, bound {sharpening_bound(mu[n]):.3g})" for n, lam in crossing.items()
        )
        smoothing = ", ".join(str(n) for n in crossing if layer_smooths(spectra[n], mu[n]))
        warnings.warn(
            f"layers {listed} cross the bound −2/(1 + μ_min), "
            f"μ_min {f'taken as {mu_min:.3g}' if batch is None else 'as read on the batch'}: for that eigenvalue μ = 1 "
            f"beats μ_min. Of these, smoothing as a whole: {smoothing or 'none'}. "
            "spectrum='bounded' or 'clipped' keeps Λ in [−1, 0]",
            AcutanceWarning,
            stacklevel=2,
        )
    return crossing


def _mu_min(model: nn.Module, steered: list[sites.AttentionSite], batch: Any) -> dict[int, float]:
    """The largest μ_min of any sample and head, by layer."""
    found: dict[int, float] = {}

    def note(layer: int) -> Callable[[AttentionRecord], None]:
        def read(record: AttentionRecord) -> None:
            A = record.operator
            found[layer] = float(competitors(A, [], visible_keys(A)).smallest.max())

        return read

    with evaluating(model), sites.reading(model), ExitStack() as stack:
        for site in steered:
            stack.callback(site.observe(note(site.layer)).remove)
        feed(model, batch)
    return found


def _without(mitigation: Mitigation | None, eigen: Eigen) -> Mitigation:
    parts = list(mitigation.parts) if isinstance(mitigation, Chain) else [mitigation]
    rest = [part for part in parts if part is not eigen and isinstance(part, Mitigation)]
    return rest[0] if len(rest) == 1 else Chain(rest) if rest else Mitigation()
