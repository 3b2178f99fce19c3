"""Two profiles side by side, for the terminal."""

from __future__ import annotations

from rich.table import Table

from acutance.profile import Profile


def side_by_side(before: Profile, after: Profile) -> Table:
    """One row per tap and layer, a column per metric: before → after, means over samples."""
    table = Table(title=f"{before.title} → {after.title}", caption=after.caption)
    table.add_column("tap")
    table.add_column("layer", justify="right")
    for metric in before.metrics:
        table.add_column(metric, justify="right")
    pairs = [{(r.tap, r.layer, r.metric): r.mean for r in profile.readings} for profile in (before, after)]
    for tap, layer in dict.fromkeys((r.tap, r.layer) for r in before.readings):
        cells = [[means.get((tap, layer, metric)) for means in pairs] for metric in before.metrics]
        table.add_row(
            tap, str(layer), *(" → ".join(f"{mean:.4f}" for mean in cell if mean is not None) for cell in cells)
        )
    return table
