"""One optimiser step, from a global batch to new weights. Everything random in it depends on (seed, step) alone."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from acutance.errors import AcutanceError, first_line
from acutance.lab.data.seeds import mixed_seed
from acutance.lab.tasks import BatchSlice, Task
from acutance.lab.train.config import Config
from acutance.lab.train.engine import Engine, raise_on_all_ranks
from acutance.lab.train.optim import Ema, build_optimiser, set_learning_rate

T = TypeVar("T")
Parts = tuple[Any, ...]  # this process's slices of a global batch; their gradients are accumulated
# Steps in which kernels are compiled and tuned and the optimiser makes its moments. The last of them already refuses
# what waits for the device: after a failed capture, torch 2.11 cannot draw random numbers in this process.
WARM_UP = 3


class TrainStep:
    """A task's model, sharded in place, its optimiser, and the step itself.

    A `bare` model is built without the run's initial weights, since a checkpoint is restored afterwards.
    """

    def __init__(self, config: Config, engine: Engine, task: Task[Any], *, bare: bool = False) -> None:
        loop, count = config.loop, engine.world * config.loop.accumulate
        self.config, self.engine, self.task = config, engine, task
        if loop.batch_size % count:
            raise AcutanceError(
                f"a batch of {loop.batch_size} cannot be cut into {engine.world} processes × {loop.accumulate} parts: "
                f"choose a loop.batch_size that {count} divides"
            )
        # This process's slices of every global batch. All slices are numbered as a single process would take them.
        self.slices = [BatchSlice(engine.rank * loop.accumulate + part, count) for part in range(loop.accumulate)]
        torch.manual_seed(mixed_seed(loop.seed))
        self.model: nn.Module = raise_on_all_ranks(task.bare_model if bare else task.build_model).train()
        self.wrapped = engine.wrap(self.model)
        alone = engine.strategy == "single" and len(self.slices) == 1
        graph = loop.graph and engine.device.type == "cuda" and alone
        self.graphed = CUDAGraphStep(self._update) if graph else None
        # After sharding, which replaces the parameters.
        self.optimiser = build_optimiser(self.model, config.optim, graph=graph)
        self.ema = None if loop.ema is None else Ema(self.model, loop.ema)

    def __call__(self, step: int, parts: Parts, rate: float) -> Tensor:
        """One step at this learning rate. The loss stays on the device and is valid until the next step."""
        set_learning_rate(self.optimiser, rate)
        if self.graphed is None:
            loss = self._update(parts, step)
        else:
            self._seed(step, self.slices[0])
            loss = self.graphed(parts)
        if self.ema is not None:  # not in the graph, which would keep the first step's decay
            self.ema.update(step)
        return loss

    def batches(self, first_step: int) -> Iterator[Parts]:
        """This process's slices of global batch `first_step`, the next, and so on without end."""
        size, device = self.config.loop.batch_size, self.engine.device
        parts = zip(*(self.task.batches(size, first_step, part) for part in self.slices), strict=True)
        return prefetch(parts, device) if self.task.made_on_device and device.type == "cuda" else parts

    def losses(self, step: int, parts: Parts) -> Tensor:
        """The slices' losses in this step, by the unwrapped model."""
        found = []
        for part, batch in zip(self.slices, parts, strict=True):
            self._seed(step, part)
            with self.engine.precision():
                found.append(self.task.loss(self.model, batch))
        return torch.stack(found)

    def _update(self, parts: Parts, step: int | None = None) -> Tensor:
        """Update the weights. Without `step` the random state is not set, since a CUDA graph cannot do so."""
        total = torch.zeros((), device=self.engine.device)
        for part, batch in zip(self.slices, parts, strict=True):
            if step is not None:
                self._seed(step, part)
            with self.engine.no_sync(self.wrapped, enabled=part is not self.slices[-1]):
                loss = self.task.loss(self.wrapped, batch) / len(parts)
                self.engine.backward(loss)
            total += loss.detach()
        if self.config.optim.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optim.clip)
        self.optimiser.step()
        self.optimiser.zero_grad()
        return total

    def _seed(self, step: int, part: BatchSlice) -> None:
        """Give a slice the same dropout and stochastic depth in any process."""
        torch.manual_seed(mixed_seed(self.config.loop.seed, step, part.index))


