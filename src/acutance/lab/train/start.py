"""train: a configuration and a folder in, a trained and recorded model out."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from acutance.distributed import raise_on_all_ranks
from acutance.errors import AcutanceError
from acutance.files.atomic import digest
from acutance.files.locks import held, holder
from acutance.lab.tasks.base import STARTS
from acutance.lab.train.checkpointer import checkpoint_paths
from acutance.lab.train.config import Config, incidental_fields
from acutance.lab.train.engine import Engine
from acutance.lab.train.initial_weights import InitialWeights, initial_weights, shown
from acutance.lab.train.loop import Loop
from acutance.lab.train.run import Run, changes

Say = Callable[[str], None]
# How far a run goes and how fast it learns: a resumed run may change these for the steps that are left.
COURSE = re.compile(r"loop\.epochs|schedule\..*|optim\.(?!name$).*")


def train(
    config: Config,
    folder: Path | str,
    *,
    recipe: str | None = None,
    resume: bool = False,
    device: str = "auto",
    processes: int | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Train, or go on training, and give the result: step, scores on the held-out slice, the best of them.

    Args:
        config: what the run is made of; it is written to run.json.
        folder: the run's folder.
        recipe: its name, for the record.
        resume: go on from the newest checkpoint that is whole.
        device: cpu, cuda or auto.
        processes: how many to start on this machine, for ddp and fsdp without torchrun.
        console: where progress is shown.
    """
    run, console = Run(Path(folder)), console or Console()

    def say(words: str) -> None:
        console.print(escape(words), highlight=False, soft_wrap=True)

    with deterministic(config.loop.deterministic):
        engine = Engine(config.loop, device=device, processes=processes)
        try:
            done, weights = engine.on_main(lambda: _check(run, config, resume))
            if done is not None:
                return done
            loop = Loop(config, run, engine, console)  # a run that cannot be built leaves nothing behind
            _refuse_unshared_folder(run, engine)
            with ExitStack() as alone:
                engine.on_main(lambda: _lock(run, alone))
                if resume:
                    step = loop.restore()  # what does not fit is refused before anything is written
                    engine.on_main(lambda: _record_resumed(run, config, step, loop.total, engine.world, say))
                else:
                    engine.on_main(lambda: _record_new(run, config, recipe, weights, engine.world, say))
                    loop.restore()
                return loop.fit()
        finally:
            engine.close()


def _check(run: Run, config: Config, resume: bool) -> tuple[dict[str, Any] | None, InitialWeights | None]:
    """The result of a run that has nothing left to do, and what a new one starts from."""
    if not resume:
        _refuse_existing(run)
        return None, initial_weights(config.task)
    changed = changes(run.config().to_dict(), config.to_dict())
    if not changed and (done := run.result()) is not None:
        return done, None
    _refuse_another_run(run, config, changed)
    if (run.result_path.exists() or run.model_path.exists()) and not checkpoint_paths(run.checkpoints):
        raise AcutanceError(
            f"{run.folder} is finished, and {run.checkpoints} holds no checkpoint to go on from: start anew with "
            "another --out"
        )
    return None, None


def _refuse_existing(run: Run) -> None:
    if run.exists():
        raise AcutanceError(f"{run.folder} holds a run already: --resume goes on with it, --out names another folder")


def _refuse_another_run(run: Run, config: Config, changed: Mapping[str, list[Any]]) -> None:
    if "optim.name" in changed:
        old, new = changed["optim.name"]
        raise AcutanceError(
            f"{run.folder} is trained by {old}, whose moments {new} cannot go on from: leave optim.name as it is, or "
            f"start anew from its weights (--set task.weights={run.model_path})"
        )
    free, weights = incidental_fields(config), run.start() or {}

    def moved(name: str, new: str | None) -> bool:
        """Whether initial weights have another path, but the same content."""
        same = name in {f"task.{field}" for field in STARTS} and new is not None and Path(new).is_file()
        return same and digest(Path(str(new))) == weights.get("sha256")

    others = [name for name in changed if name not in free and not COURSE.fullmatch(name)]
    if others := [name for name in others if not moved(name, changed[name][1])]:
        raise AcutanceError(
            f"{run.folder} cannot go on with {_listed(changed, others)}, which would make it another run: leave that "
            "as it was, or begin one with another --out"
        )


def _refuse_unshared_folder(run: Run, engine: Engine) -> None:
    """The main process writes and all read, so all machines must see the same folder."""
    if engine.world == 1:
        return
    with ExitStack() as stack:

        def remove_if_empty() -> None:
            with suppress(OSError):
                run.folder.rmdir()

        def mark() -> str:
            run.folder.mkdir(parents=True, exist_ok=True)
            stack.callback(remove_if_empty)
            return Path(stack.enter_context(NamedTemporaryFile(dir=run.folder, prefix=".seen-")).name).name

        def find() -> None:
            if not (run.folder / name).exists():
                raise AcutanceError(
                    f"{run.folder.absolute()} is not the folder that the first process writes to: all machines need "
                    "the same one, on a file system that they share. Name it with --out"
                )

        name = engine.on_main(mark)
        raise_on_all_ranks(find)


def _lock(run: Run, alone: ExitStack) -> None:
    """Two commands at once would write each other's checkpoints."""
    if not alone.enter_context(held(run.lock_path)):
        raise AcutanceError(
            f"{run.folder} is being trained by another command ({holder(run.lock_path)}): wait for it, or name another "
            "folder with --out"
        )


def _record_new(
    run: Run, config: Config, recipe: str | None, weights: InitialWeights | None, world: int, say: Say
) -> None:
    _refuse_existing(run)  # begun by another command since it was checked
    if weights is not None:
        say(str(weights))
    run.begin(config, recipe, world, None if weights is None else weights.to_dict())


def _record_resumed(run: Run, config: Config, step: int, total: int, world: int, say: Say) -> None:
    changed = changes(run.config().to_dict(), config.to_dict())
    allowed = set() if run.result_path.exists() else incidental_fields(config) | {"loop.epochs"}
    if step >= total and (idle := [name for name in changed if name not in allowed]):
        raise AcutanceError(
            f"nothing is left to train: {run.folder} is at step {step} of {total}, so {_listed(changed, idle)} would "
            "change its record alone. Leave that as it was, or set more epochs (--set loop.epochs=…)"
        )
    if not checkpoint_paths(run.checkpoints):
        say(f"{run.checkpoints} holds no checkpoint: starting over from step 0")
    run.result_path.unlink(missing_ok=True)  # a finished run that is made longer is unfinished again
    run.go_on(config, world)


def _listed(changed: Mapping[str, list[Any]], names: Iterable[str]) -> str:
    return ", ".join(f"{name} {shown(changed[name][1])} instead of {shown(changed[name][0])}" for name in names)


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Inside, torch uses algorithms that give the same bits every time, or says that it has none."""
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]
