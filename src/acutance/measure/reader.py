"""MetricReader: what `measure` reads of each batch, without waiting for the device.

The numbers of a batch are copied to the host asynchronously, in one transfer. They are looked at when they are there,
at most eight batches later, so a NaN error may come that late.
"""

import zlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from acutance import distributed as processes
from acutance import metrics as metric_room
from acutance import sites
from acutance.attention import AttentionCall
from acutance.attention.kernels import packed
from acutance.attention.operator import AttentionOperator
from acutance.errors import AcutanceError, ShapeError, SignedRowsError, warn
from acutance.measure import PREFIXES, TAPS
from acutance.measure.profile import MATRIX, MetricValue
from acutance.measure.samples import Fed, TokenLayout, arguments_of
from acutance.measure.walk import EVERY, Batch, Visitor
from acutance.metrics.kernels import token_sums
from acutance.metrics.sums import FROM_ROWS, FROM_SUMS, Numbers, complain, finite_flags, from_rows
from acutance.sites.patched import has_windows

ATTENTION_COSINE = "attention_cosine"  # of a layer's attention with the layer before (Fig. 5 of arXiv 2312.00751)
MAX_PENDING_BATCHES = 8
MAX_KEPT_SAMPLES = 1000  # of which a profile has single values
Key = tuple[str, int, str]  # tap, layer, metric
Moments = tuple[int, float, float]  # samples, mean, sum of squared deviations
Kept = tuple[dict[Key, NDArray[np.float32]], Sequence[int]]  # the values by sample, and what tells the samples apart
# Worked out together: shape, metrics, and a name for sums in errors.
Group = tuple[tuple[int, ...], tuple[str, ...], str | None]


def available_metrics() -> list[str]:
    """Every name that `measure(metrics=…)` knows."""
    return [*metric_room.TOKEN_METRICS, *metric_room.ATTENTION_METRICS, ATTENTION_COSINE]


@dataclass
class PendingValues:
    """What was read in one batch; after `send`, on its way from the device to the host."""

    samples: int = 0
    prints: list[int] = field(default_factory=list)  # of each row that was fed
    filled: NDArray[np.bool_] | None = None  # which samples have a token that counts; None if all have
    read: dict[Group, list[tuple[str, int, Tensor]]] = field(default_factory=dict)  # tap, layer, numbers
    numbers: Tensor = field(default_factory=lambda: torch.empty(0))
    done: torch.cuda.Event | None = None

    def add(self, tap: str, layer: int, names: Sequence[str], values: Tensor, sums: str | None = None) -> None:
        """Add values by sample, and by head or window of it, which are averaged; or sums that metrics follow from."""
        self.samples = self.samples or len(values)
        self.read.setdefault((tuple(values.shape), tuple(names), sums), []).append((tap, layer, values))

    def send(self) -> None:
        alike = (torch.stack([values for *_, values in group]) for group in self.read.values())
        numbers = torch.cat([values.flatten().double() for values in alike])
        self.numbers = numbers.to("cpu", non_blocking=True)
        if numbers.is_cuda:
            self.done = torch.cuda.current_stream(numbers.device).record_event()

    def is_there(self) -> bool:
        return self.done is None or self.done.query()

    def received(self) -> tuple[tuple[Key, ...], Numbers]:
        """What was read, and its values (keys, samples with tokens), means over heads or windows; waits for them."""
        if self.done is not None:
            self.done.synchronize()
        keys: list[Key] = []
        rows, rest = [], self.numbers.numpy()
        for (shape, names, sums), group in self.read.items():
            own, rest = np.split(rest, [len(group) * np.prod(shape, dtype=int)])
            own = own.reshape(len(group), *shape)
            for place in np.flatnonzero(own[..., token_sums.FIELDS.index("bad")].any(1)) if sums else ():
                tap, layer, _values = group[place]
                complain(own[place], metric=f"{sums} at {tap}", layer=layer)
            for name in names:
                keys += [(tap, layer, name) for tap, layer, _values in group]
                values = FROM_SUMS[name](own) if sums else own
                rows.append(values.reshape(len(group), self.samples, -1).mean(-1))
        table = np.concatenate(rows)
        return tuple(keys), table if self.filled is None else table[:, self.filled]


