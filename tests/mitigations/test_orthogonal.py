"""Free matrices to orthogonal ones and back."""

import pytest
import torch

from acutance.kernels.orthogonal import BASES, polar, qr

D = 24


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def random_orthogonal(seed=0):
    return torch.linalg.qr(draw(D, D, seed=seed))[0]


def with_condition(number, dtype=torch.float64):
    singular = torch.logspace(0, -torch.tensor(float(number)).log10().item(), D, dtype=torch.float64)
    return ((random_orthogonal(1) * singular) @ random_orthogonal(2)).to(dtype)


def polar_by_svd(theta):
    u, _, vh = torch.linalg.svd(theta)
    return u @ vh


def polar_gradient(theta, g):
    """Q Y with S Y + Y S = QᵀG − GᵀQ and Θ = Q S, solved in the eigenbasis of S."""
    q = polar_by_svd(theta)
    s, e = torch.linalg.eigh(q.mT @ theta)
    skew = q.mT @ g - g.mT @ q
    return q @ e @ ((e.mT @ skew @ e) / (s[:, None] + s)) @ e.mT


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.float64, 1e-14)])
def test_the_image_is_orthogonal(name, dtype, tolerance):
    v = BASES[name].map(draw(2, 3, D, D, dtype=dtype))
    assert v.dtype == dtype
    torch.testing.assert_close(v.mT @ v, torch.eye(D, dtype=dtype).expand(2, 3, D, D), rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", BASES)
def test_every_orthogonal_matrix_is_reached_up_to_signs_of_columns(name):
    basis = BASES[name]
    for v in (random_orthogonal(), -torch.eye(D, dtype=torch.float64), torch.eye(D, dtype=torch.float64).flip(0)):
        alignment = (basis.map(basis.preimage(v)) * v).sum(-2)
        torch.testing.assert_close(alignment.abs(), torch.ones(D, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", BASES)
def test_the_cayley_and_other_preimages_stay_small(name):
    assert all(BASES[name].preimage(random_orthogonal(seed)).abs().max() < 10 for seed in range(20))


@pytest.mark.parametrize("name", BASES)
def test_gradients_against_finite_differences(name):
    theta = draw(4, 4).requires_grad_()
    assert torch.autograd.gradcheck(BASES[name].map, theta)


@pytest.mark.parametrize("condition", [1, 30, 300])
def test_polar_is_the_polar_factor_and_has_its_gradient(condition):
    theta, g = with_condition(condition).requires_grad_(), draw(D, D, seed=3)
    v = polar(theta)
    (gradient,) = torch.autograd.grad(v, theta, g)
    torch.testing.assert_close(v, polar_by_svd(theta.detach()), rtol=0, atol=1e-13)
    expected = polar_gradient(theta.detach(), g)
    assert (gradient - expected).norm() < 1e-11 * expected.norm()


def test_polar_in_float32_keeps_float32():
    theta, g = with_condition(100), draw(D, D, seed=3)
    single = theta.float().requires_grad_()
    (gradient,) = torch.autograd.grad(polar(single), single, g.float())
    expected = polar_gradient(theta, g)
    torch.testing.assert_close(polar(single).double(), polar_by_svd(theta), rtol=0, atol=2e-5)
    assert (gradient.double() - expected).norm() < 1e-4 * expected.norm()


def test_polar_of_what_is_too_ill_conditioned_never_exceeds_orthogonality():
    singular = torch.linalg.svdvals(polar(with_condition(1e9)))
    assert singular.max() < 1 + 1e-12
    assert singular.min() < 0.9  # not converged, and harmless: V Λ Vᵀ keeps signs and bounds


def test_qr_does_not_jump_where_the_diagonal_of_r_changes_sign():
    """LAPACK chooses the signs of R as it likes; with the diagonal positive, Q is a function of Θ that has a slope."""
    theta = draw(D, D)
    q, r = torch.linalg.qr(theta)
    torch.testing.assert_close(qr(q @ r.abs().diagonal().diag()), q, rtol=0, atol=1e-13)
    nudged = qr(theta + 1e-9 * draw(D, D, seed=1))
    assert (nudged - qr(theta)).abs().max() < 1e-6
