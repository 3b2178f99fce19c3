"""What a run learns: a task has its data, model, loss and score. The loop knows nothing else about it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from acutance.distributed import gather, rank_and_world_size
from acutance.errors import AcutanceError
from acutance.io.saving import load_checkpoint
from acutance.mitigations import as_mitigation

T = TypeVar("T")
ConfigT = TypeVar("ConfigT")
STARTS = ("weights", "encoder_weights")  # fields of a task's configuration that name initial weights

RANGES: Mapping[str, Callable[[Any], bool]] = {
    "more than 0": lambda value: value > 0,
    "1 or more": lambda value: value >= 1,
    "0 or more": lambda value: value >= 0,
    "at least 0 and less than 1": lambda value: 0 <= value < 1,
}


def check_ranges(part: str, config: Any, ranges: Mapping[str, str]) -> None:
    """Refuse fields outside their range. `ranges` maps a key of `RANGES` to names of fields, separated by spaces."""
    for words, name in ((words, name) for words, names in ranges.items() for name in names.split()):
        value = getattr(config, name)
        if value is not None and not all(map(RANGES[words], value if isinstance(value, tuple) else (value,))):
            raise AcutanceError(f"{part}.{name} must be {words}, not {value}")


def incidental(default: Any) -> Any:
    """A field that says where, how fast or how often, but not what is trained. Runs may differ in it."""
    return field(default=default, metadata={"incidental": True})


@dataclass(frozen=True)
class BatchSlice:
    """Some rows of every global batch: part `index` of `count` equal parts, for a process or for accumulation."""

    index: int = 0
    count: int = 1

    def rows(self, batch_size: int) -> slice:
        """The rows of a global batch of this size; it must divide evenly."""
        size, rest = divmod(batch_size, self.count)
        if rest:
            raise ValueError(f"a batch of {batch_size} cannot be cut into {self.count} equal parts")
        return slice(self.index * size, (self.index + 1) * size)


class Task(ABC, Generic[ConfigT]):
    """One task on one data set. Everything random depends on (seed, step) alone, never on what ran before.

    A resumed run therefore equals one that was never stopped, and nothing about the data has to be saved.
    """

    headline: ClassVar[str]  # the score by which the best checkpoint is kept
    higher_is_better: ClassVar[bool] = True
    unit: ClassVar[str] = "images"  # what throughput counts
    made_on_device: ClassVar[bool] = False  # whether a GPU makes batches by itself, and so the next one during a step
    probe_samples: ClassVar[int] = 64
    monitored_part: ClassVar[str | None] = None  # of a model with several stacks of layers

    def __init__(self, config: ConfigT, *, seed: int, device: torch.device) -> None:
        self.config, self.seed, self.device = config, seed, device

    @abstractmethod
    def build_model(self) -> nn.Module:
        """A new model on the CPU, initialised from the current random state."""

    def bare_model(self) -> nn.Module:
        """The same without initial weights, whose file may be gone. Trained weights replace them anyway."""
        bare, none = copy(self), {name: None for name in STARTS if hasattr(self.config, name)}
        bare.config = replace(self.config, **none)  # type: ignore[type-var]
        return bare.build_model()

    def units(self, batch_size: int) -> int:
        """How many of `unit` a global batch holds."""
        return batch_size

    def size(self, split: str) -> int:
        """How many samples "train", "val" or "test" has."""
        raise AcutanceError(f"a {type(self).__name__} has no samples to measure: leave loop.monitor_every unset")

    def inputs(self, split: str, indices: Sequence[int]) -> Tensor:
        """Samples of a split as the model takes them in evaluation."""
        raise NotImplementedError

    def labelled(self, split: str, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """The same with their labels, if the task has some."""
        return (self.inputs(split, indices),)

    def probe(self) -> Tensor:
        """A few samples of "val", on which `Monitor` measures the model during training."""
        return self.inputs("val", range(min(self.probe_samples, self.size("val"))))

    @abstractmethod
    def steps_per_epoch(self, batch_size: int) -> int:
        """Global batches in an epoch; an incomplete last one is left out."""

    @abstractmethod
    def batches(self, batch_size: int, first_step: int, part: BatchSlice) -> Iterator[Any]:
        """This slice of global batch `first_step`, the next, and so on without end, on the device."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean loss over a batch. It calls `model` once, as DDP and FSDP expect."""

    @classmethod
    def evaluated_by(cls, split: str) -> tuple[str, ...]:
        """The fields of the configuration that scores on a split depend on, without the model's."""
        return ()

    @abstractmethod
    def evaluate(self, model: nn.Module, *, split: str = "val") -> dict[str, float]:
        """The scores on a split, `headline` among them; the same in every process."""


class ImageTask(Task[ConfigT]):
    """A task on images, whose splits are loaded once: listing a million files takes a while."""

    _train: Any  # the images to train on

    def __init__(self, config: ConfigT, *, seed: int, device: torch.device) -> None:
        super().__init__(config, seed=seed, device=device)
        self._images = cache(self._load)

    @abstractmethod
    def _load(self, split: str) -> Any:
        """A split of the data."""

    def size(self, split: str) -> int:
        return len(self._images(split))

    def steps_per_epoch(self, batch_size: int) -> int:
        """Repeats do not make an epoch longer."""
        name, images = getattr(self.config, "dataset", "ImageNet"), len(self._train)
        if images < batch_size:
            few = f"{images} images to train on, fewer than a batch of {batch_size}"
            raise AcutanceError(f"{name} has {few}: lower loop.batch_size")
        return images // batch_size


def turns(count: int) -> list[int]:
    """Which of `count` parts of an evaluation this process does.

    A sharded model needs all processes in every forward pass, so all get the same number of parts: the last part is
    repeated as needed.
    """
    rank, world = rank_and_world_size()
    return [min(first + rank, count - 1) for first in range(0, count, world)]


def in_order(own: Sequence[int], results: Iterable[T]) -> list[T]:
    """The results of all processes, each part once and in order. Their sum is the same for any number of processes."""
    found = {index: result for part in gather([*zip(own, results, strict=True)]) for index, result in part}
    return [found[index] for index in sorted(found)]


def load_and_install(model: Any, weights: str | None, mitigation: str | None, layers: Any = None) -> None:
    """Load initial weights, then install the mitigation; an eigen starts from the loaded weights."""
    if weights is not None:
        load_checkpoint(model, weights)
    if mitigation is not None:
        model.install(as_mitigation(mitigation), layers)


def refuse_other_classes(name: str, classes: int, model: int) -> None:
    """Refuse a model with another number of classes before training starts."""
    if classes != model:
        raise AcutanceError(f"{name} has {classes} classes, the model {model}: set task.model.num_classes")
