"""What is learnt: a task knows its data, model, loss and score; the loop knows nothing else about it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from acutance.errors import AcutanceError

ConfigT = TypeVar("ConfigT")
STARTS = ("weights", "encoder_weights")  # fields of a task's configuration that name what it starts from


@dataclass(frozen=True)
class Share:
    """Which rows of every global batch are wanted: part `index` of `count` equal ones.

    A process and its accumulated parts are shares alike, so that one process, several, and accumulation see the same
    batches.
    """

    index: int = 0
    count: int = 1

    def rows(self, batch_size: int) -> slice:
        """The rows of a global batch of this size; it must divide evenly."""
        size, rest = divmod(batch_size, self.count)
        if rest:
            raise ValueError(f"a batch of {batch_size} cannot be cut into {self.count} equal parts")
        return slice(self.index * size, (self.index + 1) * size)


class Task(ABC, Generic[ConfigT]):
    """One task on one data set. Everything random is a function of (seed, step), never of what ran before.

    That is what makes a resumed run equal to one that was never stopped: nothing about the data has to be saved.
    """

    headline: ClassVar[str]  # the score by which the best checkpoint is kept
    higher_is_better: ClassVar[bool]
    unit: ClassVar[str] = "images"  # what throughput counts
    made_on_device: ClassVar[bool] = False  # batches, without the host's help: a GPU makes the next during a step
    monitored_part: ClassVar[str | None] = None  # of the model, where it has several stacks of layers

    def __init__(self, config: ConfigT, *, seed: int, device: torch.device) -> None:
        self.config, self.seed, self.device = config, seed, device

    @abstractmethod
    def build_model(self) -> nn.Module:
        """A new model, initialised under whatever random state is current, on the CPU."""

    def bare_model(self) -> nn.Module:
        """The same for weights that were trained since: what the run started from may be gone, and is not read."""
        configured, none = self.config, {name: None for name in STARTS if hasattr(self.config, name)}
        self.config = replace(configured, **none)  # type: ignore[type-var]
        try:
            return self.build_model()
        finally:
            self.config = configured

    def units(self, batch_size: int) -> int:
        """How many of `unit` a global batch holds."""
        return batch_size

    def probe(self) -> Any:
        """A few samples in the form the model takes, on which `Monitor` reads it during training."""
        raise AcutanceError(f"a {type(self).__name__} has no probe: leave loop.monitor_every unset")

    @abstractmethod
    def steps_per_epoch(self, batch_size: int) -> int:
        """Global batches in an epoch; an incomplete last one is left out."""

    @abstractmethod
    def batches(self, batch_size: int, first_step: int, share: Share) -> Iterator[Any]:
        """This share of global batch `first_step`, the next, and so on without end, on the device."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean loss over a batch; it calls `model` once, in the way that DDP and FSDP expect."""

    @classmethod
    def evaluated_by(cls, split: str) -> tuple[str, ...]:
        """The fields of the configuration, beside the model's, that scores on a split depend on."""
        return ()

    @abstractmethod
    def evaluate(self, model: nn.Module, *, split: str = "val") -> dict[str, float]:
        """The scores on a split, `headline` among them; the same in every process."""
