"""MetricReader: what `measure` reads of each batch, without waiting for the device.

The numbers of a batch are copied to the host asynchronously, in one transfer. They are looked at up to eight batches
later, so a NaN error may come that late. Batches that were read alike are worked out together, which saves time.
"""

from __future__ import annotations

import warnings
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import prod
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from acutance import distributed as processes
from acutance import metrics as metric_room
from acutance import sites
from acutance.attention import AttentionCall
from acutance.attention.kernels import packed
from acutance.attention.operator import AttentionOperator
from acutance.errors import AcutanceError, AcutanceWarning, ShapeError
from acutance.measure import TAPS
from acutance.measure.profile import MATRIX, MetricValue
from acutance.measure.samples import TokenLayout
from acutance.measure.walk import EVERY, Batch, Visitor, hooked
from acutance.metrics.kernels import token_sums
from acutance.metrics.kernels.token_sums import FIELDS
from acutance.metrics.sums import FLAGS, FROM_ROWS, FROM_SUMS, Numbers, complain, finite_flags, from_rows
from acutance.sites.patched import has_windows

ATTENTION_COSINE = "attention_cosine"  # of a layer's attention with the layer before (Fig. 5 of arXiv 2312.00751)
MAX_PENDING_BATCHES = 8
Key = tuple[str, int, str]  # tap, layer, metric
BAD = FLAGS.index("bad")
T = TypeVar("T")


def available_metrics() -> list[str]:
    """Every name that `measure(metrics=…)` knows."""
    return [*metric_room.TOKEN_METRICS, *metric_room.ATTENTION_METRICS, ATTENTION_COSINE]


def check_prefix(prefix: str) -> None:
    """Refuse anything but in and out."""
    if prefix not in ("in", "out"):
        raise AcutanceError(f"prefix says whether class and register tokens count: 'in' or 'out', not {prefix!r}")


def metric_reader(
    target: nn.Module, metrics: str | Sequence[str], tap: str | Sequence[str], prefix: str
) -> MetricReader:
    """The visitor that reads these metrics; refuses unknown names and warns of blocks that it cannot see."""
    check_prefix(prefix)
    names = _chosen("metric", available_metrics() if metrics == "all" else metrics, [*available_metrics(), "all"])
    taps = _chosen("tap", tap, TAPS)
    if unread := sites.modules_between(target) if "block" in taps else []:
        warnings.warn(
            f"not read, and not counted as layers: {', '.join(unread)}, between the blocks with attention but unlike "
            "them",
            AcutanceWarning,
            stacklevel=3,
        )
    layers = sites.layers_of(target) if ATTENTION_COSINE in names else []
    moving = [n for site, n in layers if has_windows(site.attention)]
    return MetricReader(names, taps, prefix, moving)


def check_readable(
    model: nn.Module, *, metrics: str | Sequence[str], tap: str | Sequence[str], prefix: str, part: str | None
) -> None:
    """Raise what `measure` would raise before its first batch."""
    target = sites.part_of(model, part)
    with sites.reading(target), hooked(target, metric_reader(target, metrics, tap, prefix)):
        pass


def _chosen(what: str, choice: str | Sequence[str], known: Sequence[str]) -> list[str]:
    names = [choice] if isinstance(choice, str) else list(choice)
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise AcutanceError(f"unknown {what} {', '.join(unknown) or '(none)'}; known: {', '.join(known)}")
    return names


