"""One batch's readings on their way from the device: gathered by layer, sent in one transfer, waited for at the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from acutance.kernels.token_sums import FIELDS
from acutance.metrics._common import FLAGS, complain
from acutance.metrics.from_sums import FROM_SUMS

Key = tuple[str, int, str]  # tap, layer, metric


@dataclass(frozen=True)
class _Watch:
    """What an error says about tokens that are not finite."""

    metric: str
    layer: int
    place: int  # of what tells, in `Readout.sums` or `Readout.flags`
    summed: bool


@dataclass
class Readout:
    """What the hooks found in one batch, still on the device until `send`, and out of the host's way until `values`."""

    size: int = 0  # samples in the batch
    sums: list[Tensor] = field(default_factory=list)  # (rows, FIELDS) each
    flags: list[Tensor] = field(default_factory=list)  # (rows, FLAGS) each, of tokens that were not summed up
    found: list[Tensor] = field(default_factory=list)  # (rows, …) each
    factors: list[float] = field(default_factory=list)  # what those are multiplied by
    sources: dict[Key, tuple[int, str | None]] = field(default_factory=dict)  # in `found`, or the metric of `sums`
    watched: list[_Watch] = field(default_factory=list)
    _sent: tuple[Tensor, torch.cuda.Event | None] | None = None

    def add_sums(self, sums: Tensor, metric: str, layer: int) -> int:
        """Take in a reading's sums, which tell of tokens that are not finite too; returns their place."""
        self.size = self.size or sums.shape[0]
        self.watched.append(_Watch(metric, layer, len(self.sums), summed=True))
        self.sums.append(sums)
        return len(self.sums) - 1

    def add_flags(self, flags: Tensor, metric: str, layer: int) -> None:
        """Take in which tokens of a reading are not finite."""
        self.watched.append(_Watch(metric, layer, len(self.flags), summed=False))
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
        exact = [torch.cat(parts).flatten() for parts in (self.sums, self.flags) if parts]
        found = [torch.cat([part.flatten() for part in self.found]).double()] if self.found else []
        parts = [*exact, *found]
        numbers = parts[0] if len(parts) == 1 else torch.cat(parts)
        if numbers.is_cuda:
            host = numbers.to("cpu", non_blocking=True)  # into pinned memory
            self._sent = host, torch.cuda.current_stream(numbers.device).record_event()
        else:
            self._sent = numbers, None
        return self

    def values(self) -> dict[Key, NDArray[np.float64]]:
        """One value a sample, the mean over its heads or windows, once the device is done; refuses NaN and infinity."""
        sums, flags, found = self._received()
        self._refuse_bad(sums, flags)
        rows, numbers = _spans([part.shape[0] for part in self.sums]), _spans([part.numel() for part in self.found])
        follows = {name: FROM_SUMS[name](sums) for name in {name for _, name in self.sources.values()} if name}
        return {
            key: self._by_sample(
                self.factors[place] * found[numbers[place]] if name is None else follows[name][rows[place]]
            )
            for key, (place, name) in self.sources.items()
        }

    def _by_sample(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """The mean over heads, and over the windows that a sample is cut into."""
        return values if len(values) == self.size else values.reshape(self.size, -1).mean(1)

    def _received(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        assert self._sent is not None
        host, done = self._sent
        if done is not None:
            done.synchronize()
        numbers: NDArray[np.float64] = host.numpy()
        first = sum(part.numel() for part in self.sums)
        second = first + sum(part.numel() for part in self.flags)
        sums, flags, found = numbers[:first], numbers[first:second], numbers[second:]
        return sums.reshape(-1, len(FIELDS)), flags.reshape(-1, len(FLAGS)), found

    def _refuse_bad(self, sums: NDArray[np.float64], flags: NDArray[np.float64]) -> None:
        bad = FLAGS.index("bad")
        if not (sums[:, bad].any() or flags[:, bad].any()):
            return
        summed, flagged = (_spans([len(part) for part in parts]) for parts in (self.sums, self.flags))
        for watch in self.watched:  # the first layer that is spoilt spoils those after it
            told = sums[summed[watch.place]] if watch.summed else flags[flagged[watch.place]]
            if told[:, bad].any():
                complain(told[:, : len(FLAGS)], metric=watch.metric, layer=watch.layer)


def _spans(lengths: list[int]) -> list[slice]:
    """Where each of several parts stands in all of them one after another."""
    ends = list(accumulate(lengths))
    return [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
