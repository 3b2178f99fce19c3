"""explain itself: walk the sites for their weights, and with data stream batches through the model."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from acutance import sites
from acutance.errors import AcutanceError, AcutanceWarning
from acutance.explain.reader import LayerReader
from acutance.explain.spectrum import Spectrum
from acutance.explain.verdict import LayerSpectrum
from acutance.explain.weights import Norm, layer_spectrum
from acutance.measure.reader import check_prefix
from acutance.measure.samples import refuse_single
from acutance.measure.walk import describe, track, walk
from acutance.mitigations.base import Combined, Mitigation
from acutance.sites.structure import bare_module, refuse_sharded


@torch.no_grad()
def explain(
    model: nn.Module,
    batches: Iterable[Any] | None = None,
    *,
    norm: Norm = "fold",
    whole: bool | None = None,
    prefix: Literal["in", "out"] = "in",
    part: str | None = None,
    progress: bool = True,
) -> Spectrum:
    """Say of every layer whether its attention branch smooths or sharpens, and why.

    From the weights alone: the eigenvalues of every layer's and head's H. With data also: the eigenvalues of A, which
    family dominates I + H⊗A in how many samples, and whether HFC/LFC did what that predicts. Padding is left out of
    both, as `measure` knows it from the batch, or else tokens that no token sees. Memory is that of one forward pass,
    one batch of attention spectra and a few numbers a sample; the model is left as it was found.

    Args:
        model: any model `acutance.sites.find` knows.
        batches: as `measure` takes them; None reads the weights only.
        norm: "fold" the pre-norm's weight γ into H (H_eff = W_proj W_V diag(γ)), or "ignore" it.
        whole: True finds all eigenvalues of the whole H, False only those of the heads, without which a layer of
            several heads has no verdict. By default all up to rank 1024, where that takes seconds a layer, and
            above it those that can decide: the corners of their convex hull, found from products with the weights.
        prefix: class, distillation and register tokens `in` or `out` of HFC/LFC; A is read with them.
        part: path of the submodule to read, where a model has several stacks of layers, e.g. `model.encoder`.
        progress: show progress bars.
    """
    if norm not in ("fold", "ignore"):
        raise AcutanceError(f"norm is 'fold' or 'ignore', not {norm!r}")
    check_prefix(prefix)
    refuse_single(batches)
    bare = bare_module(model)
    refuse_sharded(bare, "explain")
    target = sites.part_of(bare, part)
    found = sites.find(target)
    with ExitStack() as stack:
        walked = track(found, "spectra of H" if progress and len(found) > 1 else None, stack)
        layers = [layer_spectrum(site, norm, whole) for site in walked]
    context = describe(bare, part) | {"norm": _norm_context(layers), "outside H": _outside(found)}
    if batches is not None:
        layers = with_data(bare, found, layers, batches, part=part, with_prefix=prefix == "in", progress=progress)
        first = layers[0].dominance
        assert first is not None
        context["samples"] = first.samples
        context["prefix"] = f"{sites.special_tokens(bare, part)} {prefix}"
        context["read"] = f"HFC/LFC in the spectral norm, {context['prefix']}, no padding; A in evaluation mode"
    for layer in layers:
        warn_beyond_bound(layer)
    return Spectrum(tuple(layers), context)


def with_data(
    model: nn.Module,
    found: Sequence[sites.AttentionSite],
    layers: Sequence[LayerSpectrum],
    batches: Iterable[Any],
    *,
    part: str | None = None,
    with_prefix: bool = True,
    progress: bool = False,
) -> list[LayerSpectrum]:
    """The layers of these sites, with what attention and tokens did in them; `part` is where in the model they are."""
    numbers = {site.attention: number for site, number in sites.layers_of(sites.part_of(model, part))}
    prefix = "in" if with_prefix else "out"
    pairs = zip(layers, found, strict=True)
    readers = [LayerReader(layer, site.update, numbers[site.attention], prefix) for layer, site in pairs]
    walk(model, batches, *readers, part=part, progress="explaining" if progress else None)
    if readers[0].count == 0:
        raise AcutanceError("explain got no batches: pass an iterable with at least one, or None for the weights only")
    return [replace(layer, dominance=reader.result()) for layer, reader in zip(layers, readers, strict=True)]


def _norm_context(layers: Iterable[LayerSpectrum]) -> str:
    states: Mapping[str, str] = {
        "folded": "pre-norm weight γ folded into H",
        "left out": "pre-norm weight γ left out of H",
        "none": "no pre-norm weight",
    }
    return "; ".join(dict.fromkeys(states[layer.norm] for layer in layers))


def _outside(found: Sequence[sites.AttentionSite]) -> str | None:
    """Mitigations that act beside the weights, a norm before W_proj: the model does something H⊗A does not say."""
    specs = [site.mitigation.spec for site in found if site.mitigation is not None and _acts_beside(site.mitigation)]
    between = [part for site in found if (part := site.between()) is not None]
    return ", ".join(dict.fromkeys([*specs, *between])) or None


def _acts_beside(mitigation: Mitigation) -> bool:
    if isinstance(mitigation, Combined):
        return any(_acts_beside(part) for part in mitigation.parts if isinstance(part, Mitigation))
    hooks = ("scores", "values", "output", "affine", "features", "stream")
    return any(mitigation.overrides(hook) for hook in hooks)


def warn_beyond_bound(layer: LayerSpectrum) -> None:
    """Say that a negative spectrum has left the disc in which μ_min beats μ = 1."""
    if layer.crosses_bound:
        outcome = "and the layer smooths" if layer.verdict == "smoothing" else "though the layer does not smooth by it"
        warnings.warn(
            f"layer {layer.layer}: the negative spectrum of H crosses the bound, {layer.crossing_words}: "
            f"for that eigenvalue μ = 1 beats μ_min, {outcome}. "
            "Bound it, e.g. with a bounded Eigen spectrum",
            AcutanceWarning,
            stacklevel=3,
        )
