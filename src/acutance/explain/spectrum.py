"""Spectrum: the eigenvalues of every layer's H, a verdict and its reason, as a table, JSON, pictures and a page."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from acutance.attention.spectra import DENSE_TOKENS
from acutance.errors import AcutanceError
from acutance.explain import spectral_theory as theory
from acutance.explain.spectral_theory import Series, format_complex
from acutance.files.atomic import read_json
from acutance.report.page import FELL, LayerRow, write_spectrum_page
from acutance.report.pictures import plot_spectrum
from acutance.report.tables import FittedTable, Result, to_plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMAT = "acutance-spectrum/3"
EXACT_MU = f"Read at most {DENSE_TOKENS} tokens a sample: there all eigenvalues of A are found"
Verdict = Literal["smoothing", "sharpening", "neutral", "unknown"]
Picture = Literal["histogram", "plane", "dominance"]
Eigenvalues = NDArray[np.complex128]


@dataclass(frozen=True)
class Share:
    """In which share of cases each family dominates; the rest are ties."""

    smoothing: float  # μ = 1
    sharpening: float  # any other μ

    def __str__(self) -> str:
        return f"{100 * self.smoothing:.4g}/{100 * self.sharpening:.4g}"


@dataclass(frozen=True)
class Outcome:
    """What HFC/LFC (spectral norm) did from one place to the next, against the prediction; NaN without one."""

    fell: float  # share of samples in which it fell: smoothed
    agreement: float  # share of samples in which it did what the dominating family says
    change: float  # mean of log(after / before); negative is smoothing
    fell_if_smoothing: float  # P(fell | predicted smoothing); NaN if that never was
    rose_if_sharpening: float  # P(rose | predicted sharpening)
    correlation: float  # Spearman's, of the predicted with the measured change; NaN if one of them does not vary

    @property
    def base_rate(self) -> float:
        """What always guessing the commoner outcome would score: an agreement means little unless it is above."""
        return max(self.fell, 1 - self.fell)


@dataclass(frozen=True, eq=False)
class Dominance:
    """Which family dominates one layer's I + H⊗A over samples, per head, and what the tokens did."""

    samples: int
    mu_min_by_sample: Series  # (samples, heads): the smallest real part of A's spectrum
    mu_largest_by_sample: Series  # (samples, heads): the largest |μ| but that of the constant mode
    mu_error: float  # the largest residual ‖Az − μz‖; 0 if all eigenvalues of A were found
    heads: tuple[Share, ...]  # I + H_h⊗A_h, each head with its own part of H
    whole: tuple[Share, ...] | None  # I + H⊗A_h, each head's attention with the layer's whole H
    predicted: Share | None  # for the layer, once per sample; None for several heads without the whole H
    undecided: float  # share of samples in which the errors of λ and μ leave the prediction open; NaN likewise
    predicted_change: float  # log of the long-run factor of HFC/LFC per layer, mean over samples; NaN likewise
    branch: Outcome  # X → X + attention branch
    block: Outcome  # X → the block's output

    @property
    def mu_min(self) -> Series:
        """(heads,): the smallest real part of A's spectrum, mean over samples."""
        return np.asarray(self.mu_min_by_sample.mean(0))


