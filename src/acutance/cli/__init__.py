"""The command line: one thin function per verb.

It turns options into one call of the library and prints what it gives. No formula stands here, and torch is not
imported before a verb runs.
"""

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from acutance.cli.lab import bench, compare, demo, evaluate, reproduce, robustness, studies, train
from acutance.cli.options import console
from acutance.cli.verbs import explain, measure, mitigate
from acutance.errors import AcutanceError
from acutance.version import __version__

app = typer.Typer(
    help="Measure, explain and mitigate over-smoothing in Transformers.\n\nStart with: acutance demo",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
for verb in (demo, measure, mitigate, explain, train, evaluate, compare, robustness, reproduce, bench):
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
