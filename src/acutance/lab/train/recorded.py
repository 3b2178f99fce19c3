"""A training step as one CUDA graph: the host launches one thing instead of a thousand, and never holds up the GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from acutance.errors import AcutanceError, first_line

# Calls in which kernels are compiled and chosen and the optimiser makes its moments. In the last one waiting is refused
# before it is too late: after a recording that failed, torch 2.11 draws no random numbers in this process any more.
WARM_UP = 3


class Recorded:
    """A function of a batch on a GPU that is recorded on its fourth call and replayed from then on.

    Every call does the work once, the first ones too, so a caller need not know. The function may change weights and
    draw random numbers, which follow from `torch.manual_seed` as they do without a recording. It must not wait for the
    device, and batches must have one shape.

    Args:
        function: batch to loss.
    """

    def __init__(self, function: Callable[[Any], Tensor]) -> None:
        self._function = function
        self._stream = torch.cuda.Stream()  # a recording may not be made on the default stream, nor warmed up there
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batch: Any = None
        self._loss: Tensor

    def __call__(self, batch: Any) -> Tensor:
        """The loss; it is overwritten by the next call."""
        self._take(batch)
        self._calls += 1
        if self._calls < WARM_UP:
            return self._aside()
        if self._calls == WARM_UP:
            with _recordable("--set loop.graph=false trains without"), _waiting_refused():
                return self._aside()
        if self._graph is None:
            self._graph = self._record()
        self._graph.replay()
        return self._loss

    def _take(self, batch: Any) -> None:
        """Into the place that the recording reads from; compiled code sees it from the first call on."""
        if self._batch is None:
            self._batch = tree_map(lambda new: new.clone(memory_format=torch.contiguous_format), batch)
            return
        own, new = tree_leaves(self._batch), tree_leaves(batch)
        if [tensor.shape for tensor in own] != [tensor.shape for tensor in new]:
            shapes = [[tuple(tensor.shape) for tensor in tensors] for tensors in (new, own)]
            raise AcutanceError(
                f"a batch of shapes {shapes[0]} after batches of {shapes[1]}: a recorded step takes one shape only. "
                "Leave an incomplete batch out, or --set loop.graph=false"
            )
        torch._foreach_copy_(own, new)

    def _aside(self) -> Tensor:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            loss = self._function(self._batch)
        torch.cuda.current_stream().wait_stream(self._stream)
        return loss

    def _record(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with (
            _recordable("--set loop.graph=false trains without, in a new process"),
            # Threads that load data may use the device meanwhile.
            torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"),
        ):
            self._loss = self._function(self._batch)
        return graph


@contextmanager
def _recordable(advice: str) -> Iterator[None]:
    """What goes wrong inside speaks against a recording."""
    try:
        yield
    except RuntimeError as error:
        raise AcutanceError(
            "the step cannot be recorded as a CUDA graph: something in it waits for the device or depends on "
            f"numbers there ({first_line(error)}). {advice}"
        ) from error


@contextmanager
def _waiting_refused() -> Iterator[None]:
    """Inside, what would make the host wait for the device raises instead."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that not all of it is found, once
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
