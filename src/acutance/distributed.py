"""Several processes that share one job, such as `torchrun` starts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager, suppress
from functools import cache
from itertools import islice
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler, Subset

from acutance.errors import AcutanceError

T = TypeVar("T")


def rank_and_world_size() -> tuple[int, int]:
    """(0, 1) outside a process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


@contextmanager
def joined() -> Iterator[tuple[int, int]]:
    """Join the process group of torchrun, if it started this process. Yields rank and world size."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield rank_and_world_size()
        return
    dist.init_process_group("gloo")  # a few numbers are exchanged, whatever device the model is on
    try:
        yield rank_and_world_size()
    finally:
        dist.destroy_process_group()


def device(choice: str) -> str:
    """`cpu`, or this process's own GPU; `auto` takes a GPU where there is one."""
    if choice not in ("cpu", "cuda", "auto"):
        raise AcutanceError(f"a device is cpu, cuda or auto, not {choice!r}")
    found = torch.cuda.device_count()
    if choice == "cpu" or (choice == "auto" and not found):
        return "cpu"
    if not found:
        raise AcutanceError("there is no CUDA device here: use --device cpu")
    return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % found}"


def gather(own: T) -> list[T]:
    """The values of all processes, by rank; every process gets the same list."""
    size = rank_and_world_size()[1]
    if size == 1:
        return [own]
    parts: list[Any] = [None] * size
    dist.all_gather_object(parts, own)
    return parts


def raise_on_all_ranks(function: Callable[[], T], gather: Callable[[Any], Sequence[str | None]] = gather) -> T:
    """Call a function that may fail on one rank only. Then all ranks raise, so that none waits for it forever."""
    try:
        value = function()
    except Exception as error:
        gather(str(error))
        raise
    messages = gather(None)
    for rank, message in enumerate(messages):
        if message is not None:
            raise AcutanceError(f"process {rank} of {len(messages)} stopped: {message}")
    return value


@cache
def _torchrun_store() -> tuple[Any, int, int]:
    """Torchrun's store, rank and world size.

    The store is kept. It may live in rank 0, and the process group meets at the same port: a rank that found the old
    store there would lose its connection when rank 0 closes it.
    """
    from torch.distributed.rendezvous import rendezvous

    return next(rendezvous("env://"))  # type: ignore[no-any-return]


def gather_by_torchrun(own: str | None) -> list[str | None]:
    """Like `gather`, before there is a process group: through torchrun's store."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or not dist.is_torchelastic_launched():
        return [own]
    from torch._C._distributed_c10d import PrefixStore

    store, rank, size = _torchrun_store()
    store = PrefixStore("acutance", store)
    store.set(str(rank), json.dumps(own))
    parts = [json.loads(store.get(str(other))) for other in range(size)]
    if store.add("readers", 1) == size:
        store.set("all have read", "")
    if rank == 0:  # the store may live in this process, and a refused run ends it
        store.wait(["all have read"])
    return parts


def share(batches: Iterable[T], rank: int, size: int) -> Iterable[T]:
    """Every `size`-th batch from `rank` on; of a sequence, the others are never made."""
    if size == 1:
        return batches
    if isinstance(batches, Sequence):
        return cast(Iterable[T], Subset(cast(Any, batches), range(rank, len(batches), size)))
    return islice(batches, rank, None, size)


def length_of(batches: Iterable[Any]) -> int | None:
    """The number of batches, if known. A DataLoader over an IterableDataset raises when asked."""
    if isinstance(batches, Sized):
        with suppress(TypeError):
            return len(batches)
    return None


def pad_uneven_batches(own: Iterable[T], *, wait: bool) -> Iterator[tuple[T, bool]]:
    """This rank's batches, each with True if it counts.

    FSDP needs every rank in each forward pass (`wait`), so a rank without batches reruns another's, with False.
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
    """Refuse batches that were already divided among the processes: some would be skipped silently."""
    if isinstance(getattr(batches, "sampler", None), DistributedSampler):
        words = (
            "across_processes=True shares batches out itself, but this loader's DistributedSampler has done so already"
        )
        raise AcutanceError(f"{words}: give every process a loader of all samples")
    lengths = gather(length_of(batches))
    if len(set(lengths)) > 1:
        given = f"the processes were given {', '.join(map(str, lengths))} batches"
        raise AcutanceError(f"{given}: with across_processes=True give every process all of them")
