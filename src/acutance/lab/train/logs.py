"""What a run tells: lines of JSON, TensorBoard, a progress bar."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from acutance.errors import AcutanceError, MissingExtraError
from acutance.files.atomic import atomic_write, finite

SECONDS_BETWEEN_LINES = 60


class Logs:
    """Appends to `log.jsonl` and to TensorBoard; what an earlier, interrupted run wrote from `step` on is dropped."""

    def __init__(self, folder: Path, step: int) -> None:
        self.path = folder / "log.jsonl"
        if self.path.exists():
            kept = [json.dumps(line) + "\n" for line in read_log(folder) if line["step"] <= step]
            atomic_write(self.path, "".join(kept).encode())
        self._board = _summary_writer(folder / "tensorboard", step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One line, and one point for each of them."""
        with self.path.open("ab") as file:
            file.write(json.dumps({"step": step, **finite(values)}).encode() + b"\n")
        for name, value in values.items():
            self._board.add_scalar(name, value, step)
        self._board.flush()

    def close(self) -> None:
        """Have TensorBoard's part on disk."""
        self._board.close()


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's log; one that a crash cut off is left out."""
    path = folder / "log.jsonl"
    if not path.is_file():
        raise AcutanceError(f"there is no {path}: {folder} is no run, or it has not logged yet")
    *lines, _unfinished = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines]


class Bar:
    """A progress bar with the loss, throughput and the time left; in processes other than the main one, nothing.

    Where there is no terminal, as in a batch job, it is a line every minute.
    """

    def __init__(self, console: Console, *, first: int, total: int, unit: str, shown: bool) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not shown,
        )
        self._unit = unit
        self._lines = console if shown and not (console.is_terminal or console.is_jupyter) else None
        self._told = time.monotonic()
        self._task = self._progress.add_task("training", total=total, completed=first, speed="")

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def advance(self) -> None:
        """One step further."""
        self._progress.advance(self._task)

    def tell(self, epoch: float, loss: float, speed: float) -> None:
        """What is known since the last log point."""
        words = f"{speed:,.0f} {self._unit}/s"
        self._progress.update(self._task, description=f"epoch {epoch:.2f}  loss {loss:.4f}", speed=words)
        if self._lines is not None and time.monotonic() - self._told >= SECONDS_BETWEEN_LINES:
            self._told = time.monotonic()
            self._lines.print(self._line(), highlight=False, soft_wrap=True)

    def _line(self) -> str:
        task = self._progress.tasks[self._task]
        left = "" if task.time_remaining is None else f"  {timedelta(seconds=int(task.time_remaining))} left"
        return f"step {task.completed:.0f} of {task.total:.0f}  {task.description}  {task.fields['speed']}{left}"


class Meter:
    """Units a second since it was last asked; to be asked when the device has finished."""

    def __init__(self) -> None:
        self._units, self._since = 0, time.perf_counter()

    def count(self, units: int) -> None:
        """So many more were handed to the device."""
        self._units += units

    def skip(self, seconds: float) -> None:
        """Time that was not training: an evaluation, a checkpoint."""
        self._since += seconds

    def read(self) -> float:
        """The speed, and begin anew."""
        now = time.perf_counter()
        speed = self._units / max(now - self._since, 1e-9)
        self._units, self._since = 0, now
        return speed


def _summary_writer(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError as error:
        raise MissingExtraError("TensorBoard is not installed: pip install 'acutance[train]'") from error
    return SummaryWriter(str(folder), purge_step=step + 1)
