"""The true dominating eigenvalue of I + Σ_h H_h⊗A_h against the explicit matrix."""

import math

import numpy as np
import pytest
import torch
from spectrum_worlds import BareSite, head_matrices

from acutance.attention import spectra as krylov
from acutance.attention.operator import AttentionOperator
from acutance.errors import AcutanceError, AcutanceWarning
from acutance.explain import layer_mode
from acutance.explain.competitors import competitors
from acutance.explain.corners import corners
from acutance.explain.spectral_theory import families
from acutance.explain.weights import layer_spectrum

SHAPES = {"three heads": (6, 3, 3, 2), "grouped queries": (8, 4, 2, 4), "one head": (6, 1, 1, 6)}
SHIFTS = (-2.5, -1.5, -0.5, 0.5)


def site_with(shape: tuple[int, int, int, int], shift: float) -> BareSite:
    """A random layer with its spectrum shifted, as far as its rank allows."""
    site = BareSite(*shape)
    inverse = torch.linalg.pinv(site.value).unflatten(1, (site.kv_heads, site.head_dim))
    group = site.heads // site.kv_heads
    site.projection = 0.4 * site.projection + shift / group * inverse.repeat_interleave(group, dim=1).flatten(1)
    return site


def attention(heads: int, tokens: int, *, equal: bool = False, kernel: str = "softmax") -> AttentionOperator:
    q, k = torch.randn(2, 3, 1 if equal else heads, tokens, 4, generator=torch.Generator().manual_seed(tokens)).double()
    return AttentionOperator(1.5 * q.expand(-1, heads, -1, -1), k.expand(-1, heads, -1, -1), kernel=kernel)


def spectra(site: BareSite, A: AttentionOperator) -> list[tuple[np.ndarray, np.ndarray]]:
    """Per sample the eigenvalues of the layer's explicit matrix, those of I + H taken out and given beside."""
    found = []
    H = head_matrices(site)
    constant = 1 + np.linalg.eigvals(sum(H))
    for entries in A.dense().numpy():
        layer = np.eye(site.dim * A.shape[-1]) + sum(np.kron(h, a) for h, a in zip(H, entries, strict=True))
        rest = list(np.linalg.eigvals(layer))
        for z in constant:
            del rest[int(np.abs(np.array(rest) - z).argmin())]
        found.append((constant, np.array(rest)))
    return found


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("tokens", [2, 5])
def test_it_is_the_largest_of_the_explicit_matrix(shape, shift: float, tokens: int) -> None:
    site, A = site_with(shape, shift), attention(shape[1], tokens)
    found = layer_mode(site, A)
    for b, (constant, varying) in enumerate(spectra(site, A)):
        assert abs(found.constant) == pytest.approx(np.abs(constant).max(), rel=1e-6)
        assert abs(found.varying[b]) == pytest.approx(np.abs(varying).max(), rel=1e-6)
        lead = np.abs(constant).max() - np.abs(varying).max()
        assert abs(lead) > 1e-4, "near ties are not what this is about"
        assert found.family[b] == ("constant" if lead > 0 else "varying")


