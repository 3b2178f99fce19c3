"""Metrics of random operators and tokens against the formulas that their own tests write out in float64."""

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import strategies as st
from laws import law
from test_operator_fuzz import BATCH, OPERATORS, SEEDS, SIZES, TOLERANCE, assert_near

from acutance import metrics
from attention.operator_cases import KERNELS, MASKINGS, make_case
from metrics import test_attention_metrics, test_token_metrics

MEASURED = st.builds(
    SimpleNamespace, seed=SEEDS, kernel=st.sampled_from(KERNELS), masking=st.sampled_from(MASKINGS),
    grouped=st.booleans(), tokens=st.integers(4, 12), width=SIZES, sharpness=st.sampled_from([0.0, 0.3, 1.5]),
)  # fmt: skip


@law(MEASURED, 200)
def test_metrics_of_operators_are_those_of_pairs(case):
    problem = make_case(case.kernel, case.masking, case.grouped, **{
        name: getattr(case, name) for name in ("tokens", "width", "sharpness")})  # fmt: skip
    rows = torch.rand(BATCH, case.tokens, generator=torch.Generator().manual_seed(case.seed)) > 0.3
    for mask in (rows, torch.ones_like(rows)):
        for name, wanted in test_attention_metrics.written_out(problem, mask).items():
            of = problem.x if name == "gradient_alignment" else problem.y
            found = test_attention_metrics.METRICS[name](problem.operator, of, mask)
            assert torch.allclose(found, wanted, rtol=1e-7, atol=1e-8), f"{name}: {found} instead of {wanted}"


@law(OPERATORS.filter(lambda case: case.queries is None and case.sharpness < 1e3), 200)
def test_energies_and_cosines_beside_sinks_and_low_numbers(case):
    A, weights, _ = case.make()
    u = torch.randn(BATCH, A.heads, case.keys, 3, generator=torch.Generator().manual_seed(case.seed)).to(A.dtype)
    squares = (u.double().unsqueeze(-2) - u.double().unsqueeze(-3)).square().sum(-1)
    assert_near(metrics.nonlocal_energy(A, u), (weights * squares).sum((-2, -1)) / 2, 5 * case.tolerance)
    if weights.amax((-2, -1)).min() < 1e-30:
        return  # float32 may have none of them
    flat = torch.nn.functional.normalize(weights.flatten(2), dim=-1, eps=1e-300)
    cosines = flat @ flat.mT
    assert_near(metrics.attention_cosine(A, A), cosines.diagonal(dim1=-2, dim2=-1), 5 * case.tolerance)
    if A.heads > 1:
        pairs = cosines[:, *torch.triu_indices(A.heads, A.heads, 1)]
        assert_near(metrics.head_cosine(A), pairs.mean(-1), 5 * case.tolerance)


TOKENS = st.builds(
    SimpleNamespace, seed=SEEDS, dtype=st.sampled_from(list(TOLERANCE)), count=SIZES, channels=SIZES,
    offset=st.sampled_from([0.0, 1.0, 10.0]), spread=st.sampled_from([0.0, 1e-3, 1.0]),
    size=st.sampled_from([1e-4, 1.0, 1e3]), masked=st.booleans(),
)  # fmt: skip


@law(TOKENS, 300)
def test_metrics_of_tokens_are_those_of_pairs_and_singular_values(case):
    generator = torch.Generator().manual_seed(case.seed)
    common, own = (torch.randn(3, n, case.channels, generator=generator).double() for n in (1, case.count))
    x = (case.size * (case.offset * common + case.spread * own)).to(getattr(torch, case.dtype))
    valid = (torch.rand(3, case.count, generator=generator) > 0.3) | (not case.masked)
    for tokens, mask in zip(x, valid, strict=True):
        kept = tokens[mask].double().numpy()
        for name, oracle in test_token_metrics.ORACLES.items() if kept.any() else ():
            found = float(getattr(metrics, name)(tokens, mask))
            with np.errstate(divide="ignore"):
                wanted = float(oracle(kept))
            assert found == wanted or abs(found - wanted) <= 2e-5 * (1 + wanted**2), f"{name}: {found}, not {wanted}"
