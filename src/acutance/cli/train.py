"""`acutance train`."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from acutance.cli.options import Changes, Device, console, is_first_process, list_rows, option, say, stoppable
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
        list_rows(((name, recipes.summary(name)) for name in recipes.names()), "recipe", "what it is")
        return
    if resume and out is None:
        raise AcutanceError("--resume goes on with a run: name its folder with --out")
    _refuse_rivals()
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
    options: dict[str, Any] = {"recipe": recipe, "resume": resume, "device": device, "processes": processes}
    with stoppable(f"The last checkpoint is kept. {Run(folder).how_to_go_on()}"):
        result = start(config, folder, console=console, **options)
    if is_first_process():
        say(_verdict(folder, config, result))


def _refuse_rivals() -> None:
    """Tasks of srun would each train the whole run."""
    tasks = int(os.environ.get("SLURM_NTASKS", "1"))
    if tasks > 1 and "SLURM_PROCID" in os.environ and "LOCAL_WORLD_SIZE" not in os.environ:
        raise AcutanceError(
            f"srun started {tasks} tasks, which know nothing of each other: start one per node, and torchrun in it "
            "(srun --ntasks-per-node 1 torchrun --nnodes … --rdzv-backend c10d … -m acutance train …)"
        )


def _verdict(folder: Path, config: Any, result: dict[str, Any]) -> str:
    name, best = result["headline"], result["best"]
    score = result["scores"][name]  # null if it is no number
    seen = getattr(config.task, "train_on", None) == "all"
    where = "a slice that was trained on (task.train_on=all)" if seen else "the held-out slice"
    words = f"{name} {'no number' if score is None else f'{score:.4g}'} on {where} after step {result['step']}"
    if best is not None:
        words += f", best {best['score']:.4g} after step {best['step']}"
    test = f"; acutance evaluate {folder} scores it on the test set" if seen else ""
    return f"{words}; models and logs are in {folder}{test}"
