"""Token metrics against their float64 oracles; masks, precision, edge cases and gradients."""

import math

import metric_oracles as oracles
import numpy as np
import pytest
import torch

from acutance.errors import AcutanceError, ShapeError
from acutance.metrics import TOKEN_METRICS, high_frequency, low_frequency

ALL = pytest.mark.parametrize("name", TOKEN_METRICS)
SHAPES = pytest.mark.parametrize("shape", [(9, 4), (4, 9), (3, 6, 6), (2, 3, 5, 4), (2, 1), (1, 7, 1)], ids=str)


def random_tokens(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) + 0.3


def random_mask(*shape, seed=1):
    """A mask that keeps at least two tokens of every sample."""
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) > 0.4
    mask[..., :2] = True
    return mask


def by_oracle(name, tokens, mask=None):
    """The oracle on every sample, given only the tokens that count."""
    x = tokens.double().numpy()
    kept = np.ones(x.shape[:-1], dtype=bool) if mask is None else mask.expand(tokens.shape[:-1]).numpy()
    values = np.array([getattr(oracles, name)(x[i][kept[i]]) for i in np.ndindex(x.shape[:-2])])
    return torch.from_numpy(values).reshape(tokens.shape[:-2])


@ALL
@SHAPES
def test_equals_the_oracle(name, shape):
    tokens = random_tokens(*shape)
    torch.testing.assert_close(TOKEN_METRICS[name](tokens, None), by_oracle(name, tokens), rtol=1e-9, atol=1e-12)


@ALL
@SHAPES
def test_a_masked_result_is_the_result_on_the_tokens_that_count(name, shape):
    tokens, mask = random_tokens(*shape), random_mask(*shape[:-1])
    expected = by_oracle(name, tokens, mask)
    torch.testing.assert_close(TOKEN_METRICS[name](tokens, mask), expected, rtol=1e-9, atol=1e-12)


@ALL
@pytest.mark.parametrize("rubbish", [math.nan, math.inf, 1e30])
def test_masked_tokens_may_hold_anything(name, rubbish):
    tokens, mask = random_tokens(3, 8, 5), random_mask(3, 8)
    spoilt = tokens.masked_fill(~mask[..., None], rubbish)
    assert torch.equal(TOKEN_METRICS[name](spoilt, mask), TOKEN_METRICS[name](tokens, mask))


@ALL
def test_one_mask_serves_every_sample(name):
    tokens, mask = random_tokens(3, 8, 5), random_mask(8)
    torch.testing.assert_close(
        TOKEN_METRICS[name](tokens, mask), TOKEN_METRICS[name](tokens, mask.expand(3, 8)), rtol=0, atol=0
    )


@ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_input_costs_only_its_own_rounding(name, dtype):
    tokens, mask = random_tokens(2, 64, 24, dtype=dtype), random_mask(2, 64)
    value = TOKEN_METRICS[name](tokens, mask)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double(), by_oracle(name, tokens, mask), rtol=1e-5, atol=1e-6)


@ALL
def test_a_nan_stays_in_its_own_sample(name):
    tokens = random_tokens(3, 6, 4)
    spoilt = tokens.clone()
    spoilt[1, 2, 0] = math.nan
    value = TOKEN_METRICS[name](spoilt, None)
    assert value.isnan().tolist() == [False, True, False]
    torch.testing.assert_close(value[[0, 2]], TOKEN_METRICS[name](tokens, None)[[0, 2]])