@dataclass(frozen=True, eq=False)
class LayerSpectrum:
    """The eigenvalues of one layer's H, per head and whole, and with data which family dominates."""

    layer: int  # 1 is the first
    heads: Eigenvalues  # (heads, head_dim): of every H_h, less its dim − head_dim zeros
    head_symmetry: Series  # (heads,)
    eigenvalues: Eigenvalues | None = None  # (dim,): of the whole H; None if it is too large
    outer: Eigenvalues | None = None  # (k,): then the corners of their convex hull, found without H
    error: float = 0.0  # the largest residual of the outer eigenvalues that decide
    symmetry: float | None = None  # cosine between the whole H and its transpose
    norm: str = "none"  # the pre-norm's weight: folded, left out, or none
    dominance: Dominance | None = None  # with data only

    @property
    def spectrum(self) -> Eigenvalues:
        """Every eigenvalue of the whole H if known, else of all heads; without the zeros of an H of lower rank."""
        known = self.heads.ravel() if self.eigenvalues is None else self.eigenvalues
        learnt = known[known != 0]
        return learnt if len(learnt) else known

    @property
    def whole(self) -> Eigenvalues | None:
        """The eigenvalues of the whole H as far as they are known: all, or those that can dominate."""
        return self.outer if self.eigenvalues is None else self.eigenvalues

    @property
    def deciding(self) -> Eigenvalues | None:
        """What the verdict is made from; None for several heads alone, whose spectra do not determine their sum's."""
        return self.heads[0] if self.whole is None and len(self.heads) == 1 else self.whole

    @property
    def strongest(self) -> complex:
        """The λ with the largest |1 + λ|."""
        values = self.spectrum if self.deciding is None else self.deciding
        return complex(values[np.abs(1 + values).argmax()])

    @property
    def smoothing_gain(self) -> float:
        """max_j |1 + λ_j|: the growth of the smoothest component (μ = 1)."""
        return abs(1 + self.strongest)

    @property
    def negative_share(self) -> float:
        """The share of eigenvalues with a negative real part."""
        return float((self.spectrum.real < 0).mean())

    @property
    def quantiles(self) -> tuple[float, ...]:
        """Minimum, 5 %, median, 95 % and maximum of the eigenvalues' real parts."""
        return tuple(np.quantile(self.spectrum.real, [0, 0.05, 0.5, 0.95, 1]).tolist())

    @property
    def mean_symmetry(self) -> float:
        """That of the whole H if known, else the mean over heads."""
        return float(self.head_symmetry.mean()) if self.symmetry is None else self.symmetry

    @property
    def mu_min(self) -> float:
        """The largest μ_min of any sample and head, the strictest for a negative λ; 0 is assumed without data."""
        return 0.0 if self.dominance is None else float(self.dominance.mu_min_by_sample.max())

    @property
    def bound(self) -> float:
        """−2/(1 + μ_min), see `mu_min`."""
        return theory.sharpening_bound(self.mu_min)

    @property
    def crossing(self) -> complex | None:
        """In a spectrum without positive real parts, the λ furthest `spectral_theory.beyond_bound`; None if none is."""
        if self.deciding is None or self.deciding.real.max() > theory.TIE * np.abs(self.deciding).max() + self.error:
            return None
        return theory.furthest_beyond(torch.from_numpy(self.deciding), self.mu_min, self.error)

    @property
    def crossing_words(self) -> str:
        """Where the `crossing` λ lies; empty if there is none."""
        if self.crossing is None:
            return ""
        bound = f"−2/(1+μ_min) = {self.bound:.3g}"
        where = f"beyond {bound}" if self.crossing.real < self.bound else f"outside the disc over {bound} to 0"
        return f"λ = {format_complex(self.crossing)} lies {where}"

    @property
    def verdict(self) -> Verdict:
        """The family that dominates I + H⊗A: in most samples, or without data if A's smallest eigenvalue is 0."""
        if self.deciding is None:
            return "unknown"
        if (seen := self.dominance) is not None and seen.predicted is not None:
            smoothing, sharpening, undecided = seen.predicted.smoothing, seen.predicted.sharpening, seen.undecided
        else:
            found = theory.families(torch.from_numpy(self.deciding), torch.zeros(1, dtype=torch.float64), self.error)
            smoothing, sharpening = float(found.leaning > 0), float(found.leaning < 0)
            undecided = float(found.undecided)
        if max(smoothing, sharpening) <= 0.5:
            return "unknown" if max(smoothing, sharpening) + undecided > 0.5 else "neutral"
        return "smoothing" if smoothing > sharpening else "sharpening"

    @property
    def reason(self) -> str:
        """The verdict in words."""
        if self.deciding is None:
            return "the spectra of the heads do not decide for their sum: explain(…, whole=True) finds that of H"
        gain = f"max|1+λ| = {self.smoothing_gain:.3f} (λ = {format_complex(self.strongest)})"
        seen, verdict = self.dominance, self.verdict
        if verdict == "unknown":  # because λ or μ, whichever is the worse, is not known well enough
            if seen is None or seen.mu_error * abs(self.strongest) <= self.error:
                return f"{gain} is known to {self.error:.1g} only: explain(…, whole=True) finds it exactly"
            return (
                f"in {seen.undecided:.0%} of samples the families differ by less than their error: μ of A is known to "
                f"{seen.mu_error:.1g} only. {EXACT_MU}"
            )
        crossing = f"; {self.crossing_words}" if self.crossing_words else ""
        if seen is not None and seen.predicted is not None:
            constant, varying = f"μ = 1 in {seen.predicted.smoothing:.0%}", f"μ ≠ 1 in {seen.predicted.sharpening:.0%}"
            shares = {"smoothing": constant, "sharpening": varying, "neutral": f"{constant}, {varying}"}
            return f"{shares[verdict]}: {gain}{crossing}"
        words = {
            "smoothing": "is above 1: the constant component grows fastest",
            "sharpening": "is below 1: every constant component shrinks against the rest",
            "neutral": "is 1: neither family dominates",
        }
        return f"{gain} {words[verdict]}{crossing}"

    def cells(self) -> dict[str, str]:
        """The layer's row in a table."""
        low, half, high = self.quantiles[::2]
        row: dict[str, str] = {
            "layer": str(self.layer),
            "verdict": self.verdict,
            "λ < 0": f"{self.negative_share:.0%}",
            "Re λ min / median / max": f"{low:.3f} / {half:.3f} / {high:.3f}",
            "symmetry": f"{self.mean_symmetry:.2f}",
            "reason": self.reason,
        }
        if (seen := self.dominance) is not None:
            branch = seen.branch
            row |= {
                "μ_min": _spread(seen.mu_min_by_sample),
                "max|μ|": _spread(seen.mu_largest_by_sample),
                "H⊗A %": "–" if seen.whole is None else str(_mean(seen.whole)),
                "by head %": str(_mean(seen.heads)),
                "HFC/LFC fell": f"{branch.fell:.0%}",
                "fell|smooth / rose|sharp": f"{_known(branch.fell_if_smoothing)} / {_known(branch.rose_if_sharpening)}",
                "rank": _known(branch.correlation, "+.2f"),
                "agrees (base)": _agreement(branch),
                "block (base)": _agreement(seen.block),
            }
        return row

    def percent(self) -> dict[str, float]:
        """What dominates, and how often the tokens did as predicted, in percent; empty without data."""
        if (seen := self.dominance) is None:
            return {}
        share, branch, block = _mean(seen.whole or seen.heads), seen.branch, seen.block
        shares = {
            "smoothing": share.smoothing,
            "sharpening": share.sharpening,
            FELL: branch.fell,
            "fell where predicted to": branch.fell_if_smoothing,
            "rose where predicted to": branch.rose_if_sharpening,
            "agreement with the prediction": branch.agreement,
            "base rate": branch.base_rate,
            "agreement across the block": block.agreement,
            "base rate of the block": block.base_rate,
        }
        return {name: 100 * value for name, value in shares.items()}


