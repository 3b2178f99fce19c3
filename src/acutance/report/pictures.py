"""Figures for papers, READMEs and slides, drawn with matplotlib."""

import math
from collections.abc import Mapping, Sequence
from itertools import cycle, zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from acutance.errors import AcutanceError, import_extra
from acutance.report.page import COLOURS, COLUMNS, FELL, PALETTE, Layers, bins, sides
from acutance.report.tables import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Figure  # other rooms take it from here: matplotlib may be missing
else:
    Figure = Any


def plot_curves(runs: Mapping[str, Result], charts: Sequence[tuple[str, str]], title: str = "") -> Figure:
    """One panel per (metric, tap), one curve per run, a band of one standard deviation."""
    figure, panels = _panels([f"{metric} ({tap})" for metric, tap in charts], title, "layer")
    for axis, chart in zip(panels, charts, strict=True):
        axis.grid(alpha=0.3)
        for (name, run), colour, style in zip(runs.items(), PALETTE, cycle(["-", "-", "--"]), strict=False):
            rows = [(r["layer"], r["mean"], r["std"]) for r in run.rows() if (r["metric"], r["tap"]) == chart]
            layers, mean, std = np.array(sorted(rows)).T
            axis.plot(layers, mean, style, marker="o", markersize=3, color=colour, label=name)
            axis.fill_between(layers, mean - std, mean + std, color=colour, alpha=0.15, linewidth=0)
    panels[0].legend(frameon=False, fontsize=8)
    return figure


def plot_steps(history: Mapping[int, Result], title: str = "") -> Figure:
    """One panel per (metric, tap): means over the training steps, one curve per layer, dark first and light last."""
    points: dict[str, dict[int, list[tuple[int, float]]]] = {}
    for step, row in [(step, row) for step, run in history.items() for row in run.rows()]:
        layers = points.setdefault(f"{row['metric']} ({row['tap']})", {})
        layers.setdefault(row["layer"], []).append((step, row["mean"]))
    figure, panels = _panels(list(points), title, "optimiser step")
    from matplotlib.cm import ScalarMappable, viridis  # `blank_figure` has checked that matplotlib is installed
    from matplotlib.colors import Normalize

    deepest = max(max(layers) for layers in points.values())
    for axis, layers in zip(panels, points.values(), strict=True):
        axis.grid(alpha=0.3)
        for layer, line in layers.items():
            axis.plot(*zip(*line, strict=True), marker=".", markersize=4, color=viridis(layer / deepest))
    figure.colorbar(ScalarMappable(Normalize(0, deepest), viridis), ax=panels, label="layer")
    return figure


def plot_attention(maps: Mapping[int, NDArray[Any]]) -> Figure:
    """Attention maps as in Fig. 4 of arXiv 2312.00751: a row per layer, a column per head."""
    figure, axes = blank_figure(len(maps), max(map(len, maps.values())), width=2.3, height=2.3)
    for row, (layer, per_head) in zip(axes, maps.items(), strict=True):
        for head, axis in enumerate(row):
            axis.set_axis_off()
            if head < len(per_head):
                axis.imshow(per_head[head], cmap="viridis", interpolation="nearest")
                axis.set_title(f"layer {layer}, head {head + 1}", fontsize=8)
    return figure


def plot_spectrum(layers: Layers, kind: str, title: str) -> Figure:
    """Eigenvalues as a `histogram` (Fig. 5 of arXiv 2401.04301) or in the complex `plane`, or `dominance` bars."""
    if kind not in ("histogram", "plane", "dominance"):
        raise AcutanceError(f"unknown picture {kind!r}; known: histogram, plane, dominance")
    if kind == "dominance":
        return _plot_dominance(layers, title)
    titles = [f"layer {row.layer}: {row.verdict}" for row in layers]
    title = title if kind == "histogram" else f"{title}: |1 + λ| = 1 dashed"
    figure, panels = _panels(titles, title, "Re λ", COLUMNS, width=3.2, height=2.6)
    from matplotlib.patches import Circle

    edges, signs = bins(layers)
    # All panels of the plane show the same window: every eigenvalue and 0, with a margin.
    every = np.concatenate([np.zeros(1), *(row.spectrum for row in layers)])
    margin = 0.08 * float(np.abs(every).max()) or 1.0
    xlim, ylim = ((part.min() - margin, part.max() + margin) for part in (every.real, every.imag))
    for axis, values in zip(panels, (row.spectrum for row in layers), strict=True):
        if kind == "histogram":
            counts, _ = np.histogram(values.real, edges)
            axis.bar(edges[:-1], counts, width=np.diff(edges), align="edge", color=[COLOURS[side] for side in signs])
            axis.axvline(0, color="#666666", linewidth=0.8)
            axis.set(ylabel="eigenvalues of H")
        else:
            axis.scatter(values.real, values.imag, s=6, c=[COLOURS[side] for side in sides(values)])
            axis.add_patch(Circle((-1, 0), 1, fill=False, color="#666666", linestyle="--"))
            axis.set(ylabel="Im λ", xlim=xlim, ylim=ylim)
    return figure


def _plot_dominance(layers: Layers, title: str) -> Figure:
    figure, axes = blank_figure(1, 1, width=max(4.5, 0.6 * len(layers) + 2), height=3.4)
    axis, numbers = axes[0][0], [row.layer for row in layers]
    smoothing, sharpening, fell = (np.array([row.percent()[name] for row in layers]) for name in (*COLOURS, FELL))
    axis.bar(numbers, smoothing, color=COLOURS["smoothing"], label="μ = 1 dominates: smoothing")
    axis.bar(numbers, sharpening, bottom=smoothing, color=COLOURS["sharpening"], label="μ ≠ 1: sharpening")
    axis.plot(numbers, fell, "o", color="black", label=FELL)
    axis.set(xlabel="layer", ylabel="% of samples and heads", ylim=(0, 105), xticks=numbers, title=title)
    axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=3, frameon=False)
    return figure


def _panels(
    titles: Sequence[str], title: str, xlabel: str, columns: int = 3, *, width: float = 4.2, height: float = 3.4
) -> tuple[Figure, list[Any]]:
    """A figure with a panel of each title, at most `columns` side by side, and the panels' axes."""
    columns = min(columns, len(titles))
    figure, axes = blank_figure(math.ceil(len(titles) / columns), columns, width=width, height=height)
    figure.suptitle(title)
    for axis, name in zip_longest(axes.flat, titles):
        axis.set(title=name, xlabel=xlabel) if name else axis.remove()
    return figure, list(axes.flat[: len(titles)])


def blank_figure(rows: int, columns: int, *, width: float, height: float) -> tuple[Figure, Any]:
    """A figure of panels, each that many inches wide and high, and its axes by row and column."""
    matplotlib = import_extra("matplotlib.figure", "a figure needs matplotlib: pip install 'acutance[report]'")
    # Figure instead of pyplot: no global state, no display needed.
    figure: Figure = matplotlib.Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)
