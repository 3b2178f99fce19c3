"""Paired timing: variants take turns beside a baseline in one process, and ratios are taken within the pairs.

What drifts (clocks, heat, other work on the machine) then reaches both of a pair alike.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from acutance.errors import first_line
from acutance.lab.bench.results import Row

MIB = 2**20

Step = Callable[[], object]


@dataclass(frozen=True)
class Pace:
    """How often everything is done.

    Attributes:
        repetitions: of the whole round of pairs.
        steps: timed together in one repetition.
        warm_up: steps before anything is timed: compiling and capturing happens there.
        refresh: untimed steps before each timing, which bring a variant's weights back into the caches.
        calls: how often one step does the work; the figures are of one call.
    """

    repetitions: int
    steps: int
    warm_up: int = 4
    refresh: int = 2
    calls: int = 1


@dataclass(frozen=True)
class Candidate:
    """One row of a comparison.

    Attributes:
        variant: what is timed.
        make: builds the step; its warm-up is done by `compare`.
        mode: how it is run, e.g. a mode of `torch.compile`.
        baseline: the fastest of the baselines is what the others are divided by.
        static: replayed from a CUDA graph, whose memory the allocator's peak does not see.
        beside: the name of a second candidate that it is divided by too, in pairs and columns of their own.
    """

    variant: str
    make: Callable[[], Step]
    mode: str = ""
    baseline: bool = False
    static: bool = False
    beside: str = ""

    @property
    def name(self) -> str:
        """Unlike any other's in its comparison."""
        return f"{self.variant}, {self.mode}" if self.mode else self.variant


def synchronise(device: str) -> None:
    """Wait for all that was launched."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def repeat(step: Step, times: int) -> None:
    """One after another."""
    for _ in range(times):
        step()


def seconds_per_step(step: Step, steps: int, device: str) -> float:
    """CUDA events around all the steps, so that the queue stays full as it does in training."""
    if torch.device(device).type == "cpu":
        start = time.perf_counter()
        repeat(step, steps)
        return (time.perf_counter() - start) / steps
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    repeat(step, steps)
    end.record()
    torch.cuda.synchronize()
    elapsed: float = begin.elapsed_time(end)
    return elapsed / 1e3 / steps


def peak_mib(step: Step, device: str) -> float | None:
    """The allocator's peak in one step, above what is resident before it; None on the CPU."""
    if torch.device(device).type == "cpu":
        return None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / MIB


def paired(step: Step, baseline: Step, pace: Pace, device: str) -> Iterator[tuple[float, float]]:
    """Seconds a call of a variant and of the baseline right beside it, which is first and last by turns."""
    for repetition in range(pace.repetitions):
        if repetition % 2 == 0:
            plain, mine = timed(baseline, pace, device), timed(step, pace, device)
        else:
            mine, plain = timed(step, pace, device), timed(baseline, pace, device)
        yield mine, plain


def timed(step: Step, pace: Pace, device: str) -> float:
    """Seconds a call, the caches warm."""
    repeat(step, pace.refresh)
    return seconds_per_step(step, pace.steps, device) / pace.calls


def compare(candidates: Sequence[Candidate], pace: Pace, device: str) -> Iterator[list[Row]]:
    """The rows there are so far, after every repetition.

    The baselines are made ready first, and the fastest is chosen. Then one candidate after another is made ready and
    timed beside it: what is done is known before the next is compiled. A candidate that cannot run is a row that says
    why; without any baseline there is nothing to compare.
    """
    found = _Found(candidates, pace, device)
    for candidate in candidates:
        if candidate.baseline:
            found.prepare(candidate)
    if not found.steps:
        failures = (f"{name}: {why}" for name, why in found.failed.items())
        raise RuntimeError("; ".join(failures) or "there is no baseline to compare with")
    found.choose_baseline()
    for candidate in candidates:
        if candidate.name != found.baseline:
            found.prepare(candidate)
            yield from found.grown(candidate.name)
            yield from found.grown_beside(candidate)
    if not any(found.pairs.values()):  # where the baseline is alone it is its own pair
        yield from found.grown(found.baseline)


