"""Laws of the token metrics, on random token matrices of any shape."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from acutance.metrics import TOKEN_METRICS, singular_ratio, token_cosine

ALL = pytest.mark.parametrize("name", TOKEN_METRICS)
laws = settings(max_examples=25, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)
sizes = st.tuples(st.integers(2, 12), st.integers(2, 12))


def tokens_of(size, seed, dtype=torch.float64):
    """Random tokens around a random offset, so that every metric is away from its special values."""
    generator = torch.Generator().manual_seed(seed)
    tokens, channels = size
    x = torch.randn(tokens, channels, generator=generator, dtype=torch.float64)
    return (x + torch.randn(channels, generator=generator, dtype=torch.float64)).to(dtype)


def rotation(channels, seed):
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.linalg.qr(torch.randn(channels, channels, generator=generator, dtype=torch.float64)).Q


@ALL
@laws
@given(size=sizes, seed=seeds)
def test_rotating_the_channels_changes_nothing(name, size, seed):
    x, metric = tokens_of(size, seed), TOKEN_METRICS[name]
    torch.testing.assert_close(metric(x @ rotation(size[1], seed), None), metric(x, None), rtol=1e-6, atol=1e-7)


@ALL
@laws
@given(size=sizes, seed=seeds)
def test_the_order_of_the_tokens_does_not_matter(name, size, seed):
    x, metric = tokens_of(size, seed), TOKEN_METRICS[name]
    order = torch.randperm(size[0], generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(metric(x[order], None), metric(x, None), rtol=1e-6, atol=1e-7)


@ALL
@laws
@given(size=sizes, seed=seeds, exponent=st.integers(-30, 30), sign=st.sampled_from([-1, 1]))
def test_a_common_factor_of_any_size_changes_nothing(name, size, seed, exponent, sign):
    x, metric = tokens_of(size, seed, torch.float32), TOKEN_METRICS[name]
    scaled = sign * x * 10.0**exponent
    torch.testing.assert_close(metric(scaled, None), metric(x, None), rtol=1e-4, atol=1e-5)


@ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_factor_at_the_end_of_the_range_changes_nothing(name, dtype):
    x, metric = tokens_of((6, 4), 0, dtype), TOKEN_METRICS[name]
    limits = torch.finfo(dtype)
    for factor in (limits.max / 16, limits.tiny * 2**10):
        torch.testing.assert_close(metric(x * factor, None), metric(x, None), rtol=1e-4, atol=1e-5)


@laws
@given(size=sizes, seed=seeds)
def test_token_cosine_ignores_the_length_of_each_token(size, seed):
    x = tokens_of(size, seed)
    lengths = torch.rand(size[0], 1, generator=torch.Generator().manual_seed(seed), dtype=x.dtype) + 0.1
    torch.testing.assert_close(token_cosine(lengths * x), token_cosine(x))


@pytest.mark.parametrize("name", [name for name in TOKEN_METRICS if name != "token_cosine"])
def test_the_other_metrics_see_the_length_of_each_token(name):
    x = tokens_of((6, 4), 0)
    lengths = torch.linspace(1, 9, 6, dtype=x.dtype)[:, None]
    assert abs(TOKEN_METRICS[name](lengths * x, None) - TOKEN_METRICS[name](x, None)) > 1e-2


@ALL
def test_a_common_offset_is_seen(name):
    x = tokens_of((6, 4), 0)
    assert abs(TOKEN_METRICS[name](x + 10, None) - TOKEN_METRICS[name](x, None)) > 1e-2


@ALL
def test_stretching_one_channel_is_seen(name):
    x = tokens_of((6, 4), 0)
    stretch = torch.tensor([10.0, 1, 1, 1], dtype=x.dtype)
    assert abs(TOKEN_METRICS[name](stretch * x, None) - TOKEN_METRICS[name](x, None)) > 1e-2


@laws
@given(size=sizes, seed=seeds)
def test_every_metric_keeps_its_bounds(size, seed):
    x = tokens_of(size, seed)
    value = {name: metric(x, None).item() for name, metric in TOKEN_METRICS.items()}
    n, smaller, slack = size[0], min(size), 1e-9
    assert -1 / (n - 1) - slack <= value["token_cosine"] <= 1
    assert 0 <= value["hfc_lfc_spectral"] <= value["hfc_lfc_frobenius"] + slack
    assert 0 <= value["rank_residual"] <= 1 + slack
    assert 0 <= value["singular_ratio"] <= 1
    assert 1 - slack <= value["effective_rank"] <= smaller + slack
    assert 1 - slack <= value["stable_rank"] <= torch.linalg.matrix_rank(x).item() + slack
    assert 0 <= value["norm_spread"] <= (n - 1) ** 0.5 + slack


@laws
@given(size=sizes, seed=seeds)
def test_rank_residual_and_frobenius_ratio_tell_the_same_story(size, seed):
    # X splits orthogonally: residual² = r²/(1 + r²) with r = ‖HFC‖_F/‖LFC‖_F.
    x = tokens_of(size, seed)
    r = TOKEN_METRICS["hfc_lfc_frobenius"](x, None)
    torch.testing.assert_close(TOKEN_METRICS["rank_residual"](x, None), r / (1 + r**2).sqrt())


@laws
@given(
    n=st.integers(2, 40),
    d=st.integers(2, 40),
    seed=seeds,
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_rank_one_tokens_have_no_second_singular_value(n, d, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    column = torch.randn(n, 1, generator=generator, dtype=dtype)
    row = torch.randn(1, d, generator=generator, dtype=dtype)
    assert singular_ratio(column * row) == 0


@pytest.mark.parametrize("name", ["hfc_lfc_spectral", "hfc_lfc_frobenius", "rank_residual", "singular_ratio"])
def test_averaging_tokens_with_one_another_smooths(name):
    # One step of x ← (1−t)x + t·mean: the four ratios fall, the cosine rises.
    x = tokens_of((10, 6), 2)
    steps = [(1 - t) * x + t * x.mean(0) for t in (0.0, 0.3, 0.6, 0.9, 1.0)]
    values = [TOKEN_METRICS[name](step, None).item() for step in steps]
    cosines = [token_cosine(step).item() for step in steps]
    assert values == sorted(values, reverse=True)
    assert cosines == sorted(cosines)
    assert values[-1] == pytest.approx(0, abs=1e-12)
    assert cosines[-1] == pytest.approx(1)
