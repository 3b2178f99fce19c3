"""Training, and what is asked of runs: `acutance train`, `evaluate`, `compare` and `robustness`."""

import json
import os
from pathlib import Path
from typing import Annotated, Any, cast

import typer

import acutance as ac
from acutance.cli import options
from acutance.cli.options import JSON, Changes, DataDir, Device, Markdown, Split, Weights, option, say, stoppable, write
from acutance.errors import AcutanceError


def train(
    recipe: Annotated[str | None, typer.Argument(help="A recipe's name; --list shows them.")] = None,
    data_dir: Annotated[Path | None, option("The folder with the data, in its usual layout.")] = None,
    assignments: Changes = None,
    out: Annotated[Path | None, option("The run's folder.", show_default="runs/RECIPE-CHANGES-seedSEED")] = None,
    resume: Annotated[bool, option("Go on with the run in --out.", "--resume")] = False,
    strategy: Annotated[str | None, option("single, ddp or fsdp; by default ddp with several processes.")] = None,
    processes: Annotated[int | None, option("Processes to start here; torchrun starts its own.", min=1)] = None,
    device: Device = "auto",
    show_list: Annotated[bool, option("List the recipes.", "--list")] = False,
) -> None:
    """Train a model by a recipe, with checkpoints that a killed run goes on from to the same bits.

    Examples: acutance train digits --set loop.seed=1 --set task.model.mitigation=neutreno:0.6

    acutance train --out runs/digits-neutreno-0.6-seed1 --resume

    Several machines: torchrun --nnodes 2 --nproc-per-node 8 … -m acutance train RECIPE --strategy fsdp
    """
    from acutance.lab import recipes
    from acutance.lab.train import override
    from acutance.lab.train.ranks import gather_by_torchrun, raise_on_all_ranks
    from acutance.lab.train.run import Run, default_folder
    from acutance.lab.train.start import train as start

    if show_list:
        options.list_rows(((name, recipes.summary(name)) for name in recipes.names()), "recipe", "what it is")
        return
    if resume and out is None:
        raise AcutanceError("--resume goes on with a run: name its folder with --out")
    tasks = int(os.environ.get("SLURM_NTASKS", "1"))
    if tasks > 1 and "SLURM_PROCID" in os.environ and "LOCAL_WORLD_SIZE" not in os.environ:  # each would train it all
        raise AcutanceError(
            f"srun started {tasks} tasks, which know nothing of each other: start one per node, and torchrun in it "
            "(srun --ntasks-per-node 1 torchrun --nnodes … --rdzv-backend c10d … -m acutance train …)"
        )
    if recipe is None and not resume:
        raise AcutanceError(f"name a recipe: {', '.join(recipes.names())} (--list says what they are)")
    begun = Run(out) if out is not None and resume else None
    config = raise_on_all_ranks(begun.config, gather_by_torchrun) if begun is not None else recipes.load(str(recipe))
    if begun is not None and recipe not in (None, begun.recipe()):
        raise AcutanceError(f"{out} was begun with the recipe {begun.recipe()}, not {recipe}: leave the name out")
    named = {"task.data_dir": data_dir and str(data_dir), "loop.strategy": strategy}  # which --set overrules
    given = [f"{field}={json.dumps(value)}" for field, value in named.items() if value is not None]
    config = override(config, [*given, *(assignments or ())])
    folder = out or default_folder(str(recipe), recipes.load(str(recipe)), config)
    how: dict[str, Any] = {"recipe": recipe, "resume": resume, "device": device, "processes": processes}
    with stoppable(f"The last checkpoint is kept. {Run(folder).how_to_go_on()}"):
        result = start(config, folder, console=options.console, **how)
    if not options.is_first_process():
        return
    name, best, seen = result["headline"], result["best"], getattr(config.task, "train_on", None) == "all"
    score = "no number" if result["scores"][name] is None else f"{result['scores'][name]:.4g}"
    where = "a slice that was trained on (task.train_on=all)" if seen else "the held-out slice"
    better = "" if best is None else f", best {best['score']:.4g} after step {best['step']}"
    test = f"; acutance evaluate {folder} scores it on the test set" if seen else ""
    say(f"{name} {score} on {where} after step {result['step']}{better}; models and logs are in {folder}{test}")


