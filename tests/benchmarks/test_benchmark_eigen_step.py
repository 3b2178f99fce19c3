"""The step benchmark on a toy: the script itself names its files, and says in them how they came about."""

import argparse
import csv
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "eigen_step.py"


@pytest.fixture
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("eigen_step_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str) -> list[dict[str, str]]:
    words = [
        "--device",
        "cpu",
        "--steps",
        "1",
        "--warm-up",
        "1",
        "--repetitions",
        "2",
        "--results",
        str(folder),
        *options,
    ]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
    benchmark.main()
    (path,) = folder.iterdir()
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(("label", "ending"), [((), ""), (("--label", "Longer, 12×40"), "-longer-12-40")])
def test_the_script_names_its_file(benchmark, monkeypatch, tmp_path, label, ending) -> None:
    variants = ("--variants", "plain", "eigen:negative,basis=householder")
    rows = run(benchmark, monkeypatch, tmp_path, *variants, *label)
    version = benchmark.torch.__version__.split("+")[0]
    assert [path.name for path in tmp_path.iterdir()] == [f"eigen_step-cpu-float32-torch{version}{ending}.csv"]
    assert [row["variant"] for row in rows] == ["plain", "eigen:negative,basis=householder"]
    assert float(rows[0]["ratio"]) == 1
    order = [float(rows[1][f"ratio{ending}"]) for ending in ("_min", "_q1", "", "_q3", "_max")]
    assert order == sorted(order)
    assert rows[1]["timings"] == "2"
    assert len(rows[1]["ratios"].split()) == 2
    assert str(tmp_path) not in rows[0]["command"]
    assert "--steps 1 --warm-up 1 --repetitions 2 --variants plain" in rows[0]["command"]
    assert rows[0]["label"] == (label[1] if label else "")


def test_a_basis_that_cannot_run_is_left_out_with_a_row_that_says_so(benchmark, monkeypatch, tmp_path) -> None:
    def step_of(variant: str, _arguments: argparse.Namespace):
        if variant != "plain":
            raise RuntimeError("operation not permitted when stream is capturing")
        return lambda: None

    monkeypatch.setattr(benchmark, "step_of", step_of)
    rows = run(benchmark, monkeypatch, tmp_path, "--variants", "plain", "eigen:negative")
    assert rows[1]["note"] == "left out: operation not permitted when stream is capturing"
    assert rows[1]["ratio"] == ""
    assert float(rows[0]["ratio"]) == 1


def test_the_mode_is_part_of_the_name(benchmark, monkeypatch, tmp_path) -> None:
    rows = run(
        benchmark, monkeypatch, tmp_path, "--variants", "plain", "--mode", "reduce-overhead", "--label", "longer"
    )
    assert [path.name.endswith("-reduce-overhead-longer.csv") for path in tmp_path.iterdir()] == [True]
    assert rows[0]["mode"] == "eager"
