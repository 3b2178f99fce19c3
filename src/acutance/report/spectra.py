"""The eigenvalues of H, layer by layer, as figures and as a page."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from acutance.errors import AcutanceError
from acutance.report.page import compose, context_row, load_altair
from acutance.report.pictures import blank_figure, blank_panels
from acutance.report.tables import Rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The same colours everywhere: positive eigenvalues and the μ = 1 family smooth, the others sharpen.
COLOURS = {"smoothing": "#D55E00", "sharpening": "#0072B2"}
FELL = "HFC/LFC fell across the branch"
BINS = 40
COLUMNS = 4
POINTS = 2000  # eigenvalues of a layer shown on a page: keeps the page of a wide model small


@dataclass(frozen=True)
class LayerRow:
    """One layer of a spectrum."""

    layer: int
    verdict: str
    eigenvalues: NDArray[np.complex128]
    percent: Mapping[str, float]  # of samples and heads: smoothing, sharpening, FELL and what tooltips show beside it

    def is_smoothing(self) -> NDArray[np.bool_]:
        """The eigenvalues along which the constant part of the tokens grows: |1 + λ| > 1."""
        return np.abs(1 + self.eigenvalues) > 1


def plot_spectrum(layers: Sequence[LayerRow], kind: str, title: str) -> Figure:
    """Eigenvalues as a `histogram` (Fig. 5 of arXiv 2401.04301) or in the complex `plane`, or `dominance` bars."""
    plots = {"histogram": _plot_histograms, "plane": _plot_planes, "dominance": _plot_dominance}
    if kind not in plots:
        raise AcutanceError(f"unknown picture {kind!r}; known: {', '.join(plots)}")
    return plots[kind](layers, title)


def _plot_histograms(layers: Sequence[LayerRow], title: str) -> Figure:
    figure, panels = _panels(layers, title, "Re λ", "eigenvalues of H")
    edges = _edges(layers)
    colours = [COLOURS[_side(low >= 0)] for low in edges[:-1]]
    for axis, row in zip(panels, layers, strict=True):
        counts, _ = np.histogram(row.eigenvalues.real, edges)
        axis.bar(edges[:-1], counts, width=np.diff(edges), align="edge", color=colours)
        axis.axvline(0, color="#666666", linewidth=0.8)
    return figure


def _plot_planes(layers: Sequence[LayerRow], title: str) -> Figure:
    figure, panels = _panels(layers, f"{title}: |1 + λ| = 1 dashed", "Re λ", "Im λ")
    from matplotlib.patches import Circle

    # All panels show the same window: every eigenvalue and 0, with a margin.
    values = np.concatenate([np.zeros(1), *(row.eigenvalues for row in layers)])
    margin = 0.08 * float(np.abs(values).max()) or 1.0
    xlim, ylim = ((part.min() - margin, part.max() + margin) for part in (values.real, values.imag))
    for axis, row in zip(panels, layers, strict=True):
        colours = [COLOURS[_side(smooths)] for smooths in row.is_smoothing()]
        axis.scatter(row.eigenvalues.real, row.eigenvalues.imag, s=6, c=colours)
        axis.set(xlim=xlim, ylim=ylim)
        axis.add_patch(Circle((-1, 0), 1, fill=False, color="#666666", linestyle="--"))
    return figure


def _panels(layers: Sequence[LayerRow], title: str, xlabel: str, ylabel: str) -> tuple[Figure, list[Any]]:
    figure, panels = blank_panels(len(layers), COLUMNS, width=3.2, height=2.6)
    for axis, row in zip(panels, layers, strict=True):
        axis.set(title=f"layer {row.layer}: {row.verdict}", xlabel=xlabel, ylabel=ylabel)
    figure.suptitle(title)
    return figure, panels


def _plot_dominance(layers: Sequence[LayerRow], title: str) -> Figure:
    figure, axes = blank_figure(1, 1, width=max(4.5, 0.6 * len(layers) + 2), height=3.4)
    axis, numbers = axes[0][0], [row.layer for row in layers]
    smoothing, sharpening, fell = (
        np.array([row.percent[name] for row in layers]) for name in ("smoothing", "sharpening", FELL)
    )
    axis.bar(numbers, smoothing, color=COLOURS["smoothing"], label="μ = 1 dominates: smoothing")
    axis.bar(numbers, sharpening, bottom=smoothing, color=COLOURS["sharpening"], label="μ ≠ 1: sharpening")
    axis.plot(numbers, fell, "o", color="black", label=FELL)
    axis.set(xlabel="layer", ylabel="% of samples and heads", ylim=(0, 105), xticks=numbers, title=title)
    axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=3, frameon=False)
    return figure


def write_spectrum_page(
    path: str | os.PathLike[str],
    layers: Sequence[LayerRow],
    title: str,
    verdict: str,
    summary: Rows,
    context: Mapping[str, Any],
) -> Path:
    """One offline page: the verdict per layer, the eigenvalues and, where it was read on data, what dominates."""
    charts = {}
    if all(row.percent for row in layers):
        heading = f"Which family dominates I + H⊗A (bars); how often {FELL} (dots)"
        charts["dominance"] = heading, _dominance_chart(layers)
    charts["histogram"] = "Eigenvalues of H by layer", _histogram_chart(layers)
    charts["plane"] = "Eigenvalues of H in the complex plane", _plane_chart(layers)
    return compose(
        path,
        title=f"Why {title} smooths or sharpens",
        verdict=verdict,
        summary=summary,
        charts=charts,
        context=[context_row(title, context, ["norm", "outside H", "read"])],
        hint="H = W_projᵀW_Vᵀ with eigenvalues λ, A attention with eigenvalues μ. Orange smooths, blue sharpens.",
    )


def _histogram_chart(layers: Sequence[LayerRow]) -> Any:
    alt, edges, data = load_altair(), _edges(layers), []
    for row in layers:
        counts = np.histogram(row.eigenvalues.real, edges)[0].tolist()
        for low, high, count in zip(edges[:-1].tolist(), edges[1:].tolist(), counts, strict=True):
            data += [{"layer": row.layer, "from": low, "to": high, "count": count, "side": _side(low >= 0)}] * (
                count > 0
            )
    x, y = alt.X("from:Q", bin="binned", title="Re λ"), alt.Y("count:Q", title=None)
    bars = alt.Chart(alt.Data(values=data)).mark_bar(stroke=None).encode(x=x, x2="to:Q", y=y, color=_colour(alt))
    return bars.properties(width=210, height=120).facet("layer:O", columns=COLUMNS)


def _plane_chart(layers: Sequence[LayerRow]) -> Any:
    alt, data = load_altair(), []
    for row in layers:
        every = slice(None, None, math.ceil(len(row.eigenvalues) / POINTS))
        for value, smooths in zip(row.eigenvalues[every].tolist(), row.is_smoothing()[every], strict=True):
            data.append({"layer": row.layer, "re": value.real, "im": value.imag, "side": _side(smooths)})
    x, y = alt.X("re:Q", title="Re λ"), alt.Y("im:Q", title="Im λ")
    tooltip = [alt.Tooltip(f"{name}:Q", format=".4g") for name in ("re", "im")]
    points = alt.Chart(alt.Data(values=data)).mark_circle(size=14).encode(x=x, y=y, color=_colour(alt), tooltip=tooltip)
    return points.properties(width=210, height=160).facet("layer:O", columns=COLUMNS)


def _dominance_chart(layers: Sequence[LayerRow]) -> Any:
    alt = load_altair()
    # JSON has no NaN, which stands for percentages of nothing.
    data = [
        {"layer": row.layer} | {name: value if math.isfinite(value) else None for name, value in row.percent.items()}
        for row in layers
    ]
    shares = [{"layer": row["layer"], "side": side, "percent": row[side]} for row in data for side in COLOURS]
    x = alt.X("layer:O", title="layer", axis=alt.Axis(labelAngle=0))
    y = alt.Y("percent:Q", title="% of samples and heads", scale=alt.Scale(domain=[0, 100]))
    bars = alt.Chart(alt.Data(values=shares)).mark_bar().encode(x=x, y=y, color=_colour(alt))
    shown = [name for name in layers[0].percent if name not in COLOURS]
    tooltip = [alt.Tooltip(f"{name}:Q", title=f"{name}, %", format=".1f") for name in shown]
    dots = alt.Chart(alt.Data(values=data)).mark_point(color="black", filled=True, size=50)
    dots = dots.encode(x=x, y=f"{FELL}:Q", tooltip=tooltip)
    return alt.layer(bars, dots).properties(width=max(300, 40 * len(data)), height=220)


def _edges(layers: Sequence[LayerRow]) -> NDArray[np.float64]:
    """Bins of one width for all layers, with 0 an edge, so that no bar mixes signs."""
    real = np.concatenate([np.zeros(1), *(row.eigenvalues.real for row in layers)])
    step = float(np.ptp(real)) / BINS or 1.0
    return step * np.arange(math.floor(real.min() / step) - 1, math.ceil(real.max() / step) + 2, dtype=np.float64)


def _side(smooths: object) -> str:
    return "smoothing" if smooths else "sharpening"


def _colour(alt: Any) -> Any:
    scale = alt.Scale(domain=list(COLOURS), range=list(COLOURS.values()))
    return alt.Color("side:N", scale=scale, title=None)
