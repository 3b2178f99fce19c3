"""The comparison with imagecorruptions, with a stand-in for that package: what it reports, and what it saves."""

import csv
import io
import runpy
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from acutance.lab.data import load_images
from acutance.lab.robustness import corrupt

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "corruption_parity.py"


def test_it_compares_and_saves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    package = types.ModuleType("imagecorruptions")
    package.corrupt = lambda image, corruption_name, severity: image // severity  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "imagecorruptions", package)
    words = ["--dataset", "digits", "--images", "6", "--corruptions", "contrast", "--save", str(tmp_path / "saved")]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["severity"] for row in rows] == ["1", "2", "3", "4", "5"]
    assert rows[0]["change_theirs"] == "0.00"
    assert rows[0]["change_ours"] == rows[0]["difference"]
    images = load_images("digits", None, "test").images[:6]
    change = (corrupt(images, "contrast", 5).float() - images.float()).abs().mean()
    assert float(rows[4]["change_ours"]) == pytest.approx(float(change), abs=0.005)
    saved = np.load(tmp_path / "saved" / "contrast.npy")
    assert saved.shape == (30, 8, 8, 1)
    assert np.array_equal(saved[12:18, ..., 0], images[:, 0].numpy() // 3)
    assert len(np.load(tmp_path / "saved" / "labels.npy")) == 30
