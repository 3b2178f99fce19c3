"""Differences of profiles and their intervals: paired where the samples are the same."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from measured_vit import small_images, small_vit
from scipy import stats

import acutance as ac
from acutance.errors import AcutanceError
from acutance.measure.comparison import Comparison, compared
from acutance.measure.profile import MetricValue, Profile
from acutance.measure.reader import MAX_KEPT_SAMPLES

METRICS = ("token_cosine", "effective_rank")


def measured(model, batches, **options):
    return ac.measure(model, batches, metrics=METRICS, progress=False, **options)


@pytest.fixture(scope="module")
def pair():
    """The same samples through two models, in batches of other sizes and another dtype."""
    images = small_images(9)
    first, second = small_vit(depth=2), small_vit(depth=2, mitigation="neutreno:0.6")
    with torch.no_grad():
        second.blocks[1].attn.proj.weight.mul_(4)
    return measured(first, images.split(4)), measured(second.bfloat16(), images.bfloat16().split(9))


def profile(values, metric="token_cosine", digest="same", name="a", tap="block") -> Profile:
    values = np.array(values, np.float32)
    reading = MetricValue(tap, 0, metric, float(values.mean()), float(values.std(ddof=1)), len(values), values)
    return Profile((reading,), {"name": name, "digest": digest, "samples": len(values)})


def test_a_profile_keeps_the_values_of_each_sample_in_order(pair) -> None:
    images, model = small_images(9), small_vit(depth=2)
    one_by_one = [measured(model, [image[None]]) for image in images]
    for place, reading in enumerate(pair[0].readings):
        expected = [single.readings[place].mean for single in one_by_one]
        np.testing.assert_allclose(reading.values, expected, rtol=1e-5)
        assert reading.mean == pytest.approx(reading.values.mean(), rel=1e-6)
    assert one_by_one[0].context["digest"] != one_by_one[1].context["digest"]
    assert pair[0].context["digest"] == pair[1].context["digest"], "batch size and dtype do not matter"


def test_values_are_saved_and_old_files_load(pair, tmp_path) -> None:
    path = pair[0].save(tmp_path / "p.json")
    loaded = Profile.load(path)
    assert loaded == pair[0]
    for there, here in zip(loaded.readings, pair[0].readings, strict=True):
        np.testing.assert_array_equal(there.values, here.values)
    old = Profile(tuple(replace(r, values=None) for r in pair[0].readings), pair[0].context)
    old.save(path)
    assert (Profile.load(path).readings[0].values, "values" in path.read_text()) == (None, False)
    assert {d.pairs for d in (pair[1] - Profile.load(path)).differences} == {0}


def test_many_samples_are_not_kept() -> None:
    images = small_images(1).expand(MAX_KEPT_SAMPLES + 1, -1, -1, -1)
    model = small_vit(depth=1)
    few, many = (measured(model, images[:count].split(250)) for count in (MAX_KEPT_SAMPLES, MAX_KEPT_SAMPLES + 1))
    assert (len(few.readings[0].values), many.readings[0].values, many.context["digest"]) == (1000, None, None)


def test_masked_samples_and_documents_have_values_too() -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    masked = {"src": torch.randn(3, 6, 16), "src_key_padding_mask": torch.arange(6) >= torch.tensor([6, 0, 4])[:, None]}
    found = measured(encoder, [masked])
    assert {(r.count, len(r.values)) for r in found.readings} == {(2, 2)}


def test_intervals_are_those_of_scipy() -> None:
    generator = np.random.default_rng(0)
    for count in (2, 3, 7, 400):
        x, y = generator.normal(size=(2, count)).astype(np.float32)
        found = (profile(y) - profile(x)).differences[0]
        test = stats.ttest_rel(y.astype(float), x.astype(float)).confidence_interval(0.95)
        assert (found.difference - found.half, found.difference + found.half) == pytest.approx(tuple(test), rel=1e-4)
        other = generator.normal(size=count + 3).astype(np.float32)
        found = (profile(other) - profile(x)).differences[0]
        test = stats.ttest_ind(other.astype(float), x.astype(float), equal_var=False).confidence_interval(0.95)
        assert (found.difference - found.half, found.difference + found.half) == pytest.approx(tuple(test), rel=1e-4)
        assert found.pairs == 0


def test_pairs_need_the_same_samples_and_make_intervals_narrow() -> None:
    x = np.linspace(0, 1, 20)
    same, other = profile(x + 0.1), profile(x + 0.1, digest="others")
    assert (same - profile(x)).differences[0].half < 1e-6
    assert (other - profile(x)).differences[0].half > 0.1


@pytest.mark.parametrize(
    ("first", "other", "metric", "sentence"),
    [
        ([0.1, 0.2, 0.3], [0.5, 0.6, 0.7], "token_cosine", "b: tokens are more alike than in a after layer 0: "),
        ([0.5, 0.6, 0.7], [0.1, 0.2, 0.3], "token_cosine", "b: tokens are less alike than in a after layer 0"),
        ([50, 51, 52], [10, 11, 12], "effective_rank", "b: tokens are more alike than in a"),
        ([0.1, 0.2, 0.3], [0.3, 0.1, 0.2], "token_cosine", "b and a do not differ clearly after layer 0"),
        ([0.1, 0.2, 0.3], [0.11, 0.21, 0.31], "token_cosine", "b differs little from a after layer 0"),
        ([1, 2, 3], [11, 12, 13], "norm_spread", "b is above a after layer 0"),
    ],
)  # fmt: skip
def test_the_sentence_is_true(first, other, metric, sentence) -> None:
    assert (profile(other, metric, name="b") - profile(first, metric)).headline.startswith(sentence)


def test_the_sentence_says_whose_tokens_they_are() -> None:
    low, high = [0.1, 0.2, 0.3], [2.1, 2.2, 2.3]
    for tap, metric, words in [
        ("attention", "token_cosine", "b: tokens of the attention branch are more alike than in a"),
        ("attention_matrix", "attention_entropy", "b is above a after layer 0: attention_entropy"),
    ]:
        found = profile(high, metric, name="b", tap=tap) - profile(low, metric, tap=tap)
        assert found.headline.startswith(words)


def test_compare_takes_anything_that_has_a_profile(pair, tmp_path) -> None:
    first, second = pair
    images = small_images(9)
    path = first.save(tmp_path / "first.json")
    model = small_vit(depth=2)
    found = ac.compare(path, SimpleNamespace(profile=second), model, batches=[images], metrics=METRICS)
    assert list(found.profiles) == ["first", "ViT + neutreno:0.6", "ViT"]
    assert {d.pairs for d in found.differences} == {9}
    assert {d.difference for d in found.differences if d.run == "ViT"} == {0}
    assert len(found.to_frame()) == 2 * 3 * len(METRICS)
    found.save(tmp_path / "c.json")
    assert Comparison.load(tmp_path / "c.json").differences == found.differences
    assert found.to_html(tmp_path / "c.html").stat().st_size > 500_000
    assert list(compared(first, first).profiles) == ["ViT", "ViT (2)"]
    assert max(map(len, str(found).splitlines())) <= 80
    for what, message in [((first,), "two or more"), ((first, 3), "not int"), ((first, model), "say what they read")]:
        with pytest.raises(AcutanceError, match=message):
            ac.compare(*what)
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(AcutanceError, match=r"other\.json is no file of a profile"):
        ac.compare(first, tmp_path / "other.json")
