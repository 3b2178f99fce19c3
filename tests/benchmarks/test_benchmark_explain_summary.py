"""The summary of a Spectrum: signs counted by hand, plain JSON."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

import acutance as ac

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "explain_summary.py"


def test_the_signs_and_shares_of_a_model_with_a_layer_of_each_sign(monkeypatch, tmp_path) -> None:
    torch.manual_seed(0)
    model = ac.models.ViT(image_size=8, patch_size=4, in_chans=1, dim=12, depth=2, heads=2, num_classes=4)
    for block, diagonal in zip(model.blocks, ([-0.5] * 12, [0.3] * 9 + [-0.1] * 3), strict=True):
        with torch.no_grad():
            block.attn.qkv.weight[-12:] = torch.eye(12)
            block.attn.proj.weight.copy_(torch.diag(torch.tensor(diagonal)))
        torch.nn.init.constant_(block.norm1.weight, -1.0)
    data = [torch.randn(3, 1, 8, 8)]
    ac.explain(model, data, progress=False).save(tmp_path / "folded.json")
    ac.explain(model, norm="ignore", progress=False).save(tmp_path / "ignored.json")
    words = ["folded.json", "--ignored", "ignored.json", "--out", "summary.json"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
    spec = importlib.util.spec_from_file_location("explain_summary_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()
    found = json.loads((tmp_path / "summary.json").read_text())
    # γ = −1 turns every sign round.
    assert found["signs_norm_ignored"]["negative_share"] == pytest.approx(15 / 24)
    assert found["signs"]["negative_share"] == pytest.approx(9 / 24)
    assert [layer["balance"] for layer in found["layers"]] == pytest.approx([1, -(2.7 - 0.3) / 3.0], abs=1e-5)
    assert found["signs"]["balance"] == pytest.approx((1 - 0.8) / 2, abs=1e-5)
    assert found["layers"][0]["verdict"] == "smoothing"
    assert found["layers"][0]["whole"] == ["100/0", "100/0"]
    assert found["context"]["versions"]["torch"] == torch.__version__
    low, mean, high = (found["layers"][1]["mu_min"][key] for key in ("lowest", "mean", "highest"))
    assert low <= mean <= high < 1
