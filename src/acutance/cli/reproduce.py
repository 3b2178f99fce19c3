"""`acutance reproduce`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from acutance.errors import AcutanceError

if TYPE_CHECKING:
    from acutance.lab.reproduce.target import Target

console = Console(emoji=False)
TIMES = (
    "A plain run of 5 million images of 32×32 took 93 s on an H200, with NeuTRENO 94 to 98 s; the first of all, which "
    "compiled everything, 141 s. Other trainings on GPUs have not been timed as a whole: divide their images by what "
    "`acutance bench` measures on your GPU, or start one, and it shows the time left."
)


def reproduce(
    target: Annotated[str | None, typer.Argument(help="A table or figure; --list names them.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="The folder with the data, in its usual layout.")] = None,
    out: Annotated[Path, typer.Option(help="Where runs and results go; runs are shared by all targets.")] = Path(
        "acutance-reproduce"
    ),
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Runs for each row.", show_default="the target's own")
    ] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", help="Change a field of every run, e.g. --set loop.epochs=100.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Images or sequences on which models are read.")] = 1000,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    plan: Annotated[bool, typer.Option("--plan", help="Print the runs as commands, and stop.")] = False,
    show_list: Annotated[bool, typer.Option("--list", help="Name all tables and figures, needs and costs.")] = False,
) -> None:
    """Reproduce a table or figure: train what it needs, measure, and print the published beside the measured.

    What is finished is reused, what was interrupted goes on. The same command started several times at once, on the
    GPUs of one machine or on machines that share the folder, divides the runs: each takes the next that nobody trains,
    and the last to end prints the whole table.

    Examples: acutance reproduce neutreno-table1 --data-dir /data/imagenet --plan

    acutance reproduce oversmoothing-fig4
    """
    from acutance.lab.reproduce import TARGETS, find

    if show_list:
        console.print(_catalogue(TARGETS.values()))
        console.print(f"\n{TIMES}", highlight=False)
        return
    if target is None:
        raise AcutanceError("name a table or figure; `acutance reproduce --list` has them all")
    chosen = find(target)

    from acutance.lab.reproduce.run import Session
    from acutance.lab.train.interrupt import StoppedError

    session = Session(
        chosen,
        out,
        data_dir=data_dir,
        seeds=seeds,
        changes=tuple(assignments or ()),
        samples=samples,
        device=device,
        console=console,
    )
    if plan:
        typer.echo(session.script())
        return
    try:
        result = session.run()
    except (StoppedError, KeyboardInterrupt):
        console.print("\nStopped. What is finished is kept; the same command goes on from there.")
        raise typer.Exit(130) from None
    console.print(escape(result.to_markdown()), highlight=False, soft_wrap=True, end="")
    written = session.write(result)
    if not written:
        console.print("Another process has finished the rest meanwhile, and writes the whole.")
    for path in written:
        console.print(f"wrote {escape(str(path))}", highlight=False, soft_wrap=True)


def _catalogue(targets: Iterable[Target]) -> Table:
    table = Table(Column("target", no_wrap=True), "what", "needs", box=None)
    for target in targets:
        table.add_row(target.name, escape(target.title), escape(target.needs or target.notes))
    return table
