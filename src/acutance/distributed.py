"""Several processes that share one job, such as `torchrun` starts."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, islice, repeat
from operator import length_hint
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler, Subset

from acutance.errors import AcutanceError

T = TypeVar("T")


def rank_and_world_size() -> tuple[int, int]:
    """(0, 1) outside a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


@contextmanager
def joined() -> Iterator[tuple[int, int]]:
    """Join the process group of torchrun, if it started this process. Yields rank and world size."""
    with ExitStack() as stack:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
            dist.init_process_group("gloo")  # a few numbers are exchanged, whatever device the model is on
            stack.callback(dist.destroy_process_group)
        yield rank_and_world_size()


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


def share(batches: Iterable[T], rank: int, size: int) -> Iterable[T]:
    """Every `size`-th batch from `rank` on; of a sequence, the others are never made.

    Batches that were already divided among the processes are refused: some would be skipped silently.
    """
    if isinstance(getattr(batches, "sampler", None), DistributedSampler):
        raise AcutanceError("a DistributedSampler shares samples out already: give every process a loader of all")
    if len(set(lengths := gather(0 if isinstance(batches, Iterator) else length_hint(batches)))) > 1:
        raise AcutanceError(f"the processes were given {', '.join(map(str, lengths))} batches: give each all of them")
    if size == 1:
        return batches
    if isinstance(batches, Sequence):
        return cast(Iterable[T], Subset(cast(Any, batches), range(rank, len(batches), size)))
    return islice(batches, rank, None, size)


def pad_uneven_batches(own: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """This rank's batches, each with True if it counts.

    FSDP needs every rank in each forward pass, so a rank without batches reruns another's, with False.
    """
    for batch in chain(own, repeat(None)):
        there = gather(batch is not None)
        if not any(there):
            return
        offered = [batch] if all(there) else gather(batch)
        yield next(one for one in (batch, *offered) if one is not None), batch is not None
