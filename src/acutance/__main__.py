"""The command line as a whole: the verbs of the core and of the laboratory. `python -m acutance` is for torchrun."""

import os
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from acutance.cli.diagnose import diagnose
from acutance.cli.options import console
from acutance.cli.verbs import explain, measure
from acutance.errors import AcutanceError
from acutance.lab.commands import bench, demo, evaluate, reproduce, robustness, studies, train
from acutance.lab.comparing import compare
from acutance.lab.sweep.commands import mitigate, sweep
from acutance.version import __version__

app = typer.Typer(
    help="Measure, explain and mitigate over-smoothing in Transformers.\n\nStart with: acutance demo",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
CORE = (diagnose, measure, explain, sweep, mitigate, compare)  # first in the help, in this order
for verb in (*CORE, demo, train, evaluate, robustness, reproduce, bench):
    app.command()(verb)
app.add_typer(studies, name="lab")


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Measure, explain and mitigate over-smoothing in Transformers."""
    if version:
        console.print(f"acutance {__version__}")
        raise typer.Exit


def run() -> None:
    """The entry point: errors made on purpose, and files that cannot be read or written, are one line, no traceback."""
    if not sys.stdout.isatty():
        os.environ.setdefault("COLUMNS", "80")  # else the width would be that of a terminal on standard error
    try:
        app()
    except AcutanceError as error:
        message = str(error)
    except OSError as error:
        if error.filename is None or error.strerror is None:
            raise
        message = f"{error.filename2 or error.filename}: {error.strerror}"
    Console(stderr=True, emoji=False).print(f"[bold red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)
    raise SystemExit(2)


if __name__ == "__main__":
    try:
        run()
    except SystemExit as left:  # with which a command always ends
        if "TORCHELASTIC_RUN_ID" in os.environ and not isinstance(left.code, str):
            # Threads of gloo sometimes abort the interpreter's shutdown, so a process of torchrun leaves at once.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(left.code or 0)
        raise
