"""Paired timing with a made-up clock: what a row says follows from what the steps took."""

import time
from functools import partial

import numpy as np
import pytest

from acutance.errors import AcutanceError
from acutance.lab.bench import timing
from acutance.lab.bench.timing import Candidate, Pace, compare, paired, spread


@pytest.fixture
def clock(monkeypatch):
    """Which steps move on; and no collection of a heap as large as that of all tests."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr("gc.collect", lambda: 0)
    return now


def takes(clock, seconds):
    def step():
        clock[0] += seconds() if callable(seconds) else seconds

    return step


@pytest.fixture
def rows_of(clock):
    """The last rows of a comparison; candidates are (name, seconds or what making them raises, options)."""

    def make(seconds):
        if isinstance(seconds, BaseException):
            raise seconds
        return takes(clock, seconds)

    def last(*candidates, **pace):
        made = [Candidate(name, partial(make, seconds), **dict(*more)) for name, seconds, *more in candidates]
        *_, rows = compare(made, Pace(**{"repetitions": 2, "steps": 1, **pace}), "cpu")
        return rows

    return last


PLAIN, BASELINE = ("plain", 1.0, {"baseline": True}), {"baseline": True}
MEMORY = RuntimeError("out of memory\nand a long story")


def test_ratios_are_taken_within_pairs_and_a_drift_reaches_both(clock):
    """A clock that runs slower and slower: the medians drift, the ratio of a step of three to one of two does not."""
    seen = []

    def step(name, cost):
        def seconds():
            seen.append(name)
            return cost * 1.5 ** ((len(seen) - 1) // 2)  # both of a pair alike

        return takes(clock, seconds)

    pairs = list(paired(step("slow", 3.0), step("plain", 2.0), Pace(repetitions=5, steps=1, refresh=0), "cpu"))
    assert seen[:4] == ["plain", "slow", "slow", "plain"]
    assert [mine / plain for mine, plain in pairs] == pytest.approx([1.5] * 5)
    assert pairs[-1][0] > 5 * pairs[0][0]


def test_the_fastest_baseline_divides_all_others(rows_of):
    slow, fast = ("plain", 4.0, {"mode": "default", **BASELINE}), ("plain", 2.0, {"mode": "graphs", **BASELINE})
    rows = rows_of(slow, fast, ("ours", 3.0), repetitions=3, steps=2)
    assert [(row["variant"], row["mode"], row["ratio"], row.get("note")) for row in rows] == [
        ("plain", "default", "2.0000", None),
        ("plain", "graphs", "1.0000", "the baseline"),
        ("ours", "", "1.5000", None),
    ]
    assert (rows[2]["ms"], rows[2]["ratios"], rows[2]["timings"]) == ("3000.0000", "1.5000 1.5000 1.5000", 3)
    assert rows_of(("plain", 4.0, BASELINE), steps=3, calls=8)[0]["ms"] == "500.0000"  # figures are of one call


def test_a_candidate_is_timed_before_the_next_is_made_and_rows_come_after_every_repetition(clock):
    """Or else all would be lost where time runs out while the last is compiled."""
    made, grown = [], []
    candidates = [
        Candidate(name, lambda name=name: made.append(name) or takes(clock, 1.0), baseline=name == "plain")
        for name in ("first", "plain", "last")
    ]
    for rows in compare(candidates, Pace(repetitions=2, steps=1), "cpu"):
        grown.append(([*made], {row["variant"]: row["timings"] for row in rows}))
    early, late = ["plain", "first"], ["plain", "first", "last"]
    assert [names for names, _ in grown] == [early, early, late, late]
    assert [timings for _, timings in grown[:2]] == [{"first": 1, "plain": 1}, {"first": 2, "plain": 2}]
    assert list(grown[-1][1]) == ["first", "plain", "last"]


@pytest.mark.parametrize("error", [AcutanceError("no recording"), KeyError("x"), Exception("memory"), MEMORY])
def test_any_error_leaves_the_others_their_turn_and_is_told_in_full(rows_of, error, capsys):
    plain, broken, third = rows_of(PLAIN, ("broken", error), ("third", 2.0))
    assert broken == {"variant": "broken", "mode": "", "note": f"left out: {str(error).splitlines()[0]}"}
    assert (plain["ratio"], third["ratio"]) == ("1.0000", "2.0000")
    assert "Traceback" in capsys.readouterr().err


def test_what_fails_on_the_way_keeps_what_it_has(rows_of):
    calls = iter(range(100))

    def seconds():
        if next(calls) == 2:
            raise RuntimeError("illegal memory access")
        return 3.0

    _, ours = rows_of(PLAIN, ("ours", seconds), repetitions=4, warm_up=1, refresh=0)
    assert (ours["timings"], ours["ratio"], ours["note"]) == (1, "3.0000", "left out: illegal memory access")


def test_one_baseline_is_enough_and_is_timed_by_itself_where_all_others_fail(rows_of):
    broken = ("plain", MEMORY, {"mode": "graphs", **BASELINE})
    assert rows_of(broken, PLAIN, ("ours", 3.0))[2]["ratio"] == "3.0000"
    alone, _ = rows_of(("plain", 2.0, BASELINE), ("ours", MEMORY))
    assert (alone["ms"], alone["timings"], alone["note"]) == ("2000.0000", 2, "the baseline")
    with pytest.raises(RuntimeError, match="plain, graphs: out of memory"):
        rows_of(broken, ("ours", 3.0))
    with pytest.raises(KeyboardInterrupt):  # is no failure of a candidate
        rows_of(("plain", KeyboardInterrupt(), BASELINE))


def test_memory_is_divided_by_the_first_baseline_that_shows_any(rows_of, monkeypatch):
    peaks = iter([100.0, 150.0])
    monkeypatch.setattr(timing, "peak_mib", lambda _step, _device: next(peaks))
    graphs = ("plain", 1.0, {"mode": "graphs", "static": True, **BASELINE})
    rows = rows_of(graphs, ("plain", 2.0, BASELINE), ("ours", 3.0))
    found = [(row.get("peak_mib"), row.get("memory_ratio")) for row in rows]
    assert found == [(None, None), ("100.0", "1.0000"), ("150.0", "1.5000")]


def test_quartiles_are_those_of_numpy():
    values = [3.0, 1.0, 4.0, 1.5, 9.0, 2.6]
    found = spread("x", values, ".6f")
    for name, share in (("x_q1", 25), ("x", 50), ("x_q3", 75), ("x_min", 0), ("x_max", 100)):
        assert float(found[name]) == pytest.approx(np.percentile(values, share), abs=1e-6)
