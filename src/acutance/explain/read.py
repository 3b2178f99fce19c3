"""explain: the spectra of a model's weights, and with data what attention and tokens did in every layer."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from acutance import sites
from acutance.attention import AttentionCall, spectra
from acutance.attention.operator import AttentionOperator
from acutance.attention.spectra import DENSE_TOKENS
from acutance.errors import AcutanceError, NonFiniteError, warn
from acutance.explain.change import ChangeReader, padding
from acutance.explain.spectral_theory import Families, Series, constant_mode, families, growth
from acutance.explain.spectrum import EXACT_MU, Dominance, LayerSpectrum, Share, Spectrum, compare, warn_beyond_bound
from acutance.explain.weights import Norm, convex_hull, layer_spectrum
from acutance.measure import PREFIXES
from acutance.measure.reader import chosen
from acutance.measure.samples import TokenLayout, refuse_single
from acutance.measure.walk import Batch, Visitor, describe, track, walk
from acutance.metrics import check_finite, hfc_lfc_spectral
from acutance.metrics.sums import masked_mean, valid_positions
from acutance.sites.structure import bare_module, refuse_sharded

HOOKS_BESIDE_H = ("scores", "values", "output", "affine", "features", "stream")


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
    """Say of every layer whether it smooths or sharpens, and which of its parts does.

    From the weights alone: the eigenvalues of every layer's and head's H, and the tendency that follows. With data: the
    measured change of log HFC/LFC across every layer and its parts, the eigenvalues of A, and which family dominates
    I + H⊗A in how many samples. Padding is left out, as `measure` knows it from the batch, or else tokens that no token
    sees. The model is left as it was found.

    Args:
        model: any model `acutance.sites.find` knows.
        batches: as `measure` takes them; None reads the weights only.
        norm: "fold" the pre-norm's weight γ into H (H_eff = W_proj W_V diag(γ)), or "ignore" it.
        whole: True finds all eigenvalues of the whole H, False only the heads', which decide nothing if there are
            several. By default all up to rank 1024, above it those that can decide: the corners of their convex hull.
        prefix: class, distillation and register tokens `in` or `out` of HFC/LFC; A is read with them.
        part: path of the submodule to read, if a model has several stacks of layers, e.g. `model.encoder`.
        progress: show progress bars.
    """
    chosen("norm", [norm], get_args(Norm))
    chosen("prefix", [prefix], PREFIXES)
    refuse_single(batches)
    bare = bare_module(model)
    refuse_sharded(bare, "explain")
    found = sites.find(sites.part_of(bare, part))
    with ExitStack() as stack:
        walked = track(found, "spectra of H" if progress and len(found) > 1 else None, stack)
        layers = [layer_spectrum(site, norm, whole) for site in walked]
    states = ", ".join(dict.fromkeys(layer.norm for layer in layers))
    # What the layers do that H⊗A does not say: mitigations beside the weights, a norm before W_proj.
    beside = [m.spec for site in found if (m := site.mitigation) and any(map(m.overrides, HOOKS_BESIDE_H))]
    outside = ", ".join(dict.fromkeys([*beside, *filter(None, (site.between() for site in found))]))
    context = describe(bare, part) | {"norm": f"pre-norm weight γ: {states}", "outside H": outside or None}
    if batches is not None:
        layers = with_data(bare, dict(zip(found, layers, strict=True)), batches, part, prefix, progress)
        assert layers[0].dominance is not None
        special = f"{sites.special_tokens(bare, part)} {prefix}"
        read = f"{special}, no padding; A in evaluation mode"
        context |= {"samples": layers[0].dominance.samples, "prefix": special, "read": read}
    crossing = {at.layer: (at.crossing, at.mu_min, at.family) for at in layers if at.crossing is not None}
    warn_beyond_bound(crossing, "taken as 0" if batches is None else "as read on the batches")
    return Spectrum(tuple(layers), context)


def with_data(
    model: nn.Module,
    layers: Mapping[sites.AttentionSite, LayerSpectrum],
    batches: Iterable[Any],
    part: str | None = None,
    prefix: str = "in",
    progress: bool = False,
) -> list[LayerSpectrum]:
    """The layers of these sites, with what attention and tokens did in them; `part` is where in the model they are."""
    numbers = {site.attention: number for site, number in sites.layers_of(sites.part_of(model, part))}
    readers = [LayerReader(layer, site, numbers[site.attention], prefix) for site, layer in layers.items()]
    changes = [ChangeReader(site, numbers[site.attention], prefix) for site in layers]
    walk(model, batches, *readers, *changes, part=part, progress="explaining" if progress else None)
    if not readers[0].kept:
        raise AcutanceError("explain got no batches: pass an iterable with at least one, or None for the weights only")
    found = zip(readers, changes, strict=True)
    return [
        replace(reader.layer, dominance=reader.result(), change=change.result(), scale=reader.scale())
        for reader, change in found
    ]


class LayerReader(Visitor):
    """Tallies one layer over batches; `number` counts all blocks, with attention or without."""

    def __init__(self, layer: LayerSpectrum, site: sites.AttentionSite, number: int = 1, prefix: str = "in") -> None:
        self.needs, self.prefix = dict.fromkeys(("enter", "attend", "leave"), (number,)), prefix
        self.lam = {"heads": convex_hull(layer.heads)}
        if layer.deciding is not None:
            self.lam["whole"] = convex_hull(layer.deciding[None])
        self.layer, self.site, self.pre_norm = layer, site, site.pre_norm()
        self.counted = self.present = TokenLayout()
        self.tokens = self.before = torch.empty(0)
        self.valid: Tensor | None = None  # (samples, tokens), False where there is padding
        self.mu_error = self.tolerance = 0.0
        self.kept = defaultdict[str, list[Tensor]](list)  # per sample: the prediction, and what happened

    def begin(self, batch: Batch) -> None:
        self.counted, self.present = batch.samples(self.prefix).refuse_empty(), batch.samples("in")

    def enter(self, layer: int, tokens: Tensor) -> None:
        self.tokens = tokens

    def attend(self, layer: int, call: AttentionCall) -> None:
        check_finite(call.branch, metric="the attention branch", layer=self.layer.layer)
        if (call.A.shape[0], *call.A.shape[-2:]) != (len(self.tokens), *[self.tokens.shape[1]] * 2):
            what = f"{call.A.shape} is over windows or merged tokens, not all {tuple(self.tokens.shape[:2])} tokens"
            raise AcutanceError(f"layer {self.layer.layer}: attention {what}: explain weights alone, explain(model)")
        A = self.present.record(call).A
        self.valid = padding(self.present, self.tokens, call)
        self.before = self._ratio(self.tokens)
        if self.pre_norm is not None:
            self.kept["scale"].append(inverse_size(self.pre_norm, *self._counted(self.tokens)))
        try:
            others, residuals = competing_eigenvalues(A, list(self.lam.values()), self.valid)
        except NonFiniteError as problem:
            raise NonFiniteError(f"layer {self.layer.layer}: {problem}") from problem
        self.mu_error, self.tolerance = max(self.mu_error, float(residuals.max())), spectra.tolerance_of(A)
        for scope, points in self.lam.items():
            lam, error = points.to(A.device), self.layer.error if scope == "whole" else 0.0
            self.kept[scope].append(families(lam, others, error, residuals).leaning)
        # All heads share the constant vector: on constant tokens the layer is exactly I + H. On the others it is
        # I + Σ H_h⊗A_h, and the largest |1 + λμ| over the heads' A_h stands in for its largest eigenvalue.
        if "whole" in self.lam:
            for name, prediction in families(lam, others.flatten(1), error, residuals.flatten(1))._asdict().items():
                self.kept[name].append(prediction)
        self.kept["mu_min"].append(others.real.amin(-1))
        self.kept["mu_largest"].append(others.abs().amax(-1))
        self._compare("branch", self.tokens + self.site.update(call.branch))

    def leave(self, layer: int, tokens: Tensor) -> None:
        if len(self.before):  # else nobody saw the attention, which is said at the end
            self._compare("block", tokens)
        self.tokens = self.before = torch.empty(0)

    def result(self) -> Dominance:
        """What was found so far; warns of eigenvalues of A that have not converged."""
        if self.mu_error > self.tolerance:
            what = f"residual is {self.mu_error:.1e}, wanted {self.tolerance:.1e}. A verdict within it is unknown"
            warn(f"layer {self.layer.layer}: eigenvalues of A have not converged: the largest {what}. {EXACT_MU}")
        series = {name: torch.cat(parts).double().cpu().numpy() for name, parts in self.kept.items()}
        unknown = np.full(len(series["branch"]), math.nan)
        lean, undecided, rate = (series.get(name, unknown) for name in Families._fields)
        return Dominance(
            samples=len(unknown),
            mu_min_by_sample=series["mu_min"],
            mu_largest_by_sample=series["mu_largest"],
            mu_error=self.mu_error,
            heads=tuple(map(_share, series["heads"].T)),
            whole=tuple(map(_share, series["whole"].T)) if "whole" in series else None,
            predicted=_share(lean) if "whole" in series else None,
            undecided=float(undecided.mean()),
            predicted_change=float(rate.mean()),
            branch=compare(series["branch"], lean, rate),
            block=compare(series["block"], lean, rate),
        )

    def scale(self) -> float:
        """The mean of 1/σ over tokens that the pre-norm is given; 1 without one."""
        return float(torch.cat(self.kept["scale"]).mean()) if "scale" in self.kept else 1.0

    def _counted(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        tokens, mask = self.counted.tokens(tokens)
        if self.valid is not None:
            mask = self.valid if mask is None else mask & self.valid
        return tokens, mask

    def _ratio(self, tokens: Tensor) -> Tensor:
        return hfc_lfc_spectral(*self._counted(tokens))

    def _compare(self, place: str, tokens: Tensor) -> None:
        after = self._ratio(tokens)
        change = torch.log(after / self.before)
        self.kept[place].append(torch.where(after == self.before, 0.0, change))  # 0/0 and ∞/∞ included: nothing changed


def inverse_size(norm: nn.Module, tokens: Tensor, mask: Tensor | None) -> Tensor:
    """The mean over tokens of 1/σ, by which a norm multiplies them, per sample."""
    x = tokens - tokens.mean(-1, keepdim=True) if centres(norm, tokens) else tokens
    sizes = x.double().square().mean(-1).sqrt().clamp_min(torch.finfo(torch.float32).eps)
    return masked_mean(1 / sizes, valid_positions(mask, tokens))


def centres(norm: nn.Module, tokens: Tensor) -> bool:
    """Whether the norm takes the channels' mean away, as LayerNorm does and RMSNorm does not."""
    weight = next(norm.parameters(), tokens)
    token = torch.arange(tokens.shape[-1], device=weight.device).to(weight.dtype) % 2
    return torch.allclose(norm.forward(token), norm.forward(token + 1), rtol=0.01, atol=0.01)


