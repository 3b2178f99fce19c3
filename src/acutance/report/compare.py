"""Two profiles side by side, for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from acutance.profile import Profile
from acutance.terminal import FittedTable


def side_by_side(before: Profile, after: Profile) -> FittedTable:
    """One row per tap and layer, a column per metric: before → after, means over samples."""
    pairs = [{(r.tap, r.layer, r.metric): r.mean for r in profile.readings} for profile in (before, after)]

    def build(metrics: Sequence[str]) -> Table:
        table = Table(title=f"{before.title} → {after.title}", title_justify="left")
        table.add_column("tap")
        table.add_column("layer", justify="right")
        for metric in metrics:
            table.add_column(metric, justify="right")
        for tap, layer in dict.fromkeys((r.tap, r.layer) for r in before.readings if r.metric in metrics):
            cells = [[means.get((tap, layer, metric)) for means in pairs] for metric in metrics]
            table.add_row(
                tap, str(layer), *(" → ".join(f"{mean:.4f}" for mean in cell if mean is not None) for cell in cells)
            )
        return table

    return FittedTable(build, before.metrics, after.caption.replace("mean ± standard deviation", "means", 1))
