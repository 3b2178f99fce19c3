"""The GELU benchmark on a toy: it runs, and its file says how it came about."""

import csv
import runpy
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gelu.py"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the toy is for the CPU")
def test_the_benchmark_runs_at_toy_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--results", str(tmp_path)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    (path,) = tmp_path.iterdir()
    rows = list(csv.DictReader(path.open()))
    assert list(dict.fromkeys(row["part"] for row in rows)) == ["GELU forward", "GELU backward", "forward", "training"]
    plain = [row for row in rows if row["variant"] == "PyTorch"]
    assert all(row["ratio"] == "1.0000" for row in plain)
    assert [row["gb_per_second"] != "" for row in plain] == [True, True, False, False]
    ours = [row for row in rows if row["variant"].startswith("ours")]
    assert len(ours) == len(rows) - 4
    assert all(row["ms"] or row["note"].startswith("left out: needs") for row in ours)
    assert "toy size" in rows[0]["device"]
