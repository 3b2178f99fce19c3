import json
import math

import numpy as np
import pytest

from acutance.errors import AcutanceError
from acutance.measure.profile import MetricValue, Profile, merge


def make(shift: float = 0.0, taps: tuple[str, ...] = ("block",)) -> Profile:
    readings = [
        MetricValue(tap, layer, metric, mean=layer + shift, std=0.5, count=7)
        for tap in taps
        for layer in (0, 1, 2)
        for metric in ("token_cosine", "rank_residual")
    ]
    return Profile(tuple(readings), {"model": "ViT", "samples": 7, "dtype": "float32"})


def test_indexing_gives_the_curve_by_depth() -> None:
    profile = make()
    np.testing.assert_array_equal(profile["token_cosine"], [0, 1, 2])
    assert profile.layers("token_cosine") == [0, 1, 2]
    assert profile.metrics == ["token_cosine", "rank_residual"]


def test_indexing_needs_the_tap_when_there_are_several() -> None:
    profile = make(taps=("block", "attention"))
    with pytest.raises(KeyError, match="read at block, attention"):
        profile["token_cosine"]
    np.testing.assert_array_equal(profile["token_cosine", "attention"], [0, 1, 2])
    with pytest.raises(KeyError, match="read at block, attention: name one"):
        profile["token_cosine", "values"]
    with pytest.raises(KeyError, match=r"no metric 'entropy'.*token_cosine, rank_residual"):
        profile["entropy"]


def test_save_and_load_round_trip_with_infinities(tmp_path) -> None:
    profile = Profile((MetricValue("block", 1, "hfc_lfc_spectral", math.inf, math.nan, 3),), {"model": "ViT"})
    path = profile.save(tmp_path / "new folder" / "p.json")
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"not JSON: {name}"))
    back = Profile.load(path)
    assert back.readings[0].mean == math.inf
    assert math.isnan(back.readings[0].std)
    assert Profile.load(make().save(tmp_path / "q.json")) == make()


@pytest.mark.parametrize("content", ["", '{"format": "other/1"}', "[1]", '{"format": "acutance-profile/1"}'])
def test_loading_something_else_names_the_file(tmp_path, content: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(content)
    with pytest.raises(AcutanceError, match=r"p\.json.*acutance-profile/1"):
        Profile.load(path)


def test_a_file_of_0_1_is_read_with_its_old_tap(tmp_path) -> None:
    value = MetricValue("attention_matrix", 1, "attention_entropy", 1.0, 0.1, 7)
    path = Profile((value,)).save(tmp_path / "p.json")
    path.write_text(path.read_text().replace("attention_matrix", "map"))
    assert Profile.load(path).readings == (value,)


def test_frame_and_table_hold_every_reading() -> None:
    profile = make(shift=0.25, taps=("block", "attention"))
    frame = profile.to_frame()
    assert len(frame) == 12
    assert list(frame.columns) == ["tap", "layer", "metric", "mean", "std", "count"]
    text = str(profile)
    assert "2.2500 ± 0.5000" in text
    assert "7 samples" in text


def test_merge_is_the_mean_and_the_spread_over_runs() -> None:
    merged = merge([make(0.0), make(1.0), make(5.0)])
    np.testing.assert_allclose(merged["token_cosine"], [2, 3, 4])
    assert merged.readings[0].std == pytest.approx(np.std([0, 1, 5], ddof=1))
    assert "over 3 runs" in merged.caption
    with pytest.raises(AcutanceError, match="same taps"):
        merge([make(), make(taps=("block", "attention"))])
