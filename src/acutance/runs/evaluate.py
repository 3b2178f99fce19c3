"""evaluate: a finished run's scores on a split, written beside it with what is needed to get them again."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch

from acutance import processes
from acutance.errors import AcutanceError
from acutance.files import atomic_write, read_json
from acutance.saving import load
from acutance.tasks import Task, task_class
from acutance.train.config import Config
from acutance.train.overrides import override
from acutance.train.run import Run, git_state, hardware, versions

FORMAT = "acutance-evaluation/1"
Weights = Literal["last", "best"]


@dataclass(frozen=True)
class Evaluation:
    """Scores, and what they were got from and with."""

    split: str
    weights: Weights
    settings: tuple[str, ...]  # fields that were changed for the evaluation, as --set takes them
    scores: Mapping[str, float]
    headline: str
    higher_is_better: bool
    model: str  # SHA-256 of the weights' file
    precision: str
    command: tuple[str, ...]
    evaluated: str
    versions: Mapping[str, str]
    hardware: Mapping[str, Any]
    git: Mapping[str, Any] | None

    def save(self, folder: Path) -> Path:
        """Write it into the run's folder."""
        body = {"format": FORMAT, **asdict(self)}
        return atomic_write(evaluation_path(folder, self.split), json.dumps(body, indent=1).encode())

    def fits(self, folder: Path, weights: Weights, settings: Sequence[str]) -> bool:
        """Whether it is what evaluating now would give: the same weights, read in the same way."""
        same = (self.weights, self.settings) == (weights, tuple(settings))
        return same and self.model == _digest(weights_path(folder, weights))


def evaluation_path(folder: Path, split: str) -> Path:
    """Where an evaluation lies in a run's folder."""
    return folder / f"evaluation-{split}.json"


def weights_path(folder: Path, weights: Weights) -> Path:
    """The last or the best model of a run that is finished."""
    run = Run(folder)
    path = run.model_path if weights == "last" else run.best_path
    run.config()  # says what is no run
    if not path.is_file():
        raise AcutanceError(f"there is no {path}: the run is not finished. {run.how_to_go_on()}")
    return path


def refuse_seen(folder: Path, config: Config, split: str, weights: Weights = "last") -> None:
    """Where a run was trained on all of the training set, its held-out slice is no test of it, nor a choice by it."""
    if getattr(config.task, "train_on", None) == "all" and (split == "val" or weights == "best"):
        what = "the split val" if split == "val" else "weights chosen on it"
        raise AcutanceError(
            f"{folder} was trained on all of its training set, the held-out slice included, so {what} would flatter "
            "it: use --split test with the last weights, or train with --set task.train_on=train"
        )


def read_evaluation(folder: Path, split: str) -> Evaluation | None:
    """What was evaluated before, if it was."""
    path = evaluation_path(folder, split)
    if not path.exists():
        return None
    return read_json(path, FORMAT, _from_body)


def evaluate_run(
    folder: Path | str,
    *,
    split: str = "test",
    weights: Weights = "last",
    data_dir: Path | str | None = None,
    settings: Sequence[str] = (),
    device: str = "auto",
) -> Evaluation:
    """Score a run's model in float32 and write the result into its folder, as `evaluation-SPLIT.json`.

    Args:
        folder: the run's.
        split: "test", or "val" or "train" of the training set.
        weights: the last ones, which recipes report, or the best on the held-out slice.
        data_dir: where the data is now, if it moved.
        settings: fields to change, e.g. `task.multi_scale=false`.
        device: cpu, cuda or auto. Under torchrun the processes share the work.
    """
    if weights not in ("last", "best"):
        raise AcutanceError(f"weights are last or best, not {weights!r}")
    where = Path(folder)
    path = weights_path(where, weights)
    config = override(with_data_dir(Run(where).config(), data_dir), settings)
    refuse_seen(where, Run(where).config(), split, weights)
    with processes.joined() as (rank, _):
        task = task_of(config, processes.device(device))
        model = load(path).to(task.device)
        scores = task.evaluate(model, split=split)
        found = Evaluation(
            split=split,
            weights=weights,
            settings=tuple(settings),
            scores=scores,
            headline=task.headline,
            higher_is_better=task.higher_is_better,
            model=_digest(path),
            precision="float32",
            command=(Path(sys.argv[0]).name, *sys.argv[1:]),
            evaluated=datetime.now(UTC).isoformat(timespec="seconds"),
            versions=versions(),
            hardware=hardware(),
            git=git_state(),
        )
        if rank == 0:
            found.save(where)
    return found


def with_data_dir(config: Config, data_dir: Path | str | None) -> Config:
    """The same configuration with its data in another place."""
    if data_dir is None:
        return config
    return replace(config, task=replace(config.task, data_dir=str(data_dir)))


def task_of(config: Config, device: str | torch.device) -> Task[Any]:
    """The task of a configuration, its data read."""
    return task_class(config.task.kind)(config.task, seed=config.loop.seed, device=torch.device(device))


def _from_body(body: Mapping[str, Any]) -> Evaluation:
    known = {field.name for field in fields(Evaluation)}
    parts = {name: value for name, value in body.items() if name in known}
    return Evaluation(**{**parts, "settings": tuple(parts["settings"]), "command": tuple(parts["command"])})


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