class MetricReader(Visitor):
    """Reads metrics at every layer; of a `model` it knows which windows move, and warns of modules it cannot see."""

    def __init__(
        self, metrics: str | Sequence[str], tap: str | Sequence[str], prefix: str = "in", model: nn.Module | None = None
    ) -> None:
        known, self.taps = available_metrics(), chosen("tap", tap, TAPS)
        (self.prefix,) = chosen("prefix", [prefix], PREFIXES)
        self.names = chosen("metric", known if metrics == "all" else metrics, [*known, "all"])
        self.token_metrics = [n for n in self.names if n in metric_room.TOKEN_METRICS]
        self.attention_metrics = [n for n in self.names if n not in self.token_metrics]
        self.reads_all = metrics == "all"
        self.refused: dict[str, SignedRowsError] = {}  # by metric, why some layer has none
        attends = {"attention", "values"} & set(self.taps) or self.attention_metrics
        wanted = {"leave": "block" in self.taps, "attend": attends, "final": "final" in self.taps}
        self.needs = {"enter": (1,)} | {method: EVERY for method, is_wanted in wanted.items() if is_wanted}
        if model is not None and "block" in self.taps and (unread := sites.modules_unread(model)):
            warn(f"modules that are no blocks are not counted as layers: {', '.join(unread)}", stacklevel=4)
        layers = sites.readable_layers(model) if model is not None and ATTENTION_COSINE in self.names else []
        self.moving = [number for site, number in layers if has_windows(site.attention)]
        self.autocast: str | None = None  # the dtype that the blocks run in; a model's forward may enter its own
        self.samples, self.out = TokenLayout(), PendingValues()
        self.pending: deque[PendingValues] = deque()
        self.moments: dict[Key, list[Moments]] = {}  # of each batch
        self.kept: list[Kept] | None = []  # of each batch, until they are too many
        self.digest: str | None = None  # of the samples that were read, after `readings`
        self.counted = False  # whether the first batch's tokens were

    def begin(self, batch: Batch) -> None:
        self.samples, self.counts = batch.samples(self.prefix), batch.counts
        self.out = PendingValues(
            prints=fingerprints(batch.fed) if self.kept is not None else [], filled=self.samples.filled
        )
        self.ran: dict[str, dict[int, int]] = {}  # by tap, the depth of each block that ran
        self.previous: dict[type, AttentionOperator] = {}  # scans and attention of a hybrid by themselves

    def depth(self, tap: str, layer: int) -> int:
        """How deep a block is that runs now: its number, or one more than before if layers share a module."""
        ran = self.ran.setdefault(tap, {})
        last = next(reversed(ran), 0)
        if layer in ran and layer != last:
            raise AcutanceError(f"layer {layer} ran again after layer {last}: feed what runs the layers once")
        ran[layer] = max(layer, ran.get(last, 0) + 1)
        return ran[layer]

    def enter(self, layer: int, tokens: Tensor) -> None:
        if self.out.samples:  # layers that share a module enter it again
            return
        kind = tokens.device.type
        on = torch.is_autocast_enabled(kind)
        self.autocast = str(torch.get_autocast_dtype(kind)).removeprefix("torch.") if on else None
        packed_in, mask = self.samples.documents, self.samples.mask
        if not self.counted and (tokens.shape[1] == 1 if mask is None else bool((mask.sum(1) < 2).all())):
            warn("samples of one token: token metrics compare the tokens of a sample, so they say nothing here")
        self.counted = True
        self.out.samples = len(tokens if packed_in is None else packed_in.rows)  # attention may have windows as rows
        if "block" in self.taps:
            self.tokens("block", 0, tokens)

    def leave(self, layer: int, tokens: Tensor) -> None:
        self.tokens("block", self.depth("block", layer), tokens)

    def final(self, layer: int, tokens: Tensor) -> None:
        self.tokens("final", layer, tokens)

    def attend(self, layer: int, call: AttentionCall) -> None:
        windows_move, layer = layer in self.moving, self.depth(MATRIX, layer)
        _, mask = self.samples.tokens(call.branch)
        record = self.samples.record(call)
        if "attention" in self.taps:
            self.tokens("attention", layer, call.branch)
        if "values" in self.taps:
            merged = call.values.transpose(1, 2).flatten(2)
            # Pyramids have fewer keys than queries; their prefix and padding are none.
            self.tokens("values", layer, merged, None if merged.shape[1] == call.branch.shape[1] else TokenLayout())
        if not self.attention_metrics:
            return
        # A branch that is not finite makes the residual stream after it so too.
        if not (self.token_metrics and {"attention", "block"} & set(self.taps)):
            self._read_sums(MATRIX, layer, self.attention_metrics, record.branch, mask)
        # One reduction gives both of these metrics; one alone has a faster way.
        rows = from_rows(record, mask) if set(FROM_ROWS) <= set(self.names) else {}
        for name in [name for name in self.attention_metrics if name != ATTENTION_COSINE]:
            try:
                values = rows[name] if name in rows else metric_room.ATTENTION_METRICS[name](record, mask)
            except SignedRowsError as error:  # scans among layers of attention
                self.refused[name] = error
                continue
            self.out.add(MATRIX, layer, [name], values)
        if ATTENTION_COSINE in self.names:
            A, before = record.A, self.previous.pop(type(record.A), None)
            self.previous |= {} if windows_move else {type(A): A}
            if before is not None and not windows_move and before.shape == A.shape:  # one stage's
                cosine = metric_room.attention_cosine(before, A, mask)
                self.out.add(MATRIX, layer, [ATTENTION_COSINE], cosine)

    def end(self) -> None:
        """Send the batch's values off, and take in those that have arrived."""
        read = {name for _, names, _ in self.out.read for name in names}
        if missing := [] if self.reads_all else [name for name in self.refused if name not in read]:
            raise self.refused[missing[0]]
        if not read:
            why = "no block of the model was called as a module: past hooks, only a Library of its own can read it"
            if MATRIX in self.ran:
                why = f"{ATTENTION_COSINE} needs two layers of the same tokens, not windows that move"
            raise AcutanceError(f"nothing was read: {why}")
        self.out.send()
        if self.counts:
            self.pending.append(self.out)
        while self.pending and (len(self.pending) > MAX_PENDING_BATCHES or self.pending[0].is_there()):
            self.arrived(self.pending.popleft())

    def readings(self, *, across_processes: bool = False) -> tuple[MetricValue, ...]:
        """Mean and standard deviation over samples, by tap as asked for and by depth; of all processes together."""
        while self.pending:
            self.arrived(self.pending.popleft())
        found = processes.gather(self.moments) if across_processes else [self.moments]
        if not any(found):
            masked = "no sample has a token that counts: masks and prefix='out' leave none"
            raise AcutanceError(masked if self.out.read else "measure got no batches: pass at least one")
        taps = [*self.taps, MATRIX]
        keys = sorted(set().union(*found), key=lambda key: (taps.index(key[0]), key[1], self.names.index(key[2])))
        values = self.values(processes.gather(self.kept) if across_processes else [self.kept])
        return tuple(
            MetricValue(*key, *pooled([part for own in found for part in own.get(key, ())]), values.get(key))
            for key in keys
        )

    def values(self, kept: Sequence[list[Kept] | None]) -> dict[Key, NDArray[np.float32]]:
        """The values of all samples, in the order of the batches, of which processes took turns."""
        if None in kept:
            return {}
        batches = [batch for turn in zip_longest(*cast(Any, kept)) for batch in turn if batch is not None]
        if samples_in(batches) > MAX_KEPT_SAMPLES:
            return {}
        prints = [mark for _, marks in batches for mark in marks]
        self.digest = f"{zlib.crc32(np.array(prints, '<u4').tobytes()):08x}" if prints else None
        keys = [key for key in batches[0][0] if all(key in values for values, _ in batches)]
        return {key: np.concatenate([values[key] for values, _ in batches]) for key in keys}

    def describe_prefix(self, model: nn.Module, part: str | None) -> str:
        """Which special tokens were in or out of the metrics, told from the last batch."""
        marked = ["the tokeniser's special tokens"] if self.samples.excludes_special else []
        with suppress(sites.NoSitesError):
            known = sites.special_tokens(model, part)
            marked = [str(known), *marked] if any(known) or not marked else marked
        return f"{' and '.join(marked) or 'prefix tokens'} {self.prefix}"

    def tokens(self, tap: str, layer: int, tokens: Tensor, layout: TokenLayout | None = None) -> None:
        if tokens.ndim != 3:
            raise ShapeError(f"{tap} of layer {layer} is {tuple(tokens.shape)}, not (batch, tokens, channels)")
        tokens, mask = (layout or self.samples).tokens(tokens)
        for name in self._read_sums(tap, layer, self.token_metrics, tokens, mask) if self.token_metrics else ():
            self.out.add(tap, layer, [name], metric_room.TOKEN_METRICS[name](tokens, mask))

    def _read_sums(self, tap: str, layer: int, names: list[str], tokens: Tensor, mask: Tensor | None) -> list[str]:
        """Read sums that tell whether all tokens are finite; returns the metrics that do not follow from them."""
        is_summed = packed.TRITON and token_sums.is_available(tokens, mask)
        derived = [name for name in names if is_summed and name in FROM_SUMS]
        sums = token_sums.token_sums(tokens, mask) if is_summed else finite_flags(tokens, mask)
        self.out.add(tap, layer, derived, sums, sums=names[0])
        return [name for name in names if name not in derived]

    def arrived(self, out: PendingValues) -> None:
        self.take_in(*out.received(), out.prints)

    def take_in(self, keys: tuple[Key, ...], values: Numbers, prints: Sequence[int] = ()) -> None:
        """Keep the moments of a batch's values (keys, samples), and the values themselves while they are few."""
        if not values.shape[1]:
            return
        with np.errstate(invalid="ignore"):  # infinities of both signs make NaN
            means = values.mean(1)
            squares = np.square(values - means[:, None]).sum(1)
        for key, mean, square in zip(keys, means.tolist(), squares.tolist(), strict=True):
            self.moments.setdefault(key, []).append((values.shape[1], mean, square))
        if self.kept is not None:
            self.kept.append((dict(zip(keys, values.astype(np.float32), strict=True)), prints))
            self.kept = self.kept if samples_in(self.kept) <= MAX_KEPT_SAMPLES else None


