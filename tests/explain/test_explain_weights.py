"""Eigenvalues and symmetry of H against NumPy on explicit dim × dim matrices."""

import numpy as np
import pytest
import torch
from spectrum_worlds import DIM, BareSite, head_matrices, ordered, set_branch, small_vit
from torch import nn

import acutance as ac
from acutance.errors import AcutanceError
from acutance.explain import symmetry_over
from acutance.explain.weights import branch, layer_spectrum, symmetry

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


def test_heads_match_numpy_up_to_zeros(site: BareSite) -> None:
    for found, H in zip(layer_spectrum(site).heads, head_matrices(site), strict=True):
        zeros = np.zeros(site.dim - site.head_dim)
        np.testing.assert_allclose(
            ordered(np.concatenate([found, zeros])), ordered(_cleaned(np.linalg.eigvals(H))), atol=1e-7
        )


def test_whole_matches_numpy_and_heads_add_up(site: BareSite) -> None:
    H = sum(head_matrices(site))
    projection, value = branch(site).merged
    np.testing.assert_allclose((projection @ value).numpy(), H, atol=1e-12)
    found = layer_spectrum(site).eigenvalues
    assert found is not None
    assert len(found) == site.dim
    np.testing.assert_allclose(ordered(found), ordered(_cleaned(np.linalg.eigvals(H))), atol=1e-7)


def _cleaned(values: np.ndarray) -> np.ndarray:
    """The zeros of a rank-deficient matrix come out as rounding noise of either sign."""
    return np.where(np.abs(values) < 1e-7, 0, values)


def test_symmetry_is_the_cosine_with_the_transpose(site: BareSite) -> None:
    found = layer_spectrum(site)
    for got, H in zip(
        [found.symmetry, *found.head_symmetry], [sum(head_matrices(site)), *head_matrices(site)], strict=True
    ):
        assert got == pytest.approx(np.sum(H * H.T) / np.sum(H * H), abs=1e-12)
        ratio = np.linalg.norm(H - H.T) / np.linalg.norm(H + H.T)
        assert np.sqrt((1 - got) / (1 + got)) == pytest.approx(ratio, rel=1e-9)


def test_symmetry_of_symmetric_antisymmetric_and_zero() -> None:
    eye = torch.eye(4, dtype=torch.float64)
    M = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert float(symmetry(M + M.mT, eye)) == pytest.approx(1)
    assert float(symmetry(M - M.mT, eye)) == pytest.approx(-1)
    assert float(symmetry(0 * M, eye)) == 1


def test_eigenvalues_are_those_of_the_branch_without_attention() -> None:
    """With A = I the branch is the map x ↦ H x + bias: its Jacobian's spectrum, and biases do not matter."""
    model = small_vit()
    attention = model.blocks[1].attn
    before = ac.explain(model, progress=False)[2]
    with torch.no_grad():
        attention.qkv.bias.normal_()
        attention.proj.bias.normal_()
    jacobian = torch.autograd.functional.jacobian(
        lambda x: attention.proj(attention.qkv(x)[..., -DIM:]), torch.randn(DIM)
    )
    found = ac.explain(model, progress=False)[2]
    np.testing.assert_allclose(
        ordered(found.eigenvalues), ordered(np.linalg.eigvals(jacobian.double().numpy())), atol=1e-6
    )
    np.testing.assert_array_equal(found.heads, before.heads)


def test_norm_is_folded_as_the_jacobian_says() -> None:
    """H_eff is the derivative of the branch by the tokens as the norm has centred and scaled them, before γ."""
    model = small_vit(layer_scale=0.5)
    block = model.blocks[0]
    with torch.no_grad():
        block.norm1.weight.copy_(torch.linspace(-1.5, 2, DIM))
        block.norm1.bias.normal_()
        block.ls1.gamma.copy_(torch.linspace(0.5, -0.5, DIM))

    def branch_of(z: torch.Tensor) -> torch.Tensor:
        x = z * block.norm1.weight + block.norm1.bias
        return block.ls1(block.attn.proj(block.attn.qkv(x)[..., -DIM:]))

    jacobian = torch.autograd.functional.jacobian(branch_of, torch.randn(DIM)).double().numpy()
    folded, ignored = (ac.explain(model, norm=norm, progress=False) for norm in ("fold", "ignore"))
    np.testing.assert_allclose(ordered(folded[1].eigenvalues), ordered(np.linalg.eigvals(jacobian)), atol=1e-7)
    without = jacobian / block.norm1.weight.detach().double().numpy()
    np.testing.assert_allclose(ordered(ignored[1].eigenvalues), ordered(np.linalg.eigvals(without)), atol=1e-7)
    assert "folded" in folded.context["norm"]
    assert "left out" in ignored.context["norm"]


