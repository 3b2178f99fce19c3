import numpy as np
import pytest
import torch
from layers import normal
from torch.nn import functional as F

from acutance import metrics
from acutance.errors import AcutanceError, ShapeError
from acutance.lab.studies import attention_from, branch_with_spectrum, drawn_attention, norm_grid, random_attention
from acutance.lab.studies.repeat import DEFINITIONS, READ_AT_ONCE, repeat

SAMPLES, TOKENS, WIDTH = 3, 6, 4


def tokens():
    return normal(SAMPLES, TOKENS, WIDTH)


@pytest.mark.parametrize("norm", ["none", "pre", "post"])
@pytest.mark.parametrize("kind", ["fixed", "drawn", "computed"])
def test_it_is_the_plain_loop_up_to_scale(norm, kind):
    W, gamma = 0.5 * normal(WIDTH, WIDTH, seed=1), normal(WIDTH, seed=2)
    w_q, w_k = normal(2, WIDTH, 3, seed=3)
    drawn, fixed = drawn_attention(TOKENS, seed=5), random_attention(TOKENS, seed=6)
    choice = {"fixed": fixed, "drawn": drawn, "computed": attention_from(w_q, w_k)}[kind]
    found = repeat(tokens(), W, choice, layers=5, norm=norm, norm_weight=gamma)
    x = tokens()
    for layer in range(1, 6):
        inner = F.layer_norm(x, (WIDTH,), gamma, eps=1e-12) if norm == "pre" else x
        if norm == "none":  # attention sees tokens of the first size
            inner = inner * tokens().norm(dim=(1, 2), keepdim=True) / inner.norm(dim=(1, 2), keepdim=True)
        computed = ((inner @ w_q) @ (inner @ w_k).mT / 3**0.5).softmax(-1)
        A = {"fixed": fixed, "drawn": drawn(x, layer), "computed": computed}[kind]
        x = (inner if norm == "none" else x) + A @ inner @ W
        x = F.layer_norm(x, (WIDTH,), gamma, eps=1e-12) if norm == "post" else x
        np.testing.assert_allclose(found.hfc_lfc[:, layer], metrics.hfc_lfc_spectral(x), rtol=1e-4)
    np.testing.assert_allclose(found.cosine[:, -1], metrics.token_cosine(x), rtol=1e-4)
    np.testing.assert_allclose(found.singular_ratio[:, -1], metrics.singular_ratio(x), rtol=1e-4)
    pairs = F.cosine_similarity(x[:, :, None], x[:, None], dim=-1)
    np.testing.assert_allclose(found.min_cosine[:, -1], pairs.amin((1, 2)), rtol=1e-4)


def test_any_depth_stays_finite_and_complete():
    uniform = torch.full((TOKENS, TOKENS), 1 / TOKENS, dtype=torch.float64)  # tokens vanish
    gone = repeat(torch.ones_like(tokens()), -torch.eye(WIDTH, dtype=torch.float64), uniform, layers=3)
    assert torch.isfinite(gone.last).all()
    layers = 3 * READ_AT_ONCE + 5
    W = branch_with_spectrum([5.0] * WIDTH)  # 6¹⁹⁷ and on: past float64 without care
    found = repeat(tokens(), W, random_attention(TOKENS), layers=8 * layers)
    assert found.layers == 8 * layers
    assert all(np.isfinite(getattr(found, name)).all() for name in DEFINITIONS)
    assert found.converged() == {"input": True, "angle": True, "rank": True}


def test_helpers_keep_their_promises():
    lam = torch.tensor([-0.5, 0.25, 1.0], dtype=torch.float64)
    torch.testing.assert_close(torch.linalg.eigvalsh(branch_with_spectrum(lam, seed=3)), lam)
    mu = torch.linalg.eigvals(random_attention(TOKENS, symmetric=True, seed=2))
    assert mu.imag.abs().max() < 1e-9 < mu.real.min()
    assert (random_attention(TOKENS, causal=True).triu(1) == 0).all()
    draw = drawn_attention(TOKENS, seed=1)
    assert torch.equal(draw(tokens(), 2), drawn_attention(TOKENS, seed=1)(tokens(), 2))
    assert not torch.equal(draw(tokens(), 2), draw(tokens(), 3))


def test_frame_and_picture_show_what_was_measured():
    found = repeat(tokens(), normal(WIDTH, WIDTH, seed=1), random_attention(TOKENS), layers=4)
    frame = found.to_frame()
    assert len(frame) == SAMPLES * 5
    row = frame[(frame["sample"] == 2) & (frame["layer"] == 3)].iloc[0]
    assert row["singular_ratio"] == found.singular_ratio[2, 3]
    axes = found.picture().axes
    assert len(axes) == 3
    np.testing.assert_allclose(axes[0].lines[0].get_ydata()[3], np.exp(np.log(found.hfc_lfc[:, 3]).mean()))


def test_the_grid_shows_the_sign_flip_of_pre_norm_and_a_rank_lost_without_smoothing():
    """The rank is lost where attention is computed from the tokens."""
    grid = norm_grid(layers=40, tokens=TOKENS, width=WIDTH, samples=2)
    plus, minus = grid["Pre-LN, weights +1"], grid["Pre-LN, weights −1"]
    positive, negative = list(plus)[:2]
    assert plus[positive].hfc_lfc[:, -1].max() < 0.2 < 0.5 < plus[negative].hfc_lfc[:, -1].min()
    assert minus[negative].hfc_lfc[:, -1].max() < 0.2 < 0.5 < minus[positive].hfc_lfc[:, -1].min()
    found = norm_grid(layers=60, samples=3, attention="computed")["no norm"]["λ in [−1, 0)"]
    assert found.hfc_lfc[:, -1].min() > 1
    assert found.min_cosine[:, -1].max() < -0.9
    assert found.singular_ratio[:, -1].max() < 0.02


def test_errors_say_what_is_wrong():
    with pytest.raises(ShapeError, match=r"\(3, 6, 4\) and W \(3, 3\)"):
        repeat(tokens(), normal(3, 3), random_attention(TOKENS), layers=1)
    for options, words in ({"norm": "rms"}, "'rms'; known: none, pre, post"), ({"layers": 0}, "at least one layer"):
        with pytest.raises(AcutanceError, match=words):
            repeat(tokens(), normal(WIDTH, WIDTH), random_attention(TOKENS), **{"layers": 1, **options})
    with pytest.raises(AcutanceError, match="unknown attention 'new'"):
        norm_grid(attention="new")
