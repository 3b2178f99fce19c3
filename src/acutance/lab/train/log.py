"""What a run reports: its log, progress, attention back-end and the source of a NaN. Also how it is interrupted."""

import json
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from acutance.errors import AcutanceError, NonFiniteError, import_extra
from acutance.files.atomic import atomic_write
from acutance.lab.files import finite
from acutance.measure.monitor import own_randomness
from acutance.sites.structure import shards_put_back

SECONDS_BETWEEN_LINES = 60
BACKENDS = {
    SDPBackend.MATH: "SDPA math (forms the matrix)",
    SDPBackend.FLASH_ATTENTION: "SDPA flash",
    SDPBackend.EFFICIENT_ATTENTION: "SDPA memory-efficient",
    SDPBackend.CUDNN_ATTENTION: "SDPA cuDNN",
}
NO_SDPA = "no SDPA: tiles and sums of our own"


class Log:
    """Appends to `log.jsonl` and to TensorBoard. What an interrupted session wrote after `step` is dropped."""

    def __init__(self, folder: Path, step: int) -> None:
        missing = "TensorBoard is not installed: pip install 'acutance[train]'"
        board = import_extra("torch.utils.tensorboard.writer", missing)
        self.path = folder / "log.jsonl"
        if self.path.exists():
            kept = [json.dumps(line) + "\n" for line in read_log(folder) if line["step"] <= step]
            atomic_write(self.path, "".join(kept).encode())
        self._board: Any = board.SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        self.close = self._board.close

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One line in the file, and one point per value on the board."""
        with self.path.open("ab") as file:
            file.write(json.dumps({"step": step, **finite(values)}).encode() + b"\n")
        for name, value in values.items():
            self._board.add_scalar(name, value, step)
        self._board.flush()


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's log. A last line that a crash cut off is left out."""
    path = folder / "log.jsonl"
    if not path.is_file():
        raise AcutanceError(f"there is no {path}: {folder} is not a run, or it has not logged yet")
    *lines, _unfinished = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines]


class Bar:
    """Progress with the loss, throughput and time left, shown by the main process only.

    Without a terminal, as in a batch job, it prints a line every minute.
    """

    def __init__(self, console: Console, *, first: int, total: int, unit: str, shown: bool) -> None:
        speed, left = TextColumn("{task.fields[speed]}"), TextColumn("left")
        columns = BarColumn(), MofNCompleteColumn(), speed, TimeElapsedColumn(), left, TimeRemainingColumn()
        self.progress = Progress(TextColumn("{task.description}"), *columns, console=console, disable=not shown)
        self._unit, self._units, self._since = unit, 0, time.perf_counter()
        self._lines = console if shown and not (console.is_terminal or console.is_jupyter) else None
        self._told = time.monotonic()
        self._task = self.progress.add_task("training", total=total, completed=first, speed="")

    def advance(self, units: int) -> None:
        """Count one step, which handed this many units to the device."""
        self._units += units
        self.progress.advance(self._task)

    def skip(self) -> None:
        """Leave the time since `tell` out of the throughput: an evaluation, a checkpoint."""
        self._since = time.perf_counter()

    def tell(self, epoch: float, loss: float) -> float:
        """Show the state at a log point, once the device has finished. Returns the units per second."""
        speed = self._units / max(time.perf_counter() - self._since, 1e-9)
        self._units = 0
        words = f"{speed:,.0f} {self._unit}/s"
        self.progress.update(self._task, description=f"epoch {epoch:.2f}  loss {loss:.4f}", speed=words)
        if self._lines is not None and time.monotonic() - self._told >= SECONDS_BETWEEN_LINES:
            self._told = time.monotonic()
            task = self.progress.tasks[self._task]
            left = "" if task.time_remaining is None else f"  {timedelta(seconds=int(task.time_remaining))} left"
            line = f"step {task.completed:.0f} of {task.total:.0f}  {task.description}  {words}{left}"
            self._lines.print(line, highlight=False, soft_wrap=True)
        return speed


class StoppedError(AcutanceError):
    """Training was stopped on request. The message says how to resume."""


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """Inside, SIGINT and SIGTERM are noted in the list. A SIGINT after either raises KeyboardInterrupt."""
    seen: list[int] = []  # not an Event: a second signal would wait for its lock

    def ask(number: int, frame: object) -> None:
        # After the terminal's SIGINT, torchrun passes a Ctrl-C on as SIGTERM. Only another SIGINT means "at once".
        if seen and number == signal.SIGINT:
            raise KeyboardInterrupt
        seen.append(number)

    alone = threading.current_thread() is threading.main_thread()  # elsewhere Python allows no handlers
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM) if alone}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def attention_backend(model: nn.Module, forward: Callable[[], object]) -> str:
    """Which SDPA back-end an uncompiled model uses in `forward`. The model's buffers are put back."""
    buffers = [buffer.clone() for buffer in model.buffers()]
    seen = _BackendCounter()
    with own_randomness(), shards_put_back(model), torch.no_grad(), seen:
        forward()
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(before)
    return ", ".join(f"{words} for {count} × {shape}" for (words, shape), count in seen.calls.items()) or NO_SDPA


class _BackendCounter(TorchFunctionMode):
    """Counts which back-end scaled_dot_product_attention chooses at every call.

    It asks as in training: cast by autocast, and with gradients, which some back-ends cannot give.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, str]] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            kind, dtype = args[0].device.type, args[0].dtype
            dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype
            qkv = [x.detach().to(dtype).requires_grad_() for x in args[:3]]
            choice = torch._fused_sdp_choice(*qkv, *args[3:], **(kwargs or {}))
            shape = f"{tuple(args[0].shape)} {str(dtype).removeprefix('torch.')}"
            self.calls[BACKENDS.get(SDPBackend(choice), str(choice)), shape] += 1
        return func(*args, **(kwargs or {}))


class DivergedError(NonFiniteError):
    """The loss or the weights became NaN or infinite. The message says at which step, where, and what is left."""


def nonfinite_names(tensors: Mapping[str, Tensor]) -> list[str]:
    """Which of them hold a NaN or an infinity."""
    return [name for name, value in tensors.items() if _nonfinite(value)]


def locate(model: nn.Module, forward: Callable[[], Tensor]) -> str:
    """Run a forward pass that gives the loss, and say which module first gives a NaN or an infinity."""
    names = {module: name for name, module in model.named_modules()}
    found: list[str] = []

    def look_in(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not found and _nonfinite(inputs):
            found.append("in the batch, before any module has seen it")

    def look_out(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if not found and module in names and _nonfinite(output):
            name, kind = names[module] or "the model", type(module).__name__
            number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)  # paths count from 0, layers from 1
            where = f"layer {int(number[1]) + 1} ({name}, {kind})" if number else f"{name} ({kind})"
            found.append(f"in the output of {where}")

    with torch.no_grad(), model.register_forward_pre_hook(look_in), register_module_forward_hook(look_out):
        loss = forward()
    if found:
        return found[0]
    if _nonfinite(loss):
        return f"in the loss itself: every module of the {type(model).__name__} gives finite numbers"
    return "nowhere: replayed from the last good checkpoint, the step gives finite numbers (a race on the device?)"


def _nonfinite(value: Any) -> bool:
    tensors = (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point())
    return any(not bool(tensor.isfinite().all()) for tensor in tensors)
