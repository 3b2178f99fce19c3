"""walk: the one pass of batches through a model that everything uses.

A visitor says at which layers it wants to see what. Only those hooks are set, and several visitors share one forward
pass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn

from acutance import distributed as processes
from acutance import sites
from acutance.attention import AttentionCall
from acutance.errors import AcutanceError
from acutance.measure.samples import SPECIAL, BatchRows, TokenLayout, refuse_single
from acutance.sites.wrappers import bare_module, evaluating, is_sharded

EVERY = range(sys.maxsize)  # layer
Calls = list[Callable[[int, Any], None]]  # methods of visitors
AsTokens = Callable[[Tensor], Tensor]


@dataclass
class Batch:
    """What is fed in one forward pass, and how its tokens fall into samples."""

    model: nn.Module  # the whole model
    part: str | None  # that is read
    fed: Any  # a tensor, a (tensor, …) tuple or a mapping of arguments
    counts: bool = True  # False where this process only runs along on another's batch
    _samples: dict[str, TokenLayout] = field(default_factory=dict, init=False)

    def samples(self, prefix: str) -> TokenLayout:
        """With the special tokens `in` or `out`."""
        if prefix not in self._samples:
            about = sites.sides(self.model, self.part) if isinstance(self.fed, Mapping) else {}
            skip = sites.special_tokens(self.model, self.part) if prefix == "out" else (0, 0)
            self._samples[prefix] = TokenLayout.of(self.fed, special_token_counts=skip, special=prefix == "in", **about)
        return self._samples[prefix]

    @property
    def packed(self) -> TokenLayout | None:
        """The samples, where a visitor has asked for them and they are documents packed into rows."""
        return next((samples for samples in self._samples.values() if samples.documents is not None), None)


class Visitor:
    """Sees what happens in a model: every method does nothing unless it is overridden.

    `needs` names the methods among `enter`, `leave`, `attend` and `final` that are to be called, and at which layers.
    Layers are numbered from 1 over all blocks, also those without attention.
    """

    needs: Mapping[str, Container[int]] = {}

    def begin(self, batch: Batch) -> None:
        """A batch is about to run."""

    def enter(self, layer: int, tokens: Tensor) -> None:
        """Tokens (batch, tokens, channels) come into the block."""

    def attend(self, layer: int, call: AttentionCall) -> None:
        """The block's attention branch is done."""

    def leave(self, layer: int, tokens: Tensor) -> None:
        """Tokens (batch, tokens, channels) leave the block."""

    def final(self, layer: int, tokens: Tensor) -> None:
        """The tokens after the final norm; the layer is the last."""

    def end(self) -> None:
        """The batch has run."""


def walk(
    model: nn.Module,
    batches: Iterable[Any],
    *visitors: Visitor,
    part: str | None = None,
    progress: str | None = None,
    across_processes: bool = False,
) -> None:
    """Stream batches through a model, once for all visitors.

    The model is read in evaluation mode without gradients, outside of torch.compile's and DDP's wrappers, and left as
    it was found.

    Args:
        model: any model that `acutance.sites` knows; of others, blocks told by structure.
        batches: tensors, (tensor, …) tuples of which the first entry is fed, or mappings of keyword arguments.
        visitors: what is done with what they see.
        part: path of the submodule to read, where a model has several stacks of layers.
        progress: what a progress bar says; None shows none.
        across_processes: every process of the process group runs its share of the batches.
    """
    refuse_single(batches)
    bare = bare_module(model)  # a compiled model would not see hooks added now
    target = sites.part_of(bare, part)
    with evaluating(bare), sites.cached_lookup(), sites.reading(target), ExitStack() as stack:
        batch: Batch | None = None

        def refuse_mixing(call: AttentionCall) -> None:
            if batch is not None and batch.packed is not None:
                batch.packed.refuse_mixing(call.A)

        stack.enter_context(hooked(target, *visitors, check=refuse_mixing))
        attends = any("attend" in visitor.needs for visitor in visitors)
        for fed, counts in _shared(batches, progress, stack, is_sharded(bare) if across_processes else None):
            is_first, batch = batch is None, Batch(bare, part, fed, counts)
            for visitor in visitors:
                visitor.begin(batch)
            with ExitStack() as around:
                if is_first:  # what the blocks are given and give is looked at once: it takes a while
                    around.enter_context(sites.checking_blocks(target, *BatchRows.of(fed)))
                if batch.packed is not None and not attends:
                    with suppress(AcutanceError):  # attention that cannot be read cannot be asked
                        around.enter_context(sites.find(target)[0].observe(refuse_mixing))
                feed(bare, fed)
            for visitor in visitors:
                visitor.end()


