"""Paired timing: variants take turns with a baseline in one process, and ratios are taken within pairs.

Drift (clocks, heat, other work on the machine) then affects both of a pair alike.
"""

import gc
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from acutance.attention.kernels import packed
from acutance.errors import first_line
from acutance.lab.bench.results import Row

MIB = 2**20
Step = Callable[[], object]
Table = tuple[str, Iterable[list[Row]]]  # a title, and all rows so far, repeatedly


def _never(*_: Any) -> bool:  # one function for all, since compiled code is guarded on its identity
    return False


# Around a step or a block: the reference models compute attention as they do where the kernel is not available.
unfused = mock.patch.object(packed, "is_available", _never)


@dataclass(frozen=True)
class Pace:
    """How often everything is repeated."""

    repetitions: int  # of the whole round of pairs
    steps: int  # timed together in one repetition
    warm_up: int = 4  # steps before anything is timed, which compile and capture
    refresh: int = 2  # untimed steps before each timing, which bring a variant's weights back into the caches
    calls: int = 1  # how often one step does the work; figures are per call


@dataclass
class Candidate:
    """One row of a comparison, and what has been measured of it."""

    variant: str
    make: Callable[[], Step]  # builds the step; `compare` warms it up
    mode: str = ""  # e.g. a mode of `torch.compile`
    baseline: bool = False  # the others are divided by the fastest baseline
    static: bool = False  # replayed from a CUDA graph, whose memory the allocator's peak does not see
    step: Any = field(default=None, init=False)  # a Step, once it is prepared
    peak: float | None = field(default=None, init=False)
    pairs: list[tuple[float, float]] = field(default_factory=list, init=False)
    failed: str = field(default="", init=False)  # a message, not the error, whose traceback keeps memory alive

    @property
    def name(self) -> str:
        """A name that is unique in its comparison."""
        return f"{self.variant}, {self.mode}" if self.mode else self.variant

    def prepare(self, pace: Pace, device: str) -> None:
        """Build it, warm it up and measure its memory, once."""
        if self.step is not None or self.failed:
            return
        start = time.perf_counter()
        gc.collect()  # a failed candidate may still hold memory
        with self._noting_failure():
            step = self.make()
            repeat(step, pace.warm_up)
            if torch.device(device).type == "cuda":
                torch.cuda.synchronize()
            self.peak = None if self.static else peak_mib(step, device)
            self.step = step
            self._say(f"ready after {time.perf_counter() - start:.0f} s")

    def timed_beside(self, baseline: Step, pace: Pace, device: str) -> Iterator[None]:
        """Yields after every repetition, and once if it fails."""
        self.prepare(pace, device)
        if self.step is not None:
            with self._noting_failure():
                for pair in paired(self.step, baseline, pace, device):
                    self.pairs.append(pair)
                    yield
        if self.failed:
            yield

    def row(self, plain: Sequence[tuple[float, float]] | None, plain_peak: float | None) -> Row:
        """A row of results; `plain` are the timings of the baseline if this is it."""
        found = Row(variant=self.variant, mode=self.mode)
        if plain:
            found |= {**figures(plain), "ratios": "", "note": "the baseline"}
        elif self.pairs:
            found |= figures(self.pairs)
        if self.failed:
            found["note"] = f"left out: {self.failed}"
        elif self.peak is not None:
            ratio = f"{self.peak / plain_peak:.4f}" if plain_peak else ""
            found |= {"peak_mib": f"{self.peak:.1f}", "memory_ratio": ratio}
        return found

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """An error inside only affects this candidate; the others are still timed."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.failed = first_line(error)
            self._say(f"left out: {self.failed}")

    def _say(self, what: str) -> None:
        print(f"{self.name}: {what}", file=sys.stderr, flush=True)


def repeat(step: Step, times: int) -> None:
    """Run a step this many times."""
    for _ in range(times):
        step()


def seconds_per_step(step: Step, steps: int, device: str) -> float:
    """Seconds per step, by CUDA events around all steps together, so that the queue stays full as in training."""
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
    """The allocator's peak in one step, above the memory in use before it; None on the CPU."""
    if torch.device(device).type == "cpu":
        return None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / MIB


def resident_peak_bytes() -> int:
    """This process's largest resident set so far; the system counts kibibytes on Linux, bytes on macOS."""
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def paired(step: Step, baseline: Step, pace: Pace, device: str) -> Iterator[tuple[float, float]]:
    """Seconds per call of a variant and of the baseline right before or after it, in alternating order."""
    for repetition in range(pace.repetitions):
        if repetition % 2 == 0:
            plain, mine = timed(baseline, pace, device), timed(step, pace, device)
        else:
            mine, plain = timed(step, pace, device), timed(baseline, pace, device)
        yield mine, plain


def timed(step: Step, pace: Pace, device: str) -> float:
    """Seconds per call with warm caches."""
    repeat(step, pace.refresh)
    return seconds_per_step(step, pace.steps, device) / pace.calls


