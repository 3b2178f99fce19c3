"""Files are named by what they hold, and say how they came about."""

import csv
import platform
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

from acutance.lab.bench import results


def test_the_name_says_device_dtype_versions_and_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA H200")
    name = "eigen_step-nvidia-h200-bfloat16-torch2.11.0-cuda13.0"
    assert results.file_name("eigen_step", "cuda:0", "bfloat16") == f"{name}.csv"
    found = results.file_name("eigen_step", "cuda", "bfloat16", "reduce-overhead", "", "Longer, 12×40")
    assert found == f"{name}-reduce-overhead-longer-12-40.csv"
    assert results.file_name("augment", "cpu", "float32") == "augment-cpu-float32-torch2.11.0.csv"


@pytest.mark.parametrize("where", [["--results", "a b"], ["--results=a b"]])
def test_where_the_file_went_is_not_part_of_the_command(where: list[str]) -> None:
    found = results.command("python benchmarks/eigen_step.py", ["--steps", "3", *where, "--tf32"])
    assert found == "python benchmarks/eigen_step.py --steps 3 --tf32"


def test_a_toy_says_that_it_is_one() -> None:
    assert results.hardware("cpu", toy=True).endswith("CPU, toy size")
    assert results.hardware("cpu").endswith("CPU")


def test_versions_are_those_of_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(package: str) -> str:
        if package == "timm":
            raise PackageNotFoundError
        return f"1.0 of {package}"

    monkeypatch.setattr(results, "version", found)
    assert results.versions().endswith(
        f"cuda {torch.version.cuda}, transformers 1.0 of transformers, triton 1.0 of triton"
    )
    assert results.versions().startswith(f"python {platform.python_version()}, torch {torch.__version__}, ")


def test_what_a_row_does_not_have_stays_empty(tmp_path: Path) -> None:
    path = results.write_rows(tmp_path / "new" / "a.csv", [{"a": 1}, {"b": "x, y"}], {"device": "CPU"})
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows == [{"a": "1", "b": "", "device": "CPU"}, {"a": "", "b": "x, y", "device": "CPU"}]
    assert path.read_bytes().count(b"\r") == 0
