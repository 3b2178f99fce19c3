"""evaluate: a finished run's scores on a split, written into its folder with all that is needed to reproduce them.

The file's name says what was evaluated, so the last and the best weights, or one scale and several, do not collide.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import reduce
from pathlib import Path
from typing import Any, Literal, Self

import torch

from acutance import distributed as processes
from acutance.errors import AcutanceError
from acutance.files.atomic import atomic_write, read_json
from acutance.io.saving import load
from acutance.lab.files import digest
from acutance.lab.tasks import Task, task_class
from acutance.lab.train.config import Config, override
from acutance.lab.train.provenance import made
from acutance.lab.train.run import Run, changes, in_a_name

FORMAT = "acutance-evaluation/1"
Weights = Literal["last", "best"]
SPLITS = ("train", "val", "test")
# Where the data is, and how it is read. These fields do not change scores.
ELSEWHERE = frozenset({"task.data_dir", "task.workers", "task.windows", "task.windows.at_once"})
# Fields that must not change: other data has other classes or words, and another held-out slice was trained on.
DATA = frozenset({"task.dataset", "task.corpus", "task.held_out_every"})


@dataclass(frozen=True)
class Evaluation:
    """Scores, and how they were computed."""

    split: str
    weights: Weights
    settings: tuple[str, ...]  # changed fields that the scores depend on, as --set takes them
    scores: Mapping[str, float]
    headline: str
    higher_is_better: bool
    model: str  # SHA-256 of the weights' file
    precision: str
    command: list[str]
    evaluated: str
    versions: Mapping[str, str]
    hardware: Mapping[str, Any]
    git: Mapping[str, Any] | None
    processes: int = 1

    def path(self, folder: Path) -> Path:
        """`evaluation-test-best.json` or `evaluation-val-last-task.length=64.json` in the run's folder."""
        changed = [in_a_name(",".join(self.settings))] if self.settings else []
        return folder / f"evaluation-{'-'.join([self.split, self.weights, *changed])}.json"

    def save(self, folder: Path) -> Path:
        return atomic_write(self.path(folder), json.dumps({"format": FORMAT, **asdict(self)}, indent=1).encode())

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> Self:
        """Read what `save` wrote. Fields that an earlier version did not write have their defaults."""
        parts = {field.name: body[field.name] for field in fields(cls) if field.name in body}
        return cls(**{**parts, "settings": tuple(parts["settings"])})


def weights_file(folder: Path, weights: Weights, split: str) -> Path:
    """The path of the last or the best model, which need not exist.

    The held-out slice, and weights chosen on it, are refused for a run that was trained on the whole training set.
    """
    if weights not in ("last", "best"):
        raise AcutanceError(f"weights are last or best, not {weights!r}")
    run = Run(folder)
    if getattr(run.config().task, "train_on", None) == "all" and (split == "val" or weights == "best"):
        what = f"{'the split val' if split == 'val' else 'weights chosen on it'} would flatter it"
        advice = "use --split test with the last weights, or train with --set task.train_on=train"
        raise AcutanceError(f"{folder} was trained on all of its training set, so {what}: {advice}")
    path: Path = run.model_path if weights == "last" else run.best_path
    return path


def weights_path(folder: Path, weights: Weights, split: str) -> Path:
    """The same for a finished run; an unfinished one is refused."""
    if not (path := weights_file(folder, weights, split)).is_file():
        raise AcutanceError(f"there is no {path}: the run is not finished. {Run(folder).how_to_go_on()}")
    return path


def read_evaluations(folder: Path, split: str) -> list[Evaluation]:
    """All earlier evaluations on a split, of any weights and settings."""
    paths = sorted(folder.glob(f"evaluation-{split}-*.json"))
    return [read_json(path, FORMAT, Evaluation.from_dict) for path in paths]


def read_evaluation(
    folder: Path, split: str, weights: Weights = "last", settings: Sequence[str] = ()
) -> Evaluation | None:
    """The earlier evaluation with these settings, if there is one and the weights are still the same."""
    wanted = weights, changed_settings(folder, split, settings)
    for found in read_evaluations(folder, split):
        if (found.weights, found.settings) == wanted:
            return found if found.model == digest(weights_path(folder, weights, split)) else None
    return None


def changed_settings(folder: Path, split: str, settings: Sequence[str]) -> tuple[str, ...]:
    """The fields that these settings actually change, in order. Fields without effect on an evaluation are refused."""
    own = Run(folder).config()
    changed = override(own, settings)
    task = task_class(own.task.kind)
    taken = {f"task.{name}" for split in SPLITS for name in task.evaluated_by(split)} - DATA
    if others := changes(own.to_dict(), changed.to_dict()).keys() - taken - ELSEWHERE:
        why = "it takes the trained model and its own data; here, --set takes"
        known = ", ".join(sorted({*taken, "task.data_dir"}))
        raise AcutanceError(f"an evaluation cannot change {', '.join(sorted(others))}: {why} {known}")
    return tuple(word for word in evaluated_with(changed, split) if word not in evaluated_with(own, split))


def evaluated_with(config: Config, split: str) -> tuple[str, ...]:
    """All fields that scores on a split depend on, apart from the model, as --set takes them."""
    names = sorted(task_class(config.task.kind).evaluated_by(split))
    return tuple(assignment(f"task.{name}", reduce(getattr, name.split("."), config.task)) for name in names)


def assignment(name: str, value: Any) -> str:
    """`name=value` as --set takes it."""
    return f"{name}={value if isinstance(value, str) else 'none' if value is None else json.dumps(value)}"


def evaluate_run(
    folder: Path | str,
    *,
    split: str = "test",
    weights: Weights = "last",
    data_dir: Path | str | None = None,
    settings: Sequence[str] = (),
    device: str = "auto",
) -> Evaluation:
    """Score a run's model in float32 and write the result into its folder, as `evaluation-SPLIT-WEIGHTS.json`.

    Recipes report the last weights; the best weights were chosen on the held-out slice. `settings` change fields that
    the evaluation reads, e.g. `task.multi_scale=false`; if scores depend on them, they are part of the file's name.
    Under torchrun the processes share the work.
    """
    where = Path(folder)
    path = weights_path(where, weights, split)
    changed = changed_settings(where, split, settings)
    config = override(with_data_dir(Run(where).config(), data_dir), settings)
    with processes.joined() as (rank, world):
        task = task_of(config, processes.device(device))
        scores = task.evaluate(load(path).to(task.device), split=split)
        found = Evaluation(
            *(split, weights, changed, scores, task.headline, task.higher_is_better, digest(path), "float32"),
            **made("evaluated"),
            processes=world,
        )
        if rank == 0:
            found.save(where)
    return found


def with_data_dir(config: Config, data_dir: Path | str | None) -> Config:
    """The same configuration with its data in another place."""
    return config if data_dir is None else replace(config, task=replace(config.task, data_dir=str(data_dir)))


def task_of(config: Config, device: str | torch.device) -> Task[Any]:
    """The task of a configuration. This reads its data."""
    return task_class(config.task.kind)(config.task, seed=config.loop.seed, device=torch.device(device))