def evaluate(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    split: Split = "test",
    data_dir: DataDir = None,
    weights: Weights = "last",
    multi_scale: Annotated[bool | None, option("Of segmentation, with flips.", "--multi-scale/--single-scale")] = None,
    assignments: Changes = None,
    device: Device = "auto",
    json_path: JSON = None,
) -> None:
    """Score a finished run on the test set; the result is kept in its folder, for `acutance compare`.

    Examples: acutance evaluate runs/cifar100-seed0 --data-dir /data

    acutance evaluate runs/camvid-seed0 --single-scale --set task.test_stride=64

    Several processes share the work: torchrun --nproc-per-node 2 -m acutance evaluate …
    """
    from acutance.distributed import joined
    from acutance.lab.evaluate.evaluate import evaluate_run
    from acutance.lab.train.run import Run

    settings = list(assignments or [])
    if multi_scale is not None:
        if (kind := Run(run).config().task.kind) != "segmentation":
            asked = "--multi-scale" if multi_scale else "--single-scale"
            raise AcutanceError(f"{asked} is for runs of segmentation; {run} is one of {kind}: leave it out")
        settings.insert(0, f"task.multi_scale={str(multi_scale).lower()}")
    how: dict[str, Any] = {"split": split, "weights": weights, "data_dir": data_dir}  # it refuses unknown ones
    with joined() as (rank, _):
        found = evaluate_run(run, settings=settings, device=device, **how)
    if rank > 0:
        return
    for name, value in found.scores.items():
        say(f"{name} {value:.6g}")
    say(f"wrote {found.path(run)}")
    write(json_path, found.path(run).read_bytes())


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs; those of one group by seed.")],
    split: Split = "test",
    score: Annotated[str | None, option("Which score; by default the task's own.")] = None,
    weights: Annotated[str | None, option("Scores of the last or the best weights.")] = None,
    assignments: Annotated[list[str] | None, option("Scores of evaluations with this field changed.", "--set")] = None,
    robustness: Annotated[bool, option("What `acutance robustness` measured.", "--robustness")] = False,
    markdown_path: Markdown = None,
    json_path: JSON = None,
) -> None:
    """Compare runs: those that differ in their seed only are one row, with mean ± standard deviation.

    Each row is also compared with the first over the seeds that both have, by an exact paired test: the share of all
    choices of signs of the differences whose mean is as far from 0. All scores must have come about in the same way,
    which is printed: the same weights, the same settings of the evaluation, the same precision.

    Examples: acutance compare runs/plain-seed* runs/neutreno-seed*

    acutance compare runs/plain-seed* runs/neutreno-seed* --robustness
    """
    from acutance.lab.evaluate.compare import compare as compared
    from acutance.lab.evaluate.compare import compare_robustness

    if robustness and assignments:
        raise AcutanceError("--robustness takes no --set: it finds the tables that were measured in the same way")
    how: dict[str, Any] = {"split": split, "score": score, "weights": weights}
    if robustness:
        tables = compare_robustness(runs, **how | {"weights": weights or "last"})
        table, body = "\n".join(one.to_markdown() for one in tables), [one.to_dict() for one in tables]
    else:
        found = compared(runs, settings=assignments, **how)
        table, body = found.to_markdown(), cast(Any, found.to_dict())
    say(table, end="")
    write(markdown_path, table.encode())
    write(json_path, json.dumps(body, indent=1, ensure_ascii=False).encode())


def robustness(
    run: Annotated[Path, typer.Argument(help="The folder of a run that `acutance train` made, of a classifier.")],
    data_dir: DataDir = None,
    corruptions: Annotated[str, option("Comma-separated names, all or none.")] = "all",
    severities: Annotated[str, option("Comma-separated, from 1 to 5.")] = "1,2,3,4,5",
    attacks: Annotated[str, option("fgsm:ε and pgd:ε:steps:size, in levels of 255, or none.")] = "fgsm:1,pgd:1",
    corrupted_dir: Annotated[Path | None, option("The published CIFAR-10-C or CIFAR-100-C.")] = None,
    split: Annotated[str, option("test, or val to choose by.")] = "test",
    weights: Weights = "last",
    limit: Annotated[int | None, option("Only so many images; of ImageNet some of each class.", min=1)] = None,
    seed: Annotated[int, option("Of what is drawn.")] = 0,
    device: Device = "auto",
    json_path: Annotated[Path | None, option("The table.", "--json", show_default="RUN/robustness….json")] = None,
    markdown_path: Markdown = None,
) -> None:
    """Measure 19 corruptions at 5 severities, FGSM and PGD. Stopped, the same command goes on.

    `acutance compare --robustness` puts the tables of several runs side by side.

    Example: acutance robustness runs/digits-seed0 --corruptions fog,contrast --attacks fgsm:8,pgd:8:20
    """
    from acutance.distributed import device as device_of
    from acutance.lab.evaluate.evaluate import refuse_seen, weights_file, weights_path
    from acutance.lab.robustness import CORRUPTIONS, evaluate, images_of, table_name
    from acutance.lab.train.run import Run

    config, chosen = Run(run).config(), cast(Any, weights)
    weights_file(run, chosen)  # refuses unknown ones
    refuse_seen(run, config, split, chosen)
    path = weights_path(run, chosen)
    images = images_of(config.task, split, data_dir=data_dir, limit=limit)
    target = json_path or run / table_name(split, weights, corrupted_dir)
    how: dict[str, Any] = {
        "corruptions": {"all": list(CORRUPTIONS), "none": []}.get(corruptions.strip(), options.words(corruptions)),
        "severities": options.ints(severities, "--severities"),
        "attacks": [] if attacks.strip() == "none" else options.words(attacks),
        "context": {"name": run.name, "split": split, "which": weights},
    }
    with stoppable():
        model = ac.load(path).to(device_of(device))
        table = evaluate(model, images, seed=seed, path=target, corrupted_dir=corrupted_dir, progress=True, **how)
    options.console.print(table.table())
    say(f"wrote {target}")
    write(markdown_path, table.markdown().encode())
