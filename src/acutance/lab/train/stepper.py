"""One optimiser step, from a global batch to new weights. What is random in it is a function of (seed, step)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from acutance import distributed as processes
from acutance.errors import AcutanceError
from acutance.lab.data.seeds import mixed_seed
from acutance.lab.tasks import Share, Task
from acutance.lab.train.ahead import ahead
from acutance.lab.train.config import Config
from acutance.lab.train.ema import Ema
from acutance.lab.train.engine import Engine
from acutance.lab.train.optim import build_optimiser, set_learning_rate
from acutance.lab.train.recorded import Recorded

Parts = tuple[Any, ...]  # this process's shares of a global batch, whose gradients are added up


class Stepper:
    """The model of a task, what trains it, and the step itself.

    Args:
        config: of the run.
        engine: the processes.
        task: what is learnt.
        bare: the weights are put in afterwards, so what the run started from is not read.

    Attributes:
        model: as it was built, on its device, sharded in place.
        wrapped: what is called in training.
        shares: of every global batch, this process's.
        recorded: whether the step is replayed from a CUDA graph.
    """

    def __init__(self, config: Config, engine: Engine, task: Task[Any], *, bare: bool = False) -> None:
        loop = config.loop
        self.config, self.engine, self.task = config, engine, task
        self.shares = _shares(loop.batch_size, loop.accumulate, engine)
        torch.manual_seed(mixed_seed(loop.seed))
        self.model: nn.Module = processes.raise_on_all_ranks(task.bare_model if bare else task.build_model).train()
        self.wrapped = engine.wrap(self.model)
        alone = engine.strategy == "single" and len(self.shares) == 1
        self.recorded = loop.graph and engine.device.type == "cuda" and alone
        # After sharding, which replaces the parameters.
        self.optimiser = build_optimiser(self.model, config.optim, recorded=self.recorded)
        self.ema = None if loop.ema is None else Ema(self.model, loop.ema)
        self._recording: Recorded | None = None

    def __call__(self, step: int, parts: Parts, rate: float) -> Tensor:
        """One step at this learning rate; the loss stays on the device, until the next step."""
        set_learning_rate(self.optimiser, rate)
        if not self.recorded:
            return self._update(parts, step)
        if self._recording is None:
            self._recording = Recorded(self._update)
        self._seed(step, self.shares[0])
        return self._recording(parts)

    def batches(self, first_step: int) -> Iterator[Parts]:
        """This process's shares of global batch `first_step`, the next, and so on without end."""
        size, device = self.config.loop.batch_size, self.engine.device
        parts = zip(*(self.task.batches(size, first_step, share) for share in self.shares), strict=True)
        return ahead(parts, device) if self.task.made_on_device and device.type == "cuda" else parts

    def forget_recording(self) -> None:
        """Weights or moments were replaced, which a recording would not notice."""
        self._recording = None

    def losses(self, step: int, parts: Parts) -> Tensor:
        """Of the shares, by the bare model, as they are in this step of training."""
        found = []
        for share, batch in zip(self.shares, parts, strict=True):
            self._seed(step, share)
            with self.engine.precision():
                found.append(self.task.loss(self.model, batch))
        return torch.stack(found)

    def _update(self, parts: Parts, step: int | None = None) -> Tensor:
        """Without a step the random state is left as it is: a recording cannot set it."""
        total = torch.zeros((), device=self.engine.device)
        for share, batch in zip(self.shares, parts, strict=True):
            if step is not None:
                self._seed(step, share)
            with self.engine.waiting(self.wrapped, enabled=share is not self.shares[-1]):
                loss = self.task.loss(self.wrapped, batch) / len(parts)
                self.engine.backward(loss)
            total += loss.detach()
        self._descend()
        return total

    def _descend(self) -> None:
        clip = self.config.optim.clip
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.optimiser.step()
        self.optimiser.zero_grad()
        if self.ema is not None:
            self.ema.update()

    def _seed(self, step: int, share: Share) -> None:
        """Dropout and stochastic depth of a share are the same in whichever process it is."""
        torch.manual_seed(mixed_seed(self.config.loop.seed, step, share.index))


def _shares(batch_size: int, accumulate: int, engine: Engine) -> list[Share]:
    """This process's, in the order in which one process would take them all."""
    shares = [Share(engine.rank * accumulate + part, engine.world * accumulate) for part in range(accumulate)]
    if batch_size % shares[0].count:
        raise AcutanceError(
            f"a batch of {batch_size} cannot be cut into {engine.world} processes × {accumulate} parts: choose a "
            f"loop.batch_size that {shares[0].count} divides"
        )
    return shares
