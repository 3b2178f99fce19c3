"""Figures for papers, READMEs and slides, drawn with matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from acutance.errors import AcutanceError, import_extra
from acutance.report.page import COLOURS, COLUMNS, FELL, PALETTE, LayerRow, bins, curve
from acutance.report.tables import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Points = Mapping[int, Sequence[tuple[int, float]]]  # layer to (step, value)


def plot_curves(runs: Mapping[str, Result], charts: Sequence[tuple[str, str]], title: str = "") -> Figure:
    """One panel per (metric, tap), one curve per run, a band of one standard deviation."""
    figure, panels = blank_panels(len(charts), 3, width=4.2, height=3.4)
    for axis, (metric, tap) in zip(panels, charts, strict=True):
        for (name, run), colour, style in zip(runs.items(), PALETTE, cycle(["-", "-", "--"]), strict=False):
            rows = curve(run, metric, tap)
            layers = [row["layer"] for row in rows]
            mean, std = np.array([row["mean"] for row in rows]), np.array([row["std"] for row in rows])
            axis.plot(layers, mean, style, marker="o", markersize=3, color=colour, label=name)
            axis.fill_between(layers, mean - std, mean + std, color=colour, alpha=0.15, linewidth=0)
        axis.set(xlabel="layer", title=f"{metric} ({tap})")
        axis.grid(alpha=0.3)
    panels[0].legend(frameon=False, fontsize=8)
    figure.suptitle(title)
    return figure


def plot_steps(charts: Mapping[str, Points], title: str = "") -> Figure:
    """One panel per chart: a value over the training steps, one curve per layer, dark first and light last."""
    figure, panels = blank_panels(len(charts), 3, width=4.2, height=3.2)
    from matplotlib.cm import ScalarMappable, viridis  # `blank_panels` has checked that matplotlib is installed
    from matplotlib.colors import Normalize

    deepest = max(layer for layers in charts.values() for layer in layers)
    for axis, (name, layers) in zip(panels, charts.items(), strict=True):
        for layer, points in layers.items():
            axis.plot(*zip(*points, strict=True), marker=".", markersize=4, color=viridis(layer / deepest))
        axis.set(xlabel="optimiser step", title=name)
        axis.grid(alpha=0.3)
    figure.colorbar(ScalarMappable(Normalize(0, deepest), viridis), ax=panels, label="layer")
    figure.suptitle(title)
    return figure


def plot_attention(maps: Mapping[int, NDArray[Any]]) -> Figure:
    """Attention maps as in Fig. 4 of arXiv 2312.00751: a row per layer, a column per head."""
    heads = max(len(layer) for layer in maps.values())
    figure, axes = blank_figure(len(maps), heads, width=2.3, height=2.3)
    for row, (layer, per_head) in zip(axes, maps.items(), strict=True):
        for head, axis in enumerate(row):
            axis.set_axis_off()
            if head < len(per_head):
                axis.imshow(per_head[head], cmap="viridis", interpolation="nearest")
                axis.set_title(f"layer {layer}, head {head + 1}", fontsize=8)
    return figure


def plot_spectrum(layers: Sequence[LayerRow], kind: str, title: str) -> Figure:
    """Eigenvalues as a `histogram` (Fig. 5 of arXiv 2401.04301) or in the complex `plane`, or `dominance` bars."""
    if kind not in ("histogram", "plane", "dominance"):
        raise AcutanceError(f"unknown picture {kind!r}; known: histogram, plane, dominance")
    if kind == "dominance":
        return _plot_dominance(layers, title)
    figure, panels = blank_panels(len(layers), COLUMNS, width=3.2, height=2.6)
    from matplotlib.patches import Circle

    edges, sides = bins(layers)
    # All panels of the plane show the same window: every eigenvalue and 0, with a margin.
    values = np.concatenate([np.zeros(1), *(row.eigenvalues for row in layers)])
    margin = 0.08 * float(np.abs(values).max()) or 1.0
    xlim, ylim = ((part.min() - margin, part.max() + margin) for part in (values.real, values.imag))
    for axis, row in zip(panels, layers, strict=True):
        axis.set(title=f"layer {row.layer}: {row.verdict}", xlabel="Re λ")
        if kind == "histogram":
            counts, _ = np.histogram(row.eigenvalues.real, edges)
            axis.bar(edges[:-1], counts, width=np.diff(edges), align="edge", color=[COLOURS[side] for side in sides])
            axis.axvline(0, color="#666666", linewidth=0.8)
            axis.set(ylabel="eigenvalues of H")
        else:
            axis.scatter(row.eigenvalues.real, row.eigenvalues.imag, s=6, c=[COLOURS[side] for side in row.sides])
            axis.add_patch(Circle((-1, 0), 1, fill=False, color="#666666", linestyle="--"))
            axis.set(ylabel="Im λ", xlim=xlim, ylim=ylim)
    figure.suptitle(title if kind == "histogram" else f"{title}: |1 + λ| = 1 dashed")
    return figure


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


def blank_panels(count: int, columns: int, *, width: float, height: float) -> tuple[Figure, list[Any]]:
    """A figure of that many panels, at most `columns` side by side, and the panels' axes."""
    columns = min(columns, count)
    figure, axes = blank_figure(math.ceil(count / columns), columns, width=width, height=height)
    for spare in axes.flat[count:]:
        spare.remove()
    return figure, list(axes.flat[:count])


def blank_figure(rows: int, columns: int, *, width: float, height: float) -> tuple[Figure, Any]:
    """A figure of panels, each that many inches wide and high, and its axes by row and column."""
    matplotlib = import_extra("matplotlib.figure", "a figure needs matplotlib: pip install 'acutance[report]'")
    # Figure instead of pyplot: no global state, no display needed.
    figure: Figure = matplotlib.Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)
