"""The laboratory's verbs: training, evaluating and comparing runs, the papers' results, timing, and `acutance lab`."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.markup import escape
from rich.table import Column, Table

import acutance as ac
from acutance.cli import options
from acutance.cli.options import console, ints, option, say, words, write
from acutance.errors import AcutanceError

studies = typer.Typer(
    help="Studies: deep random networks; affinities and layers of trained models.", no_args_is_help=True
)

Split = Annotated[str, option("test, train, or val (the held-out slice).")]
Weights = Annotated[str, option("last, which recipes report, or best on the held-out slice.")]
Changes = Annotated[list[str] | None, option("Change a field, e.g. optim.lr=1e-3; can be given again.", "--set")]
Markdown = Annotated[Path | None, option("Also write the table here.", "--markdown")]


def list_rows(rows: Iterable[Sequence[str]], *columns: str) -> None:
    """Print a table of words. The first column does not wrap."""
    table = Table(Column(columns[0], no_wrap=True), *columns[1:], box=None)
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)


def is_first_process() -> bool:
    """Whether this process is the first of those that torchrun or the trainer started, and may print."""
    return int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))) == 0


@contextmanager
def stoppable(advice: str = "Finished work is kept; the same command resumes.") -> Iterator[None]:
    """Ctrl-C ends a command of the laboratory with exit status 130, and says how to resume."""
    from acutance.lab.train import StoppedError

    try:
        yield
    except (KeyboardInterrupt, StoppedError) as stopped:
        if is_first_process():
            where = str(stopped).partition(". ")[0] or "Stopped"  # such as: stopped after step 7 of 16
            say(f"\n{where}. {advice}")
        raise typer.Exit(130) from None


def demo(
    out: Annotated[Path, option("Where checkpoints, profiles and the page go.")] = Path("acutance-demo"),
    seeds: Annotated[int, option("Runs per variant; with 2 or more, mean ± spread.", min=1)] = 1,
    epochs: Annotated[int | None, option("Train for fewer or more epochs than the default.", min=1)] = None,
) -> None:
    """Train three small ViTs on real digits, measure each by layer, and compare them on one HTML page.

    Needs no network. Takes about half a minute on two CPU cores. You can stop it and start it again: finished
    runs are reused, interrupted ones resume, and no half-written file is left behind.
    """
    from acutance.lab.demo import run_demo

    with stoppable():
        run_demo(out, seeds=seeds, changes=[] if epochs is None else [f"loop.epochs={epochs}"], console=console)


def train(
    recipe: Annotated[str | None, typer.Argument(help="A recipe's name; --list shows them.")] = None,
    data_dir: Annotated[Path | None, option("The folder with the data, in its usual layout.")] = None,
    assignments: Changes = None,
    out: Annotated[Path | None, option("The run's folder.", show_default="runs/RECIPE-CHANGES-seedSEED")] = None,
    resume: Annotated[bool, option("Resume the run in --out.", "--resume")] = False,
    strategy: Annotated[str | None, option("single, ddp or fsdp; by default ddp with several processes.")] = None,
    processes: Annotated[int | None, option("Processes to start here; not under torchrun.", min=1)] = None,
    device: options.Device = "auto",
    show_list: Annotated[bool, option("List the recipes.", "--list")] = False,
) -> None:
    """Train a model by a recipe. A killed run resumes from its last checkpoint and ends in the same bits.

    Examples: acutance train digits --set loop.seed=1 --set task.model.mitigation=neutreno:0.6

    acutance train --out runs/digits-neutreno-0.6-seed1 --resume

    Several machines: torchrun --nnodes 2 --nproc-per-node 8 … -m acutance train RECIPE --strategy fsdp
    """
    from acutance.lab import recipes
    from acutance.lab.train.start import train as start

    if show_list:
        list_rows(((name, recipes.summary(name)) for name in recipes.names()), "recipe", "what it is")
        return
    named = {"task.data_dir": data_dir, "loop.strategy": strategy}  # which --set overrules
    given = [f"{field}={json.dumps(str(value))}" for field, value in named.items() if value is not None]
    run, config = recipes.configured(recipe, [*given, *(assignments or ())], out, resume=resume)
    how: dict[str, Any] = {"recipe": recipe, "resume": resume, "device": device, "processes": processes}
    with stoppable(f"The last checkpoint is kept. {run.how_to_go_on()}"):
        result = start(config, run.folder, console=console, **how)
    if is_first_process():
        say(run.described(result))


def evaluate(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    split: Split = "test",
    data_dir: options.DataDir = None,
    weights: Weights = "last",
    multi_scale: Annotated[bool | None, option("Several scales, with flips.", "--multi-scale/--single-scale")] = None,
    assignments: Changes = None,
    device: options.Device = "auto",
    json_path: options.JSON = None,
) -> None:
    """Score a finished run on the test set. The result is kept in its folder, for `acutance compare`.

    Examples: acutance evaluate runs/cifar100-seed0 --data-dir /data

    acutance evaluate runs/camvid-seed0 --single-scale --set task.test_stride=64

    Several processes share the work: torchrun --nproc-per-node 2 -m acutance evaluate …
    """
    from acutance.lab.evaluate.evaluate import evaluate_run
    from acutance.lab.train.run import Run

    settings = list(assignments or [])
    if multi_scale is not None:
        if (kind := Run(run).config().task.kind) != "segmentation":
            asked = "--multi-scale" if multi_scale else "--single-scale"
            raise AcutanceError(f"{asked} is for runs of segmentation; {run} is one of {kind}: leave it out")
        settings.insert(0, f"task.multi_scale={str(multi_scale).lower()}")
    how: dict[str, Any] = {"split": split, "weights": weights, "data_dir": data_dir}  # it refuses unknown ones
    found = evaluate_run(run, settings=settings, device=device, **how)
    if not is_first_process():
        return
    for name, value in found.scores.items():
        say(f"{name} {value:.6g}")
    say(f"wrote {found.path(run)}")
    write(json_path, found.path(run).read_bytes())


def robustness(
    run: Annotated[Path, typer.Argument(help="The folder of a classifier's run, made by `acutance train`.")],
    data_dir: options.DataDir = None,
    corruptions: Annotated[str, option("Comma-separated names, all or none.")] = "all",
    severities: Annotated[str, option("Comma-separated, from 1 to 5.")] = "1,2,3,4,5",
    attacks: Annotated[str, option("fgsm:ε and pgd:ε:steps:size, in levels of 255, or none.")] = "fgsm:1,pgd:1",
    corrupted_dir: Annotated[Path | None, option("The published CIFAR-10-C or CIFAR-100-C.")] = None,
    split: Annotated[str, option("test, or val to make choices.")] = "test",
    weights: Weights = "last",
    limit: Annotated[int | None, option("Use only this many images; for ImageNet, of all classes.", min=1)] = None,
    seed: Annotated[int, option("The seed of corruptions and attacks.")] = 0,
    device: options.Device = "auto",
    json_path: Annotated[Path | None, option("The table.", "--json", show_default="RUN/robustness….json")] = None,
    markdown_path: Markdown = None,
) -> None:
    """Measure accuracy under 19 corruptions at 5 severities, FGSM and PGD. The same command resumes after a stop.

    `acutance compare --robustness` compares the tables of several runs.

    Example: acutance robustness runs/digits-seed0 --corruptions fog,contrast --attacks fgsm:8,pgd:8:20
    """
    from acutance.distributed import device as device_of
    from acutance.lab.evaluate.evaluate import weights_path
    from acutance.lab.robustness import CORRUPTIONS, evaluate, images_of, table_name
    from acutance.lab.train.run import Run

    path = weights_path(run, cast(Any, weights), split)  # it refuses unknown ones
    images = images_of(Run(run).config().task, split, data_dir=data_dir, limit=limit)
    target = json_path or run / table_name(split, weights, corrupted_dir)
    how: dict[str, Any] = {
        "corruptions": {"all": list(CORRUPTIONS), "none": []}.get(corruptions.strip(), words(corruptions)),
        "severities": ints(severities, "--severities"),
        "attacks": [] if attacks.strip() == "none" else words(attacks),
        "context": {"name": run.name, "split": split, "which": weights},
    }
    with stoppable():
        model = ac.load(path).to(device_of(device))
        table = evaluate(model, images, seed=seed, path=target, corrupted_dir=corrupted_dir, progress=True, **how)
    console.print(table.table())
    say(f"wrote {target}")
    write(markdown_path, table.markdown().encode())


def reproduce(
    target: Annotated[str | None, typer.Argument(help="A table or figure; --list names them.")] = None,
    data_dir: Annotated[Path | None, option("The folder with the data, in its usual layout.")] = None,
    out: Annotated[Path, option("Runs and results; targets share runs.")] = Path("acutance-reproduce"),
    seeds: Annotated[int | None, option("Runs for each row.", min=1, show_default="the target's own")] = None,
    assignments: Changes = None,
    samples: Annotated[int, option("Images or sequences on which models are measured.", min=1)] = 1000,
    device: options.Device = "auto",
    plan: Annotated[bool, option("Print the runs as commands, and stop.", "--plan")] = False,
    show_list: Annotated[bool, option("List all tables and figures with needs and costs.", "--list")] = False,
    queue: Annotated[Path | None, option("Run this file's jobs; results.jsonl beside it says what is done.")] = None,
    budget: Annotated[str, option("For a queue: the time it has, e.g. 9m. Only what fits is started.")] = "9m",
    workers: Annotated[int, option("For a queue: runs at once on one GPU.", min=1)] = 1,
    tables: Annotated[bool, option("For a queue: write its tables beside it, and stop.", "--tables")] = False,
    trial: Annotated[bool, option("For a queue: allow changed sources; results go to --out.", "--trial")] = False,
    job: Annotated[str | None, option("For a queue: run only this job, here.", hidden=True)] = None,
    stamp: Annotated[bool, option("Write provenance.json, for a copy without git history.", "--stamp")] = False,
) -> None:
    """Reproduce a table or figure: train what it needs, measure, and print measured beside published numbers.

    Finished runs are reused, and interrupted runs resume. To use several GPUs, or machines that share the folder, start
    the same command once on each. Every process takes the next run that no other trains, and the last one to finish
    prints the whole table.

    Examples: acutance reproduce neutreno-table1 --data-dir /data/imagenet --plan

    acutance reproduce oversmoothing-fig4

    acutance reproduce --queue docs/evidence/queue/queue.toml --budget 9m --workers 4 --data-dir /data
    """
    if stamp:
        from acutance.lab.train.provenance import write_stamp

        say(f"wrote {write_stamp()}")
        return
    if queue is not None:
        queue_options: dict[str, Any] = {"data_dir": data_dir, "device": device, "workers": workers, "trial": trial}
        _run_queue(queue, out, budget, job, tables, queue_options)
        return
    from acutance.lab.reproduce import TARGETS, TIMES, find
    from acutance.lab.reproduce.run import Session

    if show_list:
        rows = ((one.name, one.title, one.needs or one.notes) for one in TARGETS.values())
        list_rows(rows, "target", "what", "needs")
        say(f"\n{TIMES}")
        return
    if target is None:
        raise AcutanceError("name a table or figure; `acutance reproduce --list` names them all")
    how: dict[str, Any] = {"data_dir": data_dir, "seeds": seeds, "samples": samples, "device": device}
    session = Session(find(target), out, changes=tuple(assignments or ()), console=console, **how)
    if plan:
        typer.echo(session.script())
        return
    with stoppable():
        result = session.run()
    say(result.to_markdown(), end="")
    for path in (written := session.write(result)):
        say(f"wrote {path}")
    if not written:
        say("Another process has finished the rest meanwhile, and writes the whole result.")


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
    max_autotune: Annotated[bool, option("In steps, also time the baseline in this mode.", "--max-autotune")] = False,
    out: Annotated[Path, option("Where the CSV files go.")] = Path("acutance-bench"),
    device: options.Device = "auto",
) -> None:
    """Time the library on your own GPU, and write CSV files named by GPU, dtype and versions.

    All figures are ratios within one run: variants take turns with a baseline. A group, or part of one, is one file:

    - steps: training and inference with NeuTRENO against timm's plain ViT (parts: steps-32, steps-224).
    - end-to-end: images per second of the recipe for CIFAR-100, with augmentation (parts by batch: end-to-end-256,
      end-to-end-512, end-to-end-1024, end-to-end-2048).
    - augment: augmentation on the device. eigen: training with a negative spectrum, ViT-Ti⁻, against ViT-Ti.
    - remedies: every remedy in DeiT-Ti against the plain model, not compiled.
    - micro: the fused attention and MLP alone, against PyTorch's and against their floor in bytes and FLOPs.
    - efficiency: NeuTRENO's FLOPs, memory and time against plain, at inference.
    - measure, monitor: `measure` against a forward pass and whole matrices; a monitor against a training step.
    - long: language models, up to 131,072 tokens (parts: long-training, long-tokens, long-model).

    Each part takes a few minutes on an H200. On a CPU, toy sizes run in less than a minute for all: they show that
    everything works, not what it costs. You can stop it at any time: finished figures are in the files. A part that
    fails does not stop the others.

    Example: acutance bench --only micro,efficiency --quick
    """
    from acutance.distributed import device as device_of
    from acutance.lab.bench.run import chosen_groups, run_groups
    from acutance.lab.bench.timing import Settings

    names = chosen_groups(only)
    settings = Settings(device_of(device), quick, max_autotune)
    if not settings.on_gpu:
        say("No GPU: toy sizes on the CPU, to check that everything runs. The ratios mean nothing.")
    with stoppable(f"Finished figures are in {out}."):
        for path in run_groups(names, settings, out, console):
            say(f"wrote {path}")


@studies.command()
def depth(
    out: Annotated[Path, option("Where the table and the figure go.")] = Path("acutance-depth"),
    depths: Annotated[str, option("Comma-separated numbers of layers.")] = "12,48,96",
    seeds: Annotated[int, option("Networks per variant; with 2 or more, mean ± spread.", min=1)] = 3,
    dim: Annotated[int, option("Channels, a multiple of 3 (the heads).", min=3)] = 192,
) -> None:
    """How does smoothing grow with depth before any training? Plain, Post-LN, NeuTRENO, LayerScale, ViT⁻ and ViT⁺.

    Networks are drawn with DeiT's initialisation (σ = 0.02) and with Xavier's, and measured on the embedded digits.
    Takes about a minute. You can stop it and start it again: finished networks are reused.

    Example: acutance lab depth --depths 12,24 --seeds 2 --dim 48
    """
    from acutance.lab.studies.depth import DepthConfig, depth_study

    config = DepthConfig(depths=tuple(sorted(set(ints(depths, "--depths")))), dim=dim)
    with stoppable():
        study = depth_study(config, seeds=seeds, folder=out)
    _write(study, out)


@studies.command()
def kernel(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Checkpoints, runs, or models such as hf:gpt2.")],
    out: Annotated[Path, option("Where the table and the figure go.")] = Path("acutance-kernel"),
    samples: Annotated[int, option("Images of each split, or windows of text; Table 4 has 1000.", min=2)] = 1000,
    text: Annotated[Path | None, option("A text file or folder, instead of the digits.")] = None,
    tokens: Annotated[int | None, option("The length of a window of text.", min=2)] = None,
) -> None:
    """Are the learnt affinities a symmetric positive definite kernel, as NeuTRENO's Theorem 1 assumes?

    Reads each model on the embedded digits' training and test images, or on a text. Per layer and head it measures how
    far exp(q·k/√d) is from symmetric (0 to about 1) and from positive definite (0 to ½), for comparison also with its
    entries in random order. It also measures the alignment of the two gradients (Table 4: 1 is perfect), and whether
    the alignment is worse where the assumption is (a rank correlation below 0), pooled and within single layers. For a
    causal model, affinities are those before the mask. Runs whose names differ only in -seed0, -seed1, … are one
    variant: mean ± spread.

    Examples: acutance lab kernel acutance-demo/plain-seed0 acutance-demo/plain-seed1

    acutance lab kernel hf:gpt2 --text wiki.test.txt --tokens 128 --samples 16
    """
    from acutance.lab.studies.kernel import kernel_study, models_of

    if text is None and tokens is not None:
        raise AcutanceError("--tokens sets the length of a window of text: it needs --text FILE")
    _write(kernel_study(models_of(runs), samples=samples, text=text, tokens=tokens), out)


@studies.command()
def layers(
    model: options.Model,
    text: Annotated[Path, option("A text file, or a folder of text files, each read by itself.")],
    json_path: Annotated[Path, option("The record.", "--json")] = Path("layers.json"),
    tokens: Annotated[int | None, option("The length of a window of text.", min=2)] = None,
    batches: Annotated[int, option("Parts of the text; intervals are over these.", min=5)] = 8,
    windows: Annotated[int, option("Windows in each batch.", min=1)] = 8,
    leave_out: Annotated[int, option("First tokens left out of HFC/LFC; from 1 on also special ones.", min=0)] = 0,
) -> None:
    """How much does each layer of a language model smooth: by its weights H, and on a text?

    Per layer: the share of eigenvalues of H with a negative real part, how often μ = 1 dominates I + H⊗A, and the
    change of log HFC/LFC across the attention branch and across the rest of the block. The windows are evenly spaced.
    In many causal models the first token is larger than all others together: also run it with --leave-out 1.

    Example: acutance lab layers hf:gpt2 --text wiki.test.txt --tokens 256 --json gpt2.json
    """
    import torch

    from acutance.lab.studies.layers import layers_study
    from acutance.lab.train.provenance import made

    torch.manual_seed(0)  # for parameters that the file leaves out; nothing here reads them
    sizes: dict[str, Any] = {"tokens": tokens, "batches": batches, "windows": windows, "leave_out": leave_out}
    study = layers_study(ac.io.load_model(model), text, **sizes)
    console.print(study.table())
    write(json_path, study.to_json(made("studied")))


def _write(study: Any, out: Path) -> None:
    from acutance.lab.train.provenance import made

    written = study.save(out, context=made("studied"))
    console.print(study.table())
    say(f"wrote {', '.join(path.name for path in written)} into {out}")
