"""Spectrum: what every layer did, and the eigenvalues of its H, as a table, JSON, pictures and a page."""

import math
import os
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
from acutance.explain.change import NEUTRAL, Change, Shift, Verdict, direction
from acutance.explain.spectral_theory import Series, format_complex
from acutance.report.page import FELL, SPECTRUM_HINT, spectrum_charts, write_page
from acutance.report.pictures import Figure, plot_spectrum
from acutance.report.tables import FittedTable, Result, to_plain

EXACT_MU = f"Read at most {DENSE_TOKENS} tokens a sample: there all eigenvalues of A are found"
Family = Literal["constant", "varying", "neither", "unknown"]  # of tokens: μ = 1, or any other μ
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
    """What one layer did on data, and the eigenvalues of its H, per head and whole."""

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
    mean: float = math.nan  # tr H/d, the mean eigenvalue, zeros included
    power: float = math.nan  # ‖H‖²_F/d
    scale: float = 1.0  # the mean of 1/σ of what enters the pre-norm; 1 without data or norm

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
    def tendency(self) -> float:
        """log HFC/LFC after one step of uniform attention, whose branch has no HFC: what the weights alone tell.

        −½ log(1 + 2s·tr H/d + s²‖H‖²_F/d) for a mean token of random direction, s the `scale`.
        """
        square = 1 + 2 * self.scale * self.mean + self.scale**2 * self.power
        return -math.log(square) / 2 if square > 0 else math.nan if math.isnan(square) else math.inf

    @property
    def verdict(self) -> Verdict:
        """The direction of the measured change across the whole layer; without data that of the tendency."""
        return direction(self.tendency) if self.change is None else self.change.whole.verdict

    @property
    def family(self) -> Family:
        """The family that wins if the layer is repeated for ever, in most samples; without data with a μ_min of 0."""
        if self.deciding is None:
            return "unknown"
        if (seen := self.dominance) is not None and seen.predicted is not None:
            constant, varying, undecided = seen.predicted.smoothing, seen.predicted.sharpening, seen.undecided
        else:
            found = theory.families(torch.from_numpy(self.deciding), torch.zeros(1, dtype=torch.float64), self.error)
            constant, varying, undecided = map(float, (found.leaning > 0, found.leaning < 0, found.undecided))
        if max(constant, varying) > 0.5:
            return "constant" if constant > varying else "varying"
        return "unknown" if max(constant, varying) + undecided > 0.5 else "neither"

    @property
    def note(self) -> str:
        """Why the family is unknown, and which eigenvalue is beyond the bound."""
        words = [] if self.crossing is None else [crossing_words(self.crossing, self.mu_min)]
        if self.family == "unknown":
            error = 0.0 if self.dominance is None else self.dominance.mu_error
            if self.deciding is None:
                words.append("heads do not decide for their sum: explain(…, whole=True) finds H")
            elif error * abs(self.strongest) > self.error:
                words.append(f"μ of A is known to {error:.1g} only. {EXACT_MU}")
            else:
                words.append(f"λ is known to {self.error:.1g} only: explain(…, whole=True) finds it")
        return "; ".join(words)

    def cells(self, parts: Sequence[str] = ()) -> dict[str, str]:
        """The layer's row in a table, with these parts of the change."""
        row, tendency = {"layer": str(self.layer)}, _signed(self.tendency)
        if self.change is None:
            row["tendency"] = f"{direction(self.tendency)} {tendency}"
        else:
            found = self.change.parts
            row |= {"verdict": self.verdict, "change": str(self.change.whole)}
            row |= {name: _signed(found[name].mean if name in found else math.nan) for name in parts}
            row["tendency"] = tendency
        row |= {"λ < 0": f"{self.negative_share:.0%}", "mean λ": _signed(self.mean), "‖H‖²/d": f"{self.power:.2g}"}
        row |= {"symmetry": f"{self.symmetry:.2f}", "family": self.family}
        if (seen := self.dominance) is not None:
            for name, mu in (("μ_min", seen.mu_min_by_sample), ("max|μ|", seen.mu_largest_by_sample)):
                row[name] = f"{mu.mean():.2f} ({mu.min():.2f} to {mu.max():.2f})"
            row |= {"H⊗A %": "–" if seen.whole is None else str(_mean(seen.whole)), "by head %": str(_mean(seen.heads))}
        return row

    def percent(self) -> dict[str, float]:
        """Which family dominates, and how often HFC/LFC fell, in percent; empty without data."""
        if (seen := self.dominance) is None:
            return {}
        share = _mean(seen.whole or seen.heads)
        return {"smoothing": 100 * share.smoothing, "sharpening": 100 * share.sharpening, FELL: 100 * seen.branch.fell}


