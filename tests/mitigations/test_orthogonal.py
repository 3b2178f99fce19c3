from functools import partial

import pytest
import torch

from acutance.mitigations.orthogonal import BASES, cayley, polar, qr
from attention.operator_cases import normal
from parity.parity_formula import basis_of

D = 24
WIDE = 192  # ViT-Ti


def random_orthogonal(seed=0, dim=D):
    return torch.linalg.qr(normal(dim, dim, seed=seed))[0]


def with_condition(number, dtype=torch.float64, dim=D):
    singular = torch.logspace(0, -torch.tensor(float(number)).log10().item(), dim, dtype=torch.float64)
    return ((random_orthogonal(1, dim) * singular) @ random_orthogonal(2, dim)).to(dtype)


def value_and_gradient(basis, theta, g):
    theta = theta.clone().requires_grad_()
    v = basis(theta)
    return v.detach(), torch.autograd.grad(v, theta, g)[0]


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.float64, 1e-14)])
def test_the_image_is_orthogonal(name, dtype, tolerance):
    v = BASES[name].map(normal(2, 3, D, D, dtype=dtype))
    assert v.dtype == dtype
    torch.testing.assert_close(v.mT @ v, torch.eye(D, dtype=dtype).expand(2, 3, D, D), rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", BASES)
def test_every_orthogonal_matrix_is_reached_up_to_signs_of_columns(name):
    basis, identity = BASES[name], torch.eye(D, dtype=torch.float64)
    for v in (*map(random_orthogonal, range(20)), -identity, identity.flip(0)):
        theta = basis.preimage(v)
        assert theta.abs().max() < 10
        torch.testing.assert_close((basis.map(theta) * v).sum(-2).abs(), torch.ones(D).double(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", BASES)
def test_gradients_against_finite_differences(name):
    theta = normal(4, 4).requires_grad_()
    assert torch.autograd.gradcheck(BASES[name].map, theta)


@pytest.mark.parametrize("norm", [0.0, 0.5, 40, 500])
@pytest.mark.parametrize("dim", [2, 7, WIDE])
def test_cayley_by_products_is_the_inverse_and_has_its_gradient(norm, dim):
    drawn, g = normal(2, dim, dim, seed=5), normal(2, dim, dim, seed=3)
    skew = (drawn - drawn.mT) / 2
    theta = skew * (norm / torch.linalg.matrix_norm(skew, ord=2, keepdim=True))
    v, gradient = value_and_gradient(cayley, theta, g)
    expected, slope = value_and_gradient(partial(basis_of, "cayley"), theta, g)
    torch.testing.assert_close(v, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient, slope, rtol=0, atol=1e-11 * max(1, slope.abs().max().item()))


def test_what_is_too_hard_never_exceeds_orthogonality():
    turns = torch.logspace(0, 4, D // 2, dtype=torch.float64)
    plane = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    rotation = random_orthogonal()
    for v in (cayley(rotation @ torch.kron(turns.diag(), plane) @ rotation.mT), polar(with_condition(1e9))):
        singular = torch.linalg.svdvals(v)
        assert singular.max() < 1 + 1e-12
        assert singular.min() < 0.9  # not converged, and harmless: V Λ Vᵀ keeps signs and bounds


def test_cayley_has_second_derivatives_and_transforms():
    theta = normal(4, 4).requires_grad_()
    assert torch.autograd.gradgradcheck(cayley, theta)
    many = normal(3, 4, 4)
    torch.testing.assert_close(torch.func.vmap(cayley)(many), cayley(many))
    slopes = torch.func.vmap(torch.func.grad(lambda t: cayley(t)[0, 1]))(many)
    torch.testing.assert_close(slopes[1], torch.func.grad(lambda t: cayley(t)[0, 1])(many[1]))


def wide_theta(name, hardness):
    """For qr and polar of this condition number; else what a new layer has, times this or with this noise."""
    if name in ("qr", "polar"):
        return with_condition(hardness, dim=WIDE)
    start = BASES[name].preimage(random_orthogonal(dim=WIDE))
    return hardness * start if name == "cayley" else start + hardness * normal(WIDE, WIDE, seed=4)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize(
    ("name", "hardness", "of_value", "of_gradient"),  # the bounds that the docstrings of the maps state
    [
        *(("qr", condition, 5e-6, 2e-5) for condition in (1, 30, 300)),
        *(("polar", condition, 1e-5, 1e-4) for condition in (1, 3, 30, 300)),
        *(("cayley", size, 3e-6, 1e-5) for size in (0.1, 1, 10)),
        *(("householder", noise, 2e-6, 2e-6) for noise in (0, 0.1, 0.4)),
    ],
)
def test_float32_is_as_exact_as_stated_at_the_size_of_a_vit(name, hardness, of_value, of_gradient, device):
    single, g = wide_theta(name, hardness).float(), normal(WIDE, WIDE, seed=3, dtype=torch.float32)
    v, gradient = (found.cpu() for found in value_and_gradient(BASES[name].map, single.to(device), g.to(device)))
    expected, slope = value_and_gradient(partial(basis_of, name), single.double(), g.double())
    if name == "polar":  # an SVD has no gradient where singular values are equal
        # Q Y with S Y + Y S = QᵀG − GᵀQ and Θ = Q S, solved in the eigenbasis of S.
        s, e = torch.linalg.eigh(expected.mT @ single.double())
        skew = expected.mT @ g.double() - g.mT.double() @ expected
        slope = expected @ e @ ((e.mT @ skew @ e) / (s[:, None] + s)) @ e.mT
    assert (v - expected).norm() < of_value * expected.norm()
    assert (v.mT @ v - torch.eye(WIDE)).norm() < 2 * of_value * WIDE**0.5
    assert (gradient - slope).norm() < of_gradient * slope.norm()


def test_qr_does_not_jump_where_the_diagonal_of_r_changes_sign():
    """LAPACK chooses the signs of R as it likes; with the diagonal positive, Q is a function of Θ that has a slope."""
    theta = normal(D, D)
    assert ((qr(theta).mT @ theta).diagonal() > 0).all()
    q, r = torch.linalg.qr(theta)
    torch.testing.assert_close(qr(q @ r.abs().diagonal().diag()), q, rtol=0, atol=1e-13)
    nudged = qr(theta + 1e-9 * normal(D, D, seed=1))
    assert (nudged - qr(theta)).abs().max() < 1e-6
