"""The benchmark of the long kernels runs where there is Triton."""

import csv
import os
import runpy
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "long_kernels.py"


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the toy is for the CPU")
def test_the_benchmark_runs_at_toy_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--results", str(tmp_path)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    (path,) = tmp_path.iterdir()
    with path.open(newline="") as file:
        ours = {row["variant"]: row["ms"] for row in csv.DictReader(file) if row["variant"].startswith("ours")}
    assert list(ours) == ["ours 64 32 4 2", "ours, over queries 64 32 4 2, over keys 32 64 4 2"]
    assert all(ours.values())
