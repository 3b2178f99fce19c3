"""Around `Eigen`: fold a steered model into a plain one, and see whether its spectrum does what its sign promises."""

from __future__ import annotations

import copy
import warnings
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from acutance import sites
from acutance.errors import AcutanceError, AcutanceWarning
from acutance.explain.read import with_data
from acutance.explain.spectral_theory import furthest_beyond, layer_smooths, sharpening_bound
from acutance.explain.verdict import LayerSpectrum, format_complex
from acutance.explain.weights import layer_spectrum
from acutance.mitigations import Combined, Eigen, Mitigation, eigen_of
from acutance.sites.structure import refuse_sharded
from acutance.sites.transformers import note

__all__ = ["check_spectrum", "fold", "sharpening_bound"]

Model = TypeVar("Model", bound=nn.Module)


def fold(model: Model) -> Model:
    """A copy of the model in which every `Eigen` has become plain W_V and W_proj.

    Same outputs, ordinary state-dict keys and the cost of a plain model; other mitigations it carries stay.
    """
    refuse_sharded(model, "fold")
    plain = copy.deepcopy(model)
    steered = [(site, eigen) for site in sites.find(plain) if (eigen := eigen_of(site.mitigation)) is not None]
    if not steered:
        raise AcutanceError(f"this {type(model).__name__} carries no eigen: there is nothing to fold")
    for site, eigen in steered:
        rest, projections = _without(site.mitigation, eigen), site.projections()
        eigen.fold(projections.value, projections.output)
        site.replace(rest)
    note(plain)
    return plain


def check_spectrum(
    model: nn.Module, mu_min: float = 0.0, *, batch: Any = None, part: str | None = None
) -> dict[int, complex]:
    """Warn of layers with an `Eigen` that have eigenvalues beyond the bound, where μ = 1 beats μ_min.

    For real λ that is λ < `sharpening_bound(mu_min)`, for complex ones see `spectral_theory.beyond_bound`. The warning
    says whether the layer smooths by that. The spectrum is that of the effective H, as `explain` has it: the
    pre-norm's weight and LayerScale are folded in.

    Args:
        model: any model `acutance.sites.find` knows; layers without `Eigen` are not looked at.
        mu_min: the smallest eigenvalue of attention, in every layer; 0 is assumed, about where softmax over many
            tokens has it. Sharp attention over few tokens has it higher, which leaves less room.
        batch: data for the model, as `measure` takes them. Then attention is read there as `explain` reads it: the
            bound is that of the largest μ_min of any sample and head, which is the strictest, and a layer smooths if
            `explain` says so, where every μ of every head counts.
        part: path of the submodule to look at, where a model has several stacks of layers.

    Returns:
        The eigenvalue furthest beyond the bound of each layer that crosses it, by layer.
    """
    steered = [site for site in sites.find(sites.part_of(model, part)) if eigen_of(site.mitigation) is not None]
    layers = [layer_spectrum(site, whole=True) for site in steered]
    if batch is not None and steered:
        layers = with_data(model, steered, layers, [batch], part=part)
    crossing: dict[int, complex] = {}
    listed, smoothing = [], []
    for layer in layers:
        mu = mu_min if layer.dominance is None else layer.mu_min
        lam = furthest_beyond(_whole(layer), mu)
        if lam is not None:
            crossing[layer.layer] = lam
            listed.append(f"{layer.layer} (λ = {format_complex(lam)}, bound {sharpening_bound(mu):.3g})")
            smoothing += _if_smoothing(layer, mu)
    if crossing:
        warnings.warn(
            f"layers {', '.join(listed)} cross the bound −2/(1 + μ_min), "
            f"μ_min {f'taken as {mu_min:.3g}' if batch is None else 'as read on the batch'}: for that eigenvalue μ = 1 "
            f"beats μ_min. Of these, smoothing as a whole: {', '.join(smoothing) or 'none'}. "
            "spectrum='bounded' or 'clipped' keeps Λ in [−1, 0]",
            AcutanceWarning,
            stacklevel=2,
        )
    return crossing


def _if_smoothing(layer: LayerSpectrum, mu_min: float) -> list[str]:
    """The layer's number if it smooths; with data as `explain` says, which may leave it open."""
    if layer.dominance is None:
        return [str(layer.layer)] if layer_smooths(_whole(layer), mu_min) else []
    words = {"smoothing": str(layer.layer), "unknown": f"{layer.layer} (unknown)"}
    return [words[layer.verdict]] if layer.verdict in words else []


def _whole(layer: LayerSpectrum) -> Tensor:
    assert layer.eigenvalues is not None, "all of them were asked for"
    return torch.from_numpy(layer.eigenvalues)


def _without(mitigation: Mitigation | None, eigen: Eigen) -> Mitigation | None:
    parts = list(mitigation.parts) if isinstance(mitigation, Combined) else [mitigation]
    rest = [part for part in parts if part is not eigen and isinstance(part, Mitigation)]
    return rest[0] if len(rest) == 1 else Combined(rest) if rest else None