class MetricReader(Visitor):
    """Reads metrics at every layer; holds running means, a few batches' values and at most one earlier layer's q and k.

    Special tokens are `in` or `out` by `prefix`; `moving` are the layers whose windows hold other tokens than before.
    """

    def __init__(
        self, names: Sequence[str], taps: Sequence[str], prefix: str = "in", moving: Container[int] = ()
    ) -> None:
        self.names, self.taps, self.prefix, self.moving = names, taps, prefix, moving
        self.token_metrics = [n for n in names if n in metric_room.TOKEN_METRICS]
        self.attention_metrics = [n for n in names if n not in self.token_metrics]
        reads_attention = {"attention", "values"} & set(taps) or self.attention_metrics
        wanted = {"leave": "block" in taps, "attend": reads_attention, "final": "final" in taps}
        self.needs = {"enter": (1,)} | {method: EVERY for method, is_wanted in wanted.items() if is_wanted}
        self.batches = 0  # that ran
        self.autocast: str | None = None  # the dtype that the blocks run in; a model's forward may enter its own
        self.pending: list[PendingValues] = []
        self.statistics: dict[tuple[Key, ...], Running] = {}  # by the keys that are read together
        self.start(TokenLayout())

    def start(self, samples: TokenLayout, *, counts: bool = True) -> None:
        """Start a batch whose tokens fall into these samples."""
        self.samples, self.counts = samples, counts
        self.out = PendingValues(filled=samples.filled)
        self.width = 0  # tokens in a sample at the first reading
        self.ran: dict[str, dict[int, int]] = {}  # by tap, the depth of each block that ran
        self.previous: AttentionOperator | None = None

    def begin(self, batch: Batch) -> None:
        self.start(batch.samples(self.prefix), counts=batch.counts)

    def depth(self, tap: str, layer: int) -> int:
        """How deep a block is that runs now: its number, or one more than before if layers share a module."""
        ran = self.ran.setdefault(tap, {})
        last = next(reversed(ran), 0)
        if layer in ran and layer != last:
            raise AcutanceError(
                f"layer {layer} ran again after layer {last} in one forward pass, so its readings cannot be told "
                "apart: feed what runs the layers once"
            )
        ran[layer] = max(layer, ran.get(last, 0) + 1)
        return ran[layer]

    def enter(self, layer: int, tokens: Tensor) -> None:
        if self.out.samples:  # layers that share a module enter it again
            return
        kind = tokens.device.type
        on = torch.is_autocast_enabled(kind)
        self.autocast = str(torch.get_autocast_dtype(kind)).removeprefix("torch.") if on else None
        special = sum(self.samples.special_token_counts)
        if special and tokens.ndim == 3 and tokens.shape[1] <= special:
            raise AcutanceError(f"all {tokens.shape[1]} tokens of a sample are special: read with prefix='in'")
        self.out.samples = self.samples.count(len(tokens))  # attention has windows as rows, and could not tell
        if "block" in self.taps:
            self.tokens("block", 0, tokens)

    def leave(self, layer: int, tokens: Tensor) -> None:
        self.tokens("block", self.depth("block", layer), tokens)

    def final(self, layer: int, tokens: Tensor) -> None:
        self.tokens("final", layer, tokens)

    def end(self) -> None:
        """Send the batch's values off and work out earlier ones: at once if the device is behind, else together."""
        self.batches += 1
        if not self.out.values and not any(part.derived for part, _ in self.out.sums):
            raise AcutanceError(f"nothing was read: {self._why_nothing()}")
        self.out.send()
        self.pending += [self.out] if self.counts else []
        if len(self.pending) > MAX_PENDING_BATCHES or (len(self.pending) > 1 and not self.pending[-2].is_there()):
            self.settle(keep=1)

    def settle(self, keep: int = 0) -> None:
        """Take in pending batches but the last few."""
        ready = self.pending[: len(self.pending) - keep]
        self.pending = self.pending[len(ready) :]
        for _, alike in groupby(ready, key=lambda batch: (batch.samples, batch.parts)):
            keys, values = values_of(list(alike))
            if values.shape[1]:
                take_in(self.statistics, keys, Running.of(values))

    def readings(self, *, across_processes: bool = False) -> tuple[MetricValue, ...]:
        """Mean and standard deviation over samples, by tap as asked for and by depth; of all processes together."""
        self.settle()
        each: dict[Key, Running] = {}
        for statistics in processes.gather(self.statistics) if across_processes else [self.statistics]:
            for keys, found in statistics.items():
                for place, key in enumerate(keys):
                    take_in(each, key, Running(found.count, found.mean[place], found.squares[place]))
        if not each:
            raise AcutanceError(
                "no sample has a token that counts: masks and prefix='out' leave none"
                if self.batches
                else "measure got no batches: pass an iterable with at least one"
            )
        taps = [*self.taps, MATRIX]
        ordered = sorted(each, key=lambda key: (taps.index(key[0]), key[1], self.names.index(key[2])))
        return tuple(MetricValue(*key, float(each[key].mean), float(each[key].std), each[key].count) for key in ordered)

    def describe_prefix(self, model: nn.Module, part: str | None) -> str:
        """Which special tokens were in or out of the metrics, told from the last batch."""
        marked = self.samples.excludes_special
        try:
            known = sites.special_tokens(model, part)
        except sites.NoSitesError:
            return f"{'special' if marked else 'prefix'} tokens {self.prefix}"
        if marked:
            return f"{f'{known} and ' if any(known) else ''}the tokeniser's special tokens {self.prefix}"
        return f"{known} {self.prefix}"

    def tokens(self, tap: str, layer: int, tokens: Tensor) -> None:
        """Read the token metrics at one tap."""
        if tokens.ndim != 3:
            raise ShapeError(f"{tap} of layer {layer} is {tuple(tokens.shape)}, not (batch, tokens, channels)")
        self._refuse_added(layer, tokens)
        self._read_tokens(tap, layer, *self.samples.tokens(tokens))

    def attend(self, layer: int, call: AttentionCall) -> None:
        windows_move, layer = layer in self.moving, self.depth(MATRIX, layer)
        self._refuse_added(layer, call.branch)
        _, mask = self.samples.tokens(call.branch)
        record = self.samples.record(call)
        if "attention" in self.taps:
            self._read_tokens("attention", layer, record.branch, mask)
        if "values" in self.taps:
            merged = record.values.transpose(1, 2).flatten(2)
            # Pyramids have fewer keys than queries; their prefix and padding are none.
            self._read_tokens("values", layer, merged, mask if merged.shape[1] == record.branch.shape[1] else None)
        if not self.attention_metrics:
            return
        # A branch that is not finite makes the residual stream after it so too.
        if not (self.token_metrics and {"attention", "block"} & set(self.taps)):
            self._read_sums(MATRIX, layer, self.attention_metrics, record.branch, mask)
        # One reduction gives both of these metrics; one alone has a faster way.
        rows = from_rows(record, mask) if set(FROM_ROWS) <= set(self.names) else {}
        for name in self.attention_metrics:
            if name in rows:
                self.out.add((MATRIX, layer, name), *rows[name])
            elif name != ATTENTION_COSINE:
                self.out.add((MATRIX, layer, name), metric_room.ATTENTION_METRICS[name](record, mask))
        if ATTENTION_COSINE in self.names:
            before, self.previous = self.previous, None if windows_move else record.A
            if before is not None and self.previous is not None and before.shape == self.previous.shape:  # one stage's
                cosine = metric_room.attention_cosine(before, self.previous, mask)
                self.out.add((MATRIX, layer, ATTENTION_COSINE), cosine)

    def _why_nothing(self) -> str:
        if MATRIX in self.ran:
            return (
                f"{ATTENTION_COSINE} compares successive layers and needs two of them, of the same tokens: windows "
                "that move from layer to layer have none"
            )
        return (
            "no block of the model was called as a module in this forward pass. Some models, such as SqueezeBERT, run "
            "block.forward(…) past all hooks, and can be read only through a Library of their own"
        )

    def _refuse_added(self, layer: int, tokens: Tensor) -> None:
        """Tokens that join on the way, such as EoMT's queries, move the special tokens away from the ends."""
        self.width = self.width or tokens.shape[1]
        if any(self.samples.special_token_counts) and tokens.shape[1] > self.width:
            raise AcutanceError(
                f"layer {layer} has {tokens.shape[1]} tokens, the first reading had {self.width}: some were added on "
                "the way, so where the special tokens are is not known. Read with prefix='in'"
            )

    def _read_tokens(self, tap: str, layer: int, tokens: Tensor, mask: Tensor | None) -> None:
        if self.token_metrics:
            derived = self._read_sums(tap, layer, self.token_metrics, tokens, mask)
            for name in [name for name in self.token_metrics if name not in derived]:
                self.out.add((tap, layer, name), metric_room.TOKEN_METRICS[name](tokens, mask))

    def _read_sums(
        self, tap: str, layer: int, names: Sequence[str], tokens: Tensor, mask: Tensor | None
    ) -> Sequence[str]:
        """Sums over tokens that tell whether all are finite, and the metrics that follow from them."""
        is_summed = packed.TRITON and token_sums.is_available(tokens, mask)
        derived = tuple(name for name in names if name in FROM_SUMS and is_summed)
        if is_summed:
            sums = token_sums.token_sums(tokens, mask)
        else:
            sums = F.pad(finite_flags(tokens, mask), (0, len(FIELDS) - len(FLAGS)))
        self.out.add_sums((tap, layer, names[0]), sums, derived)
        return derived


