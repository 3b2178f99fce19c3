"""Spectrum: why each layer smooths or sharpens, as a table, JSON, pictures and a page."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from acutance.errors import AcutanceError
from acutance.explain.verdict import Dominance, LayerSpectrum, Outcome, Share, Verdict, rank_correlation
from acutance.files.atomic import read_json
from acutance.report.spectra import FELL, LayerRow, plot_spectrum, write_spectrum_page
from acutance.report.tables import FittedTable, Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMAT = "acutance-spectrum/3"
Picture = Literal["histogram", "plane", "dominance"]
Scope = Literal["whole", "heads"]


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

    def share(self, scope: Scope | None = None) -> Share:
        """Table 1: in which share of samples, layers and heads each family dominates.

        Args:
            scope: "whole" pairs each head's attention with the layer's whole H, "heads" with the head's own part
                of it; by default whole, if it is known.
        """
        found = self._dominances()
        if scope is None:
            scope = "heads" if any(d.whole is None for d in found) else "whole"
        if scope == "whole" and any(d.whole is None for d in found):
            raise AcutanceError("the eigenvalues of the whole H were left out: explain(…, whole=True) finds them")
        return _mean([share for d in found for share in (d.heads if scope == "heads" else d.whole or ())])

    def outcome(self, place: Literal["branch", "block"] = "branch") -> Outcome:
        """Prediction against measurement, over all layers and samples.

        The correlation here is over layers, between their mean predicted and their mean measured change.
        """
        layers = self._dominances()
        found: list[Outcome] = [getattr(d, place) for d in layers]
        predicted = [Share(math.nan, math.nan) if d.predicted is None else d.predicted for d in layers]
        fell, agreement, change = np.mean([(o.fell, o.agreement, o.change) for o in found], axis=0).tolist()
        return Outcome(
            fell=fell,
            agreement=agreement,
            change=change,
            fell_if_smoothing=_pooled([o.fell_if_smoothing for o in found], [p.smoothing for p in predicted]),
            rose_if_sharpening=_pooled([o.rose_if_sharpening for o in found], [p.sharpening for p in predicted]),
            correlation=rank_correlation(
                np.array([d.predicted_change for d in layers]), np.array([o.change for o in found])
            ),
        )

    def cells(self) -> list[dict[str, str]]:
        """The table's cells, a mapping per layer."""
        return [_cells(layer) for layer in self.layers]

    def rows(self) -> list[dict[str, Any]]:
        names = ("layer", "verdict", "negative_share", "smoothing_gain", "mean_symmetry", "mu_min", "bound", "reason")
        return [
            {name: getattr(layer, name) for name in names}
            | dict(zip(("lowest", "median", "highest"), layer.quantiles[::2], strict=True))
            | ({} if layer.dominance is None else _percent(layer.dominance))
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
        rows = self.cells()
        columns = [name for name in rows[0] if name != "reason"]
        columns.insert(columns.index("symmetry") + 1, "reason")  # before the columns that are read from data
        return FittedTable(
            f"{self.title}: spectra of H = W_projᵀW_Vᵀ",
            [{column: row[column] for column in columns} for row in rows],
            f"{self.summary()}\n{self._notes()}",
            left=("verdict", "reason"),
            sentences="reason",
        )

    def to_json(self) -> str:
        # The verdict and its reason are for readers of the file; they are computed again when it is loaded.
        layers = [_to_plain(layer) | {"verdict": layer.verdict, "reason": layer.reason} for layer in self.layers]
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
        """The layers as the report takes them."""
        return [
            LayerRow(row.layer, row.verdict, row.spectrum, _percent(row.dominance) if row.dominance else {})
            for row in self.layers
        ]

    def _dominances(self) -> list[Dominance]:
        found = [layer.dominance for layer in self.layers if layer.dominance is not None]
        if len(found) < len(self.layers):
            raise AcutanceError("dominance needs data: explain(model, batches)")
        return found

    def _notes(self) -> str:
        notes = [str(self.context[key]) for key in ("norm", "read", "dtype") if self.context.get(key)]
        if outside := self.context.get("outside H"):
            notes.append(f"{outside} acts beside H⊗A and is not in the spectra")
        if any(layer.eigenvalues is None for layer in self.layers):
            notes.append("not all eigenvalues of the whole H were found: the columns on λ are about its heads'")
        return "; ".join(notes)


def _cells(layer: LayerSpectrum) -> dict[str, str]:
    low, half, high = layer.quantiles[::2]
    row: dict[str, str] = {
        "layer": str(layer.layer),
        "verdict": layer.verdict,
        "λ < 0": f"{layer.negative_share:.0%}",
        "Re λ min / median / max": f"{low:.3f} / {half:.3f} / {high:.3f}",
        "symmetry": f"{layer.mean_symmetry:.2f}",
    }
    if (found := layer.dominance) is not None:
        branch = found.branch
        row |= {
            "μ_min": _spread(found.mu_min_by_sample),
            "max|μ|": _spread(found.mu_largest_by_sample),
            "H⊗A %": "–" if found.whole is None else str(_mean(found.whole)),
            "by head %": str(_mean(found.heads)),
            "HFC/LFC fell": f"{branch.fell:.0%}",
            "fell|smooth / rose|sharp": f"{_known(branch.fell_if_smoothing)} / {_known(branch.rose_if_sharpening)}",
            "rank": _known(branch.correlation, "+.2f"),
            "agrees (base)": _agreement(branch),
            "block (base)": _agreement(found.block),
        }
    return row | {"reason": layer.reason}


def _agreement(found: Outcome) -> str:
    return "–" if math.isnan(found.agreement) else f"{found.agreement:.0%} ({found.base_rate:.0%})"


def _spread(per_sample: np.ndarray[Any, Any]) -> str:
    """Mean, lowest and highest over samples and heads."""
    return f"{per_sample.mean():.2f} ({per_sample.min():.2f} to {per_sample.max():.2f})"


def _known(value: float, form: str = ".0%") -> str:
    return "–" if math.isnan(value) else format(value, form)


def _mean(shares: Sequence[Share]) -> Share:
    return Share(*np.mean([(share.smoothing, share.sharpening) for share in shares], axis=0).tolist())


def _percent(found: Dominance) -> dict[str, float]:
    """What dominates, and how often the tokens did as predicted, in percent of samples and heads."""
    share, branch, block = _mean(found.whole or found.heads), found.branch, found.block
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


def _pooled(shares: list[float], weights: list[float]) -> float:
    """The share over all layers, from each layer's and from how often its condition was met."""
    pairs = [(share, weight) for share, weight in zip(shares, weights, strict=True) if weight > 0]
    total = sum(weight for _, weight in pairs)
    return sum(share * weight for share, weight in pairs) / total if total else math.nan


def _to_plain(value: Any) -> Any:
    """What JSON can hold: infinity and NaN by name, complex arrays by their parts."""
    if is_dataclass(value):
        return {f.name: _to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, np.ndarray):
        is_complex = np.iscomplexobj(value)
        return {"real": value.real.tolist(), "imag": value.imag.tolist()} if is_complex else value.tolist()
    if isinstance(value, tuple):
        return [_to_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _from_plain(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {"real", "imag"}:
        return np.array(value["real"], np.float64) + 1j * np.array(value["imag"], np.float64)
    if isinstance(value, dict):
        return {name: _from_plain(item) for name, item in value.items()}
    return float(value) if value in ("nan", "inf", "-inf") else value


def _layer(data: Mapping[str, Any]) -> LayerSpectrum:
    known = _from_plain({f.name: data[f.name] for f in fields(LayerSpectrum)})
    known["head_symmetry"] = np.array(known["head_symmetry"], np.float64)
    if (found := known["dominance"]) is not None:
        for name in ("mu_min_by_sample", "mu_largest_by_sample"):
            found[name] = np.array(found[name], np.float64)
        for name in ("branch", "block"):
            found[name] = Outcome(**found[name])
        for name in ("heads", "whole"):
            found[name] = None if found[name] is None else tuple(Share(**share) for share in found[name])
        found["predicted"] = None if found["predicted"] is None else Share(**found["predicted"])
        known["dominance"] = Dominance(**found)
    return LayerSpectrum(**known)
