"""What `measure` reads of each batch, how it gets from the device, and what becomes of it over many batches.

A batch's values are gathered by layer, sent in one transfer, and waited for at the end. Batches that were read alike
are worked out together: for each by itself Python would take longer than a small model's forward pass leaves it.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from operator import attrgetter, is_
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from acutance import distributed as processes
from acutance import metrics as metric_room
from acutance.attention import AttentionCall
from acutance.attention.operator import AttentionOperator
from acutance.errors import AcutanceError, ShapeError
from acutance.measure.profile import MAP, Reading
from acutance.measure.samples import TokenLayout
from acutance.measure.walk import EVERY, Batch, Visitor
from acutance.metrics.from_rows import FROM_ROWS, from_rows
from acutance.metrics.from_sums import FROM_SUMS, Numbers
from acutance.metrics.kernels import token_sums
from acutance.metrics.kernels.token_sums import FIELDS, room
from acutance.metrics.tokens import FLAGS, complain, finite_flags

SUCCESSIVE = "attention_cosine"  # compares a layer's attention with the layer before (Fig. 5 of arXiv 2312.00751)
TOGETHER = 8  # at most, batches whose values are worked out at a time
Key = tuple[str, int, str]  # tap, layer, metric
BAD = FLAGS.index("bad")


class Reader(Visitor):
    """Reads metrics at every layer; holds running means, a few batches' values and at most one earlier layer's q and k.

    Args:
        names: of the metrics.
        taps: where token metrics are read.
        prefix: special tokens `in` or `out`.
        moving: layers whose windows hold other tokens than those of the layer before.
    """

    def __init__(
        self, names: Sequence[str], taps: Sequence[str], prefix: str = "in", moving: Container[int] = ()
    ) -> None:
        self.token_metrics = [n for n in names if n in metric_room.TOKEN_METRICS]
        self.attention_metrics = [n for n in names if n in metric_room.ATTENTION_METRICS]
        self.has_both_of_rows = set(FROM_ROWS) <= set(names)  # of which one alone has its own way
        self.successive = SUCCESSIVE in names
        self.taps, self.prefix, self.moving = taps, prefix, moving
        reads_attention = {"attention", "values"} & set(taps) or self.attention_metrics or self.successive
        wanted = {"leave": "block" in taps, "attend": reads_attention, "final": "final" in taps}
        self.needs = {"enter": (1,)} | {method: EVERY for method, is_wanted in wanted.items() if is_wanted}
        self.batches = 0  # that ran
        self.waiting: list[Found] = []
        self.statistics: Statistics = {}
        self.counts, self.samples = True, TokenLayout()  # of the batch that runs now
        self.filled: NDArray[np.bool_] | None = None
        self.out = Readout()
        self.count = 0  # tokens in a sample, as its first reading has them
        self.ran: dict[str, list[int]] = {}  # by tap, the blocks that ran, and
        self.depths: dict[str, int] = {}  # how deep the last one was
        self.previous: AttentionOperator | None = None

    def begin(self, batch: Batch) -> None:
        """Which of its tokens count, and which samples have one; the device has nothing of this batch to do yet."""
        self.counts, self.samples = batch.counts, batch.samples(self.prefix)
        self.filled = self.samples.filled

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

    def enter(self, layer: int, tokens: Tensor) -> None:
        """The tokens (batch, …) enter the first block: attention alone would not tell samples from their windows."""
        if self.out.size:  # layers that share a module enter it again
            return
        special = sum(self.samples.special_token_counts)
        if special and tokens.ndim == 3 and tokens.shape[1] <= special:
            raise AcutanceError(f"all {tokens.shape[1]} tokens of a sample are special: read with prefix='in'")
        self.out.size = self.samples.count(len(tokens))
        if "block" in self.taps:
            self.tokens("block", 0, tokens)

    def leave(self, layer: int, tokens: Tensor) -> None:
        """The residual stream after a block."""
        self.tokens("block", self.depth("block", layer), tokens)

    def final(self, layer: int, tokens: Tensor) -> None:
        """After the final norm."""
        self.tokens("final", layer, tokens)

    def end(self) -> None:
        """Work out batches before this one.

        At once where the device has them still to do, as the host has time then; else the device waits for the host,
        which takes less for several together.
        """
        self.batches += 1
        found = self.flush()
        self.waiting += [(found, self.filled)] if self.counts else []
        if len(self.waiting) > TOGETHER or (len(self.waiting) > 1 and not self.waiting[-2][0].is_there()):
            settle(self.statistics, self.waiting[:-1])
            self.waiting = self.waiting[-1:]

    def readings(self, *, across_processes: bool = False) -> tuple[Reading, ...]:
        """Mean and standard deviation over samples, by tap as asked for and by depth; of all processes together."""
        settle(self.statistics, self.waiting)
        self.waiting = []
        statistics: Statistics = {}
        for own in processes.gather(self.statistics) if across_processes else [self.statistics]:  # in order of ranks
            for keys, found in own.items():
                take_in(statistics, keys, found)
        if not statistics:
            raise AcutanceError(
                "no sample has a token that counts: masks and prefix='out' leave none"
                if self.batches
                else "measure got no batches: pass an iterable with at least one"
            )
        order = {name: position for position, name in enumerate([*self.taps, MAP])}
        every = sorted(by_key(statistics).items(), key=lambda item: (order[item[0][0]], item[0][1]))
        return tuple(Reading(*key, mean=float(s.mean[0]), std=float(s.std[0]), count=s.count) for key, s in every)

    def tokens(self, tap: str, layer: int, tokens: Tensor) -> None:
        """Read the token metrics at one tap."""
        if tokens.ndim != 3:
            raise ShapeError(f"{tap} of layer {layer} is {tuple(tokens.shape)}, not (batch, tokens, channels)")
        self._refuse_added(layer, tokens)
        self._measure_tokens(tap, layer, *self.samples.tokens(tokens))

    def attend(self, layer: int, call: AttentionCall) -> None:
        """Read what one layer's attention did."""
        windows_move, layer = layer in self.moving, self.depth(MAP, layer)
        self._refuse_added(layer, call.branch)
        _, mask = self.samples.tokens(call.branch)
        record = self.samples.record(call)
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

    def flush(self) -> Sent:
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
        if any(self.samples.special_token_counts) and tokens.shape[1] > self.count:
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
        flags = finite_flags(tokens, mask)
        self.out.add_sums(F.pad(flags, (0, len(FIELDS) - len(FLAGS))), metric, layer)
        return None


