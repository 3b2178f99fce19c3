"""The measured change of log HFC/LFC across a layer, split by the parts of its block: which part smooths, and how much.

HFC/LFC is in the Frobenius norm: it counts all differences between tokens, not the largest alone, and needs no
eigenvalues. LFC is the same in both norms.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from acutance.attention import AttentionCall
from acutance.errors import AcutanceError
from acutance.measure.intervals import margin_of
from acutance.measure.samples import TokenLayout
from acutance.measure.walk import Batch, Visitor
from acutance.metrics import hfc_lfc_frobenius
from acutance.sites import AttentionSite

Verdict = Literal["smoothing", "sharpening", "neutral", "unknown"]
# The spread of the median layer of a healthy small ViT: 0.058 over seeds, 0.061 to 0.064 over samples; 0.013 and 0.029
# over samples of two language models (benchmarks/neutral.py). A smaller change is no property of a layer.
NEUTRAL = 0.06


def direction(change: float) -> Verdict:
    """What a change of log HFC/LFC is called: "neutral" within ±NEUTRAL."""
    if math.isnan(change):
        return "unknown"
    return "neutral" if abs(change) <= NEUTRAL else "smoothing" if change < 0 else "sharpening"


@dataclass(frozen=True, eq=False)
class Shift:
    """The change of log HFC/LFC across a layer or a part of it, sample by sample: below 0 tokens become more alike."""

    by_sample: NDArray[np.float64]

    @property
    def mean(self) -> float:
        """The mean over samples."""
        return float(self.by_sample.mean())

    @property
    def margin(self) -> float:
        """Half the 95 % interval of the mean, by Student's t; NaN for one sample."""
        return margin_of(self.by_sample)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the mean, for samples that are independent."""
        return self.mean - self.margin, self.mean + self.margin

    @property
    def verdict(self) -> Verdict:
        """The direction of the mean; "unknown" if it is outside the neutral band, but its interval includes 0."""
        found = direction(self.mean)
        return found if found == "neutral" or abs(self.mean) > self.margin else "unknown"

    def __str__(self) -> str:
        return f"{self.mean:+.2f} ±{self.margin:.2f}"


@dataclass(frozen=True, eq=False)
class Change:
    """What a layer did to log HFC/LFC on data, and which part of its block did it."""

    parts: Mapping[str, Shift]  # "attention", "mlp", …, in the order they ran; their sum is the whole; empty if unknown
    whole: Shift  # from what enters the block to what leaves it
    parallel: bool = False  # whether both branches read the block's input: each part is then the mean of both orders

    @property
    def attention(self) -> Shift:
        """The attention's part; where the parts are not known, the whole."""
        return self.parts.get("attention", self.whole)


def change_between(before: Tensor, after: Tensor) -> Tensor:
    """From one log HFC/LFC to the next; 0 where both are the same infinity, as for one token."""
    return torch.where(after == before, 0.0, after - before)


class ChangeReader(Visitor):
    """Reads the `Change` of one layer over batches; `number` counts all blocks, with attention or without.

    Put one for each of `sites.layers_of(model)` into a walk, then ask `result`. A part is named "attention", "mlp"
    ("rest", if more than one branch follows), and in Post-LN "norm1" and "norm2", which act on the stream. Padding is
    left out, as the batch tells it or, if it does not, as attention shows it.
    """

    def __init__(self, site: AttentionSite, number: int, prefix: str = "in") -> None:
        self.site, self.prefix = site, prefix
        try:
            stages = site.stages()
        except AcutanceError:  # the block does not run by itself
            stages = None
        self.names: tuple[str, ...] = ()
        self.parallel = stages is not None and stages.parallel
        if stages is not None:
            mitigation = site.mitigation
            rest = "rest" if mitigation is not None and mitigation.overrides("stream") else stages.rest
            self.names = ("attention", "norm1", rest, "norm2") if stages.norms else ("attention", rest)
        methods = ("enter", "attend", "leave", *(["norm"] if "norm1" in self.names else []))
        self.needs = dict.fromkeys(methods, (number,))
        self.counted = self.present = TokenLayout()
        self.valid: Tensor | None = None  # (samples, tokens), False where there is padding
        self.tokens = self.added = torch.empty(0)
        self.logs: list[Tensor] = []  # log HFC/LFC of the stream, in the order of the block
        self.kept = defaultdict[str, list[Tensor]](list)

    def begin(self, batch: Batch) -> None:
        self.counted, self.present = batch.samples(self.prefix), batch.samples("in")

    def enter(self, layer: int, tokens: Tensor) -> None:
        self.tokens, self.logs = tokens, []

    def attend(self, layer: int, call: AttentionCall) -> None:
        self.valid = padding(self.present, self.tokens, call)
        self.logs = [self._log(self.tokens)]
        if len(self.names) == 2:
            self.added = self.site.update(call.branch)
            if self.added.shape != self.tokens.shape:  # windows
                self.names = ()
            else:
                self.logs.append(self._log(self.tokens + self.added))

    def norm(self, layer: int, tokens: tuple[Tensor, Tensor]) -> None:
        self.logs += map(self._log, tokens)

    def leave(self, layer: int, tokens: Tensor) -> None:
        if not self.logs:  # nobody saw the attention, which the walk says at the end
            return
        after = self._log(tokens)
        self.kept["whole"].append(change_between(self.logs[0], after))
        marks = [*(self.logs[:-1] if "norm1" in self.names else self.logs), after]  # the last norm ends the block
        found = [change_between(*pair) for pair in pairwise(marks)]
        if len(found) != len(self.names):
            self.names = ()  # a norm ran more than once
        elif self.parallel:
            other = self._log(tokens - self.added)  # the block without its attention
            orders = (found[0], change_between(other, after)), (found[1], change_between(self.logs[0], other))
            found = [(one + two) / 2 for one, two in orders]
        for name, values in zip(self.names, found, strict=False):
            self.kept[name].append(values)
        self.tokens, self.added, self.logs = torch.empty(0), torch.empty(0), []

    def result(self) -> Change:
        """What was found so far."""
        kept = {name: Shift(torch.cat(values).cpu().numpy()) for name, values in self.kept.items()}
        return Change({name: kept[name] for name in self.names}, kept["whole"], self.parallel and bool(self.names))

    def _log(self, tokens: Tensor) -> Tensor:
        tokens, mask = self.counted.tokens(tokens)
        if self.valid is not None:
            mask = self.valid if mask is None else mask & self.valid
        return hfc_lfc_frobenius(tokens, mask).double().log()


def padding(present: TokenLayout, tokens: Tensor, call: AttentionCall) -> Tensor | None:
    """(samples, tokens), False where there is padding: as the batch tells it, or else tokens that no token sees."""
    _, valid = present.tokens(tokens)
    visible = call.visible() if valid is None and call.refusal is None else None
    if visible is None or visible.shape[-1] != tokens.shape[1] or len(visible) not in (1, len(tokens)):
        return valid
    return visible.any(-2).any(1).expand(tokens.shape[:2])
