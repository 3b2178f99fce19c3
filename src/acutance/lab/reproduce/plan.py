"""The runs that a target needs, in an order in which they can be trained."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from acutance.errors import AcutanceError
from acutance.files import locks
from acutance.files.atomic import atomic_write
from acutance.lab import recipes
from acutance.lab.data import load_images, load_segmentation
from acutance.lab.data.tokens import corpus_files
from acutance.lab.evaluate.evaluate import with_data_dir
from acutance.lab.reproduce.target import Training
from acutance.lab.tasks.base import STARTS
from acutance.lab.tasks.imagenet import load_imagenet
from acutance.lab.train.config import Config, incidental_fields, override
from acutance.lab.train.log import DivergedError
from acutance.lab.train.run import Run, changes
from acutance.lab.train.start import train

# What is read to see that a task's data is there. For "val" of ImageNet all of train/ is listed.
LOADERS: dict[str, Callable[[Any], object]] = {
    "classification": lambda t: (load_images(t.dataset, t.data_dir, "all"), load_images(t.dataset, t.data_dir, "test")),
    "imagenet": lambda t: (load_imagenet(t, "val"), load_imagenet(t, "test")),
    "segmentation": lambda t: [load_segmentation(t.dataset, t.data_dir, "all" if i else "test") for i in range(2)],
    "language": lambda t: corpus_files(t.corpus, t.data_dir),
}
PLACE = ("kind", "dataset", "corpus", "data_dir", "shards", "test_shards", "held_out_every", "train_on")


@dataclass(frozen=True)
class Planned:
    """One run: a training and a seed."""

    recipe: str
    config: Config
    run: Run
    base: Planned | None = None  # the run it starts from

    @property
    def label(self) -> str:
        """The name of its folder."""
        return self.run.folder.name

    @property
    def divergence(self) -> str | None:
        """The message of a run whose loss stopped being a number."""
        path = self.run.folder / "diverged.txt"
        return path.read_text(encoding="utf-8") if path.is_file() else None

    @property
    def state(self) -> str:
        """finished, diverged, begun or new."""
        if self.run.result() is not None:
            return "finished"
        if self.divergence is not None:
            return "diverged"
        return "begun" if self.run.exists() else "new"

    @property
    def is_open(self) -> bool:
        """Whether there is something left to train."""
        return self.state in ("new", "begun")

    @property
    def lock_path(self) -> Path:
        """Held by the `reproduce` that trains it. It lies beside the folder, which may not exist yet."""
        return self.run.folder.with_name(f".{self.label}.lock")

    @contextmanager
    def taken(self) -> Iterator[str | None]:
        """Take the run. Yields None, or the process that trains it already, by `reproduce` or by `train`."""
        with locks.held(self.lock_path) as mine:
            if not mine:
                yield locks.holder(self.lock_path)
                return
            command = self.run.lock_path
            with locks.held(command) if command.exists() else nullcontext(True) as free:
                who = None if free else locks.holder(command)
            yield who  # `train` takes the command's lock itself, so it is released here

    def command(self) -> str | None:
        """The command that trains what is left, e.g. under torchrun; `reproduce` then finds the run finished."""
        if not self.is_open:
            return None
        differing = changes(recipes.load(self.recipe).to_dict(), self.config.to_dict())
        fields = [word for name, (_, value) in differing.items() for word in ("--set", f"{name}={_text(value)}")]
        resume = ["--resume"] if self.run.exists() else []
        return shlex.join(["acutance", "train", self.recipe, "--out", str(self.run.folder), *resume, *fields])

    def check(self) -> None:
        """Refuse to go on with a run that was begun with other settings."""
        if not self.run.exists():
            return
        found = changes(self.run.config().to_dict(), self.config.to_dict())
        free = incidental_fields(self.config) | {f"task.{name}" for name in STARTS}
        differing = {name: pair for name, pair in found.items() if name not in free}
        if differing:
            words = ", ".join(f"{name} {old!r} instead of {new!r}" for name, (old, new) in differing.items())
            raise AcutanceError(
                f"{self.run.folder} is a run with {words}: name another folder with --out, or the same --set as then"
            )

    def train(self, device: str, console: Console) -> None:
        """Train what is left. Divergence is a result too, and kept."""
        self.check()
        if not self.is_open:
            return
        if self.config.loop.compile:
            torch.compiler.reset()  # many runs in one process would reach the limit on recompilations
        told = {"recipe": self.recipe, "resume": self.run.exists()}
        try:
            train(self.config, self.run.folder, **told, device=device, console=console)  # type: ignore[arg-type]
        except DivergedError as error:
            atomic_write(self.run.folder / "diverged.txt", str(error).encode())


@dataclass(frozen=True)
class Planner:
    """Makes runs of trainings: their folder, their data, and the changes in all of them."""

    folder: Path
    data_dir: Path | None
    changes: tuple[str, ...]

    def plan(self, trainings: Iterable[Training], seeds: Sequence[int]) -> list[Planned]:
        """All runs, each once and after the one it starts from."""
        ordered: dict[str, Planned] = {}
        for seed in seeds:
            for training in trainings:
                planned = self.one(training, seed)
                for each in (planned.base, planned):  # a base starts from nothing
                    if each is not None:
                        ordered.setdefault(each.label, each)
        plan = list(ordered.values())
        for change in self.changes if plan else ():
            if not any(_concerns(planned.config, change) for planned in plan):
                override(plan[0].config, [change])  # raises: there is no such field
        return plan

    def one(self, training: Training, seed: int) -> Planned:
        """A single run."""
        base = None if training.base is None else self.one(training.base, seed)
        plain = recipes.load(training.recipe)
        wanted = (change for change in self.changes if _concerns(plain, change))
        config = override(plain, [*training.changes, f"loop.seed={seed}", *wanted])
        if base is not None:
            config = replace(config, task=replace(config.task, **{training.start: str(base.run.model_path)}))
        run = Run(self.folder / f"{training.name}-seed{seed}")
        return Planned(training.recipe, with_data_dir(config, self.data_dir), run, base)


def check_data(configs: Iterable[Config]) -> None:
    """Look for the data of all runs before the first training; refuse with a line for each set that is missing.

    Folders are listed and small sets read. Images are not decoded.
    """
    tasks: dict[Any, Any] = {tuple(getattr(c.task, name, None) for name in PLACE): c.task for c in configs}
    complaints = []
    for task in tasks.values():
        try:
            LOADERS[task.kind](task)
        except AcutanceError as error:
            complaints.append(str(error))
    if complaints:
        raise AcutanceError("\n".join(dict.fromkeys(complaints)))


def _concerns(config: Config, change: str) -> bool:
    """Whether a run has the field: task.shards is ImageNet's, and other tasks ignore it."""
    room, *inside = (part.strip() for part in change.partition("=")[0].split("."))
    return room != "task" or not inside or hasattr(config.task, inside[0])


def _text(value: object) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value).replace(" ", "") if isinstance(value, list) else str(value)
