"""Several processes that share one measurement, such as `torchrun` starts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist

from acutance.errors import AcutanceError

T = TypeVar("T")


def place() -> tuple[int, int]:
    """This process's rank and how many there are; (0, 1) outside a process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


@contextmanager
def joined() -> Iterator[tuple[int, int]]:
    """Meet the other processes that torchrun started, if it did; yields `place()`."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield place()
        return
    dist.init_process_group("gloo")  # a few numbers are exchanged, whatever device the model is on
    try:
        yield place()
    finally:
        dist.destroy_process_group()


def device(choice: str) -> str:
    """`cpu`, or a GPU of this process's own; `auto` takes a GPU where there is one."""
    if choice not in ("cpu", "cuda", "auto"):
        raise AcutanceError(f"a device is cpu, cuda or auto, not {choice!r}")
    found = torch.cuda.device_count()
    if choice == "cpu" or (choice == "auto" and not found):
        return "cpu"
    if not found:
        raise AcutanceError("there is no CUDA device here: use --device cpu")
    return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % found}"


def gather(own: T) -> list[T]:
    """What every process handed in, by rank; the same list in all of them."""
    size = place()[1]
    if size == 1:
        return [own]
    parts: list[Any] = [None] * size
    dist.all_gather_object(parts, own)
    return parts


def share(batches: Iterable[T], rank: int, size: int) -> Iterable[T]:
    """Every `size`-th batch from `rank` on; of a sequence, the others are never made."""
    if size == 1:
        return batches
    return _Share(batches, rank, size) if isinstance(batches, Sequence) else islice(batches, rank, None, size)


class _Share(Sequence[T]):
    def __init__(self, batches: Sequence[T], rank: int, size: int) -> None:
        self._batches, self._indices = batches, range(rank, len(batches), size)

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            return [self._batches[i] for i in self._indices[index]]
        return self._batches[self._indices[index]]
