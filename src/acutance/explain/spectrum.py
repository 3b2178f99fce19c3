"""Spectrum: why each layer smooths or sharpens, as a table, JSON, pictures and a page."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from acutance.errors import AcutanceError
from acutance.explain.cells import percent, signed, table_row
from acutance.explain.dominance import Dominance, Outcome, Share
from acutance.explain.statistics import rank_correlation
from acutance.explain.verdict import LayerSpectrum, Verdict
from acutance.files.atomic import atomic_write, read_json
from acutance.report.spectra import FELL, LayerRow, plot_spectrum, write_spectrum_page
from acutance.report.tables import FittedTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMAT = "acutance-spectrum/3"
Picture = Literal["histogram", "plane", "dominance"]
Scope = Literal["whole", "heads"]


@dataclass(frozen=True, eq=False)
class Spectrum:
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

    @property
    def title(self) -> str:
        """What was explained, in one line."""
        model, mitigation = self.context.get("model", "model"), self.context.get("mitigation")
        return f"{model} + {mitigation}" if mitigation else str(model)

    def share(self, scope: Scope | None = None) -> Share:
        """Table 1: in which share of samples, layers and heads each family dominates.

        Args:
            scope: "whole" pairs each head's attention with the layer's whole H, "heads" with the head's own part
                of it; by default whole, where it is known.
        """
        found = self._dominances()
        if scope is None:
            scope = "heads" if any(d.whole is None for d in found) else "whole"
        if scope == "whole" and any(d.whole is None for d in found):
            raise AcutanceError("the eigenvalues of the whole H were left out: explain(…, whole=True) finds them")
        cells = [share for d in found for share in (d.heads if scope == "heads" else d.whole or ())]
        return Share(*(float(np.mean([getattr(c, k) for c in cells])) for k in ("smoothing", "sharpening")))

    def outcome(self, place: Literal["branch", "block"] = "branch") -> Outcome:
        """Prediction against measurement, over all layers and samples.

        The correlation here is over layers, between their mean predicted and their mean measured change.
        """
        layers = self._dominances()
        found: list[Outcome] = [getattr(d, place) for d in layers]
        predicted = [Share(math.nan, math.nan) if d.predicted is None else d.predicted for d in layers]
        return Outcome(
            fell=float(np.mean([o.fell for o in found])),
            agreement=float(np.mean([o.agreement for o in found])),
            change=float(np.mean([o.change for o in found])),
            fell_if_smoothing=_pooled([o.fell_if_smoothing for o in found], [p.smoothing for p in predicted]),
            rose_if_sharpening=_pooled([o.rose_if_sharpening for o in found], [p.sharpening for p in predicted]),
            correlation=rank_correlation(
                np.array([d.predicted_change for d in layers]), np.array([o.change for o in found])
            ),
        )

    def rows(self) -> list[dict[str, str]]:
        """The table's cells, a mapping per layer."""
        return [table_row(layer) for layer in self.layers]

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
            f"{percent(branch.fell_if_smoothing)} of the cases predicted to smooth and rose in "
            f"{percent(branch.rose_if_sharpening)} of those predicted to sharpen; rank correlation of predicted and "
            f"measured change over layers {signed(branch.correlation)}."
        )

    def table(self) -> FittedTable:
        """For the terminal: the verdict and its reason per layer; several tables where it is narrow."""
        rows = self.rows()
        columns = [name for name in rows[0] if name != "reason"]
        columns.insert(columns.index("symmetry") + 1, "reason")  # before the columns that are read from data
        return FittedTable(
            f"{self.title}: spectra of H = W_projᵀW_Vᵀ",
            [{column: row[column] for column in columns} for row in rows],
            f"{self.summary()}\n{self._notes()}",
            left=("verdict", "reason"),
            sentences="reason",
        )

    def __str__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write JSON, atomically."""
        return atomic_write(path, self.to_json().encode())

    def to_json(self) -> str:
        """The spectrum as JSON text."""
        layers = [_to_dict(layer) for layer in self.layers]
        return json.dumps({"format": FORMAT, "context": dict(self.context), "layers": layers}, allow_nan=False)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Spectrum:
        """Read a spectrum that `save` wrote."""
        return read_json(path, FORMAT, lambda body: cls(tuple(map(_from_dict, body["layers"])), body["context"]))

    def picture(self, kind: Picture = "histogram") -> Figure:
        """A matplotlib figure: eigenvalues by layer as a `histogram` or in the complex `plane`, or `dominance` bars."""
        if kind == "dominance":
            self._dominances()
        return plot_spectrum(self._layer_rows(), kind, self.title)

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write one offline page with the table and the charts."""
        return write_spectrum_page(
            path,
            self._layer_rows(),
            title=self.title,
            verdict=self.summary(),
            summary=self.rows(),
            context=self.context,
        )

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


def _percent(found: Dominance) -> dict[str, float]:
    """What dominates, and how often the tokens did as predicted, in percent of samples and heads."""
    shares, branch, block = found.whole or found.heads, found.branch, found.block
    share = {
        "smoothing": float(np.mean([s.smoothing for s in shares])),
        "sharpening": float(np.mean([s.sharpening for s in shares])),
        FELL: branch.fell,
        "fell where predicted to": branch.fell_if_smoothing,
        "rose where predicted to": branch.rose_if_sharpening,
        "agreement with the prediction": branch.agreement,
        "base rate": branch.base_rate,
        "agreement across the block": block.agreement,
        "base rate of the block": block.base_rate,
    }
    return {name: 100 * value for name, value in share.items()}


def _pooled(shares: list[float], weights: list[float]) -> float:
    """The share over all layers, from each layer's and from how often its condition was met."""
    pairs = [(share, weight) for share, weight in zip(shares, weights, strict=True) if weight > 0]
    total = sum(weight for _, weight in pairs)
    return sum(share * weight for share, weight in pairs) / total if total else math.nan


def _to_dict(layer: LayerSpectrum) -> dict[str, Any]:
    return {
        "layer": layer.layer,
        "verdict": layer.verdict,  # for readers of the file; computed again when loaded
        "reason": layer.reason,
        "heads": _complex_to_dict(layer.heads),
        "head_symmetry": layer.head_symmetry.tolist(),
        "eigenvalues": None if layer.eigenvalues is None else _complex_to_dict(layer.eigenvalues),
        "outer": None if layer.outer is None else _complex_to_dict(layer.outer),
        "error": layer.error,
        "symmetry": layer.symmetry,
        "norm": layer.norm,
        "dominance": None if layer.dominance is None else layer.dominance.to_dict(),
    }


def _from_dict(data: Mapping[str, Any]) -> LayerSpectrum:
    return LayerSpectrum(
        layer=data["layer"],
        heads=_complex_from_dict(data["heads"]),
        head_symmetry=np.array(data["head_symmetry"], dtype=np.float64),
        eigenvalues=None if data["eigenvalues"] is None else _complex_from_dict(data["eigenvalues"]),
        outer=None if data["outer"] is None else _complex_from_dict(data["outer"]),
        error=data["error"],
        symmetry=data["symmetry"],
        norm=data["norm"],
        dominance=None if data["dominance"] is None else Dominance.from_dict(data["dominance"]),
    )


def _complex_to_dict(values: np.ndarray[Any, Any]) -> dict[str, list[Any]]:
    return {"real": values.real.tolist(), "imag": values.imag.tolist()}


def _complex_from_dict(data: Mapping[str, Any]) -> np.ndarray[Any, np.dtype[np.complex128]]:
    return np.array(data["real"], dtype=np.float64) + 1j * np.array(data["imag"], dtype=np.float64)