def _shared(
    batches: Iterable[Any], progress: str | None, stack: ExitStack, sharded: bool | None
) -> Iterable[tuple[Any, bool]]:
    """The batches of this process and whether they count; `sharded` is None where the process has all of them."""
    if sharded is None:
        return ((batch, True) for batch in track(batches, progress, stack))
    processes.refuse_shares(batches)
    rank, size = processes.rank_and_world_size()
    own = track(processes.share(batches, rank, size), progress if rank == 0 else None, stack)
    return processes.pad_uneven_batches(own, wait=sharded)


@contextmanager
def hooked(
    model: nn.Module, *visitors: Visitor, check: Callable[[AttentionCall], None] = lambda call: None
) -> Iterator[None]:
    """With the hooks that the visitors need, for the time of a with block; `check` sees attention before they do."""
    with ExitStack() as stack:
        blocks = sites.blocks(model)
        for layer, block, as_tokens in blocks:
            if entering := _called(visitors, "enter", layer):
                hook = partial(_entered, entering, layer, as_tokens)
                stack.callback(block.register_forward_pre_hook(hook, with_kwargs=True).remove)
            if leaving := _called(visitors, "leave", layer):
                stack.callback(block.register_forward_hook(partial(_left, leaving, layer, as_tokens)).remove)
        if any("attend" in visitor.needs for visitor in visitors):
            for site, layer in sites.layers_of(model):
                if attending := _called(visitors, "attend", layer):
                    stack.callback(site.observe(partial(_attended, attending, layer, check)).remove)
        last = blocks[-1][0]
        if after := _called(visitors, "final", last):
            norm, as_tokens = sites.final_norm(model), sites.find(model)[-1].tokens
            stack.callback(norm.register_forward_hook(partial(_left, after, last, as_tokens)).remove)
        yield


def _called(visitors: Sequence[Visitor], method: str, layer: int) -> Calls:
    """The methods of the visitors that want to see this at this layer."""
    return [getattr(visitor, method) for visitor in visitors if layer in visitor.needs.get(method, ())]


def _entered(called: Calls, layer: int, as_tokens: AsTokens, _block: nn.Module, args: Any, kwargs: Any) -> None:
    tokens = as_tokens(sites.tokens_in(args, kwargs))
    for call in called:
        call(layer, tokens)


def _left(called: Calls, layer: int, as_tokens: AsTokens, _block: nn.Module, _args: Any, output: Any) -> None:
    tokens = as_tokens(sites.tokens_out(output))
    for call in called:
        call(layer, tokens)


def _attended(called: Calls, layer: int, check: Callable[[AttentionCall], None], record: AttentionCall) -> None:
    check(record)
    for call in called:
        call(layer, record)


def track(batches: Iterable[Any], progress: str | None, stack: ExitStack) -> Iterable[Any]:
    """The batches, with a progress bar that says this and closes with the stack; None shows none."""
    if progress is None:
        return batches
    done, times = [BarColumn(), MofNCompleteColumn()], [TimeElapsedColumn(), TimeRemainingColumn()]
    bar = stack.enter_context(Progress(TextColumn("{task.description}"), *done, *times, transient=True))
    return bar.track(batches, total=processes.length_of(batches), description=progress)


def feed(model: nn.Module, batch: Any) -> Any:
    """Run one batch of any accepted form through the model, on the model's device."""
    device = next(model.parameters()).device
    if isinstance(batch, Mapping):
        return model(**_moved({name: value for name, value in batch.items() if name != SPECIAL}, device))
    inputs = batch[0] if isinstance(batch, (tuple, list)) else batch
    if not isinstance(inputs, Tensor):
        raise AcutanceError(
            f"a batch must be a tensor, a (tensor, …) tuple or a mapping of arguments, not {type(inputs).__name__}"
        )
    return model(inputs.to(device))


def _moved(value: Any, device: torch.device) -> Any:
    """Tensors, also those inside a mapping, on the device."""
    if isinstance(value, Mapping):
        return {name: _moved(inside, device) for name, inside in value.items()}
    return value.to(device) if isinstance(value, Tensor) else value
