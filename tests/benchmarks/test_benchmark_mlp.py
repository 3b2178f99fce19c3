"""The MLP benchmark on a toy: it runs, and its file says how it came about and how far from the floor it is."""

import csv
import runpy
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "mlp.py"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the toy is for the CPU")
def test_the_benchmark_runs_at_toy_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--results", str(tmp_path)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    (path,) = tmp_path.iterdir()
    rows = list(csv.DictReader(path.open()))
    assert list(dict.fromkeys(row["part"] for row in rows)) == ["training", "inference", "forward", "backward"]
    plain = [row for row in rows if row["variant"] == "PyTorch"]
    assert [row["ratio"] for row in plain] == ["1.0000"] * 4
    assert all(row["ms"] or row["note"].startswith("left out: needs") for row in rows)
    assert all(bool(row["times_floor"]) == bool(row["ms"]) for row in rows)
    assert "toy size" in rows[0]["device"]


def test_the_floor_counts_each_tensor_of_each_product_once() -> None:
    shape = runpy.run_path(str(SCRIPT))["Shape"](65536, 192, 768)
    narrow, wide, weight = 65536 * 192 * 2, 65536 * 768 * 2, 192 * 768 * 2
    flops = 2 * 65536 * 192 * 768
    assert shape.passes("forward", 2) == [(2 * (narrow + weight) + wide, 2 * flops)]
    assert shape.passes("backward", 2) == [(narrow + 3 * wide + weight, flops)]
    everything = shape.passes("training", 2)
    assert sum(moved for moved, _ in everything) == 6 * (narrow + weight) + 7 * wide  # of x: 34 times as much
    assert sum(work for _, work in everything) == 6 * flops
    assert shape.passes("inference", 2) == [(2 * (narrow + weight), 2 * flops)]