@dataclass(frozen=True, eq=False)
class Spectrum(Result):
    """A verdict and spectra per layer, with the context that makes them reproducible.

    With data the verdict is the measured change of log HFC/LFC across the whole layer. Without, it is a tendency of the
    attention branch.
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

    def agreement(self) -> tuple[float, float]:
        """Tendency against the measured change across the attention: rank correlation, and share of equal signs."""
        found = [(at.tendency, at.change.attention.mean) for at in self.layers if at.change is not None]
        if not found:
            raise AcutanceError("agreement needs data: explain(model, batches)")
        tendency, change = np.array(found).T
        return theory.rank_correlation(tendency, change), float((np.sign(tendency) == np.sign(change)).mean())

    def rows(self) -> list[dict[str, Any]]:
        names = "layer verdict tendency family mean_eigenvalue power negative_share smoothing_gain mean_symmetry "
        names += "mu_min bound note lowest median highest"
        rows = []
        for at in self.layers:
            row: list[Any] = [at.layer, at.verdict, at.tendency, at.family, at.mean, at.power, at.negative_share]
            row += [abs(1 + at.strongest), at.symmetry, at.mu_min, at.bound, at.note, *at.quantiles[::2]]
            rows.append(dict(zip(names.split(), row, strict=True)) | at.percent())
            if at.change is not None:
                whole = at.change.whole
                rows[-1] |= dict(
                    zip(("change", "change_low", "change_high"), (whole.mean, *whole.interval), strict=True)
                )
                rows[-1] |= {name: part.mean for name, part in at.change.parts.items()}
        return rows

    def summary(self) -> str:
        """The model in a sentence or three."""
        verdicts = [layer.verdict for layer in self.layers]
        counts = ", ".join(f"{verdicts.count(v)} {v}" for v in get_args(Verdict) if v in verdicts)
        changes = [layer.change for layer in self.layers if layer.change is not None]
        if len(changes) < len(verdicts):
            return f"Tendency of the weights, with 1/σ taken as 1: of {len(verdicts)} layers {counts}."
        correlation, share = self.agreement()
        measured = f"{len(verdicts)} layers, as measured on {len(changes[0].whole.by_sample)} samples: {counts}."
        signs = f"The weights' tendency has the sign of the change across attention in {share:.0%} of layers"
        return (
            f"{measured} {signs} (rank correlation {_signed(correlation)}). Repeated for ever, μ = 1 / other μ would "
            f"dominate in {self.share()} % of samples, layers and heads ({self.share('heads')} % head by head)."
        )

    def table(self) -> FittedTable:
        """For the terminal: verdict, change by parts, and spectra per layer; several tables where it is narrow."""
        notes = [str(self.context[key]) for key in ("norm", "read", "dtype") if self.context.get(key)]
        if outside := self.context.get("outside H"):
            notes.append(f"{outside} acts beside H⊗A and is not in the spectra")
        if any(layer.eigenvalues is None for layer in self.layers):
            notes.append("not all eigenvalues of the whole H were found: λ < 0 is about its heads'")
        changes = [layer.change for layer in self.layers if layer.change is not None]
        if changes:
            notes.append(f"change: of log HFC/LFC (Frobenius), mean and 95 % interval; neutral within ±{NEUTRAL}")
        if any(change.parallel for change in changes):
            notes.append("attention and MLP run in parallel: parts are the mean of both orders")
        if any(not change.parts for change in changes):
            notes.append("how the parts of a block follow one another is not known where only its whole is given")
        title, caption = f"{self.title}: does each layer smooth or sharpen?", f"{self.summary()}\n{'; '.join(notes)}"
        parts = list(dict.fromkeys(name for change in changes for name in change.parts))
        cells = [layer.cells(parts) for layer in self.layers]
        if any(of_layers := [layer.note for layer in self.layers]):
            cells = [row | {"note": note} for row, note in zip(cells, of_layers, strict=True)]
        return FittedTable(title, cells, caption, left=("verdict", "tendency", "note"), sentences="note")

    def content(self) -> dict[str, Any]:
        # The verdict and the family are for readers of the file; they are computed again when it is loaded.
        return {"layers": [to_plain(at) | {"verdict": at.verdict, "family": at.family} for at in self.layers]}

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
    """Warn of layers with a λ outside the disc in which μ_min beats μ = 1: this λ, μ_min, and the layer's family."""
    if crossing:
        found = [f"{layer} ({crossing_words(lam, mu)}; {family})" for layer, (lam, mu, family) in crossing.items()]
        why = "for that eigenvalue μ = 1 beats μ_min; the family is that of all"
        advice = "An Eigen with spectrum='bounded' or 'clipped' keeps Λ in [−1, 0]"
        warn(f"H crosses the bound in layers {', '.join(found)}, with μ_min {mu_min}: {why}. {advice}", stacklevel=4)


def _signed(value: float) -> str:
    """Two digits and the sign; a dash for what is not known."""
    return "–" if math.isnan(value) else f"{value:+.2f}"


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
