"""Spectrum: the eigenvalues of every layer's H, a verdict and its reason, as a table, JSON, pictures and a page."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from acutance.attention.spectra import DENSE_TOKENS
from acutance.errors import AcutanceError, warn
from acutance.explain import spectral_theory as theory
from acutance.explain.change import Change, Shift
from acutance.explain.spectral_theory import Series, format_complex
from acutance.report.page import FELL, SPECTRUM_HINT, spectrum_charts, write_page
from acutance.report.pictures import Figure, plot_spectrum
from acutance.report.tables import FittedTable, Result, to_plain

EXACT_MU = f"Read at most {DENSE_TOKENS} tokens a sample: there all eigenvalues of A are found"
Verdict = Literal["smoothing", "sharpening", "neutral", "unknown"]
BY_WEIGHTS = {
    "smoothing": "is above 1: the constant component grows fastest",
    "sharpening": "is below 1: every constant component shrinks against the rest",
    "neutral": "is 1: neither family dominates",
}
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
    symmetry: float = math.nan  # cosine between the whole H and its transpose
    norm: str = "none"  # the pre-norm's weight: folded, left out, or none
    dominance: Dominance | None = None  # with data only, as is the next
    change: Change | None = None  # what the layer did to log HFC/LFC, part by part

    @property
    def spectrum(self) -> Eigenvalues:
        """Every eigenvalue of the whole H if known, else of all heads; without the zeros of an H of lower rank."""
        known = self.heads.ravel() if self.eigenvalues is None else self.eigenvalues
        learnt = known[known != 0]
        return learnt if len(learnt) else known

    @property
    def deciding(self) -> Eigenvalues | None:
        """Of the whole H, all or the outer ones; None for several heads alone, which do not decide for their sum."""
        known = self.outer if self.eigenvalues is None else self.eigenvalues
        return self.heads[0] if known is None and len(self.heads) == 1 else known

    @property
    def strongest(self) -> complex:
        """The λ with the largest |1 + λ|, which is the growth of the smoothest component (μ = 1)."""
        values = self.spectrum if self.deciding is None else self.deciding
        return complex(values[np.abs(1 + values).argmax()])

    @property
    def negative_share(self) -> float:
        """The share of eigenvalues with a negative real part."""
        return float((self.spectrum.real < 0).mean())

    @property
    def quantiles(self) -> tuple[float, ...]:
        """Minimum, 5 %, median, 95 % and maximum of the eigenvalues' real parts."""
        return tuple(np.quantile(self.spectrum.real, [0, 0.05, 0.5, 0.95, 1]).tolist())

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
    def verdict(self) -> Verdict:
        """The family that dominates I + H⊗A: in most samples, or without data if A's smallest eigenvalue is 0."""
        if self.deciding is None:
            return "unknown"
        if (seen := self.dominance) is not None and seen.predicted is not None:
            smoothing, sharpening, undecided = seen.predicted.smoothing, seen.predicted.sharpening, seen.undecided
        else:
            found = theory.families(torch.from_numpy(self.deciding), torch.zeros(1, dtype=torch.float64), self.error)
            smoothing, sharpening, undecided = map(float, (found.leaning > 0, found.leaning < 0, found.undecided))
        if max(smoothing, sharpening) > 0.5:
            return "smoothing" if smoothing > sharpening else "sharpening"
        return "unknown" if max(smoothing, sharpening) + undecided > 0.5 else "neutral"

    @property
    def reason(self) -> str:
        """The verdict in words."""
        if self.deciding is None:
            return "the spectra of the heads do not decide for their sum: explain(…, whole=True) finds that of H"
        gain = f"max|1+λ| = {abs(1 + self.strongest):.3f} (λ = {format_complex(self.strongest)})"
        seen, verdict = self.dominance, self.verdict
        if verdict == "unknown":  # because λ or μ, whichever is the worse, is not known well enough
            words = f"{gain} is known to {self.error:.1g} only: explain(…, whole=True) finds it exactly"
            if seen is not None and seen.mu_error * abs(self.strongest) > self.error:
                known = f"μ of A is known to {seen.mu_error:.1g} only"
                words = f"in {seen.undecided:.0%} of samples the families differ within the error: {known}. {EXACT_MU}"
        elif seen is not None and (share := seen.predicted) is not None:
            words = f"μ = 1 in {share.smoothing:.0%}, μ ≠ 1 in {share.sharpening:.0%}: {gain}"
        else:
            words = f"{gain} {BY_WEIGHTS[verdict]}"
        return words if self.crossing is None else f"{words}; {crossing_words(self.crossing, self.mu_min)}"

    def cells(self) -> dict[str, str]:
        """The layer's row in a table."""
        low, half, high = self.quantiles[::2]
        row = {
            "layer": str(self.layer),
            "verdict": self.verdict,
            "λ < 0": f"{self.negative_share:.0%}",
            "Re λ min / median / max": f"{low:.3f} / {half:.3f} / {high:.3f}",
            "symmetry": f"{self.symmetry:.2f}",
            "reason": self.reason,
        }
        if (seen := self.dominance) is None:
            return row
        branch, block = seen.branch, seen.block
        for name, mu in (("μ_min", seen.mu_min_by_sample), ("max|μ|", seen.mu_largest_by_sample)):
            row[name] = f"{mu.mean():.2f} ({mu.min():.2f} to {mu.max():.2f})"
        return row | {
            "H⊗A %": "–" if seen.whole is None else str(_mean(seen.whole)),
            "by head %": str(_mean(seen.heads)),
            "HFC/LFC fell": f"{branch.fell:.0%}",
            "fell|smooth / rose|sharp": _dash(f"{branch.fell_if_smoothing:.0%} / {branch.rose_if_sharpening:.0%}"),
            "rank": _dash(f"{branch.correlation:+.2f}"),
            "agrees (base)": _dash(f"{branch.agreement:.0%} ({branch.base_rate:.0%})"),
            "block (base)": _dash(f"{block.agreement:.0%} ({block.base_rate:.0%})"),
        }

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

    FORMAT, INDENT = "acutance-spectrum/3", None
    layers: tuple[LayerSpectrum, ...]
    context: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, layer: int) -> LayerSpectrum:
        found = {at.layer: at for at in self.layers}
        if layer not in found:
            raise KeyError(f"no layer {layer}: this spectrum has layers 1 to {len(self.layers)}")
        return found[layer]

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
        figures = np.array([astuple(getattr(d, place)) for d in layers]).T
        odds = np.array([astuple(d.predicted or Share(math.nan, math.nan)) for d in layers]).T
        correlation = theory.rank_correlation([d.predicted_change for d in layers], figures[2])
        return Outcome(*[*figures[:3].mean(1).tolist(), *map(share_where, figures[3:5], odds), correlation])

    def rows(self) -> list[dict[str, Any]]:
        names = "layer verdict negative_share smoothing_gain mean_symmetry mu_min bound reason lowest median highest"
        rows = []
        for at in self.layers:
            row: list[Any] = [at.layer, at.verdict, at.negative_share, abs(1 + at.strongest), at.symmetry, at.mu_min]
            row += [at.bound, at.reason, *at.quantiles[::2]]
            rows.append(dict(zip(names.split(), row, strict=True)) | at.percent())
        return rows

    def summary(self) -> str:
        """The model in a sentence or three."""
        verdicts = [layer.verdict for layer in self.layers]
        counts = ", ".join(f"{verdicts.count(v)} {v}" for v in get_args(Verdict) if v in verdicts)
        text = f"{len(verdicts)} layers: {counts}."
        if not self.has_data:
            return f"{text} Weights only: μ_min of A taken as 0."
        branch, block = self.outcome("branch"), self.outcome("block")
        both = f"{self.share()} % of samples, layers and heads ({self.share('heads')} % head by head)"
        text += f" μ = 1 / other μ dominate in {both}."
        if math.isnan(branch.agreement):
            return f"{text} No prediction: not every layer has a verdict."
        return _dash(
            f"{text} The prediction agrees with HFC/LFC across the attention branch "
            f"in {branch.agreement:.1%} (base rate {branch.base_rate:.1%}), across the block in "
            f"{block.agreement:.1%} (base rate {block.base_rate:.1%}). Across the branch it fell in "
            f"{branch.fell_if_smoothing:.0%} of the cases predicted to smooth and rose in "
            f"{branch.rose_if_sharpening:.0%} of those predicted to sharpen; rank correlation of predicted and "
            f"measured change over layers {branch.correlation:+.2f}."
        )

    def table(self) -> FittedTable:
        """For the terminal: the verdict and its reason per layer; several tables where it is narrow."""
        notes = [str(self.context[key]) for key in ("norm", "read", "dtype") if self.context.get(key)]
        if outside := self.context.get("outside H"):
            notes.append(f"{outside} acts beside H⊗A and is not in the spectra")
        if any(layer.eigenvalues is None for layer in self.layers):
            notes.append("not all eigenvalues of the whole H were found: the columns on λ are about its heads'")
        title, caption = f"{self.title}: spectra of H = W_projᵀW_Vᵀ", f"{self.summary()}\n{'; '.join(notes)}"
        cells = [layer.cells() for layer in self.layers]
        return FittedTable(title, cells, caption, left=("verdict", "reason"), sentences="reason")

    def content(self) -> dict[str, Any]:
        # The verdict and its reason are for readers of the file; they are computed again when it is loaded.
        return {"layers": [to_plain(at) | {"verdict": at.verdict, "reason": at.reason} for at in self.layers]}

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> Self:
        layers = tuple(map(_from_plain, body["layers"]))
        if not all(isinstance(layer, LayerSpectrum) for layer in layers):
            raise ValueError("a layer lacks its eigenvalues")
        return cls(layers, body["context"])

    def plot(self, kind: Picture = "histogram") -> Figure:
        """A matplotlib figure: eigenvalues by layer as a `histogram` or in the complex `plane`, or `dominance` bars."""
        if kind == "dominance":
            self._dominances()
        return plot_spectrum(self.layers, kind, self.title)

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write one offline page with the table and the charts."""
        charts, title = spectrum_charts(self.layers), f"Why {self.title} smooths or sharpens"
        return write_page({self.title: self}, path, self.summary(), self.table().rows, charts, title, SPECTRUM_HINT)

    def _dominances(self) -> list[Dominance]:
        found = [layer.dominance for layer in self.layers if layer.dominance is not None]
        if len(found) < len(self.layers):
            raise AcutanceError("dominance needs data: explain(model, batches)")
        return found


def crossing_words(lam: complex, mu_min: float) -> str:
    """Where a λ lies at which μ = 1 beats μ_min."""
    bound = theory.sharpening_bound(mu_min)
    where, end = ("beyond", "") if lam.real < bound else ("outside the disc over", " to 0")
    return f"λ = {format_complex(lam)} lies {where} −2/(1+μ_min) = {bound:.3g}{end}"


def warn_beyond_bound(crossing: Mapping[int, tuple[complex, float, str]], mu_min: str) -> None:
    """Warn of layers with a λ outside the disc in which μ_min beats μ = 1: this λ, μ_min, and the layer's verdict."""
    if crossing:
        found = [f"{layer} ({crossing_words(lam, mu)}; {verdict})" for layer, (lam, mu, verdict) in crossing.items()]
        why = "for that eigenvalue μ = 1 beats μ_min; the verdict is that of all"
        advice = "An Eigen with spectrum='bounded' or 'clipped' keeps Λ in [−1, 0]"
        warn(f"H crosses the bound in layers {', '.join(found)}, with μ_min {mu_min}: {why}. {advice}", stacklevel=4)


