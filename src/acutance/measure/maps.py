"""Attention maps of chosen layers, per head: Fig. 4 of arXiv 2312.00751."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from acutance import sites
from acutance.attention import AttentionCall
from acutance.errors import AcutanceError
from acutance.measure.walk import Visitor, walk
from acutance.report.pictures import Figure, plot_attention
from acutance.sites.structure import bare_module


class AttentionMaps(dict[int, NDArray[np.float32]]):
    """Layer number (1 is the first) to an array (heads, tokens, tokens); but for scans its rows sum to one."""

    def __repr__(self) -> str:
        return f"AttentionMaps({ {layer: maps.shape for layer, maps in self.items()} })"

    def plot(self) -> Figure:
        """A matplotlib figure: a row per layer, a column per head."""
        return plot_attention(self)


def attention_maps(model: nn.Module, sample: Tensor | Mapping[str, Any], layers: Sequence[int]) -> AttentionMaps:
    """The attention matrices of one sample, per head: whole N×N matrices, meant to be looked at.

    The sample is an image, with or without a batch axis of one, or keyword arguments; layers are such as `[1, 6, 12]`.
    """
    bare = bare_module(model)
    found = [number for _, number in sites.readable_layers(bare)]
    if not layers or not set(layers) <= {*found}:
        known = f"from {found[0]} to {found[-1]}" if len(found) > found[-1] - found[0] else f"of {found}"
        raise AcutanceError(f"layers {list(layers)}: name at least one, {known}")
    if isinstance(sample, Tensor) and sample.ndim == 3:
        sample = sample[None]
    reader = MapReader(layers)
    walk(bare, [sample], reader)
    return reader.maps


class MapReader(Visitor):
    """Keeps the attention of one sample at some layers."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.needs, self.maps = {"attend": layers}, AttentionMaps()

    def attend(self, layer: int, call: AttentionCall) -> None:
        if call.A.shape[0] != 1:
            raise AcutanceError(f"attention_maps takes one sample, got a batch of {call.A.shape[0]}")
        self.maps[layer] = call.A.dense()[0].float().cpu().numpy()
