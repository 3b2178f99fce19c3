"""Eigenvalues and stationary distributions against NumPy, and the theorems about them."""

import warnings

import numpy as np
import pytest
import torch
from operator_cases import KERNELS, MASKINGS, assert_close, assert_same_set, assert_tensors_below, formula, make_case
from torch import Tensor

from acutance.attention import spectra
from acutance.attention.operator import AttentionOperator
from acutance.errors import AcutanceError, AcutanceWarning, NonFiniteError


def numpy_spectrum(A: AttentionOperator) -> np.ndarray:
    return np.linalg.eigvals(A.dense().double().numpy())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("masking", MASKINGS)
def test_eigenvalues_are_those_of_the_matrix(kernel, masking):
    A = make_case(kernel, masking, grouped=True).operator
    found = A.eigenvalues()
    assert found.dtype == torch.complex128
    assert found.shape == (2, 4, 11)
    assert (found.abs().diff(dim=-1) <= 1e-15).all()
    expected = numpy_spectrum(A)
    assert_same_set(found, expected, 1e-5 if A.causal else 1e-7)  # NumPy's error on a triangular matrix is larger
    if A.causal:
        expected = A.dense().diagonal(dim1=-2, dim2=-1).to(torch.complex128).numpy()
    assert_close(A.eigenvalues(3), found[..., :3])
    highest, lowest = A.extreme_eigenvalues()
    assert_close(highest.real, expected.real.max(-1), 1e-7)
    assert_close(lowest.real, expected.real.min(-1), 1e-7)


@pytest.mark.parametrize("kernel", ["symmetric", "rbf", "linear", "polynomial"])
@pytest.mark.parametrize("masking", ["none", "keys"])
def test_symmetric_kernels_have_real_spectra_and_weigh_tokens_by_their_row_sums(kernel, masking):
    # All four are positive semi-definite, so the spectrum lies in [0, 1] (Proposition 1 of arXiv 2312.00751), and
    # π_i ∝ d_i = Σ_j k_ij (Lemma 2).
    c = make_case(kernel, masking)
    A = AttentionOperator(c.k, c.k, **c.options)
    values = A.eigenvalues()
    assert (values.imag == 0).all()
    assert (values.real > -1e-12).all()
    assert_close(values.real[..., 0], torch.ones(2, 4).double())
    assert_same_set(values, numpy_spectrum(A), 1e-7)
    mass = formula(c.k, c.k, c.mask, kernel=kernel)[1].exp() * (1 if c.mask is None else c.mask[:, None])
    assert_close(A.stationary(), mass / mass.sum(-1, keepdim=True))


