"""Monitor: metrics on a fixed probe batch while a model trains, with no effect on the training."""

import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from acutance import distributed, sites
from acutance.errors import AcutanceError, NonFiniteError, import_extra, warn
from acutance.files.atomic import append_line, read_lines
from acutance.measure import measure
from acutance.measure.headline import direction, main_curve
from acutance.measure.profile import Profile
from acutance.measure.reader import MetricReader
from acutance.measure.samples import arguments_of, fed_of
from acutance.measure.walk import map_tensors, walk
from acutance.report.pictures import Figure, plot_steps
from acutance.report.tables import DataFrame, data_frame, short
from acutance.sites.structure import bare_module

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

CHEAP_METRICS = ("token_cosine", "rank_residual", "norm_spread")  # none needs eigenvalues, which are slow
INTERVAL = 200  # 2 % of training time if a reading takes as long as four steps: acutance bench --only monitor


class Monitor:
    """Records smoothing metrics of a fixed probe batch every so many optimiser steps.

    In a plain loop call `step()` after `optimiser.step()`. Hugging Face's Trainer and Lightning take the monitor
    itself: `callbacks=[monitor]`. Printed, it says in a sentence what training did. Gradients, buffers, training modes
    and random states are left as they were, so training gives the same weights bit for bit. In a distributed run every
    rank calls it and rank 0 writes. `tap`, `prefix` and `part` say what is read, as in `measure`.

    Args:
        model: the model being trained; wrappers such as DDP are removed.
        probe: one batch, in any form `measure` takes. It is copied, so later changes to it have no effect.
        metrics: names from `acutance.measure.reader.available_metrics()`, or "all".
        every: optimiser steps between two readings.
        jsonl: a file that gets one line per reading. An existing file is continued.
        tensorboard: a folder, or a `SummaryWriter` of yours.
        autocast: the probe's autocast dtype. None reads in the weights' own dtype.
    """

    def __init__(
        self,
        model: nn.Module,
        probe: Any,
        *,
        metrics: str | Sequence[str] = CHEAP_METRICS,
        tap: str | Sequence[str] = "block",
        prefix: Literal["in", "out"] = "in",
        part: str | None = None,
        every: int = INTERVAL,
        jsonl: str | os.PathLike[str] | None = None,
        tensorboard: "str | os.PathLike[str] | SummaryWriter | None" = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        if every < 1:
            raise AcutanceError(f"every counts optimiser steps between two readings and must be 1 or more, not {every}")
        self._probe = map_tensors(fed_of(probe), lambda tensor: tensor.detach().clone())
        if not any(isinstance(value, Tensor) and value.numel() for value in arguments_of(self._probe)):
            raise AcutanceError("the monitor needs a probe that holds samples, one batch such as next(iter(loader))")
        self.model = bare_module(model)
        self._options: dict[str, Any] = {"metrics": metrics, "tap": tap, "prefix": prefix, "part": part}
        # What cannot be read fails now, not after hundreds of steps.
        walk(self.model, [], MetricReader(metrics, tap, prefix, sites.part_of(self.model, part)), part=part)
        self.every = every
        self.history = History() if jsonl is None or not Path(jsonl).exists() else History.load(jsonl)
        self._autocast = autocast
        self._step: int | None = None
        self._writers: list[Callable[[int, Profile], None]] = []
        if jsonl is not None:
            self._writers.append(lambda step, profile: append_line(jsonl, {"step": step, **profile.to_dict()}))
        if tensorboard is not None:
            self._writers.append(_tensorboard_writer(tensorboard))

    def step(self, step: int | None = None, last: int | None = None) -> None:
        """Count an optimiser step, or give the number taken so far; read the model if a reading is due or at `last`."""
        now = self._current() + 1 if step is None else step
        before = now - 1 if self._step is None or now < self._step else self._step
        self._step = now
        if now // self.every > before // self.every or now == last:
            self.record()

    def record(self, step: int | None = None) -> None:
        """Read the model now, whatever the interval; `step` is by default as counted by `step()`."""
        self._step = self._current() if step is None else step
        try:
            profile = self._read(self._step)
        except NonFiniteError as error:  # a monitor must not stop the training
            warn(f"step {self._step} was not recorded: {error}")
            return
        self.history.add(self._step, profile)
        for write in self._writers if distributed.rank_and_world_size()[0] == 0 else ():
            write(self._step, profile)

    def finish(self, step: int) -> None:
        """Record the last step, unless it is recorded already."""
        if step not in self.history:
            self.record(step)

    def plot(self) -> Figure:
        """Every metric over the training steps, a curve per layer, as a matplotlib figure."""
        return self.history.plot()

    def for_trainer(self) -> Self:
        """The monitor itself, for the `callbacks` of Hugging Face's Trainer."""
        return self

    def for_lightning(self) -> Self:
        """The monitor itself, for the `callbacks` of Lightning's Trainer: also if it was made before the import."""
        import_extra("lightning.pytorch", "for_lightning needs lightning: pip install lightning")
        self.__class__ = _callback(type(self))
        return self

    def __new__(cls, *_: Any, **__: Any) -> Self:
        return cast(Self, object.__new__(_callback(cls)))

    def __getattr__(self, event: str) -> Any:
        """Events of Hugging Face's Trainer, which duck-types its callbacks, that are not watched."""
        if event.startswith("on_"):
            return lambda *_, **__: None
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {event!r}")

    def on_train_begin(self, _arguments: Any, state: Any, _control: Any, **given: Any) -> None:
        self._start(given["model"], state.global_step)

    def on_step_end(self, _arguments: Any, state: Any, _control: Any, **_: Any) -> None:
        # The last step is read here: on_train_end may come after the best weights were restored.
        self.step(state.global_step, last=state.max_steps)

    def on_train_start(self, trainer: Any, module: Any) -> None:  # of Lightning, whose steps are of all optimisers
        self._start(module, trainer.global_step)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.step(trainer.global_step)

    def on_train_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        """The end for both; only Lightning's trainer has a count of steps."""
        if hasattr(trainer, "global_step"):
            self.finish(trainer.global_step)
        if distributed.rank_and_world_size()[0] == 0:
            Console(stderr=True).print(str(self), highlight=False, soft_wrap=True)

    def __str__(self) -> str:
        return f"Monitor: {self.history.headline or 'nothing was recorded yet'}"

    def _start(self, trained: nn.Module, step: int) -> None:
        if not any(module is self.model for module in trained.modules()):
            raise AcutanceError(f"{type(trained).__name__} lacks the monitor's model: give both the same object")
        self.record(step)

    def _current(self) -> int:
        if self._step is None and self.history:  # they are from the file
            raise AcutanceError(f"the file has steps up to {max(self.history)}: use monitor.step(step) or another file")
        return self._step or 0

    def _read(self, step: int) -> Profile:
        seed = torch.initial_seed()
        weights = next(self.model.parameters())
        dtype = weights.dtype if weights.is_floating_point() else None
        probe = map_tensors(self._probe, lambda x: x.to(weights.device, dtype if x.is_floating_point() else None))
        # Uncached: older versions of torch would go on to train with weights that were cast here, without gradients
        # (https://github.com/pytorch/pytorch/issues/112583).
        kind, low = weights.device.type, self._autocast
        with own_randomness(), torch.autocast(kind, low, enabled=low is not None, cache_enabled=False):
            profile = measure(self.model, [probe], progress=False, **self._options)
        readings = tuple(replace(reading, values=None) for reading in profile.readings)  # they would fill the file
        return Profile(readings, {**profile.context, "seed": seed, "step": step})


class History(dict[int, Profile]):
    """Optimiser step to Profile, in order. `History.load(path)` reads a Monitor's file, also while it grows."""

    def __repr__(self) -> str:
        return f"History(steps {', '.join(map(str, self))})" if self else "History(empty)"

    @property
    def headline(self) -> str:
        """What training did to the last layer, in a sentence; empty before two steps are recorded."""
        curves = [main_curve(profile) for profile in self.values()]
        if len(curves) < 2 or not (curves[0] and curves[-1]):
            return ""
        (before, after), steps = (curve[-1] for curve in (curves[0], curves[-1])), list(self)
        change = direction(after.mean - before.mean, after.metric, before.mean, after.mean)
        words = ("left the tokens about as alike", "made the tokens more alike", "moved the tokens apart")[change]
        return (
            f"From step {steps[0]} to {steps[-1]} training {words} after layer {after.layer}: "
            f"{after.metric} {short(before.mean)} → {short(after.mean)}."
        )

    def add(self, step: int, profile: Profile) -> None:
        """Add a profile, and drop those of this step and later: a run resumed from an earlier step replaces them."""
        for later in [known for known in self if known >= step]:
            del self[later]
        self[step] = profile

    def to_frame(self) -> DataFrame:
        """One row per step and reading, as a pandas DataFrame."""
        return data_frame([{**row, "step": step} for step, profile in self.items() for row in profile.rows()])

    def plot(self) -> Figure:
        """A panel per metric and tap: the metric over the training steps, a curve per layer."""
        if not self:
            raise AcutanceError("nothing was recorded yet: a plot needs at least one step")
        return plot_steps(self, next(iter(self.values())).title)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read the lines a Monitor wrote, without a last line that a crash cut off."""
        history = cls()
        for step, profile in read_lines(path, Profile.FORMAT, lambda body: (body["step"], Profile.from_dict(body))):
            history.add(step, profile)
        return history


def _callback(kind: type[Any]) -> type[Any]:
    """The class, or one that is also a callback of Lightning's if that is loaded, which asks its callbacks for that."""
    loaded = (getattr(sys.modules.get(name), "Callback", kind) for name in ("lightning.pytorch", "pytorch_lightning"))
    bases = [base for base in loaded if not issubclass(kind, base)]
    return type(kind.__name__, (kind, *bases), {}) if bases else kind


def _tensorboard_writer(target: "str | os.PathLike[str] | SummaryWriter") -> Callable[[int, Profile], None]:
    """Writes a scalar per metric, tap and layer, and charts of them; the first call opens the file."""
    kind = import_extra("torch.utils.tensorboard.writer", "TensorBoard: pip install 'acutance[monitor]'").SummaryWriter
    opened: list[SummaryWriter] = []

    def write(step: int, profile: Profile) -> None:
        if not opened:
            opened.append(kind(str(target)) if isinstance(target, (str, os.PathLike)) else target)
            layout: dict[str, dict[str, list[object]]] = {}
            for r in profile.readings:
                layout.setdefault(r.metric, {})[r.tap] = ["Multiline", [f"^{r.metric} {r.tap}/layer .*"]]
            opened[0].add_custom_scalars(layout)
        for r in profile.readings:
            opened[0].add_scalar(f"{r.metric} {r.tap}/layer {r.layer:02d}", r.mean, step)
        opened[0].flush()

    return write


@contextmanager
def own_randomness(seed: int = 0) -> Iterator[None]:
    """Seed all global generators, so that what is drawn is the same each time; restore their states afterwards."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices), ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002 # the global one
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed_all(seed)
        yield
