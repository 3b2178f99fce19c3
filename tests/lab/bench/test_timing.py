"""Paired timing with a made-up clock: what a row says follows from what the steps took."""

import time
from collections.abc import Callable

import numpy as np
import pytest

from acutance.errors import AcutanceError
from acutance.lab.bench import timing
from acutance.lab.bench.timing import Candidate, Pace, compare, paired, spread


class OutOfResources(Exception):  # noqa: N818
    """As Triton's, which is no RuntimeError."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def takes(clock, seconds: float | Callable[[], float]) -> Callable[[], None]:
    def step():
        clock[0] += seconds() if callable(seconds) else seconds

    return step


def candidate(clock, name: str, seconds: float, **options: object) -> Candidate:
    return Candidate(name, lambda: takes(clock, seconds), **options)  # type: ignore[arg-type]


def refused(name: str, **options: object) -> Candidate:
    def make() -> Callable[[], None]:
        raise RuntimeError("out of memory\nand a long story")

    return Candidate(name, make, **options)  # type: ignore[arg-type]


def test_ratios_are_taken_within_pairs_and_a_drift_reaches_both(clock):
    """A clock that runs slower and slower: the medians drift, the ratio of a step of three to one of two does not."""
    seen: list[str] = []

    def step(name: str, cost: float) -> Callable[[], None]:
        def seconds() -> float:
            seen.append(name)
            return cost * 1.5 ** ((len(seen) - 1) // 2)  # both of a pair alike

        return takes(clock, seconds)

    pace = Pace(repetitions=5, steps=1, refresh=0)
    pairs = list(paired(step("slow", 3.0), step("plain", 2.0), pace, "cpu"))
    assert seen[:4] == ["plain", "slow", "slow", "plain"]
    assert [mine / plain for mine, plain in pairs] == pytest.approx([1.5] * 5)
    assert pairs[-1][0] > 5 * pairs[0][0]


def test_the_fastest_baseline_divides_all_others(clock):
    candidates = [
        candidate(clock, "plain", 4.0, mode="default", baseline=True),
        candidate(clock, "plain", 2.0, mode="graphs", baseline=True),
        candidate(clock, "ours", 3.0),
    ]
    *_, rows = compare(candidates, Pace(repetitions=3, steps=2), "cpu")
    assert [(row["variant"], row["mode"], row["ratio"]) for row in rows] == [
        ("plain", "default", "2.0000"),
        ("plain", "graphs", "1.0000"),
        ("ours", "", "1.5000"),
    ]
    assert [row.get("note") for row in rows] == [None, "the baseline", None]
    assert rows[2]["ms"] == "3000.0000"
    assert rows[2]["ratios"] == "1.5000 1.5000 1.5000"


def test_figures_are_of_one_call(clock):
    candidates = [candidate(clock, "plain", 4.0, baseline=True)]
    *_, rows = compare(candidates, Pace(repetitions=2, steps=3, calls=8), "cpu")
    assert rows[0]["ms"] == "500.0000"


def test_rows_come_after_every_repetition(clock):
    candidates = [candidate(clock, "plain", 1.0, baseline=True), candidate(clock, "ours", 1.0)]
    grown = [rows[1]["timings"] for rows in compare(candidates, Pace(repetitions=4, steps=1), "cpu")]
    assert grown == [1, 2, 3, 4]


def test_a_candidate_is_timed_before_the_next_is_made(clock):
    """Or else all would be lost where time runs out while the last is compiled."""
    made: list[str] = []

    def noted(name: str, **options: object) -> Candidate:
        def make() -> Callable[[], None]:
            made.append(name)
            return takes(clock, 1.0)

        return Candidate(name, make, **options)  # type: ignore[arg-type]

    candidates = [noted("first"), noted("plain", baseline=True), noted("last")]
    grown = []
    for rows in compare(candidates, Pace(repetitions=1, steps=1), "cpu"):
        grown.append(([*made], [row["variant"] for row in rows]))
    assert grown == [(["plain", "first"], ["first", "plain"]), (["plain", "first", "last"], ["first", "plain", "last"])]


@pytest.mark.parametrize("error", [AcutanceError("no recording"), KeyError("x"), OutOfResources("shared memory")])
def test_any_error_leaves_the_others_their_turn_and_is_told_in_full(
    error: Exception, clock, capsys: pytest.CaptureFixture[str]
):
    def broken() -> Callable[[], None]:
        raise error

    candidates = [
        candidate(clock, "plain", 1.0, baseline=True),
        Candidate("broken", broken),
        candidate(clock, "third", 2.0),
    ]
    *_, rows = compare(candidates, Pace(repetitions=2, steps=1), "cpu")
    assert [row["variant"] for row in rows] == ["plain", "broken", "third"]
    assert rows[1]["note"] == f"left out: {error}"
    assert rows[2]["ratio"] == "2.0000"
    assert "Traceback" in capsys.readouterr().err


def test_what_fails_on_the_way_keeps_what_it_has(clock):
    calls = iter(range(100))

    def step():
        if next(calls) == 2:
            raise RuntimeError("illegal memory access")
        clock[0] += 3.0

    candidates = [candidate(clock, "plain", 1.0, baseline=True), Candidate("ours", lambda: step)]
    *_, rows = compare(candidates, Pace(repetitions=4, steps=1, warm_up=1, refresh=0), "cpu")
    assert (rows[1]["timings"], rows[1]["ratio"]) == (1, "3.0000")
    assert rows[1]["note"] == "left out: illegal memory access"


def test_an_interruption_is_no_failure_of_a_candidate(clock):
    def stopped() -> Callable[[], None]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(compare([Candidate("plain", stopped, baseline=True)], Pace(repetitions=1, steps=1), "cpu"))


def test_the_baseline_is_timed_by_itself_where_all_others_fail(clock):
    *_, rows = compare([candidate(clock, "plain", 2.0, baseline=True), refused("ours")], Pace(2, 1), "cpu")
    assert (rows[0]["ms"], rows[0]["timings"], rows[0]["note"]) == ("2000.0000", 2, "the baseline")


def test_memory_is_divided_by_the_first_baseline_that_shows_any(clock, monkeypatch):
    peaks = iter([100.0, 150.0])
    monkeypatch.setattr(timing, "peak_mib", lambda _step, _device: next(peaks))
    candidates = [
        candidate(clock, "plain", 1.0, mode="graphs", baseline=True, static=True),
        candidate(clock, "plain", 2.0, baseline=True),
        candidate(clock, "ours", 3.0),
    ]
    *_, rows = compare(candidates, Pace(repetitions=1, steps=1), "cpu")
    assert [(row.get("peak_mib"), row.get("memory_ratio")) for row in rows] == [
        (None, None),
        ("100.0", "1.0000"),
        ("150.0", "1.5000"),
    ]
    assert rows[2]["ratio"] == "3.0000"


def test_what_runs_out_of_memory_late_is_left_out_too(clock, monkeypatch):
    def peak(step: Callable[[], None], _device: str) -> float:
        before = clock[0]
        step()
        if clock[0] - before > 1.5:
            raise RuntimeError("out of memory")
        return 1.0

    monkeypatch.setattr(timing, "peak_mib", peak)
    candidates = [candidate(clock, "plain", 1.0, baseline=True), candidate(clock, "ours", 2.0)]
    *_, rows = compare(candidates, Pace(repetitions=1, steps=1), "cpu")
    assert rows[1]["note"] == "left out: out of memory"


def test_one_baseline_is_enough_and_without_any_nothing_is_compared(clock):
    first, second = refused("plain", mode="graphs", baseline=True), candidate(clock, "plain", 1.0, baseline=True)
    *_, rows = compare([first, second, candidate(clock, "ours", 3.0)], Pace(repetitions=1, steps=1), "cpu")
    assert rows[2]["ratio"] == "3.0000"
    with pytest.raises(RuntimeError, match="plain, graphs: out of memory"):
        list(compare([first, candidate(clock, "ours", 3.0)], Pace(repetitions=1, steps=1), "cpu"))


def test_quartiles_are_those_of_numpy():
    values = [3.0, 1.0, 4.0, 1.5, 9.0, 2.6]
    found = spread("x", values, ".6f")
    for name, share in (("x_q1", 25), ("x", 50), ("x_q3", 75), ("x_min", 0), ("x_max", 100)):
        assert float(found[name]) == pytest.approx(np.percentile(values, share), abs=1e-6)