@pytest.mark.parametrize("kernel", ["softmax", "linear"])
def test_arnoldi_finds_the_eigenvalues_of_the_matrix(kernel, monkeypatch):
    c = make_case(kernel, "keys", tokens=600, width=16, sharpness=2.0)
    A = AttentionOperator(c.q[:1, :2], c.k[:1, :2], mask=c.mask[:1], kernel=kernel)
    expected = numpy_spectrum(A)
    monkeypatch.setattr(A, "dense", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, (highest, lowest) = A.eigenvalues(5), A.extreme_eigenvalues()
    assert_close(found.abs(), -np.sort(-np.abs(expected))[..., :5], 1e-8)
    assert_same_set(found, expected, 1e-8)  # in the complex plane, not in magnitude alone
    assert_close(highest.real, expected.real.max(-1), 1e-8)
    assert_close(lowest.real, expected.real.min(-1), 1e-8)


LONG = 530  # tokens, above which Arnoldi iteration takes over


def triangular(tokens: int) -> Tensor:
    return torch.ones(2, 1, tokens, tokens, dtype=torch.bool).tril()


@pytest.mark.parametrize("padded", ["nowhere", "left", "right"])
@pytest.mark.parametrize("hidden", [None, -torch.inf, torch.finfo(torch.float32).min], ids=["bool", "infinite", "min"])
def test_a_mask_can_make_attention_triangular(padded, hidden):
    """Its eigenvalues are the diagonal at any length; Arnoldi iteration finds pseudo-eigenvalues well below 0."""
    mask = triangular(LONG)
    mask[1, ..., {"nowhere": slice(0), "left": slice(30), "right": slice(LONG - 30, LONG)}[padded]] = False
    if hidden is not None:
        if padded == "left":  # what padding itself sees: a row without any key would see all of them under the minimum
            mask[1, :, :30, 0] = True
        mask = torch.zeros(mask.shape).masked_fill(~mask, hidden)
    q, k = torch.randn(2, 2, 2, LONG, 4, generator=torch.Generator().manual_seed(0))
    A = AttentionOperator(q, k, mask=mask)
    with assert_tensors_below(A.shape[0] * A.shape[1] * LONG * LONG):
        lowest = A.extreme_eigenvalues()[1]
        assert A.is_triangular
    diagonal = A.dense().diagonal(dim1=-2, dim2=-1)
    assert_close(torch.view_as_real(lowest), torch.stack([diagonal.amin(-1), torch.zeros(2, 2)], -1), 1e-6)
    assert_close(A.eigenvalues().real, diagonal.sort(descending=True).values, 1e-6)  # all of them, at any length


def test_triangular_is_said_of_all_samples_heads_and_rows():
    q = torch.randn(2, 2, 9, 4, generator=torch.Generator().manual_seed(0))
    lower, dead = triangular(9), triangular(9)
    dead[1, 0, 2] = False
    yes = {"a sample": lower[:1], "a sliding window": lower.triu(-2), "a row of zeros": dead}
    yes["a row of −∞"] = torch.zeros(dead.shape).masked_fill(~dead, -torch.inf)
    no = {"all": None, "keys": torch.ones(2, 9, dtype=torch.bool)}
    for sample, head in np.ndindex(2, 2):
        no[sample, head] = lower.repeat(1, 2, 1, 1)
        no[sample, head][sample, head, 4, 5] = True
    # A softmax over equal logits: this row sees all tokens.
    no["a row of the lowest number"] = torch.zeros(dead.shape).masked_fill(~dead, torch.finfo(torch.float32).min)
    for masks, expected in ((yes, True), (no, False)):
        for name, mask in masks.items():
            assert AttentionOperator(q, q, mask=mask).is_triangular is expected, name
    assert AttentionOperator(q, q, causal=True).is_triangular
    assert not AttentionOperator(q[..., -3:, :], q, causal=True).is_triangular, "not square"


def test_arnoldi_counts_repeated_eigenvalues_and_survives_an_invariant_space():
    # Three groups of tokens that see only themselves: the eigenvalue one, three times.
    group = torch.arange(600) % 3
    q = torch.randn(1, 1, 600, 8, generator=torch.Generator().manual_seed(0)).double()
    values = AttentionOperator(q, q.flip(-2), mask=group[:, None] == group).eigenvalues(4)
    assert_close(values[..., :3], torch.ones(1, 1, 3, dtype=torch.complex128), 1e-9)
    assert values[..., 3].abs() < 0.99
    # Uniform attention has rank one: after one product there is nothing new to find.
    values = AttentionOperator(0 * q, 0 * q).eigenvalues(3)
    assert_close(values, torch.tensor([1.0, 0.0, 0.0]).to(torch.complex128).expand(1, 1, 3), 1e-5)


def test_residuals_are_those_of_the_ritz_vectors():
    matrix = torch.randn(60, 60, generator=torch.Generator().manual_seed(0)).double().softmax(-1)
    blocks = []

    def multiply(block):
        blocks.append(block)
        return matrix @ block

    start = torch.randn(60, 4, generator=torch.Generator().manual_seed(1)).double()
    found = spectra.arnoldi(multiply, start, lambda values: torch.arange(values.size(-1)), 12, tolerance=1.0)
    basis = torch.cat(blocks, dim=-1)
    values, vectors = torch.linalg.eig(basis.mT @ matrix @ basis)
    ritz = basis.to(vectors.dtype) @ vectors
    residuals = torch.linalg.vector_norm(matrix.to(vectors.dtype) @ ritz - ritz * values, dim=0)
    assert found.size == basis.size(-1) < 60
    assert_close(found.residuals.sort().values, residuals.sort().values, 1e-10)


def test_arnoldi_says_when_it_has_not_converged(monkeypatch):
    monkeypatch.setattr(spectra, "LARGEST_SPACE", 32)
    c = make_case("softmax", tokens=600, sharpness=4.0)
    with pytest.warns(AcutanceWarning, match="residual .* is [0-9.e-]+, wanted"):
        c.operator.eigenvalues(8)


@pytest.mark.parametrize("k", [60, 200])
def test_many_eigenvalues_are_as_many_as_asked_for(k):
    # Sixty by Arnoldi, though the first of them converge long before the last; two hundred from the matrix.
    c = make_case("symmetric", tokens=600, width=8)
    A = AttentionOperator(c.q[:1, :1], c.k[:1, :1], kernel="symmetric")
    expected = np.sort(numpy_spectrum(A).real)[..., ::-1]
    assert_close(A.eigenvalues(k).real, expected[..., :k].copy(), 1e-8)


def test_too_many_tokens_for_all_eigenvalues():
    q = torch.zeros(1, 1, spectra.LARGEST_DENSE_TOKENS + 1, 2)
    A = AttentionOperator(q, q.clone())
    with pytest.raises(AcutanceError, match=r"4097 eigenvalues .* 4097 × 4097 matrix; pass k <= 128"):
        A.eigenvalues()
    with pytest.raises(AcutanceError, match=r"129 eigenvalues .* pass k <= 128"):
        A.eigenvalues(129)
    for k in (0, 12):
        with pytest.raises(AcutanceError, match="1 <= k <= 11"):
            make_case("softmax").operator.eigenvalues(k)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("masking", ["none", "keys", "causal", "causal+keys"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_the_stationary_distribution_is_stationary(kernel, masking, symmetric):
    c = make_case(kernel, masking, grouped=True)
    A = c.operator.symmetrised() if symmetric else c.operator
    weights, distribution = A.dense(), A.stationary()
    assert (distribution >= 0).all()
    assert_close(distribution.sum(-1), torch.ones(2, 4).double())
    assert_close((distribution.unsqueeze(-2) @ weights).squeeze(-2), distribution)
    assert_close((A.T @ distribution.unsqueeze(-1)).squeeze(-1), distribution)
    if c.causal:  # every walk ends at the first token that can be seen
        first = torch.zeros(2, dtype=torch.long) if c.mask is None else c.mask.int().argmax(-1)
        assert_close(distribution, torch.nn.functional.one_hot(first, 11).double()[:, None].expand(-1, 4, -1))


def test_a_full_mask_may_take_tokens_out():
    c = make_case("softmax")
    valid = torch.arange(11) < 8
    A = AttentionOperator(c.q, c.k, mask=valid[:, None] & valid)
    distribution = A.stationary()
    assert (distribution[..., 8:].abs() < 1e-15).all()
    short = AttentionOperator(c.q[..., :8, :], c.k[..., :8, :])
    assert_close(distribution[..., :8], short.stationary())


@pytest.mark.parametrize("masked", [False, True])
def test_many_tokens_have_the_distribution_of_the_matrix_without_it(masked, monkeypatch):
    c = make_case("softmax", "keys" if masked else "none", tokens=LONG)
    solved = spectra.solve_stationary(c.operator.dense())
    monkeypatch.setattr(AttentionOperator, "dense", None)
    assert_close(c.operator.stationary(), solved, 1e-9)
    odd = torch.arange(LONG) % 2 == 1  # two groups that swap: a walk never settles
    swapped = AttentionOperator(c.q, c.k, mask=odd[:, None] != odd).stationary()
    assert_close(swapped[..., odd].sum(-1), torch.full((2, 4), 0.5).double())


def sharp(tokens: int, factor: float) -> tuple[Tensor, Tensor]:
    q, k = torch.randn(2, 1, 1, tokens, 16, generator=torch.Generator().manual_seed(0))
    return factor * q, k


@pytest.mark.parametrize(("q", "k"), [sharp(600, 0.3), sharp(600, 12), sharp(1024, 8)], ids=["flat", "sharp", "1024"])
def test_the_distribution_of_many_tokens_is_found_wherever_there_is_a_gap(q, k):
    weights = formula(q, k)[0]
    assert 1 - torch.linalg.eigvals(weights).abs().sort(-1).values[..., -2].max() > 1e-3
    assert_stationary(AttentionOperator(q, k), weights)


@pytest.mark.parametrize("gap", [1.05e-3, 2e-3, 1e-2])
@pytest.mark.parametrize(("tokens", "step"), [(600, "stay"), (600, "go on"), (600, "mix in groups"), (1500, "stay")])
def test_the_distribution_is_found_at_a_known_gap(tokens, step, gap):
    """(1 − gap) P + gap 1πᵀ has the eigenvalues 1 and 1 − gap times those of P, which "go on" around a circle."""
    i = torch.arange(tokens)
    place, goal = {"stay": (i, i), "go on": (i, (i + 1) % tokens), "mix in groups": (i % 20, i % 20)}[step]
    P, to = (
        (place == goal[:, None]).double(),
        torch.randn(tokens, generator=torch.Generator().manual_seed(0)).double().softmax(0),
    )
    bias = ((1 - gap) * P / P.sum(-1, keepdim=True) + gap * to).log().float()
    zeros = torch.zeros(1, 1, tokens, 2)
    assert_stationary(AttentionOperator(zeros, zeros.clone(), mask=bias), bias.double().softmax(-1))


def assert_stationary(A, weights):
    pi = A.stationary()
    assert pi.dtype == torch.float32
    assert (pi.double().sum(-1) - 1).abs().max() < 1e-6
    assert (pi.double().unsqueeze(-2) @ weights - pi.unsqueeze(-2)).abs().sum(-1).max() < 1e-6


def test_no_distribution_is_better_than_a_wrong_one(monkeypatch):
    c = make_case("softmax")
    apart = torch.arange(11) < 5
    cut = AttentionOperator(c.q, c.k, mask=apart[:, None] == apart)
    empty = torch.tensor([[True], [False]]).expand(2, 11)  # the second sequence has no keys
    refused = [cut, *(AttentionOperator(c.q, c.k, mask=empty, causal=causal) for causal in (False, True))]
    for operator in (*refused, refused[1].symmetrised()):
        with pytest.raises(AcutanceError, match=r"no (unique )?stationary distribution"):
            operator.stationary()
    leak = torch.ones(11, 11, dtype=torch.bool)
    leak[4] = False  # the others see token 4, which sees nothing
    leaking = AttentionOperator(c.q, c.k, mask=leak)
    with pytest.raises(AcutanceError, match="residual"):
        leaking.stationary()
    c, apart, leak = make_case("softmax", tokens=LONG), torch.arange(LONG) < 5, torch.ones(LONG, LONG).bool()
    leak[4] = False
    monkeypatch.setattr(spectra, "LARGEST_SPACE", 64)
    for largest in (LONG, LONG // 2 - 1):  # the matrix is asked too, or there are too many tokens for it
        monkeypatch.setattr(spectra, "LARGEST_DENSE_TOKENS", largest)
        for mask in (apart[:, None] == apart, leak):
            with pytest.raises(AcutanceError, match=r"no unique stationary distribution was found \(residual"):
                AttentionOperator(c.q[:1, :1], c.k[:1, :1], mask=mask).stationary()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("tokens", [5, 20])
def test_nothing_is_said_of_the_spectrum_of_nan(tokens, value, monkeypatch):
    monkeypatch.setattr(spectra, "DENSE_TOKENS", 10)
    q, k = torch.randn(1, 2, tokens, 8), torch.randn(1, 2, tokens, 8)
    q[0, 0, 1, 0] = value
    for options in ({}, {"causal": True}, {"kernel": "symmetric"}):
        A = AttentionOperator(k, q, **options)
        for spectrum in (A.eigenvalues, A.extreme_eigenvalues, *[A.stationary] * (not A.causal)):
            with pytest.raises(NonFiniteError, match="NaN"):
                spectrum()