class CUDAGraphStep:
    """A function of a batch on a GPU that is captured on its fourth call and replayed from then on.

    The function may change weights and draw random numbers, which follow `torch.manual_seed` as without a graph. It
    must not wait for the device, and all batches must have one shape.
    """

    def __init__(self, function: Callable[[Any], Tensor]) -> None:
        self._function = function
        self._stream = torch.cuda.Stream()  # a capture may not be made on the default stream, nor warmed up there
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batch: Any = None
        self._loss: Tensor

    def __call__(self, batch: Any) -> Tensor:
        """The loss, which the next call overwrites."""
        self._copy_in(batch)
        self._calls += 1
        if self._calls <= WARM_UP:
            explained = _explained("--set loop.graph=false trains without", waiting=False)
            self._stream.wait_stream(torch.cuda.current_stream())
            with explained if self._calls == WARM_UP else nullcontext(), torch.cuda.stream(self._stream):
                loss = self._function(self._batch)
            torch.cuda.current_stream().wait_stream(self._stream)
            return loss
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            # Threads that load data may use the device meanwhile.
            capture = torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local")
            with _explained("--set loop.graph=false trains without, in a new process"), capture:
                self._loss = self._function(self._batch)
        self._graph.replay()
        return self._loss

    def _copy_in(self, batch: Any) -> None:
        """Copy into the memory that the graph reads. Compiled code sees this memory from the first call on."""
        if self._batch is None:
            self._batch = tree_map(lambda new: new.clone(memory_format=torch.contiguous_format), batch)
            return
        own, new = tree_leaves(self._batch), tree_leaves(batch)
        before, after = ([tuple(tensor.shape) for tensor in tensors] for tensors in (own, new))
        if before != after:
            raise AcutanceError(
                f"a batch of shapes {after} after batches of {before}: a CUDA graph takes one shape only. "
                "Leave an incomplete batch out, or --set loop.graph=false"
            )
        torch._foreach_copy_(own, new)


@contextmanager
def _explained(advice: str, *, waiting: bool = True) -> Iterator[None]:
    """Inside, what cannot be captured is refused with advice; without `waiting`, also what makes the host wait."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns once that it does not find every case
        torch.cuda.set_sync_debug_mode(before if waiting else "error")
    try:
        yield
    except RuntimeError as error:
        raise AcutanceError(
            "the step cannot be recorded as a CUDA graph: something in it waits for the device or depends on "
            f"numbers there ({first_line(error)}). {advice}"
        ) from error
    finally:
        torch.cuda.set_sync_debug_mode(before)


def prefetch(batches: Iterator[T], device: torch.device) -> Iterator[T]:
    """The same batches, bit for bit. The GPU makes each on a side stream while the step before it runs.

    The training stream waits for a batch before reading it. Before each batch, the side stream waits for everything
    queued on the training stream so far. It is therefore never more than one batch ahead, and never overwrites a used
    batch's memory while a step still reads it. `record_stream` would keep that memory until the host, which runs many
    steps ahead, sees an event.
    """
    side = _side_stream(device)

    def made() -> tuple[T, torch.cuda.Event]:
        side.wait_stream(torch.cuda.current_stream(side.device))
        with torch.cuda.stream(side):
            return next(batches), side.record_event()

    try:
        upcoming = made()
        while True:
            batch, ready = upcoming
            upcoming = made()
            torch.cuda.current_stream(device).wait_event(ready)
            yield batch
    finally:  # the last batch is not used, but its kernels still read the data, which may now be freed
        torch.cuda.current_stream(device).wait_stream(side)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all uses, so that a task's own state between batches is always in order."""
    return torch.cuda.Stream(device)
