"""The augmentation benchmark on a toy: it runs, and its file says how it came about."""

import csv
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "augment.py"


def test_the_benchmark_runs_at_toy_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = ["--device", "cpu", "--repetitions", "2", "--steps", "1", "--batch", "4", "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    (path,) = tmp_path.iterdir()
    rows = list(csv.DictReader(path.open()))
    assert [row["variant"] for row in rows] == ["normalise alone", "crop and flip", "all but RandAugment", "DeiT"]
    assert all(float(row["images_per_second"]) > 0 for row in rows)
    assert rows[0]["ratio"] == "1.0000"
    assert "toy size" in rows[0]["device"]
    assert "--batch 4" in rows[0]["command"]
