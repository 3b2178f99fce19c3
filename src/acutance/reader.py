"""What `measure` reads of one batch, and what becomes of it over many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from acutance import metrics as metric_room
from acutance.attention import AttentionCall
from acutance.errors import AcutanceError, ShapeError
from acutance.kernels import token_sums
from acutance.metrics._common import finite_flags
from acutance.metrics.from_rows import FROM_ROWS, from_rows
from acutance.metrics.from_sums import FROM_SUMS, Numbers
from acutance.operator import AttentionOperator
from acutance.profile import MAP
from acutance.readout import Key, Readout
from acutance.samples import Samples

SUCCESSIVE = "attention_cosine"  # compares a layer's attention with the layer before (Fig. 5 of arXiv 2312.00751)


class Reader:
    """Turns what the hooks see in one batch into metric values; holds at most one earlier layer's q and k."""

    def __init__(self, names: Sequence[str], taps: Sequence[str]) -> None:
        self.token_metrics = [n for n in names if n in metric_room.TOKEN_METRICS]
        self.attention_metrics = [n for n in names if n in metric_room.ATTENTION_METRICS]
        self.has_both_of_rows = set(FROM_ROWS) <= set(names)  # of which one alone has its own way
        self.successive = SUCCESSIVE in names
        self.taps = taps
        self.samples = Samples()
        self.is_checked = False  # whether the blocks of the model are known to give its samples' tokens
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
        if any(self.samples.skip) and tokens.ndim == 3 and tokens.shape[1] <= sum(self.samples.skip):
            raise AcutanceError(f"all {tokens.shape[1]} tokens of a sample are special: read with prefix='in'")
        self.out.size = self.out.size or self.samples.count(len(tokens))

    def tokens(self, tap: str, layer: int, tokens: Tensor) -> None:
        """Read the token metrics at one tap."""
        if tokens.ndim != 3:
            raise ShapeError(f"{tap} of layer {layer} is {tuple(tokens.shape)}, not (batch, tokens, channels)")
        self._refuse_added(layer, tokens)
        self._measure_tokens(tap, layer, *self.samples.tokens(tokens))

    def record(self, layer: int, record: AttentionCall, *, windows_move: bool = False) -> None:
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
        # What spoils the branch spoils the residual stream after it.
        is_watched = self.token_metrics and {"attention", "block"} & set(self.taps)
        if (self.attention_metrics or self.successive) and not is_watched:
            self._watch([*self.attention_metrics, SUCCESSIVE][0], layer, record.branch, mask)
        rows = from_rows(record, mask) if self.has_both_of_rows else {}
        for name in self.attention_metrics:
            if name in rows:
                self.out.add((MAP, layer, name), *rows[name])
            else:
                self.out.add((MAP, layer, name), metric_room.ATTENTION_METRICS[name](record, mask))
        if self.successive:
            # Windows that move hold other tokens than in the layer before.
            before, self.previous = self.previous, None if windows_move else record.A
            if before is not None and self.previous is not None and before.shape == self.previous.shape:  # one stage's
                cosine = metric_room.attention_cosine(before, self.previous, mask)
                self.out.add((MAP, layer, SUCCESSIVE), cosine)

    def flush(self) -> Readout:
        """Hand over the batch's values, on their way from the device in one transfer, and begin anew."""
        if not self.out.sources:
            raise AcutanceError(f"nothing was read: {self._why_nothing()}")
        out, self.out = self.out, Readout(expected=max(1, len(self.out.sums)))
        self.previous, self.count, self.ran, self.depths = None, 0, {}, {}
        return out.send()

    def _why_nothing(self) -> str:
        if MAP in self.ran:
            return (
                f"{SUCCESSIVE} compares successive layers and needs two of them, of the same tokens: windows that move "
                "from layer to layer have none"
            )
        return (
            "no block of the model was called as a module in this forward pass. Some models, such as SqueezeBERT, run "
            "block.forward(…) past all hooks, and can be read only through a Library of their own"
        )

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
            place = self.out.place(len(tokens), tokens.device)
            return self.out.add_sums(token_sums.token_sums(tokens, mask, place), metric, layer)
        self.out.add_flags(finite_flags(tokens, mask), metric, layer)
        return None


Statistics = dict[tuple[Key, ...], "Running"]  # by the keys that are read together


def take_in(statistics: Statistics, keys: tuple[Key, ...], found: Running) -> None:
    """Add other samples' statistics of the same keys."""
    if keys in statistics:
        statistics[keys].merge(found)
    else:
        statistics[keys] = found


def by_key(statistics: Statistics) -> dict[Key, Running]:
    """The statistics of each key, also where not all batches have the same."""
    each: Statistics = {}
    for keys, found in statistics.items():
        for place, key in enumerate(keys):
            take_in(each, (key,), Running(found.count, found.mean[place, None], found.squares[place, None]))
    return {key: found for (key,), found in each.items()}


@dataclass
class Running:
    """Means and standard deviations of several streams, merged batch by batch and process by process (Chan's update).

    An array operation for all streams, since one for each would keep the device waiting.
    """

    count: int  # of samples in every stream
    mean: Numbers
    squares: Numbers  # the sums of squared deviations from the mean

    @classmethod
    def of(cls, values: Numbers) -> Running:
        """Of streams × samples; some are documented to be infinite, such as HFC/LFC of tokens whose mean is zero."""
        finite = np.isfinite(values)
        if finite.all():
            mean = values.mean(1)
            away = values - mean[:, None]
            return cls(values.shape[1], mean, np.einsum("ij,ij->i", away, away))
        whole = np.all(finite, axis=1)
        known = cls.of(np.where(whole[:, None], values, 0))
        with np.errstate(invalid="ignore"):  # infinities of both signs make NaN
            known.mean = np.where(whole, known.mean, np.where(finite, 0, values).sum(1))
        return known

    def merge(self, other: Running) -> None:
        """Take in the statistics of other samples."""
        total = self.count + other.count
        with np.errstate(invalid="ignore"):
            both = self.mean + other.mean
        finite = np.isfinite(both)  # once infinite, always infinite
        delta = np.where(finite, other.mean, 0) - np.where(finite, self.mean, 0)
        self.squares = np.where(finite, self.squares + other.squares + delta**2 * (self.count * other.count / total), 0)
        self.mean = np.where(finite, self.mean + delta * (other.count / total), both)
        self.count = total

    @property
    def std(self) -> Numbers:
        """The standard deviations over samples; infinite where the mean is."""
        return np.where(np.isfinite(self.mean), np.sqrt(self.squares / max(self.count - 1, 1)), np.inf)
