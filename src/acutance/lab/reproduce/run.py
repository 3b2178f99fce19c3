"""The runs of a target, and a session that trains and measures them and compares with the published numbers."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from torch import nn

from acutance import distributed as processes
from acutance.errors import AcutanceError, NonFiniteError
from acutance.files.atomic import atomic_write
from acutance.io import LoadedModel, loading
from acutance.io.saving import load
from acutance.lab import locks, recipes
from acutance.lab.data import load_images, load_segmentation
from acutance.lab.data.seeds import mixed_seed
from acutance.lab.data.tokens import corpus_files
from acutance.lab.evaluate.evaluate import assignment, evaluate_run, read_evaluation, task_of, with_data_dir
from acutance.lab.reproduce.target import Line, Result, Row, Target, Training
from acutance.lab.studies.pictures import save_picture
from acutance.lab.tasks import samples as samples_of
from acutance.lab.tasks.base import STARTS
from acutance.lab.tasks.imagenet import load_imagenet
from acutance.lab.train.config import Config, override
from acutance.lab.train.log import DivergedError
from acutance.lab.train.provenance import made
from acutance.lab.train.run import Run, changes, differences, listed
from acutance.lab.train.start import train
from acutance.report.pictures import Figure

TEXTS = ("wikitext-103/wiki.test.tokens", "wikitext-2/wiki.test.tokens")  # the first that exists
# What is read to check that a task's data is there. ImageNet's "val" lists all of train/.
LOADERS: dict[str, Callable[[Any], object]] = {
    "classification": lambda t: (load_images(t.dataset, t.data_dir, "all"), load_images(t.dataset, t.data_dir, "test")),
    "imagenet": lambda t: (load_imagenet(t, "val"), load_imagenet(t, "test")),
    "segmentation": lambda t: [load_segmentation(t.dataset, t.data_dir, "all" if i else "test") for i in range(2)],
    "language": lambda t: corpus_files(t.corpus, t.data_dir),
}
PLACE = ("kind", "dataset", "corpus", "data_dir", "shards", "test_shards", "held_out_every", "train_on")
HINT = "# One run over 8 GPUs: add --processes 8, or write torchrun --nproc-per-node 8 -m before a command."


@dataclass(frozen=True)
class Planned:
    """One run: a training and a seed."""

    recipe: str
    config: Config
    run: Run
    base: Planned | None = None  # the run it starts from

    @property
    def label(self) -> str:
        return self.run.folder.name

    @property
    def divergence(self) -> str | None:
        """The message of a run whose loss became NaN or infinite."""
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
        """Lock the run. Yields None, or the process that already trains it by `reproduce` or `train`."""
        with locks.held(self.lock_path) as mine:
            if not mine:
                yield locks.holder(self.lock_path)
                return
            command = self.run.lock_path
            with locks.held(command) if command.exists() else nullcontext(True) as free:
                who = None if free else locks.holder(command)
            yield who  # the command's lock is free again here, since `train` takes it itself

    def command(self) -> str | None:
        """The command that trains what is left, e.g. for torchrun. `reproduce` then finds the run finished."""
        if not self.is_open:
            return None
        differing = changes(recipes.load(self.recipe).to_dict(), self.config.to_dict())
        fields = [word for name, (_, value) in differing.items() for word in ("--set", assignment(name, value))]
        resume = ["--resume"] if self.run.exists() else []
        return shlex.join(["acutance", "train", self.recipe, "--out", str(self.run.folder), *resume, *fields])

    def check(self) -> None:
        """Refuse a run that was started with other settings."""
        free = {f"task.{name}" for name in STARTS}
        if self.run.exists() and (found := differences(self.config, self.run.config(), free)):
            advice = "name another folder with --out, or the same --set as then"
            raise AcutanceError(f"{self.run.folder} is a run with {listed(found)}: {advice}")

    def train(self, device: str, console: Console) -> None:
        """Train what is left. Divergence is a result too, and is recorded."""
        self.check()
        if self.config.loop.compile:
            torch.compiler.reset()  # many runs in one process would reach the limit on recompilations
        told = {"recipe": self.recipe, "resume": self.run.exists()}
        try:
            train(self.config, self.run.folder, **told, device=device, console=console)  # type: ignore[arg-type]
        except DivergedError as error:
            atomic_write(self.run.folder / "diverged.txt", str(error).encode())


def check_data(configs: Iterable[Config]) -> None:
    """Check the data of all runs before the first training. The error has a line for each missing data set.

    Folders are listed and small sets are read. Images are not decoded.
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


