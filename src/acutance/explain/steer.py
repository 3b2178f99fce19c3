"""Around `Eigen`: fold a steered model into a plain one, and see whether its spectrum does what its sign promises."""

import copy
from typing import Any, TypeVar

import torch
from torch import nn

from acutance import sites
from acutance.errors import AcutanceError
from acutance.explain.read import with_data
from acutance.explain.spectral_theory import furthest_beyond, layer_smooths, sharpening_bound
from acutance.explain.spectrum import warn_beyond_bound
from acutance.explain.weights import layer_spectrum
from acutance.mitigations import Combined, Eigen, eigen_of
from acutance.mitigations.base import parts_of
from acutance.sites.structure import refuse_sharded
from acutance.sites.transformers import note

__all__ = ["check_spectrum", "fold", "sharpening_bound"]

Model = TypeVar("Model", bound=nn.Module)


def fold(model: Model) -> Model:
    """A copy with the same outputs in which every `Eigen` has become plain W_V and W_proj; other mitigations stay."""
    refuse_sharded(model, "fold")
    plain = copy.deepcopy(model)
    steered = [(site, parts_of(m)) for site in sites.find(plain) if (m := site.mitigation) and eigen_of(m)]
    if not steered:
        raise AcutanceError(f"this {type(model).__name__} carries no eigen: there is nothing to fold")
    for site, parts in steered:
        rest = [part for part in parts if not isinstance(part, Eigen)]
        for projection in site.projections()[2:]:
            projection.unparametrise(keep=True)
        site.replace(rest[0] if len(rest) == 1 else Combined(rest) if rest else None)
    note(plain)
    return plain


def check_spectrum(
    model: nn.Module, mu_min: float = 0.0, *, batch: Any = None, part: str | None = None
) -> dict[int, complex]:
    """Warn of layers with an `Eigen` that have eigenvalues beyond the bound, where μ = 1 beats μ_min.

    The spectrum is that of the effective H, as in `explain`; for complex λ see `spectral_theory.beyond_bound`.

    Args:
        model: any model `acutance.sites.find` knows; layers without `Eigen` are skipped.
        mu_min: the smallest eigenvalue of attention: about 0 for softmax over many tokens, higher over few.
        batch: one on which attention is read, as in `explain`. The bound is then that of the largest μ_min of any
            sample and head, and a layer smooths if `explain` says so.
        part: path of the submodule to look at, if a model has several stacks of layers.

    Returns:
        The eigenvalue furthest beyond the bound of each layer that crosses it, by layer.
    """
    steered = [site for site in sites.find(sites.part_of(model, part)) if eigen_of(site.mitigation) is not None]
    spectra = {site: layer_spectrum(site, whole=True) for site in steered}
    layers = with_data(model, spectra, [batch], part) if batch is not None and spectra else spectra.values()
    crossing = {}
    for layer in layers:
        assert layer.eigenvalues is not None, "all of them were asked for"
        every, mu = torch.from_numpy(layer.eigenvalues), mu_min if layer.dominance is None else layer.mu_min
        if (lam := furthest_beyond(every, mu)) is not None:
            family = layer.family if layer.dominance else "constant" if layer_smooths(every, mu) else "varying"
            crossing[layer.layer] = lam, mu, family
    warn_beyond_bound(crossing, f"taken as {mu_min:.3g}" if batch is None else "as read on the batch")
    return {layer: lam for layer, (lam, *_) in crossing.items()}