def _share(lean: Series) -> Share:
    return Share(float((lean > 0).mean()), float((lean < 0).mean()))


def competing_eigenvalues(
    A: AttentionOperator, points: Sequence[Tensor], valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The μ other than 1 that can dominate beside given λ, sets of (heads or 1, k) each; complex (batch, heads, m).

    They are the μ of smallest real part, that of largest modulus, and for each set of λ the one with the largest
    |1 + λμ|. Where `valid` (batch, tokens) is False there is padding: A is restricted to the other tokens. The second
    tensor has the residuals ‖Az − μz‖ of the μ's unit vectors z, 0 for a triangular A and up to 512 tokens.
    """
    A.require_row_sums_of_one("the verdict on a layer")
    # Among long samples with masks of their own, some may be triangular and others not.
    is_mixed = A.shape[-1] > DENSE_TOKENS and A.mask4 is not None and A.mask4.size(0) > 1 and not A.is_triangular
    if is_mixed or (valid is not None and not valid.all()):
        valid = torch.ones(A.shape[0], A.shape[-1], dtype=torch.bool) if valid is None else valid
        alone = [competing_eigenvalues(_one_sample(A, sample, keep), points) for sample, keep in enumerate(valid)]
        return torch.cat([others for others, _ in alone]), torch.cat([residuals for _, residuals in alone])

    def dominating(values: Tensor) -> Tensor:
        gains = [growth(lam.to(values.device)[..., :, None] * values[..., None, :]).amax(-2) for lam in points]
        aims = torch.stack([-values.real, values.abs(), *gains], dim=-2)
        # One token has no other μ than 1, which then stands in for its competitors: neither family dominates.
        is_constant = F.one_hot(constant_mode(values), values.shape[-1]).bool()
        return aims.masked_fill(is_constant.unsqueeze(-2), -torch.inf).argmax(-1)

    found = spectra.selected(A, dominating, 2 + len(points))
    return found.values, found.residuals.to(A.device)


def _one_sample(A: AttentionOperator, sample: int, keep: Tensor) -> AttentionOperator:
    """Attention among the kept tokens of one sample: no row of theirs takes anything from the others."""
    chosen, places = slice(sample, sample + 1), keep.nonzero()[:, 0].to(A.device)
    k = A.k[chosen, :, places]
    q = k if A.q is A.k else A.q[chosen, :, places]
    mask = None if A.mask4 is None else A.mask4.expand(A.shape[0], -1, -1, -1)[chosen]
    for axis in (-2, -1):
        mask = mask if mask is None or mask.size(axis) == 1 else mask.index_select(axis, places)
    return A.replace(q=q, k=k, mask=mask)