@dataclass(frozen=True, eq=False)
class Spectrum(Result):
    """Spectra and a verdict per layer, with the context that makes them reproducible.

    Without data the smallest eigenvalue of A is unknown; 0 is assumed, which is about where softmax attention over
    many tokens has it. The verdict is about the attention branch: the MLP is not part of it.
    """

    layers: tuple[LayerSpectrum, ...]
    context: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, layer: int) -> LayerSpectrum:
        for spectrum in self.layers:
            if spectrum.layer == layer:
                return spectrum
        raise KeyError(f"no layer {layer}: this spectrum has layers 1 to {len(self.layers)}")

    @property
    def has_data(self) -> bool:
        """Whether attention was read too, not the weights alone."""
        return all(layer.dominance is not None for layer in self.layers)

    def share(self, scope: Literal["whole", "heads"] | None = None) -> Share:
        """Table 1: in which share of samples, layers and heads each family dominates.

        Args:
            scope: "whole" pairs each head's attention with the layer's whole H, "heads" with the head's own part
                of it; by default whole, if it is known.
        """
        found = self._dominances()
        lacks_whole = any(d.whole is None for d in found)
        if scope == "whole" and lacks_whole:
            raise AcutanceError("the eigenvalues of the whole H were left out: explain(…, whole=True) finds them")
        by_head = scope == "heads" or lacks_whole
        return _mean([share for d in found for share in (d.heads if by_head else d.whole or ())])

    def outcome(self, place: Literal["branch", "block"] = "branch") -> Outcome:
        """Prediction against measurement, over all layers and samples; the correlation is that of the layers' means."""
        layers = self._dominances()
        found: list[Outcome] = [getattr(d, place) for d in layers]
        predicted = [Share(math.nan, math.nan) if d.predicted is None else d.predicted for d in layers]
        fell, agreement, change = np.mean([(o.fell, o.agreement, o.change) for o in found], axis=0).tolist()
        fell_if_smoothing = _pooled([(o.fell_if_smoothing, p.smoothing) for o, p in zip(found, predicted, strict=True)])
        rose = _pooled([(o.rose_if_sharpening, p.sharpening) for o, p in zip(found, predicted, strict=True)])
        correlation = theory.rank_correlation([d.predicted_change for d in layers], [o.change for o in found])
        return Outcome(fell, agreement, change, fell_if_smoothing, rose, correlation)

    def cells(self) -> list[dict[str, str]]:
        """The table's cells, a mapping per layer."""
        return [layer.cells() for layer in self.layers]

    def rows(self) -> list[dict[str, Any]]:
        names = ("layer", "verdict", "negative_share", "smoothing_gain", "mean_symmetry", "mu_min", "bound", "reason")
        return [
            {name: getattr(layer, name) for name in names}
            | dict(zip(("lowest", "median", "highest"), layer.quantiles[::2], strict=True))
            | layer.percent()
            for layer in self.layers
        ]

    def summary(self) -> str:
        """The model in a sentence or three."""
        verdicts = [layer.verdict for layer in self.layers]
        counts = ", ".join(f"{verdicts.count(v)} {v}" for v in get_args(Verdict) if v in verdicts)
        text = f"{len(verdicts)} layers: {counts}."
        if not self.has_data:
            return f"{text} Weights only: μ_min of A taken as 0."
        branch, block = self.outcome("branch"), self.outcome("block")
        text = (
            f"{text} μ = 1 / other μ dominate in {self.share()} % of samples, layers and heads "
            f"({self.share('heads')} % head by head)."
        )
        if math.isnan(branch.agreement):
            return f"{text} No prediction: not every layer has a verdict."
        return (
            f"{text} The prediction agrees with HFC/LFC across the attention branch "
            f"in {branch.agreement:.1%} (base rate {branch.base_rate:.1%}), across the block in "
            f"{block.agreement:.1%} (base rate {block.base_rate:.1%}). Across the branch it fell in "
            f"{_known(branch.fell_if_smoothing)} of the cases predicted to smooth and rose in "
            f"{_known(branch.rose_if_sharpening)} of those predicted to sharpen; rank correlation of predicted and "
            f"measured change over layers {_known(branch.correlation, '+.2f')}."
        )

    def table(self) -> FittedTable:
        """For the terminal: the verdict and its reason per layer; several tables where it is narrow."""
        notes = [str(self.context[key]) for key in ("norm", "read", "dtype") if self.context.get(key)]
        if outside := self.context.get("outside H"):
            notes.append(f"{outside} acts beside H⊗A and is not in the spectra")
        if any(layer.eigenvalues is None for layer in self.layers):
            notes.append("not all eigenvalues of the whole H were found: the columns on λ are about its heads'")
        title, caption = f"{self.title}: spectra of H = W_projᵀW_Vᵀ", f"{self.summary()}\n{'; '.join(notes)}"
        return FittedTable(title, self.cells(), caption, left=("verdict", "reason"), sentences="reason")

    def to_json(self) -> str:
        # The verdict and its reason are for readers of the file; they are computed again when it is loaded.
        layers = [to_plain(layer) | {"verdict": layer.verdict, "reason": layer.reason} for layer in self.layers]
        return json.dumps({"format": FORMAT, "context": dict(self.context), "layers": layers}, allow_nan=False)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Spectrum:
        """Read a spectrum that `save` wrote."""
        return read_json(path, FORMAT, lambda body: cls(tuple(map(_layer, body["layers"])), body["context"]))

    def plot(self, kind: Picture = "histogram") -> Figure:
        """A matplotlib figure: eigenvalues by layer as a `histogram` or in the complex `plane`, or `dominance` bars."""
        if kind == "dominance":
            self._dominances()
        return plot_spectrum(self._layer_rows(), kind, self.title)

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write one offline page with the table and the charts."""
        return write_spectrum_page(path, self._layer_rows(), self.title, self.summary(), self.cells(), self.context)

    def _layer_rows(self) -> list[LayerRow]:
        return [LayerRow(layer.layer, layer.verdict, layer.spectrum, layer.percent()) for layer in self.layers]

    def _dominances(self) -> list[Dominance]:
        found = [layer.dominance for layer in self.layers if layer.dominance is not None]
        if len(found) < len(self.layers):
            raise AcutanceError("dominance needs data: explain(model, batches)")
        return found


def _agreement(found: Outcome) -> str:
    return "–" if math.isnan(found.agreement) else f"{found.agreement:.0%} ({found.base_rate:.0%})"


def _spread(per_sample: Series) -> str:
    """Mean, lowest and highest over samples and heads."""
    return f"{per_sample.mean():.2f} ({per_sample.min():.2f} to {per_sample.max():.2f})"


def _known(value: float, form: str = ".0%") -> str:
    return "–" if math.isnan(value) else format(value, form)


def _mean(shares: Sequence[Share]) -> Share:
    return Share(*np.mean([(share.smoothing, share.sharpening) for share in shares], axis=0).tolist())


def _pooled(weighted: Sequence[tuple[float, float]]) -> float:
    """The share over all layers, from each layer's and from how often its condition was met."""
    met = [(share, weight) for share, weight in weighted if weight > 0]
    return sum(share * weight for share, weight in met) / sum(weight for _, weight in met) if met else math.nan


def _from_plain(value: Any) -> Any:
    """The arrays, shares and numbers that `to_plain` took apart; other dataclasses stay mappings."""
    if isinstance(value, dict):
        inside = {name: _from_plain(item) for name, item in value.items()}
        if inside.keys() == {"real", "imag"}:
            return inside["real"] + 1j * inside["imag"]
        return Share(**inside) if inside.keys() == {"smoothing", "sharpening"} else inside
    if isinstance(value, list):
        items = [_from_plain(item) for item in value]
        return tuple(items) if items and isinstance(items[0], Share) else np.array(items, np.float64)
    return float(value) if value in ("nan", "inf", "-inf") else value


def _layer(data: Mapping[str, Any]) -> LayerSpectrum:
    known = {f.name: _from_plain(data[f.name]) for f in fields(LayerSpectrum)}
    if (seen := known["dominance"]) is not None:
        outcomes = {place: Outcome(**seen[place]) for place in ("branch", "block")}
        known["dominance"] = Dominance(**seen | outcomes)
    return LayerSpectrum(**known)
