"""The monitor's cost benchmark at toy size: what it writes follows from what it timed."""

import csv
import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "monitor_cost.py"


@pytest.fixture
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("monitor_cost_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def table(benchmark, tmp_path, monkeypatch, capsys) -> list[dict[str, str]]:
    """Time is made up: a training step takes 1 s, a reading 3 s."""
    clock = [0.0]

    def slow(method, cost):
        def timed(*args):
            clock[0] += cost
            return method(*args)

        return timed

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(benchmark.Training, "step", slow(benchmark.Training.step, 1.0))
    monkeypatch.setattr(benchmark.ac.Monitor, "record", slow(benchmark.ac.Monitor.record, 3.0))
    options = {
        "device": "cpu",
        "every": 2,
        "repetitions": 2,
        "readings": 1,
        "batch": 2,
        "probe": 1,
        "results": tmp_path,
    }
    monkeypatch.setattr(sys, "argv", ["monitor_cost.py", *(f"--{name}={value}" for name, value in options.items())])
    benchmark.main()
    assert "below 2 % from every=150 on" in capsys.readouterr().out
    (path,) = tmp_path.glob("monitor_cost-cpu-float32-torch*.csv")
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_figures_follow_from_the_times(table, benchmark):
    assert [row["variant"] for row in table] == list(benchmark.VARIANTS)
    for row in table:
        assert (row["step_ms"], row["reading_ms"]) == ("1000.000", "3000.000")
        assert float(row["reading_in_steps"]) == 3
        assert float(row["ratio"]) == pytest.approx((2 * 1 + 3) / 2)  # one reading in two steps
        assert float(row["share_percent"]) == 150
        assert int(row["every_for_2_percent"]) == 150
        assert row["probe"] == ("2" if row["variant"] == "whole batch" else "1")