def _dash(text: str) -> str:
    """The text with a dash for what is not known, its base rate included."""
    return re.sub(r"\+?\bnan\b%?( \([^)]*\))?", "–", text)


def _mean(shares: Sequence[Share]) -> Share:
    return Share(*np.mean([astuple(share) for share in shares], axis=0).tolist())


def compare(change: Series, lean: Series, predicted: Series) -> Outcome:
    """The measured log change of HFC/LFC per sample against the leaning (1 smoothing) and the predicted one, or NaN."""
    moved = np.where(np.abs(change) <= theory.TIE, 0, -np.sign(change))  # 1 where it fell
    return Outcome(
        fell=float((moved > 0).mean()),
        agreement=float(np.where(np.isnan(lean), math.nan, moved == lean).mean()),
        change=float(change.mean()),
        fell_if_smoothing=share_where(moved > 0, lean > 0),
        rose_if_sharpening=share_where(moved < 0, lean < 0),
        correlation=theory.rank_correlation(predicted, change),
    )


def share_where(event: NDArray[Any], met: NDArray[Any]) -> float:
    """How often an event happens where its condition is met, of shares or truth values; NaN if it never is."""
    return float(np.average(event[met > 0], weights=met[met > 0])) if (met > 0).any() else math.nan


KINDS: Sequence[Any] = (Share, Outcome, Dominance, LayerSpectrum, Change, Shift)


def _from_plain(value: Any) -> Any:
    """What `to_plain` took apart; the name of its first field tells a dataclass."""
    if isinstance(value, dict):
        inside = {name: _from_plain(item) for name, item in value.items()}
        if inside.keys() == {"real", "imag"}:
            return inside["real"] + 1j * inside["imag"]
        named = [kind for kind in KINDS if kind.__match_args__[0] in inside]
        known = [name for name in named[0].__match_args__ if name in inside] if named else []
        return named[0](**{name: inside[name] for name in known}) if named else inside
    if isinstance(value, list):
        items = [_from_plain(item) for item in value]
        return tuple(items) if items and isinstance(items[0], Share) else np.array(items, np.float64)
    return float(value) if value in ("nan", "inf", "-inf") else value
