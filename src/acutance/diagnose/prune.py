"""Which layers could go: those that change their input least (arXiv 2403.03853), and what going without them costs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from acutance import sites
from acutance.diagnose.findings import named
from acutance.diagnose.quality import Quality, objective_of
from acutance.diagnose.readings import Numbers
from acutance.errors import AcutanceError, ShapeError
from acutance.measure.samples import TokenLayout
from acutance.measure.walk import Batch, Visitor, walk
from acutance.metrics.sums import masked_mean, unit_vectors, valid_positions


@dataclass(frozen=True)
class Removal:
    """Layers that were left out together, and what that did to the model."""

    layers: tuple[int, ...]
    influence: float  # 1 − cosine between a layer's input and output, the mean of these layers
    cost: str  # the quality with and without them, and the paired difference with its interval
    verdict: str  # better, worse or no clear change

    def __str__(self) -> str:
        return f"without {named(self.layers)}: {self.cost}: {self.verdict}"


def prune(
    model: nn.Module, batches: Sequence[Any], influence: Numbers, count: int, *, part: str | None, quality: Any = None
) -> tuple[Removal, ...]:
    """The `count` layers of least influence, left out one at a time and then all together, each time measured.

    Quality is what `objective_of` finds, or else the cosine between the embeddings with and without the layers.
    """
    blocks = sites.blocks(sites.part_of(model, part))
    if len(blocks) != len(influence):
        raise AcutanceError(f"{len(influence)} layers share {len(blocks)} blocks: none can be left out by itself")
    if not 1 <= count < len(blocks):
        raise AcutanceError(f"{count} of {len(blocks)} layers cannot be left out: give 1 to {len(blocks) - 1}")
    chosen = np.sort(np.argsort(influence, kind="stable")[:count]) + 1
    sets = [(int(layer),) for layer in chosen] + ([tuple(chosen.tolist())] if count > 1 else [])
    measure = measured_by(model, batches, part, quality)
    before, removals = measure(), []
    for layers in sets:
        with without(model, layers, part):
            after = measure()
        least = float(influence[np.array(layers) - 1].mean())
        removals.append(Removal(layers, least, before.to(after), before.change(after).verdict))
    return tuple(removals)


@contextmanager
def without(model: nn.Module, layers: Sequence[int], part: str | None = None) -> Iterator[None]:
    """In a with block these layers hand on what they are given."""

    def hand_on(block: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        tokens, made = sites.tokens_in(args, kwargs), sites.tokens_out(output)
        if made.shape != tokens.shape:
            raise ShapeError(f"a layer makes {tuple(made.shape)} of {tuple(tokens.shape)}: it cannot be left out")
        return tokens if isinstance(output, Tensor) else type(output)((tokens, *output[1:]))

    with ExitStack() as stack:
        for layer, block, _ in sites.blocks(sites.part_of(model, part)):
            if layer in layers:
                stack.callback(block.register_forward_hook(hand_on, with_kwargs=True).remove)
        yield


def measured_by(model: nn.Module, batches: Sequence[Any], part: str | None, quality: Any) -> Callable[[], Quality]:
    """What measures the model as it is now."""
    if (objective := objective_of(model, batches, quality)) is not None:
        return lambda: objective.measure(model, batches)[0]
    whole = embeddings(model, batches, part)

    def alike() -> Quality:
        cosines = (unit_vectors(embeddings(model, batches, part)) * unit_vectors(whole)).sum(-1).tolist()
        return Quality("cosine to the embeddings of the whole model", True, tuple(cosines), (1.0,) * len(cosines))

    return alike


class Pooled(Visitor):
    """The mean token of every sample after the last block."""

    def __init__(self, last: int) -> None:
        self.needs, self.samples, self.found = {"leave": (last,)}, TokenLayout(), list[Tensor]()

    def begin(self, batch: Batch) -> None:
        self.samples = batch.samples("in")

    def leave(self, layer: int, tokens: Tensor) -> None:
        tokens, mask = self.samples.tokens(tokens)
        self.found.append(masked_mean(tokens.double().mT, valid_positions(mask, tokens).unsqueeze(-2)).cpu())


def embeddings(model: nn.Module, batches: Sequence[Any], part: str | None) -> Tensor:
    """The samples' mean tokens (samples, channels) in float64."""
    reader = Pooled(sites.blocks(sites.part_of(model, part))[-1][0])
    walk(model, batches, reader, part=part)
    return torch.cat(reader.found)
