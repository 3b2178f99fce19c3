"""Paired timing: variants take turns beside a baseline in one process, and ratios are taken within the pairs.

What drifts (clocks, heat, other work on the machine) then reaches both of a pair alike.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from acutance.bench.results import Row
from acutance.errors import first_line

MIB = 2**20

Step = Callable[[], object]
Pairs = dict[str, list[tuple[float, float]]]


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
    """

    variant: str
    make: Callable[[], Step]
    mode: str = ""
    baseline: bool = False
    static: bool = False

    @property
    def name(self) -> str:
        """Unlike any other's in its comparison."""
        return f"{self.variant}, {self.mode}" if self.mode else self.variant


def seconds_per_step(step: Step, steps: int, device: str) -> float:
    """CUDA events around all the steps, so that the queue stays full as it does in training."""
    if torch.device(device).type == "cpu":
        start = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - start) / steps
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(steps):
        step()
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


def paired(steps: Mapping[str, Step], baseline: str, pace: Pace, device: str) -> Iterator[Pairs]:
    """Seconds a call of every variant and of the baseline right beside it: all pairs so far, after every repetition."""
    # Where the baseline is alone it is its own pair.
    pairs: Pairs = {name: [] for name in steps if name != baseline} or {baseline: []}
    for repetition in range(pace.repetitions):
        for name, found in pairs.items():
            order = (baseline, name) if repetition % 2 == 0 else (name, baseline)
            took = {which: timed(steps[which], pace, device) for which in order}
            found.append((took[name], took[baseline]))
        yield pairs


def timed(step: Step, pace: Pace, device: str) -> float:
    """Seconds a call, the caches warm."""
    for _ in range(pace.refresh):
        step()
    return seconds_per_step(step, pace.steps, device) / pace.calls


def compare(candidates: Sequence[Candidate], pace: Pace, device: str) -> Iterator[list[Row]]:
    """The rows of all repetitions so far, after every repetition.

    A candidate that cannot run is a row that says why; without any baseline there is nothing to compare.
    """
    ready: dict[str, Step] = {}
    peaks: dict[str, float | None] = {}
    failed: dict[str, str] = {}  # not the errors, whose tracebacks keep memory alive
    for candidate in candidates:
        try:
            step = _warmed_up(candidate, pace, device)
            peaks[candidate.name] = None if candidate.static else peak_mib(step, device)
            ready[candidate.name] = step
        except RuntimeError as error:
            failed[candidate.name] = first_line(error)
            _say(f"{candidate.name}: left out: {first_line(error)}")
    plain = [c.name for c in candidates if c.baseline and c.name in ready]
    if not plain:
        raise RuntimeError("; ".join(f"{c.name}: {failed[c.name]}" for c in candidates if c.baseline))
    baseline = min(plain, key=lambda name: timed(ready[name], pace, device)) if len(plain) > 1 else plain[0]
    memory = next((peaks[name] for name in plain if peaks[name] is not None), None)
    for pairs in paired(ready, baseline, pace, device):
        yield [_row(c, baseline, pairs, peaks.get(c.name), memory, failed.get(c.name)) for c in candidates]


def _warmed_up(candidate: Candidate, pace: Pace, device: str) -> Step:
    start = time.perf_counter()
    step = candidate.make()
    seconds_per_step(step, pace.warm_up, device)
    _say(f"{candidate.name}: ready after {time.perf_counter() - start:.0f} s")
    return step


def _row(
    candidate: Candidate,
    baseline: str,
    pairs: Pairs,
    peak: float | None,
    plain_peak: float | None,
    failure: str | None,
) -> Row:
    if failure is not None:
        row: Row = {"note": f"left out: {failure}"}
    elif candidate.name == baseline:
        beside = [(plain, plain) for found in pairs.values() for _, plain in found]
        row = {**figures(beside), "ratios": "", "note": "the baseline"}
    else:
        row = figures(pairs[candidate.name])
    if peak is not None:
        row["peak_mib"] = f"{peak:.1f}"
        row["memory_ratio"] = f"{peak / plain_peak:.4f}" if plain_peak else ""
    return {"variant": candidate.variant, "mode": candidate.mode, **row}


def figures(pairs: Sequence[tuple[float, float]]) -> Row:
    """Milliseconds and ratios of (seconds, seconds of the baseline beside it), one pair per repetition."""
    ratios = [mine / plain for mine, plain in pairs]
    return {
        **spread("ms", [1e3 * mine for mine, _ in pairs], ".4f"),
        **spread("ratio", ratios, ".4f"),
        "timings": len(pairs),
        "ratios": " ".join(f"{ratio:.4f}" for ratio in ratios),
    }


def spread(name: str, values: Sequence[float], spec: str) -> Row:
    """Median, quartiles, smallest and largest, formatted."""
    low, middle, high = statistics.quantiles(values, method="inclusive") if len(values) > 1 else [*values] * 3
    found = {"": middle, "_q1": low, "_q3": high, "_min": min(values), "_max": max(values)}
    return {f"{name}{ending}": format(value, spec) for ending, value in found.items()}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
