"""Going on with a run: what may change then, and what would make it another run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from acutance.errors import AcutanceError
from acutance.files.atomic import digest
from acutance.lab.tasks.base import STARTS
from acutance.lab.train.checkpoint import Store
from acutance.lab.train.config import Config, OptimConfig, ScheduleConfig
from acutance.lab.train.run import INCIDENTAL, Run, changes

# Where the data lie, on what and how the work is done, how often it is looked at: the run stays what it is.
HOW = (INCIDENTAL - {"loop.seed"}) | {
    "loop.accumulate", "loop.compile", "loop.deterministic", "loop.evaluate_every", "task.shards", "task.test_shards",
    "task.windows", "task.windows.at_once",
}  # fmt: skip
# How far the run goes and how fast it learns on the way: steps that are left can be made otherwise.
COURSE = {
    "loop.epochs",
    *(f"optim.{field.name}" for field in fields(OptimConfig) if field.name != "name"),
    *(f"schedule.{field.name}" for field in fields(ScheduleConfig)),
}


def changed_fields(run: Run, config: Config) -> dict[str, list[Any]]:
    """The fields in which a configuration differs from the run's, as [the run's, the new one]."""
    return changes(run.config().to_dict(), config.to_dict())


def refuse_another_run(run: Run, changed: Mapping[str, list[Any]]) -> None:
    """Weights of one model would be called another, and compared as such."""
    if "optim.name" in changed:
        old, new = changed["optim.name"]
        raise AcutanceError(
            f"{run.folder} is trained by {old}, whose moments {new} cannot go on from: leave optim.name as it is, or "
            f"start anew from its weights (--set task.weights={run.model_path})"
        )
    others = [name for name, pair in changed.items() if name not in HOW | COURSE and not _only_moved(run, name, pair)]
    if others:
        raise AcutanceError(
            f"{run.folder} cannot go on with {_listed(changed, others)}, which would make it another run: leave that "
            "as it was, or begin one with another --out"
        )


def refuse_without_checkpoints(run: Run) -> None:
    """Training from the first step again would end on top of the model that is there."""
    if (run.result_path.exists() or run.model_path.exists()) and not has_checkpoints(run):
        raise AcutanceError(
            f"{run.folder} is finished, and {run.checkpoints} holds no checkpoint to go on from: start anew with "
            "another --out"
        )


def refuse_without_effect(run: Run, changed: Mapping[str, list[Any]], step: int, total: int) -> None:
    """Where no step is left a change would reach the record alone. What was cut may still be ended where it stands."""
    if step < total:
        return
    allowed = () if run.result_path.exists() else HOW | {"loop.epochs"}
    if idle := [name for name in changed if name not in allowed]:
        raise AcutanceError(
            f"nothing is left to train: {run.folder} is at step {step} of {total}, so {_listed(changed, idle)} would "
            "change its record alone. Leave that as it was, or set more epochs (--set loop.epochs=…)"
        )


def has_checkpoints(run: Run) -> bool:
    """Whether there is something to go on from, whole or not."""
    return Store(run.checkpoints, 1).newest() is not None


def _only_moved(run: Run, name: str, pair: list[Any]) -> bool:
    """Whether a path to what the run started from now leads to the same file in another place."""
    start, new = run.start(), pair[1]
    if name not in {f"task.{field}" for field in STARTS} or start is None or new is None:
        return False
    return Path(new).is_file() and digest(Path(new)) == start["sha256"]


def _listed(changed: Mapping[str, list[Any]], names: Iterable[str]) -> str:
    return ", ".join(f"{name} {_shown(changed[name][1])} instead of {_shown(changed[name][0])}" for name in names)


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)
