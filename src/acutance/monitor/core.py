"""Monitor: reads a model in the middle of its training and leaves no trace in it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import distributed, nn

from acutance.errors import AcutanceError, AcutanceWarning, NonFiniteError
from acutance.measure import check_readable, measure
from acutance.monitor.history import History
from acutance.monitor.probe import autocast_seen, fitted, fixed_copy, own_randomness
from acutance.monitor.writers import JsonLines, TensorBoard
from acutance.profile import Profile
from acutance.wrappers import bare_module, shards_put_back

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch.utils.tensorboard.writer import SummaryWriter

# None of them needs eigenvalues, which take longer to find than everything else together.
CHEAP_METRICS = ("token_cosine", "rank_residual", "norm_spread")
INTERVAL = 200  # 2 % of training time where a reading takes as long as four steps: benchmarks/monitor_cost.py


class Monitor:
    """Records smoothing metrics of a fixed probe batch every so many optimiser steps.

    In a plain loop call `step()` after `optimiser.step()`; `for_trainer()` and `for_lightning()` are callbacks for
    Hugging Face's Trainer and for Lightning. Gradients, buffers, training modes and the random state of Python, NumPy
    and torch (CPU and CUDA) are left as they were, so training gives the same weights bit for bit.

    In a distributed run every rank calls it and reads (a sharded model needs all ranks for a forward pass, and the
    others would wait anyway); rank 0 alone writes.

    Args:
        model: the model being trained, or what wraps it: the bare module is read.
        probe: one batch, in any form `measure` takes. It is copied, so that it stays the same throughout.
        metrics: names from `acutance.measure.available_metrics()`, or "all".
        tap: where token metrics are read, as in `measure`.
        prefix: class, distillation, register or special tokens `in` or `out`, as in `measure`.
        part: path of the submodule to read, where a model has several stacks of layers, as in `measure`.
        every: optimiser steps between two readings.
        jsonl: a file that gets one line per reading. One that exists is continued.
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
        tensorboard: str | os.PathLike[str] | SummaryWriter | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        if every < 1:
            raise AcutanceError(f"every counts optimiser steps between two readings and must be 1 or more, not {every}")
        self.model = bare_module(model)
        self._chosen: dict[str, Any] = {"metrics": metrics, "tap": tap, "prefix": prefix, "part": part}
        check_readable(self.model, **self._chosen)  # what cannot be read is refused now, not after hundreds of steps
        self.every = every
        self.history = History() if jsonl is None else History.load(jsonl, missing_ok=True)
        self._resumed = bool(self.history)
        self._probe = fixed_copy(probe)
        self._autocast = autocast
        self._step: int | None = None
        self._writers: list[JsonLines | TensorBoard] = []
        if jsonl is not None:
            self._writers.append(JsonLines(jsonl))
        if tensorboard is not None:
            self._writers.append(TensorBoard(tensorboard))

    def step(self, step: int | None = None) -> None:
        """Count an optimiser step, and read the model if one is due.

        Args:
            step: how many optimiser steps were taken so far, for a run that does not start at 0; else they are
                counted here. The same number again, as within gradient accumulation, does nothing.
        """
        now = self._current() + 1 if step is None else step
        before = now - 1 if self._step is None or now < self._step else self._step
        self._step = now
        if now // self.every > before // self.every:
            self.record()

    def record(self, step: int | None = None) -> None:
        """Read the model now, whatever the interval: before training, say, or at its end.

        Args:
            step: how many optimiser steps were taken so far; else as counted by `step()`.
        """
        self._step = self._current() if step is None else step
        try:
            profile = self._read(self._step)
        except NonFiniteError as error:  # the training is not ours to stop
            warnings.warn(f"step {self._step} was not recorded: {error}", AcutanceWarning, stacklevel=2)
            return
        self.history.add(self._step, profile)
        if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0:
            for writer in self._writers:
                writer.write(self._step, profile)

    def picture(self) -> Figure:
        """Every metric over the training steps, a curve per layer, as a matplotlib figure."""
        return self.history.picture()

    def for_trainer(self) -> Any:
        """A `TrainerCallback` for Hugging Face's Trainer: reads at the start, every so many steps, and at the end."""
        from acutance.monitor.trainer import trainer_callback

        return trainer_callback(self)

    def for_lightning(self) -> Any:
        """A `Callback` for Lightning's Trainer: reads at the start, every so many steps, and at the end."""
        from acutance.monitor.lightning import lightning_callback

        return lightning_callback(self)

    def check_watched(self, trained: nn.Module) -> None:
        """Raise if the model being trained does not hold the model being watched."""
        if not any(module is self.model for module in trained.modules()):
            raise AcutanceError(
                f"the monitor watches a {type(self.model).__name__} that is no part of the {type(trained).__name__} "
                "being trained: give both the same object"
            )

    def finish(self, step: int) -> None:
        """Record a last step, unless it was."""
        if step not in self.history:
            self.record(step)

    def _current(self) -> int:
        if self._step is None and self._resumed:
            raise AcutanceError(
                f"the file holds steps up to {max(self.history)} from an earlier run. To go on, say how many steps "
                "were taken: monitor.step(step); to begin anew, name another file or remove this one"
            )
        return self._step or 0

    def _read(self, step: int) -> Profile:
        seed = torch.initial_seed()
        device = next(self.model.parameters()).device
        with (
            own_randomness(),
            shards_put_back(self.model),
            self._precision(device),
            autocast_seen(self.model, device) as seen,
        ):
            profile = measure(self.model, [fitted(self._probe, self.model)], progress=False, **self._chosen)
        context = {**profile.context, "seed": seed, "step": step, "autocast": next(iter(seen), None)}
        return Profile(profile.readings, context)

    def _precision(self, device: torch.device) -> AbstractContextManager[Any]:
        """The same wherever it is called from.

        Uncached: older versions of torch would go on to train with weights that were cast here, without gradients
        (https://github.com/pytorch/pytorch/issues/112583).
        """
        return torch.autocast(
            device.type, dtype=self._autocast, enabled=self._autocast is not None, cache_enabled=False
        )
