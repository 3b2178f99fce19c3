"""Which runs a target needs, in an order in which they can be trained, and who trains which."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console

from acutance.errors import AcutanceError
from acutance.files import locks
from acutance.files.atomic import atomic_write
from acutance.lab import recipes
from acutance.lab.evaluate.evaluate import with_data_dir
from acutance.lab.reproduce.target import Training
from acutance.lab.reproduce.trainings import training
from acutance.lab.tasks.base import STARTS
from acutance.lab.train.config import Config
from acutance.lab.train.nonfinite import DivergedError
from acutance.lab.train.overrides import override
from acutance.lab.train.plain import field_types
from acutance.lab.train.run import INCIDENTAL, Run, changes
from acutance.lab.train.start import train

# Where data and weights lie and how the work is done may change between two calls; a folder is of one seed.
MAY_CHANGE = INCIDENTAL - {"loop.seed"} | {f"task.{name}" for name in STARTS}
Share = tuple[int, int]  # the i-th, from 1, of n


@dataclass(frozen=True)
class Planned:
    """One run: a training and a seed."""

    name: str
    seed: int
    recipe: str
    config: Config
    run: Run
    base: Planned | None = None  # what it starts from

    @property
    def label(self) -> str:
        """What its folder is called."""
        return self.run.folder.name

    @property
    def root(self) -> str:
        """The run that it and its kin start from."""
        return self.label if self.base is None else self.base.root

    @property
    def divergence(self) -> str | None:
        """What stopped it for good, if something did."""
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
        """Held by the `reproduce` that trains it, from before there is a folder."""
        return self.run.folder.with_name(f".{self.label}.lock")

    @contextmanager
    def taken(self) -> Iterator[str | None]:
        """Inside, nobody else trains it; or who does, another `reproduce` or one that runs the plan's command."""
        with locks.held(self.lock_path) as mine:
            if not mine:
                yield locks.holder(self.lock_path)
                return
            command = self.run.lock_path
            with locks.held(command) if command.exists() else nullcontext(True) as free:
                who = None if free else locks.holder(command)
            yield who  # the command's lock is let go of: training takes it itself

    def command(self) -> str | None:
        """How to train what is left by itself, e.g. under torchrun; `reproduce` then finds it finished."""
        if not self.is_open:
            return None
        plain = recipes.load(self.recipe).to_dict()
        differing = changes(plain, self.config.to_dict())
        fields = [word for name, (_, value) in differing.items() for word in ("--set", f"{name}={_text(value)}")]
        resume = ["--resume"] if self.run.exists() else []
        return shlex.join(["acutance", "train", self.recipe, "--out", str(self.run.folder), *resume, *fields])

    def check(self) -> None:
        """Refuse to go on with a run that was begun with something else."""
        if not self.run.exists():
            return
        found = changes(self.run.config().to_dict(), self.config.to_dict())
        differing = {name: pair for name, pair in found.items() if name not in MAY_CHANGE}
        if differing:
            words = ", ".join(f"{name} {old!r} instead of {new!r}" for name, (old, new) in differing.items())
            raise AcutanceError(
                f"{self.run.folder} is a run with {words}: name another folder with --out, or the same --set as then"
            )

    def train(self, device: str, console: Console) -> None:
        """Train what is left to train; a loss that is no number is a result too, and kept as such."""
        self.check()
        if not self.is_open:
            return
        if self.config.loop.compile:
            torch.compiler.reset()  # or many runs in one process reach the limit on compiling the same code again
        try:
            train(
                self.config,
                self.run.folder,
                recipe=self.recipe,
                resume=self.run.exists(),
                device=device,
                console=console,
            )
        except DivergedError as error:
            atomic_write(self.run.folder / "diverged.txt", str(error).encode())


@dataclass(frozen=True)
class Planner:
    """Makes runs of trainings: where they lie, on which data, and what is changed in all of them."""

    folder: Path
    data_dir: Path | None
    changes: tuple[str, ...]
    shrink: Callable[[Config], Config]  # the identity, but at tiny scale

    def plan(self, names: Sequence[str], seeds: Sequence[int]) -> list[Planned]:
        """All runs, each after the one it starts from."""
        ordered: dict[tuple[str, int], Planned] = {}
        for seed in seeds:
            for name in names:
                self._add(name, seed, ordered)
        plan = list(ordered.values())
        for change in self.changes if plan else ():
            if not any(_concerns(planned.config, change) for planned in plan):
                override(plan[0].config, [change])  # which says that there is no such field
        return plan

    def one(self, name: str, seed: int) -> Planned:
        """A single run, without what it starts from."""
        chosen = training(name)
        base = None if chosen.starts_from is None else self.one(chosen.starts_from[1], seed)
        run = Run(self.folder / f"{name}-seed{seed}")
        return Planned(name, seed, chosen.recipe, self._config(chosen, seed, base), run, base)

    def _add(self, name: str, seed: int, ordered: dict[tuple[str, int], Planned]) -> None:
        start = training(name).starts_from
        if start is not None:
            self._add(start[1], seed, ordered)
        ordered.setdefault((name, seed), self.one(name, seed))

    def _config(self, chosen: Training, seed: int, base: Planned | None) -> Config:
        plain = recipes.load(chosen.recipe)
        wanted = (change for change in self.changes if _concerns(plain, change))
        config = override(plain, [*chosen.changes, f"loop.seed={seed}", *wanted])
        if chosen.starts_from is not None and base is not None:
            start = {chosen.starts_from[0]: str(base.run.model_path)}
            config = replace(config, task=replace(config.task, **start))
        return self.shrink(with_data_dir(config, self.data_dir))


def share_of(text: str | None) -> Share | None:
    """`2/4` as a pair."""
    if text is None:
        return None
    first, slash, last = text.partition("/")
    if not (slash and first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last)):
        raise AcutanceError(f"--only takes i/n with i from 1 to n, such as 2/4, not {text!r}")
    return int(first), int(last)


def mine(plan: Sequence[Planned], share: Share | None) -> list[Planned]:
    """This share of a plan: whole families, so that nobody waits for another's run."""
    if share is None:
        return list(plan)
    roots = list(dict.fromkeys(planned.root for planned in plan))
    return [planned for planned in plan if roots.index(planned.root) % share[1] == share[0] - 1]


def _concerns(config: Config, change: str) -> bool:
    """Fields of one kind of task, such as task.shards of ImageNet, are changed in runs of that kind."""
    room, *inside = (part.strip() for part in change.partition("=")[0].split("."))
    return room != "task" or not inside or inside[0] in field_types(type(config.task))


def _text(value: object) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value).replace(" ", "") if isinstance(value, list) else str(value)
