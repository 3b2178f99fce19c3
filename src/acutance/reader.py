"""What `measure` reads of one batch, and what becomes of it over many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from acutance import metrics as metric_room
from acutance.errors import AcutanceError, ShapeError
from acutance.kernels import token_sums
from acutance.metrics._common import finite_flags
from acutance.metrics.from_sums import FROM_SUMS
from acutance.operator import AttentionOperator, AttentionRecord
from acutance.profile import MAP
from acutance.readout import Key, Readout
from acutance.samples import Samples

SUCCESSIVE = "attention_cosine"  # compares a layer's attention with the layer before (Fig. 5 of arXiv 2312.00751)


class Reader:
    """Turns what the hooks see in one batch into metric values; holds at most one earlier layer's q and k."""

    def __init__(self, names: Sequence[str], taps: Sequence[str]) -> None:
        self.token_metrics = [n for n in names if n in metric_room.TOKEN_METRICS]
        self.attention_metrics = [n for n in names if n in metric_room.ATTENTION_METRICS]
        self.successive = SUCCESSIVE in names
        self.taps = taps
        self.samples = Samples()
        self.out = Readout()
        self.count = 0  # tokens in a sample, as its first reading has them
        self.ran: dict[str, list[int]] = {}  # by tap, the blocks that ran, and
        self.depths: dict[str, int] = {}  # how deep the last one was
        self.previous: AttentionOperator | None = None

    @property
    def wants_records(self) -> bool:
        """Whether anything is to be read of the attention itself."""
        return bool({"attention", "values"} & set(self.taps) or self.attention_metrics or self.successive)

    def depth(self, tap: str, layer: int) -> int:
        """How deep a block is that runs now: its number, or one more than before where layers share a module."""
        before = self.ran.setdefault(tap, [])
        if layer in before and layer != before[-1]:
            raise AcutanceError(
                f"layer {layer} ran again after layer {before[-1]} in one forward pass, so its readings cannot be told "
                "apart: feed what runs the layers once"
            )
        before.append(layer)
        self.depths[tap] = max(layer, self.depths.get(tap, 0) + 1)
        return self.depths[tap]

    def begin(self, tokens: Tensor) -> None:
        """The tokens (batch, …) enter the first block: attention alone would not tell samples from their windows."""
        self.out.size = self.out.size or self.samples.count(len(tokens))

    def tokens(self, tap: str, layer: int, tokens: Tensor) -> None:
        """Read the token metrics at one tap."""
        if tokens.ndim != 3:
            raise ShapeError(f"{tap} of layer {layer} is {tuple(tokens.shape)}, not (batch, tokens, channels)")
        self._refuse_added(layer, tokens)
        self._measure_tokens(tap, layer, *self.samples.tokens(tokens))

    def record(self, layer: int, record: AttentionRecord, *, windows_move: bool = False) -> None:
        """Read what one layer's attention did."""
        self._refuse_added(layer, record.branch)
        _, mask = self.samples.tokens(record.branch)
        record = self.samples.record(record)
        if "attention" in self.taps:
            self._measure_tokens("attention", layer, record.branch, mask)
        if "values" in self.taps:
            merged = record.values.transpose(1, 2).flatten(2)
            # Pyramids have fewer keys than queries; their prefix and padding are none.
            self._measure_tokens("values", layer, merged, mask if merged.shape[1] == record.branch.shape[1] else None)
        is_watched = "attention" in self.taps and self.token_metrics
        if (self.attention_metrics or self.successive) and not is_watched:
            self._watch([*self.attention_metrics, SUCCESSIVE][0], layer, record.branch, mask)
        for name in self.attention_metrics:
            self.out.add((MAP, layer, name), metric_room.ATTENTION_METRICS[name](record, mask))
        if self.successive:
            # Windows that move hold other tokens than in the layer before.
            before, self.previous = self.previous, None if windows_move else record.operator
            if before is not None and self.previous is not None and before.shape == self.previous.shape:  # one stage's
                cosine = metric_room.attention_cosine(before, self.previous, mask)
                self.out.add((MAP, layer, SUCCESSIVE), cosine)

    def flush(self) -> Readout:
        """Hand over the batch's values, on their way from the device in one transfer, and begin anew."""
        if not self.out.sources:
            raise AcutanceError(
                f"nothing was read: {SUCCESSIVE} compares successive layers and needs two of them, of the same tokens: "
                "windows that move from layer to layer have none"
            )
        out, self.out = self.out, Readout()
        self.previous, self.count, self.ran, self.depths = None, 0, {}, {}
        return out.send()

    def _refuse_added(self, layer: int, tokens: Tensor) -> None:
        """Tokens that join on the way, such as EoMT's queries, move those at the ends away from there."""
        self.count = self.count or tokens.shape[1]
        if any(self.samples.skip) and tokens.shape[1] > self.count:
            raise AcutanceError(
                f"layer {layer} has {tokens.shape[1]} tokens, the first reading had {self.count}: some were added on "
                "the way, so where the special tokens are is not known. Read with prefix='in'"
            )

    def _measure_tokens(self, tap: str, layer: int, tokens: Tensor, mask: Tensor | None) -> None:
        if not self.token_metrics:
            return
        sums = self._watch(f"{self.token_metrics[0]} at {tap}", layer, tokens, mask)
        for name in self.token_metrics:
            if sums is not None and name in FROM_SUMS:
                self.out.follow((tap, layer, name), sums)
            else:
                self.out.add((tap, layer, name), metric_room.TOKEN_METRICS[name](tokens, mask))

    def _watch(self, metric: str, layer: int, tokens: Tensor, mask: Tensor | None) -> int | None:
        """Have tokens that are not finite complained about, by name of a metric; the place of their sums, if any."""
        if token_sums.is_available(tokens, mask):
            return self.out.add_sums(token_sums.token_sums(tokens, mask), metric, layer)
        self.out.add_flags(finite_flags(tokens, mask), metric, layer)
        return None


