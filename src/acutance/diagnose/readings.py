"""Reader: every number a diagnosis is made from, layer by layer, in one pass beside the profile's own reader."""

import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from acutance import sites
from acutance.attention import AttentionCall
from acutance.attention.operator import AttentionOperator
from acutance.errors import AcutanceError, AcutanceWarning, NoSitesError
from acutance.explain.change import ChangeReader
from acutance.explain.read import inverse_size
from acutance.explain.spectrum import LayerSpectrum
from acutance.explain.weights import layer_spectrum
from acutance.measure.profile import MetricValue
from acutance.measure.reader import MetricReader
from acutance.measure.walk import EVERY, Batch, Visitor, walk
from acutance.metrics import attention_cosine, check_finite, effective_rank, token_cosine, unit_vectors
from acutance.metrics.sums import masked_mean, ratio, valid_positions

METRICS = ("token_cosine", "hfc_lfc_frobenius", "rank_residual")
FROM_PROFILE = (("cosine", "token_cosine", "block"), ("branch_residual", "rank_residual", "attention"))
MOST_PATCHES = 1024  # whose matrix of cosines is formed

Numbers = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Readings:
    """Means over samples: curves with a number per layer (or per layer and head), and facts about the model."""

    curves: dict[str, Numbers]
    facts: Mapping[str, Any]

    def __getitem__(self, name: str) -> Numbers:
        return self.curves[name]

    def __contains__(self, name: str) -> bool:
        return name in self.curves

    @property
    def layers(self) -> int:
        return len(self.curves["influence"])


