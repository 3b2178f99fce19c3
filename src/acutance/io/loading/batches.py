"""Batches that are made when they are asked for, and always the same."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, overload


class Batches(Sequence[Any], ABC):
    """Samples in batches: counted beforehand, made one at a time, may be run through again and again."""

    def __init__(self, samples: Sequence[Any], batch: int, description: str) -> None:
        self.samples, self.batch = samples, batch
        self.description = description  # what a profile says it was read on

    @abstractmethod
    def make(self, samples: Sequence[Any]) -> Any:
        """One batch, in a form that `measure` takes."""

    def __len__(self) -> int:
        return -(-len(self.samples) // self.batch)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        start = range(len(self))[index] * self.batch
        return self.make(self.samples[start : start + self.batch])
