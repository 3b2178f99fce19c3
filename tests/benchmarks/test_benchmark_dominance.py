"""The dominance benchmark on a toy: which family wins where the signs are decided, and what it writes down."""

import csv
import importlib.util
import json
import sys
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import acutance as ac
from acutance.lab.data import digits
from acutance.lab.demo import DemoConfig, new_model

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "dominance.py"


@pytest.fixture
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dominance_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, which: str, *options: str
) -> tuple[list[dict[str, str]], dict[str, Any]]:
    words = [which, "--device", "cpu", "--seeds", "1", "--depth", "2", "--out", str(folder), *options]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
    benchmark.main()
    path = folder / f"dominance-{which}"
    with path.with_suffix(".csv").open(newline="") as file:
        return list(csv.DictReader(file)), json.loads(path.with_suffix(".json").read_text())


def test_trained_models_before_and_after(benchmark, monkeypatch, tmp_path, capsys) -> None:
    options = ("--epochs", "1", "--samples", "32", "--mode-samples", "2")
    table, body = run(benchmark, monkeypatch, tmp_path, "trained", *options)
    rows = {(row["model"], row["state"]): row for row in table}
    assert list(rows) == [
        (name, state) for name in ("plain", "positive", "negative") for state in ("random", "trained")
    ]
    for state in ("random", "trained"):  # the sign decides
        assert float(rows["positive", state]["smoothing_percent"]) == 100
        assert float(rows["negative", state]["sharpening_percent"]) == 100
        assert float(rows["plain", state]["smoothing_percent"]) + float(
            rows["plain", state]["sharpening_percent"]
        ) == pytest.approx(100)
    assert float(rows["plain", "trained"]["accuracy"]) > 0
    assert rows["plain", "random"]["accuracy"] == ""

    model = new_model(DemoConfig(depth=2), 0)
    direct = ac.explain(model, [digits()[1].images[:32]], progress=False)
    assert float(rows["plain", "random"]["smoothing_percent"]) == pytest.approx(100 * direct.share("whole").smoothing)
    assert float(rows["plain", "random"]["agreement_branch"]) == pytest.approx(direct.outcome().agreement)

    assert body["demo"]["epochs"] == 1
    assert body["command"].startswith("python benchmarks/dominance.py trained --device cpu")
    assert [layer["layer"] for layer in body["runs"][0]["layers"]] == [1, 2]
    trained = [r["layers"] for r in body["runs"] if r["state"] == "trained"]
    agreement = np.mean([layer["dominance"]["branch"]["agreement"] for layers in trained for layer in layers])
    assert f"all trained, branch: agreement {agreement:.3f}" in capsys.readouterr().out


def test_a_random_vit_on_a_folder_of_images(benchmark, monkeypatch, tmp_path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 40, 60, 3), dtype=np.uint8)
    for index, image in enumerate(pixels):
        (tmp_path / "images" / "class").mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(tmp_path / "images" / "class" / f"{index}.png")
    options = ("--samples", "2", "--dim", "24", "--heads", "3", "--images", str(tmp_path / "images"))
    (row,), body = run(benchmark, monkeypatch, tmp_path, "random", *options)
    assert row["data"] == "2 images of a folder"
    assert row["samples"] == "2"
    assert row["mode_agreement"] == ""
    files = [tmp_path / "images" / "class" / f"{n}.png" for n in (0, 1)]
    assert body["images"] == {f"class/{file.name}": sha256(file.read_bytes()).hexdigest() for file in files}
    assert body["demo"] is None


def test_images_are_prepared_as_deit_evaluates(benchmark, tmp_path) -> None:
    """A grey image stays grey: each channel is (grey − mean)/deviation, in the middle 224 of 256."""
    Image.new("RGB", (300, 500), (128, 128, 128)).save(tmp_path / "grey.png")
    found = benchmark.prepare(tmp_path / "grey.png")
    assert found.shape == (3, 224, 224)
    expected = (128 / 255 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])
    torch.testing.assert_close(found, expected[:, None, None].expand(3, 224, 224))


def test_variants_are_written_with_semicolons(benchmark) -> None:
    found = benchmark.variants("plain,positive,bounded=eigen:negative;spectrum=bounded")
    assert found == {"plain": None, "positive": "eigen:positive", "bounded": "eigen:negative,spectrum=bounded"}


def test_an_empty_folder_is_refused(benchmark, monkeypatch, tmp_path) -> None:
    (tmp_path / "none").mkdir()
    with pytest.raises(SystemExit, match="no images in"):
        run(benchmark, monkeypatch, tmp_path, "random", "--images", str(tmp_path / "none"))