CONSTANT = torch.full((6, 4), 0.1)
ORTHOGONAL = 3 * torch.eye(5)
OPPOSITE = torch.tensor([[1.0, 2.0], [-1.0, -2.0]])
ZERO = torch.zeros(5, 3)
ONE_TOKEN = torch.tensor([[3.0, -4.0]])
SOME_ZEROS = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
ONE_LINE = torch.tensor([[1.0, 1.0], [-2.0, -2.0], [5.0, 5.0]])
VALUES = {
    "token_cosine": {
        "constant": 1,
        "orthogonal": 0,
        "opposite": -1,
        "zero": 0,
        "one": 1,
        "none": 1,
        "zeros": 1 / 3,
    },
    "hfc_lfc_spectral": {
        "constant": 0,
        "orthogonal": 1,
        "opposite": math.inf,
        "zero": 0,
        "one": 0,
        "none": 0,
    },
    "hfc_lfc_frobenius": {
        "constant": 0,
        "orthogonal": 2,
        "opposite": math.inf,
        "zero": 0,
        "one": 0,
        "none": 0,
    },
    "rank_residual": {
        "constant": 0,
        "orthogonal": math.sqrt(0.8),
        "opposite": 1,
        "zero": 0,
        "one": 0,
        "none": 0,
    },
    "singular_ratio": {
        "constant": 0,
        "orthogonal": 1,
        "opposite": 0,
        "zero": 0,
        "one": 0,
        "none": 0,
        "line": 0,
    },
    "effective_rank": {
        "constant": 1,
        "orthogonal": 5,
        "opposite": 1,
        "zero": 0,
        "one": 1,
        "none": 0,
        "line": 1,
    },
    "stable_rank": {"constant": 1, "orthogonal": 5, "opposite": 1, "zero": 0, "one": 1, "none": 0, "line": 1},
    "norm_spread": {"constant": 0, "orthogonal": 0, "opposite": 0, "zero": 0, "one": 0, "none": 0},
}
CASES = {
    "constant": (CONSTANT, None),
    "orthogonal": (ORTHOGONAL, None),
    "opposite": (OPPOSITE, None),
    "zero": (ZERO, None),
    "one": (torch.cat([ONE_TOKEN, OPPOSITE]), torch.tensor([True, False, False])),
    "none": (OPPOSITE, torch.tensor([False, False])),
    "zeros": (SOME_ZEROS, None),
    "line": (ONE_LINE, None),
}


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in VALUES.items() for case in cases])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exact_values_and_edge_cases(name, case, dtype):
    tokens, mask = CASES[case]
    value = TOKEN_METRICS[name](tokens.to(dtype), mask)
    assert value.shape == ()
    assert value.item() == pytest.approx(VALUES[name][case], rel=1e-6, abs=1e-7)


def test_rounding_does_not_push_a_cosine_out_of_its_range():
    for n in range(2, 60):
        token = random_tokens(1, 7, seed=n, dtype=torch.float32)
        assert TOKEN_METRICS["token_cosine"](token.expand(n, 7), None) <= 1
        assert TOKEN_METRICS["token_cosine"](torch.cat([token, -token]), None) >= -1


@ALL
def test_gradients_are_right(name):
    # Tokens away from the places where a maximum changes hands.
    tokens, mask = random_tokens(2, 5, 4, seed=3).requires_grad_(), random_mask(2, 5)
    assert torch.autograd.gradcheck(lambda x: TOKEN_METRICS[name](x, mask), tokens)


@ALL
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_finite_at_the_edges(name, case):
    tokens, mask = CASES[case]
    if name.startswith("hfc") and case == "opposite":
        pytest.skip("the value itself is infinite")
    x = tokens.clone().requires_grad_()
    TOKEN_METRICS[name](x, mask).backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()
    if mask is not None:
        assert (x.grad[~mask] == 0).all()


@pytest.mark.parametrize("name", ["hfc_lfc_spectral", "hfc_lfc_frobenius", "rank_residual"])
def test_nearly_constant_tokens_keep_their_differences(name):
    tokens = (1e3 + 1e-3 * random_tokens(2, 197, 16)).float()
    value = TOKEN_METRICS[name](tokens, None).double()
    torch.testing.assert_close(value, by_oracle(name, tokens), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_low_and_high_frequencies_add_up_and_are_orthogonal(dtype, masked):
    tokens = random_tokens(2, 3, 11, 5, dtype=dtype)
    mask = random_mask(2, 3, 11) if masked else torch.ones(2, 3, 11, dtype=torch.bool)
    low, high = low_frequency(tokens, mask), high_frequency(tokens, mask)
    assert low.dtype == high.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close((low + high)[mask], tokens[mask].to(low.dtype))
    assert (low[~mask] == 0).all()
    assert (high[~mask] == 0).all()
    torch.testing.assert_close((low * high).sum((-2, -1)), torch.zeros(2, 3, dtype=low.dtype), atol=1e-5, rtol=0)
    torch.testing.assert_close(high.sum(-2), torch.zeros_like(high.sum(-2)), atol=1e-5, rtol=0)


@ALL
def test_what_does_not_fit_is_refused_by_name(name):
    metric = TOKEN_METRICS[name]
    with pytest.raises(ShapeError, match=r"\(7,\)"):
        metric(torch.ones(7), None)
    with pytest.raises(ShapeError, match=r"not empty.*\(2, 0, 4\)"):
        metric(torch.ones(2, 0, 4), None)
    with pytest.raises(ShapeError, match=r"\(2, 4\) does not fit tokens of shape \(2, 5\)"):
        metric(torch.ones(2, 5, 3), torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(AcutanceError, match=r"must be bool.*mask\.bool\(\)"):
        metric(torch.ones(2, 5, 3), torch.ones(2, 5))