def counted(site: BareSite, A: AttentionOperator) -> list[float]:
    points = corners(layer_spectrum(site).deciding[None])
    return families(points, competitors(A, [points]).values.flatten(1)).leaning.tolist()


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("kernel", ["softmax", "symmetric"])
@pytest.mark.parametrize(("heads", "equal"), [(1, False), (3, True)])
def test_counting_is_exact_for_one_head_and_for_equal_attention(
    heads: int, equal: bool, kernel: str, shift: float
) -> None:
    site, A = site_with((6, heads, heads, 6 // heads), shift), attention(heads, 6, equal=equal, kernel=kernel)
    found = layer_mode(site, A)
    assert found.families.leaning.tolist() == counted(site, A)
    assert 0 not in counted(site, A)


def test_counting_can_be_wrong_for_heads_that_differ() -> None:
    """Why it is a heuristic: it pairs head 1's λ = −1.4 with head 2's μ = −½, which never meet.

    Head 1 attends uniformly (μ = 0): 1 + 0 is left of its differences. Head 2 has λ = 0.2: 1 − 0.1. So 1 + 0.2 on
    constant tokens dominates, but the count finds |1 + 1.4 · ½| = 1.7.
    """
    site = BareSite(2, 2, 2, 1)
    site.value, site.projection = torch.eye(2).double(), torch.diag(torch.tensor([-1.4, 0.2]).double())
    q = torch.zeros(1, 2, 2, 2, dtype=torch.float64)
    q[0, 1] = math.log(3) * torch.eye(2).flip(0)  # head 2 gives ¾ to the other token
    A = AttentionOperator(q, torch.eye(2).double().expand(1, 2, 2, 2), scale=1.0)
    found = layer_mode(site, A)
    assert (found.constant, found.varying[0]) == (pytest.approx(1.2), pytest.approx(1.0))
    assert found.family == ["constant"]
    assert counted(site, A) == [-1]


def test_one_token_has_no_rival() -> None:
    found = layer_mode(site_with((6, 3, 3, 2), 0.5), attention(3, 1))
    assert found.family == ["neither"] * 3


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("told", ["flag", "mask"])
def test_causal_attention_has_the_eigenvalues_of_its_tokens(shape, shift: float, told: str) -> None:
    site, A = site_with(shape, shift), attention(shape[1], 4)
    mask = torch.ones(4, 4, dtype=torch.bool).tril() if told == "mask" else None
    A = AttentionOperator(A.q, A.k, mask=mask, causal=told == "flag")
    found = layer_mode(site, A)
    assert found.residual == 0
    for b, (constant, varying) in enumerate(spectra(site, A)):
        assert abs(found.constant) == pytest.approx(np.abs(constant).max(), rel=1e-6)
        assert abs(found.varying[b]) == pytest.approx(np.abs(varying).max(), rel=1e-6)


def test_pseudo_eigenvalues_of_long_causal_attention_do_not_win() -> None:
    """H = −2.02 I: constant tokens have 1.02, all others |1 − 2.02 A_ii| < 1.02; Arnoldi iteration finds 1.06."""
    site = BareSite(2, 1, 1, 2)
    site.value, site.projection = torch.eye(2).double(), -2.02 * torch.eye(2).double()
    q, k = torch.randn(2, 1, 1, 200, 4, generator=torch.Generator().manual_seed(0)).double()
    A = AttentionOperator(q, k, causal=True)
    found = layer_mode(site, A)
    assert found.family == ["constant"]
    assert abs(found.varying[0]) == pytest.approx(float((1 - 2.02 * A.diagonal()[..., 1:]).abs().max()))


@pytest.mark.parametrize("causal", [False, True])
def test_padding_is_refused(causal: bool) -> None:
    """A token that none sees has an eigenvalue 0 of its own; tokens that some sees are no padding."""
    site, A = site_with((6, 3, 3, 2), -0.5), attention(3, 5)
    mask = torch.ones(3, 5, dtype=torch.bool)
    layer_mode(site, AttentionOperator(A.q, A.k, mask=mask, causal=causal))
    layer_mode(site, AttentionOperator(A.q, A.k, mask=torch.ones(5, 5, dtype=torch.bool).tril()))
    mask[1, 3:] = mask[2, :1] = False
    for given in (mask, torch.zeros(3, 1, 1, 5).masked_fill(~mask[:, None, None], -torch.inf)):
        with pytest.raises(AcutanceError, match=r"2 of 3 samples .*\(3, 3, 5, 5\).* have padding.*without it"):
            layer_mode(site, AttentionOperator(A.q, A.k, mask=given, causal=causal))


def test_it_says_when_it_has_not_converged(monkeypatch) -> None:
    monkeypatch.setattr(krylov, "LARGEST_SPACE", 4)
    with pytest.warns(AcutanceWarning, match="not converged in a Krylov space of 4 vectors"):
        layer_mode(site_with((6, 3, 3, 2), 0.5), attention(3, 5))
