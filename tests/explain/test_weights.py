"""Eigenvalues and symmetry of H against NumPy on explicit dim × dim matrices."""

import numpy as np
import pytest
import torch
from spectrum_worlds import DIM, BareSite, assert_same_eigenvalues, head_matrices, set_branch, small_vit
from torch import nn

import acutance as ac
from acutance.errors import AcutanceError
from acutance.explain import symmetry_over
from acutance.explain.weights import factors, layer_spectrum, symmetry, whole_factors
from attention.operator_cases import normal

SHAPES = {
    "plain": (12, 3, 3, 4),
    "grouped queries": (12, 4, 2, 3),
    "one value head": (8, 4, 1, 2),
    "narrow inside": (10, 2, 2, 3),
    "wide inside": (6, 3, 3, 4),
}


@pytest.fixture(params=SHAPES.values(), ids=SHAPES)
def site(request) -> BareSite:
    return BareSite(*request.param)


def test_heads_and_the_whole_match_numpy(site: BareSite) -> None:
    found, matrices = layer_spectrum(site), head_matrices(site)
    for own, H in zip(found.heads, matrices, strict=True):
        assert_same_eigenvalues(np.concatenate([own, np.zeros(site.dim - site.head_dim)]), H)
    projection, value = whole_factors(*factors(site)[:2])
    np.testing.assert_allclose((projection @ value).numpy(), sum(matrices), atol=1e-12)
    assert_same_eigenvalues(found.eigenvalues, sum(matrices))


def test_symmetry_is_the_cosine_with_the_transpose(site: BareSite) -> None:
    found, matrices = layer_spectrum(site), head_matrices(site)
    for got, H in zip([found.symmetry, *found.head_symmetry], [sum(matrices), *matrices], strict=True):
        assert got == pytest.approx(np.sum(H * H.T) / np.sum(H * H), abs=1e-12)
        ratio = np.linalg.norm(H - H.T) / np.linalg.norm(H + H.T)
        assert np.sqrt((1 - got) / (1 + got)) == pytest.approx(ratio, rel=1e-9)


def test_symmetry_of_symmetric_antisymmetric_and_zero() -> None:
    M, eye = normal(4, 4), torch.eye(4).double()
    assert [float(symmetry(H, eye)) for H in (M + M.mT, M - M.mT, 0 * M)] == pytest.approx([1, -1, 1])


def test_norm_is_folded_as_the_jacobian_says() -> None:
    """H_eff, without biases, is the derivative of the branch by the normed tokens before γ."""
    model = small_vit(layer_scale=0.5)
    block = model.blocks[0]
    with torch.no_grad():
        block.norm1.weight.copy_(torch.linspace(-1.5, 2, DIM))
        block.ls1.gamma.copy_(torch.linspace(0.5, -0.5, DIM))
        for bias in (block.norm1.bias, block.attn.qkv.bias, block.attn.proj.bias):
            bias.normal_()

    def branch_of(z: torch.Tensor) -> torch.Tensor:
        x = z * block.norm1.weight + block.norm1.bias
        return block.ls1(block.attn.proj(block.attn.qkv(x)[..., -DIM:]))

    jacobian = torch.autograd.functional.jacobian(branch_of, torch.randn(DIM)).double().numpy()
    folded, ignored = (ac.explain(model, norm=norm, progress=False) for norm in ("fold", "ignore"))
    assert_same_eigenvalues(folded[1].eigenvalues, jacobian)
    assert_same_eigenvalues(ignored[1].eigenvalues, jacobian / block.norm1.weight.detach().double().numpy())
    assert "folded" in folded.context["norm"]
    assert "left out" in ignored.context["norm"]


def test_post_norm_and_missing_weights_have_nothing_to_fold() -> None:
    assert ac.explain(small_vit(norm="post"), progress=False).context["norm"] == "pre-norm weight γ: none"
    for kind in (nn.LayerNorm, nn.RMSNorm):
        assert factors(BareSite(8, 2, 2, 4, kind(8, elementwise_affine=False)))[2] == "none"


def test_a_wide_layer_of_low_rank_is_read_whole_unless_told_not_to() -> None:
    site = BareSite(1026, 2, 2, 3)
    H, found = sum(head_matrices(site)), layer_spectrum(site, whole=False)
    assert found.deciding is None
    assert found.symmetry == pytest.approx(np.sum(H * H.T) / np.sum(H * H), rel=1e-9)
    every = layer_spectrum(site).eigenvalues  # wide, but of low rank: all of them are cheap
    assert (every == 0).sum() == 1026 - 6  # rank heads · head_dim, the rest exactly zero


def test_symmetry_over_checkpoints(tmp_path) -> None:
    """H goes from random to symmetric over a run, in one layer."""
    model, files = small_vit(), []
    M = torch.randn(DIM, DIM)
    for step, share in enumerate([0.0, 0.5, 1.0]):
        set_branch(model, 2, M + share * M.mT)
        files.append(ac.save(model, tmp_path / f"{step}.safetensors"))
    found = symmetry_over(files)
    assert found.shape == (3, 3)
    assert found[0, 1] < found[1, 1] < found[2, 1] == pytest.approx(1, abs=1e-6)
    np.testing.assert_array_equal(found[0, [0, 2]], found[2, [0, 2]])
    np.testing.assert_array_equal(symmetry_over([model])[0], found[2])
    assert found[0, 0] == pytest.approx(ac.explain(small_vit(), progress=False)[1].symmetry)
    with pytest.raises(AcutanceError, match="layers"):
        symmetry_over([model, small_vit(depth=1)])
