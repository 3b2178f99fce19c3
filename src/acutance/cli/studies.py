"""`acutance lab`: the experiments of the laboratory as commands."""

import platform
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import typer

from acutance.cli.options import console, ints, option, say, stoppable
from acutance.errors import AcutanceError

app = typer.Typer(help="Studies: deep random networks, the affinities of trained ones.", no_args_is_help=True)


@app.command()
def depth(
    out: Annotated[Path, option("Where the table and the figure go.")] = Path("acutance-depth"),
    depths: Annotated[str, option("Comma-separated numbers of layers.")] = "12,48,96",
    seeds: Annotated[int, option("Networks per variant; with 2 or more, mean ± spread.", min=1)] = 3,
    dim: Annotated[int, option("Channels, a multiple of 3 (the heads).", min=3)] = 192,
) -> None:
    """How does smoothing grow with depth before any training? Plain, Post-LN, NeuTRENO, LayerScale, ViT⁻ and ViT⁺.

    Networks are drawn with DeiT's initialisation (σ = 0.02) and with Xavier's, and read on the embedded digits. Takes
    about two minutes; finished networks are reused, so it can be stopped and started again.

    Example: acutance lab depth --depths 12,24 --seeds 2 --dim 48
    """
    from acutance.lab.studies.depth import VARIANTS, DepthConfig, depth_study

    config = DepthConfig(depths=tuple(sorted(set(ints(depths, "--depths")))), dim=dim)
    with stoppable(), _progress(len(VARIANTS) * len(config.inits) * seeds) as advance:
        study = depth_study(config, seeds=seeds, folder=out, advance=advance)
    _write(study, out, "depth", {"--depths": depths, "--seeds": seeds, "--dim": dim})


@app.command()
def kernel(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Checkpoints, runs, or models such as hf:gpt2.")],
    out: Annotated[Path, option("Where the table and the figure go.")] = Path("acutance-kernel"),
    samples: Annotated[int, option("Images of each split, or windows of text; Table 4 has 1000.", min=2)] = 1000,
    text: Annotated[Path | None, option("A text file or folder, in place of the digits.")] = None,
    tokens: Annotated[int | None, option("The length of a window of text.", min=2)] = None,
) -> None:
    """Are the learnt affinities a symmetric positive definite kernel, as NeuTRENO's Theorem 1 takes them to be?

    Reads each model on the embedded digits' training and test images, or on a text. Per layer and head: how far
    exp(q·k/√d) is from symmetric (0 to about 1) and from positive definite (0 to ½), both also with its entries in
    random order, the alignment of the two gradients (Table 4: 1 is perfect), and whether the alignment is worse where
    the assumption is (a rank correlation below 0), pooled and within single layers. Of a causal model the affinities
    are taken as they are before the mask. Runs named alike but for -seed0, -seed1, … are one variant: mean ± spread.

    Examples: acutance lab kernel acutance-demo/plain-seed0 acutance-demo/plain-seed1

    acutance lab kernel hf:gpt2 --text wiki.test.txt --tokens 128 --samples 16
    """
    from acutance.io.loading import load_model
    from acutance.lab.studies.kernel import batch_count, kernel_study

    if text is None and tokens is not None:
        raise AcutanceError("--tokens is the length of a window of text: it needs --text FILE")
    models = {_run_name(run): partial(load_model, run) for run in runs}
    if len(models) < len(runs):
        raise AcutanceError(f"two of these runs have one name: {', '.join(map(_run_name, runs))}. Rename one of them")
    with _progress(len(models) * batch_count(samples, text=text is not None)) as advance:
        study = kernel_study(models, samples=samples, text=text, tokens=tokens, advance=advance)
    _write(study, out, "kernel", {"--samples": samples, "--text": text, "--tokens": tokens}, *runs)


def _write(study: Any, out: Path, name: str, options: dict[str, Any], *arguments: str) -> None:
    given = [str(word) for pair in options.items() if pair[1] is not None for word in pair]
    command = shlex.join(["acutance", "lab", name, *arguments, *given])
    written = study.save(out, context={"command": command, "hardware": f"{platform.machine()} CPU"})
    console.print(study.table())
    say(f"wrote {', '.join(path.name for path in written)} into {out}")


def _run_name(run: str) -> str:
    """A folder's name, or that of a checkpoint without its ending; model.safetensors is called after its folder."""
    path = Path(run.removeprefix("hf:").removeprefix("timm:"))
    return path.parent.name if path.name == "model.safetensors" else path.name.removesuffix(".safetensors")


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar; the function is called with what begins now."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<36}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task, started = progress.add_task("", total=total), count()
        yield lambda what: progress.update(task, description=what, completed=next(started))