def samples_in(kept: Iterable[Kept]) -> int:
    """How many samples have been kept."""
    return sum(len(next(iter(values.values()))) for values, _ in kept)


def fingerprints(fed: Fed) -> list[int]:
    """A number for each row of a batch, told from some of its entries, that is the same in any floating dtype."""
    first = fed.get("input_ids") if isinstance(fed, Mapping) else fed
    x = next((x for x in (first, *arguments_of(fed)) if isinstance(x, Tensor) and x.ndim), None)
    if x is None:
        return []
    # On the CPU nearly without torch, which would cost a batch more time than its readings do.
    x = x.float() if x.dtype == torch.bfloat16 else x  # which NumPy has not
    rows = x.numpy(force=x.requires_grad or x.device.type != "cpu").reshape(len(x), -1 if x.numel() else 1)
    rows = np.ascontiguousarray(rows[:, :: rows.shape[1] // 512 + 1])
    if x.is_floating_point():
        bits = rows.astype(np.float32).view(np.uint32)
        rows = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16  # rounded to bfloat16
    return [zlib.crc32(row.tobytes()) for row in rows]


def pooled(parts: Sequence[Moments]) -> tuple[float, float, int]:
    """Mean, standard deviation (infinite if the mean is) and count of the whole, from the moments of its parts."""
    counts, means, squares = np.array(parts).T
    with np.errstate(invalid="ignore"):
        mean = (counts * means).sum() / counts.sum()
        variance = (squares + counts * np.square(means - mean)).sum() / max(counts.sum() - 1, 1)
    return float(mean), float(np.sqrt(variance)) if np.isfinite(mean) else np.inf, int(counts.sum())


def chosen(what: str, choice: str | Sequence[str], known: Sequence[str]) -> list[str]:
    """The names chosen, all of which are known."""
    names = [choice] if isinstance(choice, str) else list(choice)
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise AcutanceError(f"unknown {what} {', '.join(map(str, unknown)) or '(none)'}; known: {', '.join(known)}")
    return names
