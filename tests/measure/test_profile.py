import json
import math

import numpy as np
import pytest

from acutance.errors import AcutanceError
from acutance.lab.studies.runs import merge
from acutance.measure.profile import MetricValue, Profile
from report.made_profiles import made_profile


def test_indexing_gives_the_curve_by_depth_and_needs_the_tap_when_there_are_several() -> None:
    profile = made_profile()
    assert (profile.layers("token_cosine"), profile.metrics) == ([0, 1, 2], ["token_cosine", "rank_residual"])
    both = made_profile(taps=("block", "attention"))
    for curve in (profile["token_cosine"], both["token_cosine", "attention"]):
        np.testing.assert_array_equal(curve, [0, 1, 2])
    several, unknown = "read at block, attention: name one", r"no metric 'entropy'.*token_cosine, rank_residual"
    for key, message in (("token_cosine", several), (("token_cosine", "values"), several), ("entropy", unknown)):
        with pytest.raises(KeyError, match=message):
            both[key]


def test_save_and_load_round_trip_with_infinities(tmp_path) -> None:
    profile = Profile((MetricValue("block", 1, "hfc_lfc_spectral", math.inf, math.nan, 3),), {"model": "ViT"})
    path = profile.save(tmp_path / "new folder" / "p.json")
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"not JSON: {name}"))
    back = Profile.load(path)
    assert back.readings[0].mean == math.inf
    assert math.isnan(back.readings[0].std)
    for tap in ("attention_matrix", "map"):  # as version 0.1 called it
        expected = made_profile(taps=("attention_matrix",))
        path.write_text(expected.to_json().replace("attention_matrix", tap))
        assert Profile.load(path) == expected


@pytest.mark.parametrize("content", ["", '{"format": "other/1"}', "[1]", '{"format": "acutance-profile/1"}'])
def test_loading_something_else_names_the_file(tmp_path, content: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(content)
    with pytest.raises(AcutanceError, match=r"p\.json.*acutance-profile/1"):
        Profile.load(path)


def test_frame_and_table_hold_every_reading() -> None:
    profile = made_profile(shift=0.25, taps=("block", "attention"))
    frame = profile.to_frame()
    assert (len(frame), list(frame.columns)) == (12, ["tap", "layer", "metric", "mean", "std", "count"])
    assert "2.2500 ± 0.5000" in str(profile)
    assert "7 samples" in str(profile)


def test_merge_is_the_mean_and_the_spread_over_runs() -> None:
    merged = merge(made_profile(shift=shift) for shift in (0, 1, 5))
    np.testing.assert_allclose(merged["token_cosine"], [2, 3, 4])
    assert merged.readings[0].std == pytest.approx(np.std([0, 1, 5], ddof=1))
    assert "over 3 runs" in merged.caption
    with pytest.raises(AcutanceError, match="same taps"):
        merge([made_profile(), made_profile(taps=("block", "attention"))])
