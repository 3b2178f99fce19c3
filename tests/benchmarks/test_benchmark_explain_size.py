"""The size benchmark on a toy: what it counts and where it writes it."""

import csv
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "explain_size.py"


@pytest.fixture
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("explain_size_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str) -> list[dict[str, str]]:
    words = ["--dim", "48", "--heads", "4", "--head-dim", "12", "--out", str(folder), *options]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
    benchmark.main()
    (path,) = folder.iterdir()
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_layer_is_read_and_counted(benchmark, monkeypatch, tmp_path) -> None:
    (row,) = run(benchmark, monkeypatch, tmp_path, "--layers", "3")
    assert row["verdicts"] == "3 smoothing"
    assert (row["layers"], row["dim"], row["kv_heads"]) == ("3", "48", "4")
    assert row["eigenvalues_kept"] == str(3 * (4 * 12 + 48))
    assert float(row["cpu_seconds_lowest"]) <= float(row["cpu_seconds_median"]) <= float(row["cpu_seconds_highest"])
    assert float(row["resident_mib"]) > float(row["peak_mib"]) >= 0
    assert row["command"].startswith("python benchmarks/explain_size.py --dim 48")
    assert benchmark.torch.__version__ in row["versions"]


def test_other_commands_add_rows_and_the_same_one_replaces_its_own(benchmark, monkeypatch, tmp_path) -> None:
    run(benchmark, monkeypatch, tmp_path, "--layers", "1")
    run(benchmark, monkeypatch, tmp_path, "--layers", "1", "--kv-heads", "2")
    rows = run(benchmark, monkeypatch, tmp_path, "--layers", "1")
    assert [row["kv_heads"] for row in rows] == ["2", "4"]


def test_layers_differ_and_come_out_the_same_again(benchmark) -> None:
    sites = [benchmark.SyntheticSite(layer, 24, 2, 1, 12, benchmark.torch.bfloat16) for layer in (1, 2, 1)]
    first, second, again = (site.projection_weight().float().numpy() for site in sites)
    assert sites[0].value_weight().shape == (12, 24)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, second)