class Form(NamedTuple):
    """What was read and where its numbers are; batches of one form differ in their numbers alone."""

    size: int  # samples in the batch
    sums: tuple[int, ...]  # rows of each part of `Readout.sums`
    found: tuple[int, ...]  # numbers in each part of `Readout.found`
    factors: tuple[float, ...]
    sources: tuple[tuple[Key, tuple[int, str | None]], ...]


@dataclass
class Readout:
    """What the hooks found in one batch, still on the device."""

    size: int = 0  # samples in the batch
    expected: int = 1  # readings by sums, as many as the batch before had
    sums: list[Tensor] = field(default_factory=list)  # (rows, FIELDS) each; beyond FLAGS zero if not summed up
    watched: list[tuple[str, int]] = field(default_factory=list)  # metric and layer of each of them, for errors
    found: list[Tensor] = field(default_factory=list)  # (rows, …) each
    factors: list[float] = field(default_factory=list)  # what those are multiplied by
    sources: dict[Key, tuple[int, str | None]] = field(default_factory=dict)  # in `found`, or the metric of `sums`
    _room: Tensor | None = None
    _places: tuple[Tensor, ...] = ()  # in the room

    def place(self, samples: int, device: torch.device) -> Tensor | None:
        """Where the next reading's sums go, side by side with the others'; None where there is no such place."""
        if not self.sums:
            self._room = room(self.expected, samples, device)
            self._places = self._room.unbind()
        if len(self.sums) >= len(self._places):
            return None
        place = self._places[len(self.sums)]
        return place if place.shape[0] == samples and place.device == device else None

    def add_sums(self, sums: Tensor, metric: str, layer: int) -> int:
        """Take in a reading's sums, which tell of tokens that are not finite too; returns their place."""
        self.size = self.size or sums.shape[0]
        self.watched.append((metric, layer))
        self.sums.append(sums)
        return len(self.sums) - 1

    def add(self, key: Key, value: Tensor, factor: float = 1.0) -> None:
        """Take in a metric's values by sample, and by head or window of it, and what they are to be multiplied by."""
        self.size = self.size or len(value)
        self.sources[key] = len(self.found), None
        self.found.append(value)
        self.factors.append(factor)

    def follow(self, key: Key, place: int) -> None:
        """A metric whose values follow from the sums in this place."""
        self.sources[key] = place, key[2]

    def send(self) -> Sent:
        """Begin the one transfer; nothing waits for it here."""
        # Joined before they are made float64 or flat: a launch for all, not for each.
        parts = [self._joined_sums()] if self.sums else []
        parts += [torch.cat([part.flatten() for part in self.found]).double()] if self.found else []
        numbers = parts[0] if len(parts) == 1 else torch.cat(parts)
        device, done = numbers.device, None
        if numbers.is_cuda:
            numbers = numbers.to("cpu", non_blocking=True)  # into pinned memory
            done = torch.cuda.current_stream(device).record_event()
        rows, lengths = tuple([part.shape[0] for part in self.sums]), tuple([part.numel() for part in self.found])
        form = Form(self.size, rows, lengths, tuple(self.factors), tuple(self.sources.items()))
        return Sent(form, self.watched, numbers, done)

    def _joined_sums(self) -> Tensor:
        is_all = len(self.sums) == len(self._places) and all(map(is_, self.sums, self._places))
        return (self._room if self._room is not None and is_all else torch.cat(self.sums)).flatten()


