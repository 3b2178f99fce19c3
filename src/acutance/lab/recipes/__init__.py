"""Recipes. Each is a function whose docstring says what to expect, what it costs and which command runs it.

Every public function in this folder's files is a recipe. `acutance train --list` shows the first line of its docstring.
"""

import os
import pkgutil
from collections.abc import Callable, Sequence
from importlib import import_module
from inspect import isfunction
from pathlib import Path

from acutance.errors import AcutanceError
from acutance.lab.train.config import Config, hint, override
from acutance.lab.train.engine import gather_by_torchrun, raise_on_all_ranks
from acutance.lab.train.run import Run, default_folder

_FILES = [import_module(f"{__name__}.{file.name}") for file in pkgutil.iter_modules(__path__)]
RECIPES: dict[str, Callable[[], Config]] = {
    name: found
    for file in _FILES
    for name, found in vars(file).items()
    if isfunction(found) and found.__module__ == file.__name__ and not name.startswith("_")
}


def names() -> list[str]:
    """All recipes."""
    return sorted(RECIPES)


def summary(name: str) -> str:
    """The first line of a recipe's docstring."""
    return (RECIPES[name].__doc__ or "").partition("\n")[0]


def configured(
    name: str | None, assignments: Sequence[str], out: Path | None = None, *, resume: bool = False
) -> tuple[Run, Config]:
    """A run and its configuration with these assignments: the recipe's, or with `resume` that of the run in `out`."""
    _refuse_tasks_of_srun()
    if name is None and not resume:
        raise AcutanceError(f"name a recipe: {', '.join(names())} (--list says what they are)")
    if not resume:
        plain = load(str(name))
        config = override(plain, assignments)
        return Run(out or default_folder(str(name), plain, config)), config
    if out is None:
        raise AcutanceError("--resume goes on with a run: name its folder with --out")
    run = Run(out)
    begun = raise_on_all_ranks(run.config, gather_by_torchrun)
    if name not in (None, recipe := run.record()["recipe"]):
        raise AcutanceError(f"{out} was begun with the recipe {recipe}, not {name}: leave the name out")
    return run, override(begun, assignments)


def _refuse_tasks_of_srun() -> None:
    """Refuse several tasks of srun without torchrun: each would train the whole run."""
    tasks = int(os.environ.get("SLURM_NTASKS", "1"))
    if tasks > 1 and "SLURM_PROCID" in os.environ and "LOCAL_WORLD_SIZE" not in os.environ:
        raise AcutanceError(
            f"srun started {tasks} tasks, which know nothing of each other: start one per node, and torchrun in it "
            "(srun --ntasks-per-node 1 torchrun --nnodes … --rdzv-backend c10d … -m acutance train …)"
        )


def load(name: str) -> Config:
    """The configuration of a recipe."""
    if name not in RECIPES:
        raise AcutanceError(f"there is no recipe {name!r}{hint(name, names())}; there are {', '.join(names())}")
    return RECIPES[name]()
