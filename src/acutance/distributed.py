"""Several processes that share one measurement, such as `torchrun` starts."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any, NoReturn, TypeVar, overload

import torch
import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler

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


def leave(status: int | str | None) -> NoReturn:
    """End the process as `sys.exit` does; one of torchrun's at once, once everything is written.

    Threads that gloo has left may abort a process that takes the interpreter down first: "terminate called without an
    active exception", now and then, after all work is done.
    """
    if not dist.is_available() or not dist.is_torchelastic_launched() or isinstance(status, str):
        sys.exit(status)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)


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


def agreed(function: Callable[[], T], gathered: Callable[[str | None], Sequence[str | None]] = gather) -> T:
    """What this process gets from it; what goes wrong in one goes wrong in all, so that none waits for it.

    Args:
        function: reads something that another process, perhaps on another machine, may not find.
        gathered: how the processes hear of each other.
    """
    value: Any = None
    error: Exception | None = None
    try:
        value = function()
    except Exception as caught:
        error = caught
    words = gathered(None if error is None else str(error))
    if error is not None:
        raise error
    for rank, complaint in enumerate(words):
        if complaint is not None:
            raise AcutanceError(f"process {rank} of {len(words)} stopped: {complaint}")
    result: T = value
    return result


def gather_by_torchrun(own: str | None) -> list[str | None]:
    """Like `gather`, before there is a process group: through the store that torchrun's processes meet by."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or not dist.is_torchelastic_launched():
        return [own]
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, rank, size = next(rendezvous("env://"))
    store = PrefixStore("acutance", store)
    store.set(str(rank), json.dumps(own))
    parts = [json.loads(store.get(str(other))) for other in range(size)]
    if store.add("readers", 1) == size:
        store.set("all have read", "")
    if rank == 0:  # the store is on its machine, and may go when it does
        store.wait(["all have read"])
    return parts


def share(batches: Iterable[T], rank: int, size: int) -> Iterable[T]:
    """Every `size`-th batch from `rank` on; of a sequence, the others are never made."""
    if size == 1:
        return batches
    return _Share(batches, rank, size) if isinstance(batches, Sequence) else islice(batches, rank, None, size)


def length_of(batches: Iterable[Any]) -> int | None:
    """How many there are, where that is known: a DataLoader has a length, but not over an IterableDataset."""
    if isinstance(batches, Sized):
        with suppress(TypeError):
            return len(batches)
    return None


def in_step(own: Iterable[T], *, wait: bool) -> Iterator[tuple[T, bool]]:
    """A process's batches, and whether they count.

    Who has run out before the others, of a model whose processes `wait` for each other in every forward pass, runs
    along on another's batch, which does not count there.
    """
    rest = iter(own)
    while True:
        batch = next(rest, None)
        there = gather(batch is not None) if wait else [batch is not None]
        if not any(there):
            return
        offered = [batch] if all(there) else gather(batch)
        yield next(one for one in (batch, *offered) if one is not None), batch is not None


def refuse_shares(batches: Iterable[Any]) -> None:
    """Every process must be given all batches: a share of a share would leave some out without a word."""
    if isinstance(getattr(batches, "sampler", None), DistributedSampler):
        raise AcutanceError(
            "across_processes=True shares the batches out itself, but this loader's DistributedSampler has done so "
            "already: give every process a loader of all samples"
        )
    lengths = gather(length_of(batches))
    if len(set(lengths)) > 1:
        raise AcutanceError(
            f"the processes were given {', '.join(map(str, lengths))} batches: with across_processes=True give all "
            "batches to every process, which reads its share of them"
        )


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