class Reader(Visitor):
    """Reads what `Readings` hold. Layers are counted as they run, as tied ones run several times."""

    def __init__(self, model: nn.Module) -> None:
        self.needs = dict.fromkeys(("enter", "leave"), EVERY)
        self.found: dict[int, sites.AttentionSite] = {}
        with suppress(NoSitesError):  # attention that is not known is not read
            self.found = {layer: site for site, layer in sites.layers_of(model)}
            self.needs["attend"] = EVERY
        self.weights: dict[int, Tensor] = {}  # W_proj, where it is known
        self.spectra: dict[int, LayerSpectrum] = {}  # likewise
        self.norms: dict[int, nn.Module | None] = {}  # before the attention, likewise
        for layer, site in self.found.items():
            with suppress(AcutanceError):  # asked for now: a site may try its block on random tokens
                self.weights[layer], self.norms[layer] = site.projection_weight(), site.pre_norm()
                self.spectra[layer] = layer_spectrum(site)
        with suppress(AcutanceError):
            sites.final_norm(model)
            self.needs["final"] = EVERY
        self.kept = defaultdict[tuple[str, int], list[Tensor]](list)  # by name and layer: (samples, …) of each batch
        self.causal = self.images = False
        self.tokens = 0  # of the longest sample
        self.order: list[int] = []  # which layers ran, by depth

    def begin(self, batch: Batch) -> None:
        fed, kind = batch.fed, sites.token_kind(batch.model, batch.part)
        self.images = fed.ndim == 4 if isinstance(fed, Tensor) else kind["images"]
        self.every = batch.samples("in").refuse_empty()
        self.patches = batch.samples("out") if self.images and self.found else self.every
        self.order, self.before, self.gram = [], torch.empty(0), torch.empty(0)
        self.attention: AttentionOperator | None = None  # of the layer before

    @property
    def depth(self) -> int:
        """Of the layer that runs now."""
        return len(self.order)

    def enter(self, layer: int, tokens: Tensor) -> None:
        self.before = tokens
        self.order.append(layer)
        if self.depth == 1:
            self.tokens = max(self.tokens, self.every.tokens(tokens)[0].shape[1])
            self._pool("pooled", 0, tokens)
            self.gram = self._gram(tokens)

    def attend(self, layer: int, call: AttentionCall) -> None:
        if (norm := self.norms.get(layer)) is not None:
            self._keep("scale", inverse_size(norm, *self.every.tokens(self.before)))
        if call.refusal is not None or call.A.shape[0] != len(self.before):  # no operator, or one of windows
            return
        call = self.every.record(call)
        tokens, mask = self.every.tokens(call.branch)
        A, previous = call.A, self.attention
        self.causal = self.causal or A.is_triangular
        if A.shape[-1] == A.shape[-2] == tokens.shape[1]:
            for name, numbers in read_attention(A, mask).items():
                self._keep(name, numbers)
            if previous is not None and previous.shape == A.shape:
                self._keep("attention_cosine", attention_cosine(previous, A, mask).mean(-1))
            self.attention = A
        weight, u = self.weights.get(layer), call.output
        if weight is not None and u is not None and (len(u), u.shape[1] * u.shape[3]) == (len(tokens), weight.shape[1]):
            for name, numbers in read_heads(u, weight, mask).items():
                self._keep(name, numbers)

    def leave(self, layer: int, tokens: Tensor) -> None:
        check_finite(tokens, metric="the residual stream", layer=self.depth)
        (x, mask), (y, _) = self.every.tokens(self.before), self.every.tokens(tokens)
        valid = valid_positions(mask, y)
        self._keep("influence", influence(x, y, valid))
        for name, numbers in read_norms(y, valid).items():
            self._keep(name, numbers)
        self._pool("pooled", self.depth, tokens)
        gram, before = self._gram(tokens), self.gram
        if gram.shape == before.shape and gram.numel():
            count = gram.diagonal(dim1=-2, dim2=-1).sum(-1)  # of patches, each of cosine 1 with itself
            self._keep("patch_drift", (gram - before).square().sum((-2, -1)).sqrt() / count.clamp_min(1))
        self.gram = gram

    def final(self, layer: int, tokens: Tensor) -> None:
        if tokens.ndim == 3:  # else the norm follows the pooling
            self._pool("embedding", 0, tokens)

    def result(self, profile: Iterable[MetricValue]) -> Readings:
        """Means over samples, some of which the profile has; of the pooled tokens, how alike the samples are."""
        if not self.kept:
            raise AcutanceError("diagnose got no batches: pass an iterable with at least one")
        by_name = defaultdict[str, dict[int, Tensor]](dict)
        for (name, layer), parts in self.kept.items():
            by_name[name][layer] = torch.cat(parts)
        pooled = by_name.pop("pooled")
        depth = max(pooled)
        vectors = [pooled[layer] for layer in sorted(pooled)] + list(by_name.pop("embedding", {}).values())
        stacked = {name: _by_layer(values, depth) for name, values in by_name.items()}
        stacked["pooled_cosine"] = np.array([float(token_cosine(v[None])[0]) for v in vectors])
        stacked["pooled_rank"] = np.array([float(effective_rank(v[None])[0]) for v in vectors])
        scale = np.nan_to_num(stacked.pop("scale", np.ones(depth)), nan=1.0).tolist()
        known = [replace(self.spectra[n], scale=s) for n, s in zip(self.order, scale, strict=True) if n in self.spectra]
        if len(known) == depth:
            stacked["tendency"] = np.array([layer.tendency for layer in known])
        for name, metric, tap in FROM_PROFILE:
            found = {value.layer: value.mean for value in profile if (value.metric, value.tap) == (metric, tap)}
            places = range(min(found, default=0), depth + 1)
            stacked |= {name: np.array([found.get(place, np.nan) for place in places])} if found else {}
        samples, channels = pooled[depth].shape
        facts = {"samples": samples, "tokens": self.tokens, "channels": channels}
        return Readings(stacked, facts | {"causal": self.causal, "images": self.images})

    def _keep(self, name: str, values: Tensor, layer: int | None = None) -> None:
        self.kept[name, self.depth if layer is None else layer].append(values.detach().double().cpu())

    def _pool(self, name: str, layer: int, tokens: Tensor) -> None:
        tokens, mask = self.every.tokens(tokens)
        self._keep(name, masked_mean(tokens.float().mT, valid_positions(mask, tokens).unsqueeze(-2)), layer)

    def _gram(self, tokens: Tensor) -> Tensor:
        """The cosines of all pairs of patches, 0 where one is padding; empty for what is no image."""
        if not self.images or tokens.shape[1] > MOST_PATCHES:
            return torch.empty(0)
        tokens, mask = self.patches.tokens(tokens)
        unit = unit_vectors(tokens.float()).masked_fill(~valid_positions(mask, tokens).unsqueeze(-1), 0)
        return unit @ unit.mT


class Read(NamedTuple):
    """What one pass over the data, and the weights, gave."""

    readings: Readings
    profile: tuple[MetricValue, ...]
    spectra: tuple[LayerSpectrum, ...]  # of the layers whose weights are known


def read(model: nn.Module, batches: Iterable[Any], *, part: str | None = None, progress: bool = False) -> Read:
    """Read a model's weights, and everything else in one pass over the batches."""
    inside = sites.part_of(model, part)
    with sites.cached_lookup(), torch.no_grad():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AcutanceWarning)  # of eigenvalues that have not converged
            reader = Reader(inside)
        profile = MetricReader(METRICS, ["block", "attention"] if reader.found else "block", "in", inside)
        changes = {layer: ChangeReader(site, layer) for layer, site in reader.found.items()}
        walk(model, batches, profile, reader, *changes.values(), part=part, progress="diagnosing" if progress else None)
    values = profile.readings()
    readings = reader.result(values)
    depth, found = readings.layers, {n: change.result().parts for n, change in changes.items() if change.kept["whole"]}
    if set(found) <= set(reader.order) and len(set(reader.order)) == depth:  # else layers are tied
        for name in {name for parts in found.values() for name in parts}:
            curve = [found[n][name].mean if name in found.get(n, {}) else np.nan for n in reader.order]
            readings.curves[f"change by {name}"] = np.array(curve)
    return Read(readings, values, tuple(reader.spectra.values()))


