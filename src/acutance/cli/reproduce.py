"""`acutance reproduce`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from acutance.cli.options import Changes, Device, console, list_rows, option, say, stoppable
from acutance.errors import AcutanceError

TIMES = (
    "A plain run of 5 million images of 32×32 took 93 s on an H200, with NeuTRENO 94 to 98 s; the first of all, which "
    "compiled everything, 141 s. Other trainings on GPUs have not been timed as a whole: divide their images by what "
    "`acutance bench` measures on your GPU, or start one, and it shows the time left."
)


def reproduce(
    target: Annotated[str | None, typer.Argument(help="A table or figure; --list names them.")] = None,
    data_dir: Annotated[Path | None, option("The folder with the data, in its usual layout.")] = None,
    out: Annotated[Path, option("Runs and results; targets share runs.")] = Path("acutance-reproduce"),
    seeds: Annotated[int | None, option("Runs for each row.", min=1, show_default="the target's own")] = None,
    assignments: Changes = None,
    samples: Annotated[int, option("Images or sequences on which models are read.", min=1)] = 1000,
    device: Device = "auto",
    plan: Annotated[bool, option("Print the runs as commands, and stop.", "--plan")] = False,
    show_list: Annotated[bool, option("Name all tables and figures, needs and costs.", "--list")] = False,
) -> None:
    """Reproduce a table or figure: train what it needs, measure, and print the published beside the measured.

    What is finished is reused, what was interrupted goes on. The same command started several times at once, on the
    GPUs of one machine or on machines that share the folder, divides the runs: each takes the next that nobody trains,
    and the last to end prints the whole table.

    Examples: acutance reproduce neutreno-table1 --data-dir /data/imagenet --plan

    acutance reproduce oversmoothing-fig4
    """
    from acutance.lab.reproduce import TARGETS, find
    from acutance.lab.reproduce.run import Session

    if show_list:
        rows = ((one.name, one.title, one.needs or one.notes) for one in TARGETS.values())
        list_rows(rows, "target", "what", "needs")
        say(f"\n{TIMES}")
        return
    if target is None:
        raise AcutanceError("name a table or figure; `acutance reproduce --list` has them all")
    options: dict[str, Any] = {"data_dir": data_dir, "seeds": seeds, "samples": samples, "device": device}
    session = Session(find(target), out, changes=tuple(assignments or ()), console=console, **options)
    if plan:
        typer.echo(session.script())
        return
    with stoppable():
        result = session.run()
    say(result.to_markdown(), end="")
    written = session.write(result)
    for path in written:
        say(f"wrote {path}")
    if not written:
        say("Another process has finished the rest meanwhile, and writes the whole.")