def compare(candidates: Sequence[Candidate], pace: Pace, device: str) -> Iterator[list[Row]]:
    """The rows so far, after every repetition.

    The fastest baseline is chosen first. Then each candidate in turn is prepared and timed against it. A candidate that
    cannot run gets a row that says why.
    """
    candidates = [replace(one) for one in candidates]  # so that steps and their memory go with the comparison
    baselines = [one for one in candidates if one.baseline]
    for one in baselines:
        one.prepare(pace, device)
    ready = [one for one in baselines if one.step is not None]
    if not ready:
        failures = (f"{one.name}: {one.failed}" for one in baselines)
        raise RuntimeError("; ".join(failures) or "there is no baseline to compare with")
    fastest = ready[0] if len(ready) == 1 else min(ready, key=lambda one: timed(one.step, pace, device))

    def rows() -> list[Row]:
        plain_peak = next((one.peak for one in baselines if one.peak is not None), None)
        plain = [(seconds, seconds) for one in candidates for _, seconds in one.pairs]
        shown = [one for one in candidates if one.baseline or one.pairs or one.failed]
        return [one.row(plain if one is fastest else None, plain_peak) for one in shown]

    for one in candidates:
        if one is not fastest:
            yield from (rows() for _ in one.timed_beside(fastest.step, pace, device))
    if not any(one.pairs for one in candidates):  # a baseline alone is timed against itself
        yield from (rows() for _ in fastest.timed_beside(fastest.step, pace, device))


def figures(pairs: Sequence[tuple[float, float]]) -> Row:
    """Milliseconds and ratios from pairs (seconds, the baseline's seconds), one per repetition."""
    ratios = [mine / plain for mine, plain in pairs]
    found = spread("ms", [1e3 * mine for mine, _ in pairs], ".4f") | spread("ratio", ratios, ".4f")
    return found | {"ratios": " ".join(f"{ratio:.4f}" for ratio in ratios), "timings": len(pairs)}


def spread(name: str, values: Sequence[float], spec: str) -> Row:
    """Median, quartiles, smallest and largest, formatted."""
    low, middle, high = statistics.quantiles(values, method="inclusive") if len(values) > 1 else [*values] * 3
    found = {"": middle, "_q1": low, "_q3": high, "_min": min(values), "_max": max(values)}
    return {f"{name}{ending}": format(value, spec) for ending, value in found.items()}


@dataclass(frozen=True)
class Settings:
    """Where and how long to measure. On the CPU everything has toy size and nothing is compiled."""

    device: str
    quick: bool = False
    max_autotune: bool = False  # also time timm's ViT in that mode of torch.compile

    @property
    def options(self) -> str:
        return " --quick" * self.quick + " --max-autotune" * self.max_autotune

    @property
    def on_gpu(self) -> bool:
        return torch.device(self.device).type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.on_gpu else torch.float32

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes of `torch.compile`, in the order in which they are tried. Memory is measured in the first."""
        return ("default", "reduce-overhead") if self.on_gpu else ("eager",)

    def pace(self, *, steps: int = 12, refresh: int = 2, repetitions: int = 7, calls: int = 1) -> Pace:
        """The pace on a GPU, about a third of it if quick, and the least possible on the CPU."""
        if not self.on_gpu:
            return Pace(repetitions=2, steps=1, warm_up=1, refresh=0, calls=calls)
        if self.quick:  # four short repetitions, since two would give no spread
            repetitions, steps = min(repetitions, 4), -(-steps // 2)
        return Pace(repetitions, steps, warm_up=2 * refresh + 1, refresh=refresh, calls=calls)


def free() -> None:
    """Free compiled code, the pools of CUDA graphs and cached memory."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def training_step(
    model: nn.Module,
    inputs: Sequence[Tensor],
    loss_of: Callable[[Any], Tensor],
    *,
    mode: str = "eager",
    dtype: torch.dtype = torch.float32,
) -> Step:
    """Forward in autocast, backward and fused AdamW, without waiting for the device."""
    model = model.to(inputs[0].device).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=inputs[0].is_cuda)
    loss = _forward(model, inputs, loss_of, mode, dtype)

    def step() -> None:
        loss().backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    return step


def inference_step(
    model: nn.Module, inputs: Sequence[Tensor], *, mode: str = "eager", dtype: torch.dtype = torch.float32
) -> Step:
    """A forward pass in autocast, without gradients."""
    model = model.to(inputs[0].device).eval()
    return torch.no_grad()(_forward(model, inputs, lambda out: out, mode, dtype))


def _forward(
    model: nn.Module, inputs: Sequence[Tensor], then: Callable[[Any], Any], mode: str, dtype: torch.dtype
) -> Callable[[], Any]:
    """The model in autocast, compiled in this mode; `eager` does not compile."""
    run: Any = model if mode == "eager" else torch.compile(model, dynamic=False, mode=mode)

    def call() -> Any:
        torch.compiler.cudagraph_mark_step_begin()  # models take turns: none may rely on memory from before
        with torch.autocast(inputs[0].device.type, dtype=dtype, enabled=dtype != torch.float32):
            return then(run(*inputs))

    return call
