"""`acutance demo`."""

from pathlib import Path
from typing import Annotated

from acutance.cli.options import console, option, stoppable


def demo(
    out: Annotated[Path, option("Where checkpoints, profiles and the page go.")] = Path("acutance-demo"),
    seeds: Annotated[int, option("Runs per variant; with 2 or more, mean ± spread.", min=1)] = 1,
    epochs: Annotated[int | None, option("Train for fewer or more epochs than the default.", min=1)] = None,
) -> None:
    """Train three small ViTs on real digits, measure each by layer, and compare them on one HTML page.

    Needs no network and about a minute and a half on two CPU cores. Finished runs are reused and interrupted ones go
    on, so it can be stopped and started again; nothing half-written is ever left behind.
    """
    from acutance.lab.demo import run_demo

    with stoppable():
        run_demo(out, seeds=seeds, changes=[] if epochs is None else [f"loop.epochs={epochs}"], console=console)