class Session:
    """One target, its runs, and the inputs of its measures.

    `out/runs` has the runs, which all targets share, and `out/TARGET` the results. Every row has `seeds` runs, by
    default the target's own number. `changes` (as --set takes them) apply to every run and are recorded with the
    result. Models are measured on `samples` images or sequences.
    """

    def __init__(
        self,
        target: Target,
        out: Path | str,
        *,
        data_dir: Path | str | None = None,
        seeds: int | None = None,
        changes: tuple[str, ...] = (),
        samples: int = 1000,
        device: str = "auto",
        console: Console | None = None,
    ) -> None:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise AcutanceError(
                "reproduce is one process: start it once for each GPU (CUDA_VISIBLE_DEVICES=0, 1, …) to share the "
                "runs; or train single runs under torchrun by the commands that --plan prints"
            )
        self.target, self.changes, self.samples = target, changes, samples
        self.seeds = range(seeds or target.seeds)
        self.folder = Path(out) / target.name
        self.chosen_device, self.device = device, processes.device(device)
        self.console = console or Console()
        self.data_dir = None if data_dir is None else Path(data_dir)
        self.runs = Path(out) / "runs"
        self.plan = self._plan()

    def _plan(self) -> list[Planned]:
        """All runs, each once, and each after the run it starts from."""
        ordered: dict[str, Planned] = {}
        trained = [row.training for row in self.target.rows if row.training is not None and row.state == "trained"]
        for seed, training in product(self.seeds, trained):
            planned = self.planned(training, seed)
            for each in (planned.base, planned):  # a base starts from nothing
                if each is not None:
                    ordered.setdefault(each.label, each)
        plan = list(ordered.values())
        for change in self.changes if plan else ():
            if not any(_concerns(planned.config, change) for planned in plan):
                override(plan[0].config, [change])  # raises: there is no such field
        return plan

    def planned(self, training: Training, seed: int) -> Planned:
        """A single run with its folder, its data and the changes that apply to it."""
        base = None if training.base is None else self.planned(training.base, seed)
        plain = recipes.load(training.recipe)
        wanted = (change for change in self.changes if _concerns(plain, change))
        config = override(plain, [*training.changes, f"loop.seed={seed}", *wanted])
        if base is not None:
            config = replace(config, task=replace(config.task, **{training.start: str(base.run.model_path)}))
        run = Run(self.runs / f"{training.name}-seed{seed}")
        return Planned(training.recipe, with_data_dir(config, self.data_dir), run, base)

    def run(self) -> Result:
        """Train what is left and no other process trains, then measure all finished runs."""
        assert self.target.measure is not None, "there is something to run"
        for planned in self.plan:
            planned.check()
        check_data(planned.config for planned in self.plan if planned.is_open)
        while self._train():
            pass  # repeated, since another process may have finished what a run starts from
        for planned in self.plan:  # also those that other processes trained
            planned.check()
        pending = self.pending()
        sheets = self.target.measure(self)
        states = {planned.label: planned.state for planned in self.plan}
        record = {"changes": list(self.changes), "samples": self.samples, "runs": states, **made("finished")}
        return Result(self.target, len(self.seeds), tuple(sheets), pending, record)

    def _train(self) -> bool:
        """Train all that can be trained now, in order. Returns whether any was."""
        some, say = False, partial(self.console.print, highlight=False, soft_wrap=True)
        for number, planned in enumerate(self.plan, 1):
            if not planned.is_open:
                continue
            words = escape(f"[{number}/{len(self.plan)}] {planned.label}")
            with planned.taken() as other:
                if other is not None:
                    say(f"{words} is being trained by {escape(other)}")
                elif planned.is_open and (planned.base is None or planned.base.state == "finished"):
                    say(words)
                    planned.train(self.chosen_device, self.console)
                    some = True
        return some

    def pending(self) -> tuple[str, ...]:
        return tuple(planned.label for planned in self.plan if planned.is_open)

    def write(self, result: Result) -> list[Path]:
        """Write the result as Markdown and JSON; nothing if another process has finished the rest meanwhile."""
        if result.pending and not self.pending():
            return []
        body = json.dumps(result.to_dict(), indent=1, ensure_ascii=False, allow_nan=False)
        files = {"result.md": result.to_markdown(), "result.json": body}
        return [atomic_write(self.folder / name, text.encode()) for name, text in files.items()]

    def script(self) -> str:
        """The plan as a shell script that trains each run by itself."""
        runs = ((f"# {planned.label}: {planned.state}", planned.command()) for planned in self.plan)
        return "\n".join([HINT, *filter(None, chain.from_iterable(runs))])

    def line(self, row: Row, reads: Iterable[Callable[[RowModel], Mapping[str, float]]]) -> Line:
        """The numbers that `reads` find in a row's models, by name, and notes on what is missing."""
        found: dict[str, dict[int, float]] = {}
        notes: list[str] = []
        task: Any = None if row.training is None else self.planned(row.training, 0).config.task
        inputs = cache(lambda split: samples_of(task, split, self.samples)[0].split(50))
        for seed in self.seeds if row.model is None else [0]:
            planned = None if row.training is None else self.planned(row.training, seed)
            model = RowModel(self, row, seed, planned, inputs, notes)
            if planned is not None and row.state == "trained" and planned.state != "finished":
                notes.append(f"seed {seed} {planned.state}")
                continue
            for read in reads:
                try:
                    for name, value in read(model).items():
                        found.setdefault(name, {})[seed] = value
                except NonFiniteError:  # a finite training loss does not guarantee finite tokens on other data
                    notes.append(f"seed {seed} cannot be read: its tokens hold NaN or infinity")
                except AcutanceError as error:
                    if row.model is None:
                        raise
                    notes.append(str(error))  # without a library, download or data set one line is empty, not the table
        return Line(row.label, found, row.published, ", ".join(dict.fromkeys(notes)))

    def save_picture(self, figure: Figure, *words: str) -> list[Path]:
        """Write a picture into the folder of results, with these words as its name."""
        return save_picture(figure, self.folder / "-".join(re.sub(r"[^\w.]+", "-", word).strip("-") for word in words))


