"""Pictures for papers, READMEs and slides, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from acutance.errors import MissingExtraError
from acutance.profile import Profile
from acutance.report.page import PALETTE

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def curves_picture(profiles: Mapping[str, Profile], charts: Sequence[tuple[str, str]], title: str = "") -> Figure:
    """One panel per (metric, tap), one curve per profile, a band of one standard deviation.

    The figure is matplotlib's: `figure.savefig("curves.png")` keeps it.
    """
    figure, axes = blank_figure(1, len(charts), width=4.2, height=3.4)
    for axis, (metric, tap) in zip(axes[0], charts, strict=True):
        for (name, profile), colour, style in zip(profiles.items(), PALETTE, cycle(["-", "-", "--"]), strict=False):
            readings = profile.select(metric, tap)
            layers = [r.layer for r in readings]
            mean, std = np.array([r.mean for r in readings]), np.array([r.std for r in readings])
            axis.plot(layers, mean, style, marker="o", markersize=3, color=colour, label=name)
            axis.fill_between(layers, mean - std, mean + std, color=colour, alpha=0.15, linewidth=0)
        axis.set(xlabel="layer", title=f"{metric} ({tap})")
        axis.grid(alpha=0.3)
    axes[0][0].legend(frameon=False, fontsize=8)
    figure.suptitle(title)
    return figure


def attention_picture(maps: Mapping[int, NDArray[Any]]) -> Figure:
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


def blank_figure(rows: int, columns: int, *, width: float, height: float) -> tuple[Figure, Any]:
    """A figure of panels, each that many inches wide and high, and its axes by row and column."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("a picture needs matplotlib: pip install 'acutance[report]'") from error
    # Figure instead of pyplot: no global state, no display needed.
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)