class _Found:
    """What a comparison has found so far, by the names of the candidates."""

    def __init__(self, candidates: Sequence[Candidate], pace: Pace, device: str) -> None:
        self.candidates, self.pace, self.device = candidates, pace, device
        self.baseline = ""
        self.steps: dict[str, Step] = {}
        self.peaks: dict[str, float | None] = {}
        self.pairs: dict[str, list[tuple[float, float]]] = {}
        self.pairs_beside: dict[str, list[tuple[float, float]]] = {}
        self.failed: dict[str, str] = {}  # not the errors, whose tracebacks keep memory alive

    def prepare(self, candidate: Candidate) -> None:
        """Build it, warm it up and read its memory, once."""
        name, start = candidate.name, time.perf_counter()
        if name in self.steps or name in self.failed:
            return
        if self.failed:
            gc.collect()  # what failed may still hold memory
        with self._noting_failure(name):
            step = candidate.make()
            repeat(step, self.pace.warm_up)
            synchronise(self.device)
            self.peaks[name] = None if candidate.static else peak_mib(step, self.device)
            self.steps[name] = step
            _say(f"{name}: ready after {time.perf_counter() - start:.0f} s")

    def choose_baseline(self) -> None:
        """The fastest of those that are ready."""
        names = list(self.steps)
        single = len(names) == 1
        self.baseline = names[0] if single else min(names, key=lambda n: timed(self.steps[n], self.pace, self.device))

    def grown(self, name: str) -> Iterator[list[Row]]:
        """All rows, after every repetition of this candidate."""
        if name in self.steps:
            self.pairs[name] = []
            with self._noting_failure(name):
                for pair in paired(self.steps[name], self.steps[self.baseline], self.pace, self.device):
                    self.pairs[name].append(pair)
                    yield self.rows()
        if name in self.failed:
            yield self.rows()

    def grown_beside(self, candidate: Candidate) -> Iterator[list[Row]]:
        """The same for the second one it is divided by; beside the baseline it was already."""
        name, other = candidate.name, candidate.beside
        if other == self.baseline:
            self.pairs_beside[name] = self.pairs.get(name, [])
            yield self.rows()
        elif other in self.steps and name in self.steps and name not in self.failed:
            found = self.pairs_beside[name] = []
            with self._noting_failure(name):
                for pair in paired(self.steps[name], self.steps[other], self.pace, self.device):
                    found.append(pair)
                    yield self.rows()
            if name in self.failed:
                yield self.rows()

    def rows(self) -> list[Row]:
        """Of the candidates so far, in the order in which they were given."""
        return [self._row(c) for c in self.candidates if c.baseline or c.name in self.pairs or c.name in self.failed]

    def _row(self, candidate: Candidate) -> Row:
        name, row = candidate.name, Row(variant=candidate.variant, mode=candidate.mode)
        if name == self.baseline:
            beside = [(plain, plain) for pairs in self.pairs.values() for _, plain in pairs]
            row |= {**figures(beside), "ratios": "", "note": "the baseline"} if beside else {}
        elif pairs := self.pairs.get(name):
            row |= figures(pairs)
        if pairs := self.pairs_beside.get(name):
            row |= {"beside": candidate.beside, **ratio_figures("beside_ratio", pairs)}
        if name in self.failed:
            row["note"] = f"left out: {self.failed[name]}"
        elif (peak := self.peaks.get(name)) is not None:
            row["peak_mib"] = f"{peak:.1f}"
            row["memory_ratio"] = f"{peak / plain:.4f}" if (plain := self._plain_peak()) else ""
        return row

    def _plain_peak(self) -> float | None:
        """Of the first baseline that shows any."""
        peaks = (self.peaks.get(c.name) for c in self.candidates if c.baseline)
        return next((peak for peak in peaks if peak is not None), None)

    @contextmanager
    def _noting_failure(self, name: str) -> Iterator[None]:
        """Whatever goes wrong inside concerns this candidate alone: the others are timed all the same."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.failed[name] = first_line(error)
            _say(f"{name}: left out: {first_line(error)}")


def figures(pairs: Sequence[tuple[float, float]]) -> Row:
    """Milliseconds and ratios of (seconds, seconds of the baseline beside it), one pair per repetition."""
    return {
        **spread("ms", [1e3 * mine for mine, _ in pairs], ".4f"),
        **ratio_figures("ratio", pairs),
        "timings": len(pairs),
    }


def ratio_figures(name: str, pairs: Sequence[tuple[float, float]]) -> Row:
    """How the ratios are spread, and every single one."""
    ratios = [mine / plain for mine, plain in pairs]
    return {**spread(name, ratios, ".4f"), f"{name}s": " ".join(f"{ratio:.4f}" for ratio in ratios)}


def spread(name: str, values: Sequence[float], spec: str) -> Row:
    """Median, quartiles, smallest and largest, formatted."""
    low, middle, high = statistics.quantiles(values, method="inclusive") if len(values) > 1 else [*values] * 3
    found = {"": middle, "_q1": low, "_q3": high, "_min": min(values), "_max": max(values)}
    return {f"{name}{ending}": format(value, spec) for ending, value in found.items()}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
