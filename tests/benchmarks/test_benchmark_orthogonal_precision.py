"""The precision benchmark at a small size: what it compares with is right, and so is what it counts."""

import argparse
import csv
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "orthogonal_precision.py"
RECORDED = sorted((SCRIPT.parent / "results").glob("orthogonal_precision-*.csv"))


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("orthogonal_precision_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where a dataclass looks its annotations up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def table(benchmark, tmp_path_factory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("results")
    words = ["--dim", "16", "--batch", "2", "--seeds", "2", "--conditions", "3", "30", "--results", str(folder)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(SCRIPT), *words])
        benchmark.main()
    (path,) = folder.iterdir()
    version = torch.__version__.split("+")[0]
    assert path.name == f"orthogonal_precision-cpu-float32-torch{version}.csv"
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows[0]["command"] == f"python benchmarks/orthogonal_precision.py {' '.join(words[:-2])}"
    return rows


def column(table: list[dict[str, str]], variant: str, name: str) -> dict[str, float]:
    found = {row["state"]: float(row[name]) for row in table if row["variant"] == variant}
    assert found
    return found


@pytest.mark.parametrize("name", ["qr", "polar", "cayley", "householder"])
def test_float32_is_close_to_float64(table, name) -> None:
    for error in ("value_worst", "orthogonality_worst", "gradient_worst"):
        assert max(column(table, name, error).values()) < 1e-4


def test_noise_brings_the_condition_number_asked_for(table) -> None:
    assert column(table, "polar", "condition_median") == pytest.approx(
        {"start": 1, "condition 3": 3, "condition 30": 30}, rel=0.05
    )


@pytest.mark.parametrize(
    ("variant", "forward", "backward"),
    [
        ("polar", 2 + 12 * 2, 12 * 4),
        ("polar, XᵀX with its own gradient", 2 + 12 * 2, 12 * 3),
        ("cayley", 2 + 15 * 2, 2),
        ("cayley, LU inverse", 0, 2),
    ],
)
def test_products_are_counted(table, variant, forward, backward) -> None:
    assert set(column(table, variant, "products_forward").values()) == {forward}
    assert set(column(table, variant, "products_backward").values()) == {backward}


def test_what_bfloat16_loses_float32_steps_restore_for_an_inverse_only(table) -> None:
    """Newton–Schulz for an inverse starts from A again at every step, the one for a polar factor never from Θ."""
    assert column(table, "cayley, bfloat16 + 4 float32", "value_worst")["start"] < 1e-5
    assert column(table, "cayley, bfloat16 + 4 float32", "bfloat16_forward")["start"] > 0
    polar = "polar, bfloat16 unscaled + 3 float32"
    assert column(table, polar, "orthogonality_worst")["start"] < 1e-6
    assert column(table, polar, "value_worst")["start"] > 1e-4


def test_cayleys_fixed_point_needs_a_small_s(table) -> None:
    errors = column(table, "cayley, fixed point", "value_worst")
    assert errors["norm 0.5"] < 1e-6
    assert errors["norm 3"] > 1


@pytest.mark.parametrize("solver", ["newton_schulz", "conjugate_gradients"])
def test_both_solvers_solve_the_equation(benchmark, solver) -> None:
    generator = torch.Generator().manual_seed(0)
    free = torch.randn(3, 8, 8, dtype=torch.float64, generator=generator)
    p, skew = free.mT @ free + torch.eye(8, dtype=torch.float64), free - free.mT
    k = getattr(benchmark, f"sylvester_by_{solver}")(p, skew)
    torch.testing.assert_close(p @ k + k @ p, skew, rtol=0, atol=1e-5)


def test_the_polar_gradient_it_compares_with_is_the_packages_in_float64(benchmark) -> None:
    generator = torch.Generator().manual_seed(0)
    arguments = argparse.Namespace(dim=8, batch=2, conditions=[3])
    theta = dict(benchmark.states("polar", arguments, generator))["condition 3"]
    cotangent = torch.randn(theta.shape, dtype=torch.float64, generator=generator)
    _, gradient = benchmark.value_and_gradient(benchmark.orthogonal.polar, theta, cotangent)
    torch.testing.assert_close(benchmark.exact_polar_gradient(theta, cotangent), gradient, rtol=0, atol=1e-11)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_the_recorded_run_has_every_variant(path: Path, benchmark) -> None:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["variant"] for row in rows} == {variant.name for variant in benchmark.VARIANTS}
    assert {row["dim"] for row in rows} == {"192"}
