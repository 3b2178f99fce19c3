"""A Spectrum as pictures and as a page."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from acutance.errors import AcutanceError
from acutance.report.page import compose, context_row, load_altair
from acutance.report.pictures import blank_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from acutance.explain.spectrum import Spectrum

# The same colours everywhere: positive eigenvalues and the μ = 1 family smooth, the others sharpen.
SMOOTHING, SHARPENING = "#D55E00", "#0072B2"
BINS = 40
COLUMNS = 4
POINTS = 2000  # of a layer's eigenvalues shown on a page


def picture(spectrum: Spectrum, kind: str) -> Figure:
    """The figure that `Spectrum.picture` returns."""
    draw = {"histogram": _histograms, "plane": _planes, "dominance": _bars}
    if kind not in draw:
        raise AcutanceError(f"unknown picture {kind!r}; known: {', '.join(draw)}")
    return draw[kind](spectrum)


def _histograms(spectrum: Spectrum) -> Figure:
    """Fig. 5 of arXiv 2401.04301: how many eigenvalues of H lie where, negative and positive told apart."""
    figure, axes = _grid(spectrum)
    edges = _edges(spectrum)
    for axis, layer in zip(axes, spectrum.layers, strict=True):
        counts, _ = np.histogram(layer.spectrum.real, edges)
        colours = [SHARPENING if low < 0 else SMOOTHING for low in edges[:-1]]
        axis.bar(edges[:-1], counts, width=np.diff(edges), align="edge", color=colours)
        axis.axvline(0, color="#666666", linewidth=0.8)
        axis.set(title=f"layer {layer.layer}: {layer.verdict}", xlabel="Re λ", ylabel="eigenvalues of H")
    figure.suptitle(spectrum.title)
    return figure


def _planes(spectrum: Spectrum) -> Figure:
    """The eigenvalues in the complex plane; outside the circle |1 + λ| = 1 the constant part of the tokens grows."""
    from matplotlib.patches import Circle

    figure, axes = _grid(spectrum)
    real, imag = _limits(spectrum)
    for axis, layer in zip(axes, spectrum.layers, strict=True):
        values = layer.spectrum
        colours = np.where(np.abs(1 + values) > 1, SMOOTHING, SHARPENING)
        axis.scatter(values.real, values.imag, s=6, c=colours.tolist())
        axis.set(title=f"layer {layer.layer}: {layer.verdict}", xlabel="Re λ", ylabel="Im λ", xlim=real, ylim=imag)
        axis.add_patch(Circle((-1, 0), 1, fill=False, color="#666666", linestyle="--"))
    figure.suptitle(f"{spectrum.title}: |1 + λ| = 1 dashed")
    return figure


def _bars(spectrum: Spectrum) -> Figure:
    """A bar per layer, split into the share of each dominating family; dots say how often HFC/LFC really fell."""
    figure, axes = blank_figure(1, 1, width=max(4.5, 0.6 * len(spectrum.layers) + 2), height=3.4)
    axis, rows = axes[0][0], _dominance_rows(spectrum)
    layers = [row["layer"] for row in rows]
    smoothing = np.array([row["smoothing"] for row in rows])
    axis.bar(layers, smoothing, color=SMOOTHING, label="μ = 1 dominates: smoothing")
    axis.bar(layers, [row["sharpening"] for row in rows], bottom=smoothing, color=SHARPENING, label="μ ≠ 1: sharpening")
    axis.plot(layers, [row["fell"] for row in rows], "o", color="black", label="HFC/LFC fell across the branch")
    axis.set(xlabel="layer", ylabel="% of samples and heads", ylim=(0, 105), xticks=layers, title=spectrum.title)
    axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=3, frameon=False)
    return figure


def write_spectrum_page(spectrum: Spectrum, path: str | os.PathLike[str]) -> Path:
    """One offline page: the verdict per layer, the spectra, and with data dominance and prediction."""
    charts = {
        "histogram": ("Eigenvalues of H by layer", _histogram_chart(spectrum)),
        "plane": ("Eigenvalues of H in the complex plane", _plane_chart(spectrum)),
    }
    if spectrum.has_data:
        charts = {
            "dominance": (
                "Which family dominates I + H⊗A (bars); how often HFC/LFC fell across the branch (dots)",
                _bar_chart(spectrum),
            )
        } | charts
    return compose(
        path,
        title=f"Why {spectrum.title} smooths or sharpens",
        verdict=spectrum.summary(),
        summary=spectrum.rows(),
        charts=charts,
        context=[context_row(spectrum.title, spectrum.context, ["norm", "outside H", "read"])],
        hint="H = W_projᵀW_Vᵀ with eigenvalues λ, A attention with eigenvalues μ. Orange smooths, blue sharpens.",
    )


def _histogram_chart(spectrum: Spectrum) -> Any:
    alt, edges = load_altair(), _edges(spectrum)
    rows = [
        {"layer": layer.layer, "from": low, "to": high, "count": int(count), "side": _side(low >= 0)}
        for layer in spectrum.layers
        for low, high, count in zip(
            edges[:-1].tolist(), edges[1:].tolist(), np.histogram(layer.spectrum.real, edges)[0], strict=True
        )
        if count
    ]
    bars = (
        alt.Chart(alt.Data(values=rows))
        .mark_bar(stroke=None)
        .encode(
            x=alt.X("from:Q", bin="binned", title="Re λ"), x2="to:Q", y=alt.Y("count:Q", title=None), color=_colour(alt)
        )
    )
    return bars.properties(width=210, height=120).facet("layer:O", columns=COLUMNS)


def _plane_chart(spectrum: Spectrum) -> Any:
    alt = load_altair()
    rows = [
        {"layer": layer.layer, "re": z.real, "im": z.imag, "side": _side(abs(1 + z) > 1)}
        for layer in spectrum.layers
        for z in _thinned(layer.spectrum)
    ]
    points = (
        alt.Chart(alt.Data(values=rows))
        .mark_circle(size=14)
        .encode(
            x=alt.X("re:Q", title="Re λ"),
            y=alt.Y("im:Q", title="Im λ"),
            color=_colour(alt),
            tooltip=[alt.Tooltip("re:Q", format=".4g"), alt.Tooltip("im:Q", format=".4g")],
        )
    )
    return points.properties(width=210, height=160).facet("layer:O", columns=COLUMNS)


def _bar_chart(spectrum: Spectrum) -> Any:
    alt = load_altair()
    # JSON has no NaN: what was never predicted has no share.
    rows = [{k: v if math.isfinite(v) else None for k, v in row.items()} for row in _dominance_rows(spectrum)]
    shares = [{"layer": r["layer"], "side": side, "percent": r[side]} for r in rows for side in (_side(True), _side(0))]
    x = alt.X("layer:O", title="layer", axis=alt.Axis(labelAngle=0))
    bars = (
        alt.Chart(alt.Data(values=shares))
        .mark_bar()
        .encode(
            x=x,
            y=alt.Y("percent:Q", title="% of samples and heads", scale=alt.Scale(domain=[0, 100])),
            color=_colour(alt),
        )
    )
    fell = (
        alt.Chart(alt.Data(values=rows))
        .mark_point(color="black", filled=True, size=50)
        .encode(
            x=x,
            y="fell:Q",
            tooltip=[
                alt.Tooltip(f"{key}:Q", title=title, format=".1f")
                for key, title in {
                    "fell": "HFC/LFC fell across the branch, %",
                    "fell if smoothing": "fell where predicted to, %",
                    "rose if sharpening": "rose where predicted to, %",
                    "agreement": "agreement with the prediction, %",
                    "base rate": "base rate, %",
                    "block agreement": "agreement across the block, %",
                    "block base rate": "base rate of the block, %",
                }.items()
            ],
        )
    )
    return alt.layer(bars, fell).properties(width=max(300, 40 * len(rows)), height=220)


def _dominance_rows(spectrum: Spectrum) -> list[dict[str, float]]:
    rows = []
    for layer in spectrum.layers:
        found = layer.dominance
        assert found is not None, "asked for with data only"
        shares = found.heads if found.whole is None else found.whole
        branch, block = found.branch, found.block
        rows.append(
            {
                "layer": layer.layer,
                "smoothing": 100 * float(np.mean([s.smoothing for s in shares])),
                "sharpening": 100 * float(np.mean([s.sharpening for s in shares])),
                "fell": 100 * branch.fell,
                "fell if smoothing": 100 * branch.fell_if_smoothing,
                "rose if sharpening": 100 * branch.rose_if_sharpening,
                "agreement": 100 * branch.agreement,
                "base rate": 100 * branch.base_rate,
                "block agreement": 100 * block.agreement,
                "block base rate": 100 * block.base_rate,
            }
        )
    return rows


def _grid(spectrum: Spectrum) -> tuple[Figure, Sequence[Any]]:
    """A panel per layer; panels left over are hidden."""
    count = len(spectrum.layers)
    columns = min(COLUMNS, count)
    figure, axes = blank_figure(math.ceil(count / columns), columns, width=3.2, height=2.6)
    panels = list(axes.flat)
    for spare in panels[count:]:
        spare.set_visible(False)
    return figure, panels[:count]


def _edges(spectrum: Spectrum) -> NDArray[np.float64]:
    """Bins of one width for all layers, with 0 an edge, so that no bar mixes signs."""
    real = np.concatenate([layer.spectrum.real for layer in spectrum.layers])
    low, high = min(float(real.min()), 0.0), max(float(real.max()), 0.0)
    step = (high - low) / BINS or 1.0
    return step * np.arange(math.floor(low / step) - 1, math.ceil(high / step) + 2, dtype=np.float64)


def _limits(spectrum: Spectrum) -> tuple[tuple[float, float], tuple[float, float]]:
    """What all planes show: every eigenvalue and λ = 0, with a margin; the circle only where that reaches."""
    values = np.concatenate([np.zeros(1), *(layer.spectrum for layer in spectrum.layers)])
    margin = 0.08 * float(np.abs(values).max()) or 1.0

    def around(part: NDArray[np.float64]) -> tuple[float, float]:
        return float(part.min()) - margin, float(part.max()) + margin

    return around(values.real), around(values.imag)


def _thinned(values: NDArray[np.complex128]) -> list[complex]:
    """Every so many-th eigenvalue, so that a wide layer does not make a page of hundreds of megabytes."""
    kept: list[complex] = values[:: math.ceil(len(values) / POINTS)].tolist()
    return kept


def _side(smooths: object) -> str:
    return "smoothing" if smooths else "sharpening"


def _colour(alt: Any) -> Any:
    scale = alt.Scale(domain=["smoothing", "sharpening"], range=[SMOOTHING, SHARPENING])
    return alt.Color("side:N", scale=scale, title=None)
