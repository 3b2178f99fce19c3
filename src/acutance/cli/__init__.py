"""The command line: the verbs, and the demo."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, NoReturn, cast, get_args

import torch
import typer
from rich.console import Console
from rich.markup import escape

from acutance import distributed as processes
from acutance.cli.bench import bench
from acutance.cli.evaluate import compare, evaluate
from acutance.cli.options import MODEL_HELP, DataOptions, MeasureOptions, spread, words
from acutance.cli.reproduce import reproduce
from acutance.cli.robustness import robustness
from acutance.cli.studies import app as laboratory
from acutance.cli.train import train
from acutance.errors import AcutanceError
from acutance.io.loading import Batches, LoadedModel, batches_for, load_model
from acutance.measure.profile import Profile
from acutance.version import __version__

app = typer.Typer(
    help="Measure, explain and mitigate over-smoothing in Transformers.\n\nStart with: acutance demo",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
app.add_typer(laboratory, name="lab")
for command in (train, evaluate, compare, robustness, reproduce, bench):
    app.command()(command)
console = Console(emoji=False)  # timm:tm: would become a trade mark
PICTURES = (".png", ".svg", ".pdf", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".eps")


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
    from acutance.lab.demo import DemoConfig, run_demo

    config = DemoConfig() if epochs is None else DemoConfig(epochs=epochs)
    try:
        run_demo(out, seeds=seeds, config=config, console=console)
    except KeyboardInterrupt:
        console.print(f"\nStopped. Finished runs are kept in {escape(str(out))}; the same command goes on from there.")
        raise typer.Exit(130) from None


@app.command()
@spread
def measure(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    options: MeasureOptions,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write the profile here.")] = None,
    html_path: Annotated[Path | None, typer.Option("--html", help="Also write an offline page here.")] = None,
) -> None:
    """Print how smooth a model's tokens are, layer by layer, read on text, on images or on the embedded digits.

    A run is read on its own test data.

    Examples: acutance measure acutance-demo/plain-seed0 --tap block,attention --html profile.html

    acutance measure runs/cifar100-seed0 --limit 200

    acutance measure hf:gpt2 --text wiki.test.txt --limit 64

    Several processes share the work: torchrun --nproc-per-node 2 -m acutance measure …
    """
    torch.manual_seed(0)  # the same command writes the same file
    with processes.joined() as (rank, _):
        loaded = _loaded(model, options)
        profile = _profile(loaded, _batches(loaded, options), options)
    if rank > 0:
        return
    console.print(profile.table())
    if json_path is not None:
        _wrote(profile.save(json_path))
    if html_path is not None:
        _wrote(profile.to_html(html_path))


@app.command()
@spread
def mitigate(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    spec: Annotated[str, typer.Argument(help="The mitigation, e.g. neutreno:0.6 or neutreno:0.4+featscale.")],
    options: MeasureOptions,
    layers: Annotated[
        str | None, typer.Option(help="Comma-separated layer numbers, 1 the first; all by default.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Save the mitigated model in this folder.")] = None,
) -> None:
    """Put a mitigation into a model, print its smoothness before and after, and save it, ready for fine-tuning.

    Example: acutance mitigate hf:gpt2 neutreno:0.4 --text wiki.test.txt --limit 64 --out gpt2-neutreno
    """
    import acutance as ac
    from acutance.mitigations import as_mitigation
    from acutance.sites.huggingface_notes import is_pretrained

    torch.manual_seed(0)  # the same command writes the same file
    chosen = _layer_numbers(layers)
    mitigation = as_mitigation(spec)
    loaded = _loaded(model, options, head=True)
    batches = _batches(loaded, options)
    before = _profile(loaded, batches, options)
    ac.mitigate(loaded.model, mitigation, layers=chosen, part=options.part)
    after = _profile(loaded, batches, options)
    console.print(before.compare(after))
    if out is not None:
        _wrote(ac.save(loaded.model, out if is_pretrained(loaded.model) else out / "model.safetensors"))
        if is_pretrained(loaded.model):
            loaded.save_inputs(out, text=options.text is not None)


@app.command()
@spread
def explain(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    options: DataOptions,
    data: Annotated[
        str | None,
        typer.Option(help="Read attention too, on: digits (the embedded test images), or own (a run's test data)."),
    ] = None,
    prefix: Annotated[str, typer.Option(help="Class and register tokens in or out of HFC/LFC.")] = "in",
    part: Annotated[
        str | None, typer.Option(help="Submodule to read, of a model with several stacks: encoder, model.decoder, …")
    ] = None,
    norm: Annotated[str, typer.Option(help="fold the pre-norm's weight into H, or ignore it.")] = "fold",
    whole: Annotated[
        bool | None,
        typer.Option(
            help="All eigenvalues of the whole H, or none; by default all up to rank 1024, then those that count."
        ),
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write the spectrum here.")] = None,
    html_path: Annotated[Path | None, typer.Option("--html", help="Also write an offline page here.")] = None,
    picture_path: Annotated[
        Path | None, typer.Option("--picture", help="Also draw it here: .png, .svg, .pdf, ….")
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(
            help="What to draw: histogram, plane or, with data, dominance; by default the first, or the last."
        ),
    ] = None,
) -> None:
    """Print, per layer, whether the spectra of H = W_projᵀW_Vᵀ and A smooth or sharpen, and why.

    Without data the weights decide alone; text, images or the digits are read for the attention too.

    Examples: acutance explain acutance-demo/plain-seed0 --data digits --html spectrum.html

    acutance explain hf:gpt2 --text wiki.test.txt --tokens 128 --limit 16
    """
    import acutance as ac
    from acutance.files.atomic import atomic_write

    if data not in (None, "digits", "own"):
        raise AcutanceError(f"--data takes digits or own, not {data!r}; other data come by --text or --images")
    if data is not None and (options.text, options.images) != (None, None):
        raise AcutanceError("--data, --text and --images each say what to read: give one of them")
    with_data = (data, options.text, options.images) != (None, None, None)
    if not with_data and (options.tokens, options.batch, options.limit) != (None, None, None):
        raise AcutanceError("--tokens, --batch and --limit are about data: give --text, --images or --data too")
    if kind is not None and picture_path is None:
        raise AcutanceError(f"--kind says what --picture draws: give --picture FILE with --kind {kind}")
    _check_picture(picture_path, kind)
    loaded = _loaded(model, options)
    if data == "own" and loaded.own is None:
        raise AcutanceError(f"--data own is what a run of `acutance train` was tested on, and {model} is none")
    if data == "digits":
        loaded = replace(loaded, own=None)
    batches = _batches(loaded, options) if with_data else None
    spectrum = ac.explain(
        loaded.model,
        batches,
        norm=cast(Literal["fold", "ignore"], norm),  # explain refuses anything else
        whole=whole,
        prefix=cast(Literal["in", "out"], prefix),
        part=part,
    )
    console.print(spectrum.table())
    if json_path is not None:
        _wrote(spectrum.save(json_path))
    if html_path is not None:
        _wrote(spectrum.to_html(html_path))
    if picture_path is not None:
        default = "dominance" if spectrum.has_data else "histogram"
        figure = spectrum.picture(cast(Literal["histogram", "plane", "dominance"], kind or default))
        _wrote(atomic_write(picture_path, lambda path: figure.savefig(path, dpi=150)))


def _check_picture(path: Path | None, kind: str | None) -> None:
    """What could not be drawn is said before the model is read."""
    from acutance.explain.spectrum import Picture

    if kind not in (None, *get_args(Picture)):
        raise AcutanceError(f"unknown picture {kind!r}; known: {', '.join(get_args(Picture))}")
    if path is not None and path.suffix.lower() not in PICTURES:
        raise AcutanceError(f"--picture {path}: its ending says the format, and is one of {', '.join(PICTURES)}")


def _wrote(path: Path) -> None:
    console.print(f"wrote {escape(str(path))}", soft_wrap=True)


def _loaded(model: str, options: DataOptions, *, head: bool = False) -> LoadedModel:
    return load_model(model, head=head, device=processes.device(options.device), dtype=options.dtype)


def _batches(loaded: LoadedModel, options: DataOptions) -> Batches:
    return batches_for(
        loaded,
        text=options.text,
        images=options.images,
        data_dir=options.data_dir,
        tokens=options.tokens,
        batch=options.batch,
        limit=options.limit,
    )


def _profile(loaded: LoadedModel, batches: Batches, options: MeasureOptions) -> Profile:
    import acutance as ac

    profile = ac.measure(
        loaded.model,
        batches,
        metrics="all" if options.metrics.strip() == "all" else words(options.metrics),
        tap=words(options.tap),
        prefix=cast(Literal["in", "out"], options.prefix),  # measure refuses anything else
        part=options.part,
        across_processes=True,
    )
    return replace(profile, context={**profile.context, "name": loaded.name, "data": batches.description})


def _layer_numbers(layers: str | None) -> list[int] | None:
    try:
        return None if layers is None else [int(number) for number in words(layers)]
    except ValueError as error:
        raise AcutanceError(f"--layers takes numbers with commas between, such as 1,6,12, not {layers!r}") from error


def _fail(message: str) -> NoReturn:
    Console(stderr=True, emoji=False).print(f"[bold red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)
    raise SystemExit(2) from None


def run() -> None:
    """The entry point: errors made on purpose, and files that cannot be read or written, are one line, no traceback."""
    try:
        app()
    except AcutanceError as error:
        _fail(str(error))
    except OSError as error:
        if error.filename is None or error.strerror is None:
            raise
        _fail(f"{error.filename2 or error.filename}: {error.strerror}")