class Sent(NamedTuple):
    """What was found in one batch, on its way to the host: nothing of it is left on the device."""

    form: Form
    watched: Sequence[tuple[str, int]]
    numbers: Tensor
    done: torch.cuda.Event | None

    def is_there(self) -> bool:
        """Whether the device is done with it."""
        return self.done is None or self.done.query()

    def received(self) -> tuple[Numbers, Numbers]:
        """The sums and what was found, as soon as they are there."""
        if self.done is not None:
            self.done.synchronize()
        numbers: Numbers = self.numbers.numpy()
        end = sum(self.form.sums) * len(FIELDS)
        return numbers[:end].reshape(-1, len(FIELDS)), numbers[end:]

    def refuse_bad(self, sums: Numbers) -> None:
        """Complain about the first layer that holds NaN or infinity, which spoils those after it."""
        for (metric, layer), rows in zip(self.watched, _spans(self.form.sums), strict=True):
            if sums[rows, BAD].any():
                complain(sums[rows, : len(FLAGS)], metric=metric, layer=layer)


def values_of(batches: Sequence[Sent]) -> list[tuple[tuple[Key, ...], Numbers]]:
    """What was read and its values (keys, samples), of successive batches of one form together.

    A value is the mean over a sample's heads or windows. Waits for the device; refuses NaN and infinity.
    """
    return [_joined(form, list(alike)) for form, alike in groupby(batches, attrgetter("form"))]


def _joined(form: Form, batches: Sequence[Sent]) -> tuple[tuple[Key, ...], Numbers]:
    received = [batch.received() for batch in batches]
    sums, found = (np.stack(parts) for parts in zip(*received, strict=True))  # (batches, …) each
    if sums[..., BAD].any():
        for batch, (own, _) in zip(batches, received, strict=True):
            batch.refuse_bad(own)
    rows, numbers = _spans(form.sums), _spans(form.found)
    follows = {name: FROM_SUMS[name](sums) for name in {name for _, (_, name) in form.sources if name}}

    def values(place: int, name: str | None) -> Numbers:
        parts = follows[name][:, rows[place]] if name else form.factors[place] * found[:, numbers[place]]
        if parts.shape[1] != form.size:
            parts = parts.reshape(len(batches), form.size, -1).mean(2)
        return parts.reshape(-1)

    return tuple([key for key, _ in form.sources]), np.stack([values(*source) for _, source in form.sources])


def _spans(lengths: Sequence[int]) -> list[slice]:
    """Where each of several parts stands in all of them one after another."""
    ends = list(accumulate(lengths))
    return [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]


Found = tuple[Sent, NDArray[np.bool_] | None]  # of one batch, and which of its samples have a token that counts
Statistics = dict[tuple[Key, ...], "Running"]  # by the keys that are read together


def settle(statistics: Statistics, batches: Sequence[Found]) -> None:
    """Take in what was read of some batches; samples without a token that counts have no values."""
    read, filled = [found for found, _ in batches], None
    if any(own is not None for _, own in batches):
        every = [np.ones(found.form.size, bool) if own is None else own for found, own in batches]
        filled = np.concatenate(every)
    start = 0
    for keys, values in values_of(read):
        own = values if filled is None else values[:, filled[start : start + values.shape[1]]]
        start += values.shape[1]
        if own.shape[1]:
            take_in(statistics, keys, Running.of(own))


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