def take_in(statistics: dict[Key, Running], batch: Mapping[Key, NDArray[np.float64]]) -> None:
    """Add one batch's values to the statistics of each key."""
    for key, found in zip(batch, Running.of_each(np.stack(list(batch.values()))), strict=True):
        statistics.setdefault(key, Running()).merge(found)


@dataclass
class Running:
    """Mean and standard deviation of a stream, merged batch by batch and process by process (Chan's update)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # the sum of squared deviations from the mean

    @classmethod
    def of_each(cls, values: NDArray[np.float64]) -> list[Running]:
        """The statistics of each row."""
        finite = np.isfinite(values)  # some are documented not to be, such as HFC/LFC of tokens whose mean is zero
        means = np.where(finite, values, 0).mean(1)
        away = np.where(finite, values - means[:, None], 0)
        known = zip(means.tolist(), (away * away).sum(1).tolist(), strict=True)
        moments = [
            pair if row_finite.all() else (float(row[~row_finite].sum()), 0.0)
            for pair, row, row_finite in zip(known, values, finite, strict=True)
        ]
        return [cls(values.shape[1], *pair) for pair in moments]

    def add(self, values: NDArray[np.float64]) -> None:
        """Take in one batch's values."""
        self.merge(*self.of_each(values[None]))

    def merge(self, other: Running) -> None:
        """Take in the statistics of other samples."""
        total = self.count + other.count
        if np.isfinite(self.mean + other.mean):
            delta = other.mean - self.mean
            self.mean += delta * other.count / total
            self.squares += other.squares + delta**2 * self.count * other.count / total
        else:
            self.mean += other.mean  # once infinite, always infinite
        self.count = total

    @property
    def std(self) -> float:
        """The standard deviation over samples; infinite where the mean is."""
        if not np.isfinite(self.mean):
            return float("inf")
        return float(np.sqrt(self.squares / (self.count - 1))) if self.count > 1 else 0.0
