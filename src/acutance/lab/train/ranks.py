"""What fails on one rank stops all of them, also before there is a process group."""

import json
import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import torch.distributed as dist

from acutance.distributed import gather
from acutance.errors import AcutanceError

T = TypeVar("T")


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
