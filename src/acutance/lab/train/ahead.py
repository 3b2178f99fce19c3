"""The next batch made while a step runs: on a GPU, by a stream of its own beside the one that trains.

Batch n + 1 is made after step n − 1 and beside step n:

- The stream that trains waits for a batch before it reads it.
- The stream that makes batches waits, before each, for all that was asked of the other one so far. So it is never more
  than a batch ahead, and memory that a used batch left to it is not written to while a step still reads it. The
  allocator gives memory of a stream to that stream alone, so that this is enough. `record_stream` would keep memory
  until the host sees an event, and the host is many steps ahead: it would take new memory for each of them.
- A recorded step takes the batch over into memory of its own, and its recording has a pool of its own, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TypeVar

import torch

T = TypeVar("T")


def ahead(batches: Iterator[T], device: torch.device) -> Iterator[T]:
    """The same batches, to the bit.

    Args:
        batches: without end, each made by `device` alone and independent of what else happens there.
        device: a GPU.
    """
    side = _side(device)
    try:
        upcoming = _made(batches, side)
        while True:
            batch, ready = upcoming
            upcoming = _made(batches, side)
            torch.cuda.current_stream(device).wait_event(ready)
            yield batch
    finally:  # the last one is of no use, but still reads the data, which may now be freed
        torch.cuda.current_stream(device).wait_stream(side)


def _made(batches: Iterator[T], side: torch.cuda.Stream) -> tuple[T, torch.cuda.Event]:
    side.wait_stream(torch.cuda.current_stream(side.device))
    with torch.cuda.stream(side):
        return next(batches), side.record_event()


@cache
def _side(device: torch.device) -> torch.cuda.Stream:
    """One for all: what a task keeps between batches is then always in order."""
    return torch.cuda.Stream(device)
