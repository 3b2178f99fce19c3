"""The training benchmark on a toy: what it reads from the checkpoints, and what it does not train again."""

import csv
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from acutance import sites
from acutance.models import from_checkpoint

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "over_training.py"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("over_training_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    options = ["--seeds", "1", "--epochs", "1", "--depth", "2", "--variants", "softmax", "minus"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options, "--runs", str(tmp_path), "--out", str(tmp_path / "out")])
    return module


def branches(path: Path) -> list[torch.Tensor]:
    return [(s.projection_weight() @ s.value_weight()).detach().double() for s in sites.find(from_checkpoint(path))]


def test_figures_are_those_of_the_checkpoints_and_nothing_is_trained_twice(benchmark, monkeypatch, tmp_path) -> None:
    benchmark.main()
    with (tmp_path / "out" / "symmetry.csv").open(newline="") as file:
        rows = {(r["variant"], int(r["epoch"]), int(r["layer"])): r for r in csv.DictReader(file)}
    assert len(rows) == 2 * 2 * 2  # variants, epochs 0 and 1, layers
    start, end = (branches(tmp_path / "softmax-seed0" / f"epoch0{epoch}.safetensors") for epoch in (0, 1))
    for layer in (1, 2):
        H, H0 = end[layer - 1], start[layer - 1]
        found = rows["softmax", 1, layer]
        assert float(found["symmetry"]) == pytest.approx(((H * H.T).sum() / H.square().sum()).item(), abs=1e-5)
        assert float(found["moved"]) == pytest.approx(((H - H0).norm() / H0.norm()).item(), abs=1e-5)
        assert float(rows["softmax", 0, layer]["moved"]) == 0
        assert float(rows["minus", 1, layer]["symmetry"]) == pytest.approx(1, abs=1e-5)  # by construction
    body = json.loads((tmp_path / "out" / "symmetry.json").read_text())
    plain = next(row for row in body["summary"] if row["variant"] == "softmax")
    mean = sum(float(rows["softmax", 1, layer]["symmetry"]) for layer in (1, 2)) / 2
    assert plain["symmetry_end"]["mean"] == pytest.approx(mean, abs=1e-5)
    monkeypatch.setattr(benchmark, "train", lambda *_: pytest.fail("trained again"))
    benchmark.main()
    (tmp_path / "minus-seed0" / "epoch01.safetensors").unlink()
    with pytest.raises(pytest.fail.Exception):
        benchmark.main()
