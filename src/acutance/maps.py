"""Attention maps of chosen layers, per head: Fig. 4 of arXiv 2312.00751."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from acutance import sites
from acutance.attention import AttentionCall
from acutance.errors import AcutanceError
from acutance.measure import feed
from acutance.wrappers import bare_module, evaluating

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = NDArray[np.float32]


class AttentionMaps(Mapping[int, Array]):
    """Layer number (1 is the first) to an array (heads, tokens, tokens) whose rows sum to one."""

    def __init__(self, maps: Mapping[int, Array]) -> None:
        self._maps = dict(maps)

    def __getitem__(self, layer: int) -> Array:
        return self._maps[layer]

    def __iter__(self) -> Iterator[int]:
        return iter(self._maps)

    def __len__(self) -> int:
        return len(self._maps)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{layer}: {maps.shape}" for layer, maps in self.items())
        return f"AttentionMaps({{{shapes}}})"

    def picture(self) -> Figure:
        """A matplotlib figure: a row per layer, a column per head."""
        from acutance.report import attention_picture

        return attention_picture(self)


def attention_maps(model: nn.Module, sample: Tensor | Mapping[str, Any], layers: Sequence[int]) -> AttentionMaps:
    """The attention matrices of one sample, per head, at the given layers (1 is the first).

    These are whole N×N matrices, meant to be looked at; metrics never form them.

    Args:
        model: any model `acutance.sites.find` knows.
        sample: one input, with or without a batch axis of one for image tensors; or keyword arguments.
        layers: for example `[1, 6, 12]`.
    """
    bare = bare_module(model)
    found = {site.layer: site for site in sites.find(bare)}
    if not layers:
        raise AcutanceError(f"name at least one layer, from {min(found)} to {max(found)}")
    unknown = [layer for layer in layers if layer not in found]
    if unknown:
        raise AcutanceError(f"no layer {unknown[0]}: this model has layers {min(found)} to {max(found)}")
    if isinstance(sample, Tensor) and sample.ndim == 3:
        sample = sample[None]
    maps: dict[int, Array] = {}

    def keep(layer: int) -> Callable[[AttentionCall], None]:
        def observer(record: AttentionCall) -> None:
            if record.A.shape[0] != 1:
                raise AcutanceError(f"attention_maps takes one sample, got a batch of {record.A.shape[0]}")
            maps[layer] = record.A.dense()[0].float().cpu().numpy()

        return observer

    with evaluating(bare), ExitStack() as stack:
        for layer in layers:
            stack.callback(found[layer].observe(keep(layer)).remove)
        feed(bare, sample)
    return AttentionMaps(maps)
