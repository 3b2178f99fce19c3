"""`acutance demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from acutance.cli.options import console, stoppable


def demo(
    out: Annotated[Path, typer.Option(help="Where checkpoints, profiles and the page go.")] = Path("acutance-demo"),
    seeds: Annotated[int, typer.Option(min=1, help="Runs per variant; with 2 or more, mean ± spread.")] = 1,
    epochs: Annotated[int | None, typer.Option(min=1, help="Train for fewer or more epochs than the default.")] = None,
) -> None:
    """Train three small ViTs on real digits, measure each by layer, and compare them on one HTML page.

    Needs no network and about a minute and a half on two CPU cores. Finished runs are reused and interrupted ones go
    on, so it can be stopped and started again; nothing half-written is ever left behind.
    """
    from acutance.lab.demo import run_demo
    from acutance.lab.train import StoppedError

    with stoppable():
        try:
            run_demo(out, seeds=seeds, changes=[] if epochs is None else [f"loop.epochs={epochs}"], console=console)
        except StoppedError:
            raise KeyboardInterrupt from None
