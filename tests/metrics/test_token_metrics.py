"""Token metrics against NumPy in float64, from their definitions; laws, masks, precision, edge cases and gradients."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.spatial import distance
from torch.testing import assert_close

from acutance.errors import AcutanceError, NonFiniteError, ShapeError
from acutance.metrics import MEANINGS, TOKEN_METRICS, check_finite, high_frequency, low_frequency, token_cosine

ALL = pytest.mark.parametrize("name", TOKEN_METRICS)
SHAPES = pytest.mark.parametrize("shape", [(9, 4), (4, 9), (3, 6, 6), (2, 3, 5, 4), (2, 1), (1, 7, 1)], ids=str)
laws = settings(max_examples=25, deadline=None, derandomize=True)
sizes = st.tuples(st.integers(2, 12), st.integers(2, 12))


def hfc_lfc(x, order):
    low = np.ones((len(x), len(x))) @ x / len(x)  # exactly zero where the sum is
    return np.linalg.norm(x - low, order) / np.linalg.norm(low, order)


ORACLES = {
    "token_cosine": lambda x: np.nan_to_num(1 - distance.pdist(x, "cosine")).mean() if len(x) > 1 else 1.0,
    "hfc_lfc_spectral": lambda x: hfc_lfc(x, 2),
    "hfc_lfc_frobenius": lambda x: hfc_lfc(x, "fro"),
    "rank_residual": lambda x: math.sqrt(((x - x.mean(0)) ** 2).sum() / (x**2).sum()),
    "singular_ratio": lambda x: (lambda s: s[1] / s[0] if len(s) > 1 else 0)(np.linalg.svd(x, compute_uv=False)),
    "effective_rank": lambda x: math.exp(stats.entropy(np.linalg.svd(x, compute_uv=False))),
    "stable_rank": lambda x: (x**2).sum() / np.linalg.svd(x, compute_uv=False)[0] ** 2,
    "norm_spread": lambda x: stats.variation(np.linalg.norm(x, axis=1)),
}


def random_tokens(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) + 0.3).to(dtype)


def random_mask(*shape, seed=1):
    """A mask that keeps at least two tokens of every sample."""
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) > 0.4
    mask[..., :2] = True
    return mask


def by_oracle(name, tokens, mask=None):
    """The oracle on every sample, given only the tokens that count."""
    x = tokens.double().numpy()
    kept = np.ones(x.shape[:-1], dtype=bool) if mask is None else mask.expand(tokens.shape[:-1]).numpy()
    values = np.array([ORACLES[name](x[i][kept[i]]) for i in np.ndindex(x.shape[:-2])], dtype=float)
    return torch.from_numpy(values).reshape(tokens.shape[:-2])


@ALL
@SHAPES
@pytest.mark.parametrize("masked", [False, True])
def test_equals_the_oracle_on_the_tokens_that_count(name, shape, masked):
    tokens, mask = random_tokens(*shape), random_mask(*shape[:-1]) if masked else None
    value = TOKEN_METRICS[name](tokens, mask)
    assert_close(value, by_oracle(name, tokens, mask), rtol=1e-9, atol=1e-12)
    lowest, highest = MEANINGS[name].range
    assert ((lowest - 1e-12 <= value) & (value <= highest + 1e-12)).all()


@ALL
def test_masked_tokens_may_hold_anything_and_one_mask_serves_every_sample(name):
    tokens, mask = random_tokens(3, 8, 5), random_mask(8)
    value = TOKEN_METRICS[name](tokens, mask.expand(3, 8))
    for rubbish in (math.nan, math.inf, 1e30):
        assert torch.equal(TOKEN_METRICS[name](tokens.masked_fill(~mask[:, None], rubbish), mask), value)


@ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_input_costs_only_its_own_rounding(name, dtype):
    tokens, mask = random_tokens(2, 64, 24, dtype=dtype), random_mask(2, 64)
    value = TOKEN_METRICS[name](tokens, mask)
    assert value.dtype == torch.float32
    assert_close(value.double(), by_oracle(name, tokens, mask), rtol=1e-5, atol=1e-6)
    if name in ("hfc_lfc_spectral", "hfc_lfc_frobenius", "rank_residual"):  # these see nearly constant tokens differ
        tokens = (1e3 + 1e-3 * random_tokens(2, 197, 16)).float()
        assert_close(TOKEN_METRICS[name](tokens, None).double(), by_oracle(name, tokens), rtol=1e-5, atol=0)


@ALL
def test_a_nan_stays_in_its_own_sample(name):
    tokens = random_tokens(3, 6, 4)
    value = TOKEN_METRICS[name](tokens, None)
    tokens[1, 2, 0] = math.nan
    spoilt = TOKEN_METRICS[name](tokens, None)
    assert spoilt.isnan().tolist() == [False, True, False]
    assert_close(spoilt[[0, 2]], value[[0, 2]])


OPPOSITE = torch.tensor([[1.0, 2.0], [-1.0, -2.0]])
CASES = {
    "constant": (torch.full((6, 4), 0.1), None),
    "orthogonal": (3 * torch.eye(5), None),
    "opposite": (OPPOSITE, None),
    "zero": (torch.zeros(5, 3), None),
    "one": (torch.cat([torch.tensor([[3.0, -4.0]]), OPPOSITE]), torch.tensor([True, False, False])),
    "none": (OPPOSITE, torch.tensor([False, False])),
    "zeros": (torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]]), None),
    "line": (torch.tensor([[1.0, 1.0], [-2.0, -2.0], [5.0, 5.0]]), None),
}
VALUES = {  # of the cases in their order
    "token_cosine": (1, 0, -1, 0, 1, 1, 1 / 3, None),
    "hfc_lfc_spectral": (0, 1, math.inf, 0, 0, 0, None, None),
    "hfc_lfc_frobenius": (0, 2, math.inf, 0, 0, 0, None, None),
    "rank_residual": (0, math.sqrt(0.8), 1, 0, 0, 0, None, None),
    "singular_ratio": (0, 1, 0, 0, 0, 0, None, 0),
    "effective_rank": (1, 5, 1, 0, 1, 0, None, 1),
    "stable_rank": (1, 5, 1, 0, 1, 0, None, 1),
    "norm_spread": (0, 0, 0, 0, 0, 0, None, None),
}


@ALL
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exact_values_and_finite_gradients_at_the_edges(name, case, dtype):
    tokens, mask = CASES[case]
    x = tokens.to(dtype, copy=True).requires_grad_()
    value, expected = TOKEN_METRICS[name](x, mask), VALUES[name][list(CASES).index(case)]
    assert value.shape == ()
    assert expected is None or value.item() == pytest.approx(expected, rel=1e-6, abs=1e-7)
    if expected != math.inf:
        value.backward()
        assert torch.isfinite(x.grad).all()
        assert mask is None or (x.grad[~mask] == 0).all()


def test_rounding_does_not_push_a_cosine_out_of_its_range():
    for n in range(2, 60):
        token = random_tokens(1, 7, seed=n, dtype=torch.float32)
        assert token_cosine(token.expand(n, 7)) <= 1
        assert token_cosine(torch.cat([token, -token])) >= -1


@ALL
def test_gradients_are_right(name):
    # Tokens away from the places where a maximum changes hands.
    tokens, mask = random_tokens(2, 5, 4, seed=3).requires_grad_(), random_mask(2, 5)
    assert torch.autograd.gradcheck(lambda x: TOKEN_METRICS[name](x, mask), tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_low_and_high_frequencies_add_up_and_are_orthogonal(dtype):
    tokens, mask = random_tokens(2, 3, 11, 5, dtype=dtype), random_mask(2, 3, 11)
    low, high = low_frequency(tokens, mask), high_frequency(tokens, mask)
    assert low.dtype == high.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_close((low + high)[mask], tokens[mask].to(low.dtype))
    assert ((low == 0) & (high == 0))[~mask].all()
    assert max((low * high).sum((-2, -1)).abs().max(), high.sum(-2).abs().max()) < 1e-5


def test_what_does_not_fit_is_refused_by_name():
    for metric in TOKEN_METRICS.values():
        with pytest.raises(ShapeError, match=r"\(7,\)"):
            metric(torch.ones(7), None)
        with pytest.raises(ShapeError, match=r"\(2, 0, 4\).*not empty"):
            metric(torch.ones(2, 0, 4), None)
        with pytest.raises(ShapeError, match=r"\(2, 4\) does not fit tokens \(2, 5\)"):
            metric(torch.ones(2, 5, 3), torch.ones(2, 4, dtype=torch.bool))
        with pytest.raises(AcutanceError, match=r"must be bool.*mask\.bool\(\)"):
            metric(torch.ones(2, 5, 3), torch.ones(2, 5))


@ALL
@laws
@given(size=sizes, seed=st.integers(0, 2**32 - 1), exponent=st.integers(-30, 30), sign=st.sampled_from([-1, 1]))
def test_rotation_order_and_a_common_factor_change_nothing(name, size, seed, exponent, sign):
    x, metric, generator = random_tokens(*size, seed=seed), TOKEN_METRICS[name], torch.Generator().manual_seed(seed + 1)
    rotation = torch.linalg.qr(torch.randn(size[1], size[1], generator=generator, dtype=torch.float64)).Q
    order = torch.randperm(size[0], generator=generator)
    for same in (x @ rotation, x[order]):
        assert_close(metric(same, None), metric(x, None), rtol=1e-6, atol=1e-7)
    for dtype in (torch.float32, torch.float64):  # up to both ends of the range
        y, limits = x.to(dtype), torch.finfo(dtype)
        for factor in (sign * 10.0**exponent, limits.max / 16, limits.tiny * 2**10):
            assert_close(metric(factor * y, None), metric(y, None), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["token_cosine", "hfc_lfc_spectral", "hfc_lfc_frobenius", "rank_residual"])
def test_averaging_tokens_with_one_another_smooths(name):
    x = random_tokens(10, 6, seed=2)
    steps = [(1 - t) * x + t * x.mean(0) for t in (0.0, 0.3, 0.6, 0.9, 1.0)]
    values = [TOKEN_METRICS[name](step, None).item() for step in steps]
    assert values == sorted(values, reverse=MEANINGS[name].higher == "sharper")
    assert values[-1] == pytest.approx(1 if name == "token_cosine" else 0, abs=1e-12)


@pytest.mark.parametrize(
    ("shape", "places", "bad", "first"),
    [
        ((5, 3), [(4, 0)], "1 of 5", "token 4"),
        ((2, 197, 4), [(0, 12, 1), (0, 12, 3), (0, 40, 0), (1, 5, 2)], "3 of 394", "sample 0, token 12"),
        ((2, 3, 5, 4), [(1, 2, 3, 0)], "1 of 30", "sample 1, head 2, token 3"),
        ((1, 2, 3, 4, 5), [(0, 1, 2, 3, 4)], "1 of 24", "index [0, 1, 2, 3]"),
    ],
)
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_the_message_counts_tokens_and_points_at_the_first(shape, places, bad, first, value):
    tokens = torch.zeros(shape, dtype=torch.bfloat16)
    for place in places:
        tokens[place] = value
    with pytest.raises(NonFiniteError, match="bfloat16 or float32") as error:
        check_finite(tokens, metric="head_cosine", layer="final")
    words = f"layer final: head_cosine: {bad} tokens hold NaN or infinity (first: {first}). "
    assert str(error.value).startswith(words)


def test_tokens_that_do_not_count_are_not_complained_about():
    tokens, mask = torch.zeros(2, 4, 3), torch.ones(2, 4, dtype=torch.bool)
    tokens[0, 3, 0], mask[0, 3] = math.nan, False
    assert check_finite(tokens, metric="norm_spread", layer=2, mask=mask) is None
    tokens[1, 1, 1] = torch.inf
    with pytest.raises(NonFiniteError, match="1 of 7 tokens"):
        check_finite(tokens, metric="norm_spread", layer=2, mask=mask)
