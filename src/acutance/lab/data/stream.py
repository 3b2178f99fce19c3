"""Batches of data too large for memory, decoded in worker processes. A batch depends on (seed, step) alone."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from acutance.errors import AcutanceError
from acutance.lab.data.seeds import mixed_seed

REPEATS = 3  # of repeated augmentation
Ticket = tuple[int, int | None]  # a sample's index and the seed that makes it random


class Samples(Protocol):
    """Inputs and targets by index, as arrays of one shape or numbers."""

    def __len__(self) -> int: ...

    def sample(self, index: int, random: np.random.Generator | None) -> tuple[Any, Any]:
        """Augmented with a generator; without one, as evaluation needs it."""


def training_batches(
    samples: Samples,
    order: Callable[[int], Tensor],
    *,
    batch_size: int,
    seed: int,
    first_step: int = 0,
    rows: slice = slice(None),
    workers: int = 0,
    device: torch.device | str = "cpu",
) -> Iterator[tuple[Tensor, Tensor]]:
    """These rows of global batch `first_step`, the next, and so on without end. Earlier batches are not read.

    `order` gives the samples of an epoch; an incomplete last batch is left out. A sample is augmented by the seed, the
    step and its row in the global batch, so batches are the same for any number of `workers`, which decode.
    """

    def tickets() -> Iterator[list[Ticket]]:
        for step, chosen in enumerate(visits(order, batch_size, first_step), first_step):
            seeds = [mixed_seed(seed, step, row) for row in range(batch_size)[rows]]
            yield list(zip(chosen[rows].tolist(), seeds, strict=True))

    return _load(samples, tickets(), workers, device)


def visits(order: Callable[[int], Tensor], batch_size: int, first_step: int) -> Iterator[Tensor]:
    """The indices of global batch `first_step`, the next, and so on, in the order of each epoch."""
    epoch = order(0)
    steps = len(epoch) // batch_size
    if steps == 0:
        raise AcutanceError(f"an epoch has {len(epoch)} samples, fewer than a batch of {batch_size}: make it smaller")
    number, first = divmod(first_step, steps)
    while True:
        epoch = order(number) if number else epoch
        yield from epoch[first * batch_size : steps * batch_size].split(batch_size)
        number, first = number + 1, 0


def evaluation_batches(
    samples: Samples,
    *,
    batch_size: int,
    indices: Sequence[int] | None = None,
    workers: int = 0,
    device: torch.device | str = "cpu",
) -> Iterator[tuple[Tensor, Tensor]]:
    """All samples, or those at `indices`, once and in order. The last batch may be smaller."""
    wanted = range(len(samples)) if indices is None else indices
    starts = range(0, len(wanted), batch_size)
    tickets = ([(index, None) for index in wanted[start : start + batch_size]] for start in starts)
    return _load(samples, tickets, workers, device)


def repeated(order: Tensor, batch_size: int, repeats: int = REPEATS) -> Tensor:
    """Repeated augmentation: an epoch of a third of the samples, three times each (https://arxiv.org/abs/1902.05509).

    Repetitions share a batch but lie a third of it apart, so rows that are mixed in pairs are different images.
    """
    batches = order.repeat_interleave(repeats)[: len(order) // batch_size * batch_size].view(-1, batch_size)
    return torch.cat([batches[:, start::repeats] for start in range(repeats)], 1).flatten()


@dataclass(frozen=True)
class _Decoder(Dataset[Any]):
    """Whole batches by their tickets."""

    samples: Samples

    def __getitem__(self, tickets: Sequence[Ticket]) -> Any:
        sample, rng = self.samples.sample, np.random.default_rng
        try:
            made = [sample(index, None if seed is None else rng(seed)) for index, seed in tickets]
        except AcutanceError as error:
            return error  # an error raised in a worker process is buried under a traceback
        return [torch.from_numpy(np.stack(arrays)) for arrays in zip(*made, strict=True)]


def _load(
    samples: Samples, tickets: Iterable[Sequence[Ticket]], workers: int, device: torch.device | str
) -> Iterator[tuple[Tensor, Tensor]]:
    place = torch.device(device)
    options: dict[str, Any] = {"batch_size": None, "num_workers": workers, "pin_memory": place.type == "cuda"}
    for batch in DataLoader(_Decoder(samples), sampler=tickets, **options):
        if isinstance(batch, AcutanceError):
            raise batch
        inputs, targets = (tensor.to(place, non_blocking=True) for tensor in batch)
        yield inputs, targets
