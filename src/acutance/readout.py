"""One batch's readings on their way from the device: gathered by layer, sent in one transfer, waited for at the end.

Batches that were read alike are worked out together: for each by itself Python would take longer than a small model's
forward pass leaves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from operator import is_
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from acutance.kernels.token_sums import FIELDS, room
from acutance.metrics._common import FLAGS, complain
from acutance.metrics.from_sums import FROM_SUMS, Numbers

Key = tuple[str, int, str]  # tap, layer, metric
BAD = FLAGS.index("bad")


class _Watch(NamedTuple):
    """What an error says about tokens that are not finite."""

    metric: str
    layer: int
    place: int  # of what tells, in `Readout.sums` or `Readout.flags`
    summed: bool


class Form(NamedTuple):
    """What was read and where its numbers are; batches of one form differ in their numbers alone."""

    size: int  # samples in the batch
    sums: tuple[int, ...]  # rows of each part of `Readout.sums`
    flags: tuple[int, ...]
    found: tuple[int, ...]  # numbers in each part of `Readout.found`
    factors: tuple[float, ...]
    sources: tuple[tuple[Key, tuple[int, str | None]], ...]


@dataclass
class Readout:
    """What the hooks found in one batch, still on the device until `send`, and out of the host's way until `values`."""

    size: int = 0  # samples in the batch
    expected: int = 1  # readings by sums, as many as the batch before had
    sums: list[Tensor] = field(default_factory=list)  # (rows, FIELDS) each
    flags: list[Tensor] = field(default_factory=list)  # (rows, FLAGS) each, of tokens that were not summed up
    found: list[Tensor] = field(default_factory=list)  # (rows, …) each
    factors: list[float] = field(default_factory=list)  # what those are multiplied by
    sources: dict[Key, tuple[int, str | None]] = field(default_factory=dict)  # in `found`, or the metric of `sums`
    watched: list[_Watch] = field(default_factory=list)
    form: Form | None = None  # once it is sent
    _sent: tuple[Tensor, torch.cuda.Event | None] | None = None
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
        self.watched.append(_Watch(metric, layer, len(self.sums), True))
        self.sums.append(sums)
        return len(self.sums) - 1

    def add_flags(self, flags: Tensor, metric: str, layer: int) -> None:
        """Take in which tokens of a reading are not finite."""
        self.watched.append(_Watch(metric, layer, len(self.flags), False))
        self.flags.append(flags)

    def add(self, key: Key, value: Tensor, factor: float = 1.0) -> None:
        """Take in a metric's values by sample, and by head or window of it, and what they are to be multiplied by."""
        self.size = self.size or len(value)
        self.sources[key] = len(self.found), None
        self.found.append(value)
        self.factors.append(factor)

    def follow(self, key: Key, place: int) -> None:
        """A metric whose values follow from the sums in this place."""
        self.sources[key] = place, key[2]

    def send(self) -> Readout:
        """Begin the one transfer; nothing waits for it here."""
        # Joined before they are made float64 or flat: a launch for all, not for each.
        exact = [self._joined_sums()] if self.sums else []
        exact += [torch.cat(self.flags).flatten()] if self.flags else []
        found = [torch.cat([part.flatten() for part in self.found]).double()] if self.found else []
        parts = [*exact, *found]
        numbers = parts[0] if len(parts) == 1 else torch.cat(parts)
        if numbers.is_cuda:
            host = numbers.to("cpu", non_blocking=True)  # into pinned memory
            self._sent = host, torch.cuda.current_stream(numbers.device).record_event()
        else:
            self._sent = numbers, None
        self.form = Form(
            self.size,
            tuple([part.shape[0] for part in self.sums]),
            tuple([part.shape[0] for part in self.flags]),
            tuple([part.numel() for part in self.found]),
            tuple(self.factors),
            tuple(self.sources.items()),
        )
        self.sums, self.flags, self.found = [], [], []  # nothing is left on the device
        self._room, self._places = None, ()
        return self

    def _joined_sums(self) -> Tensor:
        is_all = len(self.sums) == len(self._places) and all(map(is_, self.sums, self._places))
        return (self._room if self._room is not None and is_all else torch.cat(self.sums)).flatten()

    def values(self) -> dict[Key, Numbers]:
        """One value a sample, the mean over its heads or windows, once the device is done; refuses NaN and infinity."""
        ((keys, rows),) = values_of([self])
        return dict(zip(keys, rows, strict=True))

    def is_there(self) -> bool:
        """Whether the device is done with it."""
        assert self._sent is not None, "sent before"
        done = self._sent[1]
        return done is None or done.query()

    def sent_form(self) -> Form:
        """What was read, once nothing more is."""
        assert self.form is not None, "sent before"
        return self.form

    def received(self) -> tuple[Numbers, Numbers, Numbers]:
        """The sums, the flags and what was found, as soon as they are there."""
        assert self._sent is not None, "sent before"
        (host, done), form = self._sent, self.sent_form()
        if done is not None:
            done.synchronize()
        numbers: Numbers = host.numpy()
        first = sum(form.sums) * len(FIELDS)
        second = first + sum(form.flags) * len(FLAGS)
        sums, flags, found = numbers[:first], numbers[first:second], numbers[second:]
        return sums.reshape(-1, len(FIELDS)), flags.reshape(-1, len(FLAGS)), found

    def refuse_bad(self, sums: Numbers, flags: Numbers) -> None:
        """Complain about the first layer that holds NaN or infinity, which spoils those after it."""
        summed, flagged = _spans(self.sent_form().sums), _spans(self.sent_form().flags)
        for watch in self.watched:
            told = sums[summed[watch.place]] if watch.summed else flags[flagged[watch.place]]
            if told[:, BAD].any():
                complain(told[:, : len(FLAGS)], metric=watch.metric, layer=watch.layer)


def values_of(batches: Sequence[Readout]) -> list[tuple[tuple[Key, ...], Numbers]]:
    """What was read and its values (keys, samples), of successive batches of one form together.

    A value is the mean over a sample's heads or windows. Waits for the device; refuses NaN and infinity.
    """
    return [_joined(form, list(alike)) for form, alike in groupby(batches, Readout.sent_form)]


def _joined(form: Form, batches: Sequence[Readout]) -> tuple[tuple[Key, ...], Numbers]:
    received = [batch.received() for batch in batches]
    sums, flags, found = (np.stack(parts) for parts in zip(*received, strict=True))  # (batches, …) each
    if sums[..., BAD].any() or flags[..., BAD].any():
        for batch, (own_sums, own_flags, _) in zip(batches, received, strict=True):
            batch.refuse_bad(own_sums, own_flags)
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
