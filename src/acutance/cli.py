"""The command line: the verbs, and the demo."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, cast

import typer
from rich.console import Console
from rich.markup import escape

from acutance.errors import AcutanceError
from acutance.laboratory.cli import app as laboratory
from acutance.measure import DEFAULT_METRICS
from acutance.models import ViT, from_checkpoint
from acutance.version import __version__

app = typer.Typer(
    help="Measure, explain and mitigate over-smoothing in Transformers.\n\nStart with: acutance demo",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.add_typer(laboratory, name="lab")
console = Console()

MODEL_HELP = "A checkpoint written by Acutance (model.safetensors) or the folder of a run."


def _version(show: bool) -> None:
    if show:
        console.print(f"acutance {__version__}")
        raise typer.Exit


@app.callback()
def main(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Measure, explain and mitigate over-smoothing in Transformers."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where checkpoints, profiles and the page go.")] = Path("acutance-demo"),
    seeds: Annotated[int, typer.Option(min=1, help="Runs per variant; with 2 or more, mean ± spread.")] = 1,
    epochs: Annotated[int | None, typer.Option(min=1, help="Train for fewer or more epochs than the default.")] = None,
) -> None:
    """Train three small ViTs on real digits, measure each by layer, and compare them on one HTML page.

    Needs no network and about a minute and a half on two CPU cores. Finished runs are reused, so it can be stopped
    and started again; nothing half-written is ever left behind.
    """
    from acutance.demo import DemoConfig, run_demo

    config = DemoConfig() if epochs is None else DemoConfig(epochs=epochs)
    try:
        run_demo(out, seeds=seeds, config=config, console=console)
    except KeyboardInterrupt:
        console.print(f"\nStopped. Finished runs are kept in {escape(str(out))}; the same command goes on from there.")
        raise typer.Exit(130) from None


@app.command()
def measure(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    metrics: Annotated[str, typer.Option(help="Comma-separated names, or all.")] = ",".join(DEFAULT_METRICS),
    tap: Annotated[str, typer.Option(help="Comma-separated: block, attention, values, final.")] = "block",
    prefix: Annotated[str, typer.Option(help="Class and register tokens in or out of the metrics.")] = "in",
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write the profile here.")] = None,
    html_path: Annotated[Path | None, typer.Option("--html", help="Also write an offline page here.")] = None,
) -> None:
    """Print how smooth a model's tokens are, layer by layer, read on the embedded digits' test images.

    Example: acutance measure acutance-demo/plain-seed0 --tap block,attention --html profile.html
    """
    import acutance as ac
    from acutance.data import digits

    loaded = _load(model)
    if (loaded.config.image_size, loaded.config.in_chans) != (8, 1):
        raise AcutanceError(
            f"{model} takes {loaded.config.in_chans}×{loaded.config.image_size}² images; the "
            "command measures on the embedded 1×8² digits. From Python, ac.measure(model, batches) takes any data."
        )
    _, test = digits()
    profile = ac.measure(
        loaded,
        list(test.batches(64)),
        metrics=metrics if metrics == "all" else metrics.split(","),
        tap=tap.split(","),
        prefix=cast(Literal["in", "out"], prefix),  # measure refuses anything else
    )
    console.print(profile.table())
    if json_path is not None:
        _wrote(profile.save(json_path))
    if html_path is not None:
        _wrote(profile.to_html(html_path))


@app.command()
def explain(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    data: Annotated[str | None, typer.Option(help="Read attention too, on: digits (the embedded test images).")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write the spectrum here.")] = None,
    html_path: Annotated[Path | None, typer.Option("--html", help="Also write an offline page here.")] = None,
    picture_path: Annotated[
        Path | None, typer.Option("--picture", help="Also draw the eigenvalues; with --data, who dominates.")
    ] = None,
) -> None:
    """Print, per layer, whether the spectra of H = W_projᵀW_Vᵀ and A smooth or sharpen, and why.

    Example: acutance explain acutance-demo/plain-seed0 --data digits --html spectrum.html
    """
    import acutance as ac
    from acutance.data import digits
    from acutance.files import atomic_write

    if data not in (None, "digits"):
        raise AcutanceError(
            f"--data takes digits, not {data!r}. From Python, ac.explain(model, batches) takes any data"
        )
    batches = None if data is None else list(digits()[1].batches(64))
    spectrum = ac.explain(_load(model), batches)
    console.print(spectrum.table())
    if json_path is not None:
        _wrote(spectrum.save(json_path))
    if html_path is not None:
        _wrote(spectrum.to_html(html_path))
    if picture_path is not None:
        figure = spectrum.picture("dominance" if spectrum.has_data else "histogram")
        _wrote(atomic_write(picture_path, lambda path: figure.savefig(path, dpi=150)))


def _wrote(path: Path) -> None:
    console.print(f"wrote {escape(str(path))}", soft_wrap=True)


def _load(name: str) -> ViT:
    if name.startswith(("hf:", "timm:")):
        raise AcutanceError(f"{name}: this version measures Acutance's own checkpoints; other libraries come later")
    path = Path(name)
    checkpoint = path / "model.safetensors" if path.is_dir() else path
    if not checkpoint.is_file():
        raise AcutanceError(f"no checkpoint at {checkpoint}; `acutance demo` writes some to try")
    return from_checkpoint(checkpoint)


def run() -> None:
    """The entry point: errors made on purpose are one line, not a traceback."""
    try:
        app()
    except AcutanceError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise SystemExit(2) from None
