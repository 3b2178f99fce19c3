"""What a Monitor saw, to be looked at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from acutance.errors import AcutanceError
from acutance.profile import Profile
from acutance.report.pictures import blank_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = 3


def history_picture(history: Mapping[int, Profile]) -> Figure:
    """A panel per metric and tap: the metric over the training steps, a curve per layer, dark first and light last."""
    if not history:
        raise AcutanceError("nothing was recorded yet: a picture needs at least one step")
    curves = _curves(history)
    columns = min(COLUMNS, len(curves))
    figure, axes = blank_figure(-(-len(curves) // columns), columns, width=4.2, height=3.2)
    for axis in axes.flat[len(curves) :]:
        axis.set_axis_off()
    from matplotlib.cm import ScalarMappable, viridis  # found: blank_figure would have said what to install
    from matplotlib.colors import Normalize

    deepest = max(layer for layers in curves.values() for layer in layers)
    for axis, ((metric, tap), layers) in zip(axes.flat, curves.items(), strict=False):
        for layer, points in layers.items():
            axis.plot(*zip(*points, strict=True), marker=".", markersize=4, color=viridis(layer / deepest))
        axis.set(xlabel="optimiser step", title=f"{metric} ({tap})")
        axis.grid(alpha=0.3)
    figure.colorbar(ScalarMappable(Normalize(0, deepest), viridis), ax=axes, label="layer")
    figure.suptitle(next(iter(history.values())).title)
    return figure


def _curves(history: Mapping[int, Profile]) -> dict[tuple[str, str], dict[int, list[tuple[int, float]]]]:
    """(metric, tap) to layer to (step, mean)."""
    curves: dict[Any, dict[int, list[tuple[int, float]]]] = {}
    for step, profile in history.items():
        for r in profile.readings:
            curves.setdefault((r.metric, r.tap), {}).setdefault(r.layer, []).append((step, r.mean))
    return curves
