"""train: a configuration and a folder in, a trained and recorded model out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from acutance.distributed import raise_on_all_ranks
from acutance.errors import AcutanceError
from acutance.files.locks import held, holder
from acutance.lab.train.config import Config
from acutance.lab.train.engine import Engine
from acutance.lab.train.origin import Origin, origin_of
from acutance.lab.train.resuming import (
    changed_fields,
    has_checkpoints,
    refuse_another_run,
    refuse_without_checkpoints,
    refuse_without_effect,
)
from acutance.lab.train.run import Run


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
    from acutance.lab.train.loop import Loop  # brings the tasks along

    run, shown = Run(Path(folder)), console or Console()
    with deterministic(config.loop.deterministic):
        engine = Engine(config.loop, device=device, processes=processes)
        try:
            done, start = engine.on_main(lambda: _look(run, config, resume))
            if done is not None:
                return done
            loop = Loop(config, run, engine, shown)  # what cannot be built leaves nothing behind
            _refuse_own_folders(run, engine)
            with ExitStack() as alone:
                engine.on_main(lambda: _take(run, alone))
                if resume:
                    step = loop.take_over()  # what does not fit is refused before anything is written
                    engine.on_main(lambda: _go_on(run, config, (step, loop.total), engine.world, shown))
                else:
                    engine.on_main(lambda: _begin(run, config, recipe, start, engine.world, shown))
                    loop.take_over()
                return loop.fit()
        finally:
            engine.close()


def _refuse_own_folders(run: Run, engine: Engine) -> None:
    """One process writes and all read, so a machine that has another folder by this name could never go on."""
    if engine.world == 1:
        return
    mark = engine.on_main(run.leave_mark)
    try:
        raise_on_all_ranks(lambda: run.find_mark(mark))
    finally:
        engine.on_main(lambda: run.remove_mark(mark))


def _take(run: Run, alone: ExitStack) -> None:
    """Two commands at once would write each other's checkpoints."""
    if not alone.enter_context(held(run.lock_path)):
        raise AcutanceError(
            f"{run.folder} is being trained by another command ({holder(run.lock_path)}): wait for it, or name another "
            "folder with --out"
        )


def _look(run: Run, config: Config, resume: bool) -> tuple[dict[str, Any] | None, Origin | None]:
    """The result of a run that has nothing left to do, and what a new one starts from."""
    if not resume:
        _refuse_second(run)
        return None, origin_of(config.task)
    changed = changed_fields(run, config)
    if not changed and (done := run.result()) is not None:
        return done, None
    refuse_another_run(run, changed)
    refuse_without_checkpoints(run)
    return None, None


def _go_on(run: Run, config: Config, stands: tuple[int, int], processes: int, console: Console) -> None:
    refuse_without_effect(run, changed_fields(run, config), *stands)
    if not has_checkpoints(run):
        console.print(
            escape(f"{run.checkpoints} holds no checkpoint: starting over from step 0"),
            highlight=False,
            soft_wrap=True,
        )
    run.result_path.unlink(missing_ok=True)  # a finished run that is made longer is unfinished again
    run.go_on(config, processes)


def _begin(
    run: Run, config: Config, recipe: str | None, start: Origin | None, processes: int, console: Console
) -> None:
    _refuse_second(run)  # begun by another command since it was looked at
    if start is not None:
        console.print(escape(str(start)), highlight=False, soft_wrap=True)
    run.begin(config, recipe, processes, None if start is None else start.to_dict())


def _refuse_second(run: Run) -> None:
    if run.exists():
        raise AcutanceError(f"{run.folder} holds a run already: --resume goes on with it, --out names another folder")


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