def test_negative_norm_weights_turn_the_spectrum_round() -> None:
    model = small_vit()
    set_branch(model, 1, 0.5 * torch.eye(DIM))
    assert ac.explain(model, progress=False)[1].verdict == "smoothing"
    nn.init.constant_(model.blocks[0].norm1.weight, -1.0)
    assert ac.explain(model, progress=False)[1].verdict == "sharpening"
    assert ac.explain(model, norm="ignore", progress=False)[1].verdict == "smoothing"


def test_post_norm_and_missing_weights_have_nothing_to_fold() -> None:
    assert ac.explain(small_vit(norm="post"), progress=False).context["norm"] == "no pre-norm weight"
    bare = BareSite(8, 2, 2, 4, nn.LayerNorm(8, elementwise_affine=False))
    assert layer_spectrum(bare).norm == "none"


def test_a_wide_layer_of_low_rank_is_read_whole_unless_told_not_to() -> None:
    site = BareSite(1026, 2, 2, 3)
    assert layer_spectrum(site, whole=False).whole is None
    H = sum(head_matrices(site))
    assert layer_spectrum(site, whole=False).symmetry == pytest.approx(np.sum(H * H.T) / np.sum(H * H), rel=1e-9)
    found = layer_spectrum(site)  # wide, but of low rank: all of them are cheap
    assert found.eigenvalues is not None
    assert (found.eigenvalues == 0).sum() == 1026 - 6  # rank heads · head_dim, the rest exactly zero


def test_symmetry_over_checkpoints(tmp_path) -> None:
    """H goes from random to symmetric over a run, in one layer."""
    model, files = small_vit(), []
    M = torch.randn(DIM, DIM)
    for step, share in enumerate([0.0, 0.5, 1.0]):
        set_branch(model, 2, M + share * M.mT)
        files.append(ac.save(model, tmp_path / f"{step}.safetensors"))
    found = symmetry_over(files)
    assert found.shape == (3, 3)
    assert found[0, 1] < found[1, 1] < found[2, 1]
    assert found[2, 1] == pytest.approx(1, abs=1e-6)
    np.testing.assert_array_equal(found[0, [0, 2]], found[2, [0, 2]])
    np.testing.assert_array_equal(symmetry_over([model])[0], found[2])
    assert found[0, 0] == pytest.approx(ac.explain(small_vit(), progress=False)[1].symmetry)
    with pytest.raises(AcutanceError, match="layers"):
        symmetry_over([model, small_vit(depth=1)])


def test_steered_weights_are_read_as_made() -> None:
    """Eigen makes its weights at every forward: explain sees their spectrum, head by head."""
    model = small_vit(mitigation="eigen:negative,spectrum=bounded")
    for site, layer in zip(ac.sites.find(model), ac.explain(model, progress=False).layers, strict=True):
        want = site.mitigation.eigenvalues().detach().double().numpy()
        np.testing.assert_allclose(np.sort(layer.heads.real, axis=1), np.sort(want, axis=1), atol=1e-6)
        assert layer.verdict == "sharpening"
        assert layer.symmetry == pytest.approx(1, abs=1e-6)


def test_the_gain_a_site_reports_is_folded() -> None:
    """Gemma's norms multiply by 1 + weight: the site knows, and explain asks it."""
    gamma = torch.linspace(-0.5, 0.5, 12).double()
    site = BareSite(12, 3, 3, 4)
    site.pre_norm_gain = lambda: 1 + gamma
    found = layer_spectrum(site)
    H = sum(head_matrices(site)) * (1 + gamma.numpy())
    np.testing.assert_allclose(ordered(found.eigenvalues), ordered(np.linalg.eigvals(H)), atol=1e-9)
    assert found.norm == "folded"


@pytest.mark.parametrize("norm", [nn.LayerNorm(6, elementwise_affine=False), nn.RMSNorm(6, elementwise_affine=False)])
def test_norms_without_a_weight_fold_nothing(norm: nn.Module) -> None:
    assert branch(BareSite(6, 2, 2, 3, norm=norm)).norm == "none"


def test_an_rms_norms_weight_is_folded() -> None:
    norm = nn.RMSNorm(6, dtype=torch.float64)
    nn.init.constant_(norm.weight, -2.0)
    plain, folded = BareSite(6, 2, 2, 3), BareSite(6, 2, 2, 3, norm=norm)
    found, wanted = layer_spectrum(folded).eigenvalues, -2 * layer_spectrum(plain).eigenvalues
    np.testing.assert_allclose(ordered(found), ordered(wanted), atol=1e-12)
