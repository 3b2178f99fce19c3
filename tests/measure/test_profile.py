import json
import math

import numpy as np
import pytest

from acutance.errors import AcutanceError
from acutance.lab.studies.runs import merge
from acutance.measure.profile import MATRIX, MetricValue, Profile
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
    assert ("2.25" in str(profile), "± 0.50" in str(profile)) == (True, False)
    assert "2.25 ± 0.50" in str(profile.table(spread=True))
    assert "7 samples" in str(profile)


def curve(*values: float, metric: str = "token_cosine", tap: str = "block", first: int = 0) -> Profile:
    return Profile(tuple(MetricValue(tap, layer, metric, x, 0.1, 9) for layer, x in enumerate(values, first)), {})


@pytest.mark.parametrize(
    ("profile", "sentence"),
    [
        (
            curve(0.12, 0.13, 0.40, 0.55, 0.6, 0.62, 0.65, 0.66, 0.68, 0.69, 0.7, 0.7, 0.71),
            "Tokens grow alike with depth: token_cosine 0.120 → 0.710 over 12 layers, most in layers 2 to 3.",
        ),
        (curve(0, 0.1, 0.2, 0.3, 0.4), "Tokens grow alike with depth: token_cosine 0.000 → 0.400 over 4 layers."),
        (curve(0.5, 0.1), "Tokens grow apart with depth: token_cosine 0.500 → 0.100 over 1 layer."),
        (
            curve(0.3, 0.31, 0.9, 0.33),
            "Tokens stay about as alike with depth: token_cosine 0.300 → 0.330 over 3 layers, but 0.900 after layer 2.",
        ),
        (
            curve(80, 79, 20, 20, metric="effective_rank", tap="attention", first=1),
            "Tokens of the attention branch grow alike with depth: effective_rank 80.0 → 20.0 from layer 1 to 4, "
            "most in layer 3.",
        ),
        (
            curve(80, 79, metric="norm_spread"),
            "norm_spread stays about the same with depth: 80.0 → 79.0 over 1 layer.",
        ),
        (curve(0.7, tap="final", first=12), "Tokens after layer 12: token_cosine 0.700."),
        (curve(0.7, math.inf), ""),
        (curve(2, 1, metric="my_own"), "my_own falls with depth: 2.00 → 1.00 over 1 layer."),
    ],
)
def test_the_headline_says_what_the_curve_does(profile: Profile, sentence: str) -> None:
    assert profile.headline == sentence


def test_the_headline_is_about_the_cosine_of_the_stream_if_that_was_read() -> None:
    several = curve(9, 1, metric="norm_spread").readings + curve(3, 3, metric="attention_entropy", tap=MATRIX).readings
    several += curve(1, 9, metric="effective_rank").readings
    assert Profile(several, {}).headline.startswith("Tokens grow apart with depth: effective_rank")
    several += curve(0.1, 0.9, tap="attention").readings + curve(0.9, 0.1).readings
    assert "0.900 → 0.100" in Profile(several, {}).headline


def test_merge_is_the_mean_and_the_spread_over_runs() -> None:
    merged = merge(made_profile(shift=shift) for shift in (0, 1, 5))
    np.testing.assert_allclose(merged["token_cosine"], [2, 3, 4])
    assert merged.readings[0].std == pytest.approx(np.std([0, 1, 5], ddof=1))
    assert "over 3 runs" in str(merged)
    with pytest.raises(AcutanceError, match="same taps"):
        merge([made_profile(), made_profile(taps=("block", "attention"))])
