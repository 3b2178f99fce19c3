"""The step benchmark on a toy: the script itself names its files, and says in them how they came about."""

import argparse
import csv
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "eigen_step.py"


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
    assert float(rows[1]["ratio_min"]) <= float(rows[1]["ratio"]) <= float(rows[1]["ratio_max"])
    assert str(tmp_path) not in rows[0]["command"]
    assert "--steps 1 --warm-up 1 --repetitions 2 --variants plain" in rows[0]["command"]
    assert rows[0]["label"] == (label[1] if label else "")


def test_the_name_says_device_dtype_version_and_label(benchmark) -> None:
    arguments = argparse.Namespace(device="cuda", dtype="bfloat16", label="longer")
    found = benchmark.file_name("NVIDIA H200", "2.11.0+cu130", arguments)
    assert found == "eigen_step-nvidia-h200-bfloat16-torch2.11.0-longer.csv"


@pytest.mark.parametrize("where", [["--results", "a b"], ["--results=a b"]])
def test_where_the_file_went_is_not_part_of_the_command(benchmark, where) -> None:
    assert benchmark.command(["--steps", "3", *where, "--tf32"]) == "python benchmarks/eigen_step.py --steps 3 --tf32"