def influence(before: Tensor, after: Tensor, valid: Tensor) -> Tensor:
    """1 − the mean cosine between what enters a block and what leaves it, per sample (arXiv 2403.03853)."""
    if before.shape != after.shape:
        return before.new_full((len(after),), torch.nan)
    cosines = (unit_vectors(before.float()) * unit_vectors(after.float())).sum(-1)
    return 1 - masked_mean(cosines, valid)


def read_norms(tokens: Tensor, valid: Tensor) -> dict[str, Tensor]:
    """The largest norm of a token over the median, and whether the first token has it; per sample."""
    norms = torch.linalg.vector_norm(tokens.float(), dim=-1).masked_fill(~valid, torch.nan)
    first = valid.int().argmax(-1)
    largest = norms.nan_to_num(-1).max(-1)
    return {
        "norm_outlier": ratio(largest.values, norms.nanmedian(-1).values, at_zero=1.0),
        "outlier_first": (largest.indices == first).float(),
    }


def read_attention(A: AttentionOperator, mask: Tensor | None) -> dict[str, Tensor]:
    """What each head of A does (samples, heads), rows of padding left out; one block of rows at a time.

    `evenness` is the rows' entropy over that of even attention, `own` the mean of A_ii, `first` and `top` the attention
    that the first token and the most attended one get.
    """
    valid = valid_positions(mask, A.q[:, 0])
    count = valid.sum(-1).clamp_min(1)[:, None]
    received, sums = torch.zeros((), device=A.device), torch.zeros((), device=A.device)
    for rows, weights in A.tiles():
        weights = weights.float()
        counted, seen = valid[:, None, rows], (weights > 0).sum(-1)
        entropy = torch.special.entr(weights).sum(-1) / seen.clamp_min(2).log()
        own = weights.diagonal(rows.start, -2, -1)
        chooses = counted & (seen > 1)  # causal attention's first row has no choice
        sums = sums + torch.stack([(x * chooses).sum(-1) for x in (entropy, own, torch.ones_like(own))])
        received = received + (weights * counted.unsqueeze(-1)).sum(-2)
    share = received / count.unsqueeze(-1)
    evenness, kept, rows_counted = sums.unbind()
    return {
        "evenness": ratio(evenness, rows_counted, at_zero=torch.nan),
        "own": ratio(kept, rows_counted, at_zero=torch.nan),
        "first": share.gather(-1, valid.int().argmax(-1)[:, None, None].expand(-1, share.shape[1], 1))[..., 0],
        "top": share.amax(-1),
    }


def read_heads(output: Tensor, weight: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
    """What the heads add to the stream (samples, heads): `head_share` of its norm, `head_twin` the largest cosine.

    Head h adds y_h = W_h u_h, with W_h its columns of W_proj. The products of all pairs are Σ (u_h u_kᵀ) ⊙ (W_hᵀ W_k),
    so no y_h is formed.
    """
    u = output.float()
    if mask is not None:
        u = u.masked_fill(~mask[:, None, :, None], 0)
    heads, width = u.shape[1], u.shape[3]
    channels = u.transpose(1, 2).flatten(2)
    products = (channels.mT @ channels) * (weight.float().mT @ weight.float())
    gram = products.unflatten(-1, (heads, width)).sum(-1).unflatten(-2, (heads, width)).sum(-2)
    norms = gram.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    cosines = ratio(gram, norms.unsqueeze(-1) * norms.unsqueeze(-2)).abs()
    cosines = cosines.masked_fill(torch.eye(heads, dtype=torch.bool, device=u.device), 0)
    return {"head_share": ratio(norms, norms.mean(-1, keepdim=True)), "head_twin": cosines.amax(-1)}


def _by_layer(values: Mapping[int, Tensor], depth: int) -> Numbers:
    """Means over samples by layer (depth, …); NaN where a layer was not read, or has fewer heads than another."""
    means = {layer: value.nanmean(0).numpy() for layer, value in values.items()}
    width = max((mean.size for mean in means.values()), default=1)
    table = np.full((depth, width), np.nan)
    for layer, mean in means.items():
        table[layer - 1, : mean.size] = mean
    return table if any(mean.ndim for mean in means.values()) else table[:, 0]
