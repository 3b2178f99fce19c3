"""Families and tendencies, the file, the pictures and the page."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from spectrum_worlds import DIM, set_branch, small_vit

import acutance as ac
from acutance.errors import AcutanceError, AcutanceWarning
from acutance.explain import Share, Spectrum
from acutance.models import ViT
from acutance.report.page import COLOURS


@pytest.fixture
def model() -> ViT:
    """A layer of each kind."""
    vit = small_vit()
    for layer, factor in enumerate([0.5, -0.5, 0.0], 1):
        set_branch(vit, layer, factor * torch.eye(DIM))
    return vit


@pytest.fixture
def read(model: ViT) -> Spectrum:
    return ac.explain(model, [torch.randn(4, 1, 8, 8)], progress=False)


def strict_json(text: str):
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_families_and_tendencies_follow_the_sign_of_the_spectrum(model: ViT, read: Spectrum) -> None:
    spectrum = ac.explain(model, progress=False)
    for found in (spectrum, read):
        assert [layer.family for layer in found.layers] == ["constant", "varying", "neither"]
    assert [layer.verdict for layer in spectrum.layers] == ["smoothing", "sharpening", "neutral"]
    assert [layer.tendency for layer in spectrum.layers] == pytest.approx([-np.log(1.5), np.log(2), 0])  # of (1 + λ)X
    assert read[2].tendency == pytest.approx(-np.log(abs(1 - 0.5 * read[2].scale)))
    assert spectrum[2].negative_share == 1.0
    assert spectrum[2].quantiles == pytest.approx((-0.5,) * 5)


@pytest.mark.parametrize(
    ("smoothing", "sharpening", "undecided", "family"),
    [(0.2, 0.8, 0, "varying"), (0.6, 0, 0.4, "constant"), (0.4, 0, 0.2, "unknown"), (0.3, 0, 0.1, "neither")],
)
def test_a_majority_makes_the_family(read: Spectrum, smoothing, sharpening, undecided, family) -> None:
    seen = replace(read[1].dominance, predicted=Share(smoothing, sharpening), undecided=undecided, mu_error=0.1)
    assert replace(read[1], dominance=seen).family == family


def test_one_eigenvalue_beyond_the_bound_need_not_make_the_layer_smooth(model: ViT) -> None:
    """The bound compares μ = 1 and μ_min at one λ; 1 + 0 of another is larger than |1 − 1.9|."""
    set_branch(model, 1, torch.diag(torch.tensor([-1.9] + [0.0] * (DIM - 1))))
    found = ac.explain(model, [torch.randn(2, 1, 8, 8)], progress=False)[1]
    sharp = replace(found.dominance, mu_min_by_sample=np.full((2, 2), 0.133), predicted=Share(0.0, 1.0))
    layer = replace(found, dominance=sharp)
    assert (layer.crossing, layer.family) == (pytest.approx(-1.9), "varying")
    assert "λ = -1.9 lies beyond −2/(1+μ_min) = -1.77" in layer.note


def test_a_complex_pair_crosses_the_bound_outside_the_disc(model: ViT) -> None:
    """−0.1 ± 0.6i has |1 + λ| = 1.08 > 1, with a real part far above −2: the layer smooths, and it is said why."""
    turn = torch.tensor([[-0.1, -0.6], [0.6, -0.1]])
    set_branch(model, 1, torch.block_diag(*[turn] * (DIM // 2)))
    with pytest.warns(AcutanceWarning, match=r"λ = -0.1±0.6i lies outside the disc over −2/\(1\+μ_min\) = -2 to 0"):
        found = ac.explain(model, progress=False)[1]
    assert (found.crossing is not None, found.family) == (True, "constant")
    assert "outside the disc" in found.note
    set_branch(model, 1, torch.block_diag(*[turn - 0.3 * torch.eye(2)] * (DIM // 2)))  # −0.4 ± 0.6i: |1 + λ| = 0.85
    assert ac.explain(model, progress=False)[1].crossing is None


def test_heads_do_not_decide_for_a_wide_layer(model: ViT) -> None:
    """Two heads with eigenvalues 0.5 and −1.9 whose sum has −0.9 and −0.5."""
    eye = torch.eye(DIM // 2)
    set_branch(model, 1, torch.cat([torch.cat([0.5 * eye, 1.2 * eye], 1), torch.cat([-7 / 6 * eye, -1.9 * eye], 1)]))
    data = [torch.randn(2, 1, 8, 8)]
    spectrum, whole = (ac.explain(model, data, whole=w, progress=False) for w in (False, True))
    by_head = spectrum[1]
    np.testing.assert_allclose(by_head.heads, [[0.5] * 6, [-1.9] * 6], atol=1e-6)
    assert (by_head.strongest, by_head.family) == (pytest.approx(0.5), "unknown")
    assert (whole[1].family, by_head.dominance.predicted) == ("varying", None)
    assert math.isnan(by_head.dominance.branch.agreement)
    assert by_head.dominance.branch.fell == whole[1].dominance.branch.fell
    assert by_head.cells()["H⊗A %"] == "–"
    assert "whole=True" in by_head.note
    assert spectrum.share() == spectrum.share("heads")
    with pytest.raises(AcutanceError, match="whole=True"):
        spectrum.share("whole")
    one = small_vit(heads=1, depth=1)  # one head is the whole
    set_branch(one, 1, -0.5 * torch.eye(DIM))
    assert ac.explain(one, data, whole=False, progress=False)[1].dominance.predicted == Share(0.0, 1.0)


@pytest.mark.parametrize(("data", "whole"), [(False, True), (True, False), (True, True)])
def test_round_trip(model: ViT, data: bool, whole: bool, tmp_path) -> None:
    batches = [torch.randn(3, 1, 8, 8)] if data else None
    spectrum = ac.explain(model, batches, whole=whole, progress=False)
    if data:  # what JSON has no number for
        seen = spectrum[1].dominance
        odd = replace(spectrum[1], dominance=replace(seen, branch=replace(seen.branch, change=math.nan)))
        spectrum = Spectrum((odd, *spectrum.layers[1:]), spectrum.context)
    back = Spectrum.load(spectrum.save(tmp_path / "s.json"))
    strict_json((tmp_path / "s.json").read_text())
    assert back.to_json() == spectrum.to_json()
    assert str(back) == str(spectrum)
    np.testing.assert_array_equal(back[3].heads, spectrum[3].heads)
    assert back.context["versions"]["torch"] == torch.__version__
    assert back.context.get("samples") == (3 if data else None)
    if data:
        assert math.isnan(back[1].dominance.branch.change)
        np.testing.assert_array_equal(back[2].dominance.mu_min_by_sample, spectrum[2].dominance.mu_min_by_sample)


def test_a_file_of_the_version_before_is_read(read: Spectrum, tmp_path) -> None:
    """It has no change, and neither the trace nor the size of H: then there is no verdict."""
    body = json.loads(read.to_json())
    for layer in body["layers"]:
        for name in ("change", "mean", "power", "scale"):
            del layer[name]
    (tmp_path / "old.json").write_text(json.dumps(body))
    old = Spectrum.load(tmp_path / "old.json")
    assert old.share() == read.share()
    assert (old[1].family, old[1].verdict) == ("constant", "unknown")
    assert "unknown –" in str(old)


def test_errors_name_the_file_and_the_layer(read: Spectrum, tmp_path) -> None:
    with pytest.raises(KeyError, match="layers 1 to 3"):
        read[4]
    (tmp_path / "t.json").write_text('{"format": "acutance-spectrum/3", "context": {}, "layers": [{}]}')
    with pytest.raises(AcutanceError, match=r"t\.json"):
        Spectrum.load(tmp_path / "t.json")


def test_frame_and_totals(model: ViT, read: Spectrum) -> None:
    frame = read.to_frame()
    assert frame["median"].tolist() == pytest.approx([0.5, -0.5, 0.0])
    assert frame["smoothing"].tolist() == [100, 0, 0]
    assert "smoothing" not in ac.explain(model, progress=False).to_frame()
    found = [layer.dominance.branch for layer in read.layers]
    assert read.outcome().agreement == pytest.approx(np.mean([o.agreement for o in found]))
    assert [replace(found[0], fell=fell).base_rate for fell in (0.3, 0.8)] == pytest.approx([0.7, 0.8])
    assert read.share() == Share(pytest.approx(1 / 3), pytest.approx(1 / 3))  # a third is ties


def test_conditional_shares_are_pooled_over_cases_not_over_layers(read: Spectrum) -> None:
    """Layer 1 predicts smoothing in all samples and layer 2 in a quarter: its share counts a quarter as much."""
    nan = math.nan
    # Predicted share, P(fell | smoothing), P(rose | sharpening), predicted and measured change.
    figures = [((1, 0), 0.9, nan, -0.3, -0.1), ((0.25, 0.75), 0.4, 0.6, 0.1, 0.0), ((0, 0), nan, nan, 0.0, 0.2)]
    layers = []
    for layer, (share, fell, rose, predicted, change) in zip(read.layers, figures, strict=True):
        seen = layer.dominance
        branch = replace(seen.branch, fell_if_smoothing=fell, rose_if_sharpening=rose, change=change)
        seen = replace(seen, predicted=Share(*share), predicted_change=predicted, branch=branch)
        layers.append(replace(layer, dominance=seen))
    found, total = Spectrum(tuple(layers)), Spectrum(tuple(layers)).outcome()
    assert (total.fell_if_smoothing, total.rose_if_sharpening) == pytest.approx(((0.9 + 0.25 * 0.4) / 1.25, 0.6))
    assert total.correlation == pytest.approx(0.5)  # ranks 1, 3, 2 against 1, 2, 3
    values = read[1].dominance.mu_min_by_sample
    assert found[1].cells()["μ_min"] == f"{values.mean():.2f} ({values.min():.2f} to {values.max():.2f})"


def test_pictures_show_every_eigenvalue_on_its_side(read: Spectrum) -> None:
    from matplotlib.colors import to_hex

    figure = read.plot("histogram")
    for axis, counts in zip(figure.axes, [(0, 12), (12, 0), (0, 12)], strict=False):
        bars = {colour.lower(): 0.0 for colour in COLOURS.values()}
        for bar in axis.patches:
            bars[to_hex(bar.get_facecolor())] += bar.get_height()
        assert (bars[COLOURS["sharpening"].lower()], bars[COLOURS["smoothing"].lower()]) == counts
    assert figure.axes[1].get_title() == f"layer 2: {read[2].verdict}"
    for axis, layer in zip(read.plot("plane").axes, read.layers, strict=False):
        points = axis.collections[0].get_offsets()
        np.testing.assert_allclose(points[:, 0] + 1j * points[:, 1], layer.spectrum)
        low, high = axis.get_xlim()
        assert low < points[:, 0].min() <= points[:, 0].max() < high


def test_dominance_bars_are_the_shares(model: ViT, read: Spectrum) -> None:
    (axis,) = read.plot("dominance").axes
    heights = [[bar.get_height() for bar in bars] for bars in axis.containers]
    np.testing.assert_allclose(heights, [[100, 0, 0], [0, 100, 0]])
    np.testing.assert_allclose(axis.lines[0].get_ydata(), [100 * layer.dominance.branch.fell for layer in read.layers])
    for call in (lambda spectrum: spectrum.plot("dominance"), lambda spectrum: spectrum.share()):
        with pytest.raises(AcutanceError, match="needs data"):
            call(ac.explain(model, progress=False))
    with pytest.raises(AcutanceError, match="histogram, plane, dominance"):
        read.plot("pie")


def test_page_holds_table_and_charts(model: ViT, read: Spectrum, tmp_path) -> None:
    text = read.to_html(tmp_path / "p.html").read_text()
    charts = strict_json(text.split("const charts = ")[1].split(";\nawait")[0])
    assert list(charts) == ["dominance", "histogram", "plane"]
    assert all(str(layer.change.whole) in text for layer in read.layers)
    assert sum(bar["count"] for bar in charts["histogram"]["data"]["values"]) == 3 * DIM
    assert len(charts["plane"]["data"]["values"]) == 3 * DIM
    weights = ac.explain(model, progress=False).to_html(tmp_path / "w.html").read_text()
    assert "chart-dominance" not in weights