class Part(NamedTuple):
    """The numbers of one reading: sums from which metrics follow, or the values of one metric."""

    key: Key
    shape: tuple[int, ...]
    factor: float = 1.0
    derived: tuple[str, ...] | None = None  # the metrics that follow from sums; None for values


@dataclass
class PendingValues:
    """What was read in one batch; after `send`, on its way from the device to the host."""

    samples: int = 0
    filled: NDArray[np.bool_] | None = None  # which samples have a token that counts; None if all have
    parts: list[Part] = field(default_factory=list)  # sums, then values
    sums: list[tuple[Part, Tensor]] = field(default_factory=list)
    values: list[tuple[Part, Tensor]] = field(default_factory=list)
    numbers: Tensor | None = None
    done: torch.cuda.Event | None = None

    def add(self, key: Key, values: Tensor, factor: float = 1.0) -> None:
        """Add values by sample, and by head or window of it; they are averaged and multiplied by a factor."""
        self.samples = self.samples or len(values)
        self.values.append((Part(key, tuple(values.shape), factor), values))

    def add_sums(self, key: Key, sums: Tensor, derived: tuple[str, ...]) -> None:
        """Add sums (rows, FIELDS) from which metrics follow; an error about them names the key."""
        self.samples = self.samples or len(sums)
        self.sums.append((Part(key, tuple(sums.shape), derived=derived), sums))

    def send(self) -> None:
        """Start the one transfer."""
        self.parts = [part for part, _ in (*self.sums, *self.values)]
        # Sums are float64, values mostly float32: tensors of one dtype are joined in one launch.
        groups = [[tensor.flatten() for _, tensor in group] for group in (self.sums, self.values) if group]
        numbers = torch.cat([torch.cat(group).double() for group in groups])
        self.sums, self.values, self.numbers = [], [], numbers.to("cpu", non_blocking=True)
        if numbers.is_cuda:
            self.done = torch.cuda.current_stream(numbers.device).record_event()

    def is_there(self) -> bool:
        """Whether the device is done with it."""
        return self.done is None or self.done.query()

    def received(self) -> Numbers:
        """The numbers of all parts, as soon as they are there."""
        assert self.numbers is not None, "they were sent"
        if self.done is not None:
            self.done.synchronize()
        numbers: Numbers = self.numbers.numpy()
        return numbers