@dataclass(frozen=True)
class RowModel:
    """One model of a row: its run at one seed, or a pretrained model."""

    session: Session
    row: Row
    seed: int
    planned: Planned | None  # None: pretrained
    run_inputs: Callable[[str], Iterable[Any]]
    notes: list[str] = field(default_factory=list)

    @property
    def run(self) -> Planned:
        assert self.planned is not None, "a pretrained model has no run"
        return self.planned

    @cached_property
    def _loaded(self) -> LoadedModel:
        return loading.load_model(str(self.row.model), device=self.session.device)

    @cached_property
    def module(self) -> nn.Module:
        """The model on the device, trained or at initialisation."""
        if self.planned is None:
            return self._loaded.model
        if self.row.state == "trained":
            return load(self.planned.run.model_path).to(self.session.device)
        task = task_of(self.planned.config, "cpu")
        torch.manual_seed(mixed_seed(self.seed))
        return task.build_model().to(self.session.device)

    def inputs(self, split: str) -> Iterable[Any]:
        """Samples of its run's data; for a pretrained model, images of ImageNet's val/ or WikiText's test text."""
        if self.planned is not None:
            return self.run_inputs(split)
        folder, limit = self.session.data_dir, self.session.samples
        if folder is None:
            raise AcutanceError("images and text are read from a folder: name it with --data-dir")
        if self._loaded.tokenizer is None:
            root = folder / "imagenet" if (folder / "imagenet").is_dir() else folder
            return self._loaded.image_batches(root / "val", limit=limit)
        for path in (folder / name for name in TEXTS):
            if path.is_file():
                return self._loaded.text_batches(path, limit=limit)
        raise AcutanceError(f"text is read from {' or '.join(TEXTS)} in {folder}; neither is there")

    def scores(self, split: str, settings: tuple[str, ...] = ()) -> Mapping[str, float]:
        """The run's scores on a split, evaluated once and then kept."""
        folder, session = self.run.run.folder, self.session
        found = read_evaluation(folder, split, settings=settings) or evaluate_run(
            folder, split=split, settings=settings, data_dir=session.data_dir, device=session.chosen_device
        )
        return found.scores

    def save_picture(self, figure: Figure, kind: str) -> None:
        """Write a picture of this model and name its files in the row's note."""
        self.notes.extend(path.name for path in self.session.save_picture(figure, kind, self.row.label))


def _concerns(config: Config, change: str) -> bool:
    """Whether a run has the field. For example, only ImageNet has task.shards; other tasks ignore it."""
    room, *inside = (part.strip() for part in change.partition("=")[0].split("."))
    return room != "task" or not inside or hasattr(config.task, inside[0])
