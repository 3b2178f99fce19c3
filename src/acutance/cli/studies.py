"""The laboratory's experiments: `acutance demo`, `reproduce` and `bench`, and the studies of `acutance lab`."""

import platform
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import typer

import acutance as ac
from acutance.cli.options import Changes, Device, console, ints, list_rows, option, say, stoppable
from acutance.errors import AcutanceError

TIMES = (
    "A plain run of 5 million images of 32×32 took 93 s on an H200, with NeuTRENO 94 to 98 s; the first of all, which "
    "compiled everything, 141 s. Other trainings on GPUs have not been timed as a whole: divide their images by what "
    "`acutance bench` measures on your GPU, or start one, and it shows the time left."
)

app = typer.Typer(help="Studies: deep random networks, the affinities of trained ones.", no_args_is_help=True)


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
    queue: Annotated[Path | None, option("Run this file's jobs; results.jsonl beside it says what is done.")] = None,
    budget: Annotated[str, option("Of a queue: the time it has, e.g. 9m. Only what fits is started.")] = "9m",
    workers: Annotated[int, option("Of a queue: runs side by side on one GPU.", min=1)] = 1,
    tables: Annotated[bool, option("Of a queue: write its tables beside it, and stop.", "--tables")] = False,
    trial: Annotated[bool, option("Of a queue: any sources will do; results go to --out.", "--trial")] = False,
    job: Annotated[str | None, option("Of a queue: run this job here, and no other.", hidden=True)] = None,
    stamp: Annotated[bool, option("Write provenance.json, for a copy without the history.", "--stamp")] = False,
) -> None:
    """Reproduce a table or figure: train what it needs, measure, and print the published beside the measured.

    What is finished is reused, what was interrupted goes on. The same command started several times at once, on the
    GPUs of one machine or on machines that share the folder, divides the runs: each takes the next that nobody trains,
    and the last to end prints the whole table.

    Examples: acutance reproduce neutreno-table1 --data-dir /data/imagenet --plan

    acutance reproduce oversmoothing-fig4

    acutance reproduce --queue docs/evidence/queue/queue.toml --budget 9m --workers 4 --data-dir /data
    """
    if stamp:
        from acutance.lab.train.provenance import write_stamp

        say(f"wrote {write_stamp()}")
        return
    if queue is not None:
        how = {"data_dir": data_dir, "device": device, "workers": workers, "trial": trial}
        _run_queue(queue, out, budget, job, tables, how)
        return
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
    for path in (written := session.write(result)):
        say(f"wrote {path}")
    if not written:
        say("Another process has finished the rest meanwhile, and writes the whole.")


def _run_queue(queue: Path, out: Path, budget: str, job: str | None, tables: bool, how: dict[str, Any]) -> None:
    from acutance.lab.queue.results import Results
    from acutance.lab.queue.run import Session, duration

    results = Results((out if how["trial"] else queue.parent) / "results.jsonl")
    if tables:
        from acutance.lab.queue.tables import write_tables

        for path in write_tables(queue, results):
            say(f"wrote {path}")
        return
    out.mkdir(parents=True, exist_ok=True)
    session = Session(queue, out, results, **how)
    with stoppable():
        if job is not None:
            session.run_one(job, console)
            return
        left = session.run(duration(budget), console)
    say(f"{len(left)} of {len(session.queue.jobs())} runs are left" if left else "All runs of the queue are done.")


def bench(
    only: Annotated[str | None, option("Some groups, with commas between; all by default.")] = None,
    quick: Annotated[bool, option("Four repetitions with half of the steps.", "--quick")] = False,
    max_autotune: Annotated[bool, option("Also this mode of the baseline in steps.", "--max-autotune")] = False,
    out: Annotated[Path, option("Where the CSV files go.")] = Path("acutance-bench"),
    device: Device = "auto",
) -> None:
    """Time the library on your own GPU, and write CSV files named by GPU, dtype and versions.

    All figures are ratios in one run: variants take turns beside a baseline. A group, or a part of one, is one file:

    - steps: training and inference with NeuTRENO against timm's plain ViT (parts: steps-32, steps-224).
    - end-to-end: images a second of the recipe for CIFAR-100, augmentation included (parts by batch: end-to-end-256,
      end-to-end-512, end-to-end-1024, end-to-end-2048).
    - eigen: training with a negative spectrum, ViT-Ti⁻, against ViT-Ti.
    - micro: the fused attention by itself, against SDPA and against its floor in bytes and FLOPs.
    - efficiency: NeuTRENO's FLOPs, memory and time against plain, at inference.
    - measure: `measure` against a plain forward pass, and against whole attention matrices.
    - long: language models, up to 131,072 tokens (parts: long-training, long-tokens, long-model).

    Each part takes a few minutes on an H200. On a CPU toy sizes run, in less than a minute for all: they show that
    everything works, not what it costs. Stop it when you like: finished figures are in the files, and a part that
    fails does not stop the others.

    Example: acutance bench --only micro,efficiency --quick
    """
    from acutance.distributed import device as device_of
    from acutance.lab.bench.run import chosen_groups, run_groups
    from acutance.lab.bench.timing import Settings

    names = chosen_groups(only)
    settings = Settings(device_of(device), quick, max_autotune)
    if not settings.on_gpu:
        say("No GPU: toy sizes on the CPU, to see that everything runs. The ratios mean nothing.")
    with stoppable(f"Finished figures are in {out}."):
        for path in run_groups(names, settings, out, console):
            say(f"wrote {path}")


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
    from acutance.lab.studies.kernel import batch_count, kernel_study

    if text is None and tokens is not None:
        raise AcutanceError("--tokens is the length of a window of text: it needs --text FILE")
    models = {_run_name(run): partial(ac.io.load_model, run) for run in runs}
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