def values_of(batches: Sequence[PendingValues]) -> tuple[tuple[Key, ...], Numbers]:
    """What was read and its values (keys, samples), of batches with the same parts; samples without tokens left out.

    A value is the mean over a sample's heads or windows. Waits for the device; refuses NaN and infinity.
    """
    numbers, start = np.stack([batch.received() for batch in batches]), 0
    found: dict[Key, Numbers] = {}
    for part in batches[0].parts:
        stop = start + prod(part.shape)
        own, start = numbers[:, start:stop].reshape(len(batches), *part.shape), stop
        tap, layer, metric = part.key
        if part.derived is None:
            found[part.key] = part.factor * own
            continue
        for flags in own[own[..., BAD].any(1), :, : len(FLAGS)]:
            complain(flags, metric=f"{metric} at {tap}", layer=layer)
        for name in part.derived:
            found[tap, layer, name] = FROM_SUMS[name](own)
    samples = batches[0].samples
    values = np.stack([value.reshape(len(batches) * samples, -1).mean(1) for value in found.values()])
    filled = [np.ones(samples, bool) if batch.filled is None else batch.filled for batch in batches]
    return tuple(found), values[:, np.concatenate(filled)]


def take_in(statistics: dict[T, Running], key: T, found: Running) -> None:
    """Add other samples' statistics of the same key."""
    if key in statistics:
        statistics[key].merge(found)
    else:
        statistics[key] = found


@dataclass
class Running:
    """Means and standard deviations, merged batch by batch and process by process (Chan's update).

    Some values are documented to be infinite, such as HFC/LFC of tokens whose mean is zero.
    """

    count: int  # of samples
    mean: Numbers  # of each of several metrics, or of one
    squares: Numbers  # the sums of squared deviations from the mean

    @classmethod
    def of(cls, values: Numbers) -> Running:
        """Of an array (metrics, samples)."""
        with np.errstate(invalid="ignore"):  # infinities of both signs make NaN
            mean = values.mean(1)
            return cls(values.shape[1], mean, np.square(values - mean[:, None]).sum(1))

    def merge(self, other: Running) -> None:
        """Take in the statistics of other samples."""
        total = self.count + other.count
        with np.errstate(invalid="ignore"):
            between = np.square(other.mean - self.mean) * (self.count * other.count / total)
            self.squares = self.squares + other.squares + between
            self.mean = (self.count * self.mean + other.count * other.mean) / total
        self.count = total

    @property
    def std(self) -> Numbers:
        """The standard deviations over samples; infinite if the mean is."""
        return np.where(np.isfinite(self.mean), np.sqrt(self.squares / max(self.count - 1, 1)), np.inf)
