"""The memory benchmark hides nothing: what did not finish is a row that says so."""

import argparse
import csv
import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "operator_memory.py"
RECORDED = sorted((SCRIPT.parent / "results").glob("operator_memory-*.csv"))


@pytest.fixture
def benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module that writes elsewhere; `stationary` always runs over the limit."""
    spec = importlib.util.spec_from_file_location("operator_memory_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(command, *, timeout, **_):
        if command[-1] == "stationary":
            raise subprocess.TimeoutExpired(command, timeout)
        tokens = int(command[command.index("--tokens") + 1])
        return argparse.Namespace(stdout=f'{{"peak_mib": {tokens / 1024}, "seconds": 1.5, "note": ""}}')

    monkeypatch.setattr(module.subprocess, "run", run)
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    return module


def test_what_did_not_finish_is_a_row_without_a_peak(benchmark, capsys):
    arguments = argparse.Namespace(
        device="cpu", dtype="float32", tokens=[1024, 2048], operations=["A @ x", "stationary"], limit=120.0
    )
    rows = benchmark.benchmark(arguments)
    assert benchmark.growth(rows, "A @ x") == pytest.approx(1)
    assert benchmark.growth(rows, "stationary") is None
    benchmark.show(rows)
    assert capsys.readouterr().out.count("over 120 s, not finished") == 2
    with benchmark.write(rows, arguments).open(newline="") as file:
        table = list(csv.DictReader(file))
    columns = ("tokens", "op", "peak_mib", "peak_to_matrix", "matrix_mib", "seconds", "note")
    assert [tuple(row[column] for column in columns) for row in table] == [
        ("1024", "A @ x", "1.00", "0.12500", "8", "1.500", ""),
        ("1024", "stationary", "", "", "8", "", "over 120 s, not finished"),
        ("2048", "A @ x", "2.00", "0.06250", "32", "1.500", ""),
        ("2048", "stationary", "", "", "32", "", "over 120 s, not finished"),
    ]


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_every_recorded_run_has_all_its_cells(path: Path, benchmark):
    with path.open(newline="") as file:
        table = list(csv.DictReader(file))
    tokens = {row["tokens"] for row in table}
    assert {(row["tokens"], row["op"]) for row in table} == {(n, op) for n in tokens for op in benchmark.OPERATIONS}
    assert all(float(row["peak_mib"]) > 0 if row["peak_mib"] else "not finished" in row["note"] for row in table)
