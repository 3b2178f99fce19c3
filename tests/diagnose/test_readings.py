"""Readings: every number against the same written out plainly in float64, and padding that changes none of them."""

from itertools import pairwise

import numpy as np
import pytest
import torch

import acutance as ac
from acutance.attention.operator import AttentionOperator
from acutance.diagnose.readings import influence, read, read_attention, read_heads, read_norms
from tiny_folders import tiny

TOKENS = 7


def operator(*, causal: bool, masked: bool, heads: int = 4) -> tuple[AttentionOperator, torch.Tensor | None]:
    torch.manual_seed(1)
    q, k = 3 * torch.randn(2, heads, TOKENS, 5, dtype=torch.float64), torch.randn(2, 2, TOKENS, 5, dtype=torch.float64)
    mask = torch.arange(TOKENS) < torch.tensor([[TOKENS], [4]]) if masked else None
    return AttentionOperator(q, k, mask=mask, causal=causal), mask


@pytest.mark.parametrize(("causal", "masked"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.usefixtures("tiles")
def test_attention_is_read_as_written_out(causal, masked):
    A, mask = operator(causal=causal, masked=masked)
    found, dense = read_attention(A, mask), A.dense().numpy()
    for sample in range(2):
        count = TOKENS if mask is None else int(mask[sample].sum())
        for head in range(4):
            rows = dense[sample, head, :count, :count]
            assert np.allclose(rows.sum(1), 1)
            choosing = range(1, count) if causal else range(count)
            even = [np.log(i + 1) if causal else np.log(count) for i in choosing]
            entropy = [-sum(p * np.log(p) for p in rows[i] if p > 0) for i in choosing]
            expected = {
                "evenness": np.mean(np.array(entropy) / even),
                "own": np.mean([rows[i, i] for i in choosing]),
                "first": rows[:, 0].mean(),
                "top": max(rows[:, j].mean() for j in range(count)),
            }
            assert {name: float(x[sample, head]) for name, x in found.items()} == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_heads_are_read_as_what_each_adds(masked):
    torch.manual_seed(2)
    u, weight = torch.randn(2, 3, TOKENS, 4, dtype=torch.float64), torch.randn(10, 12, dtype=torch.float64)
    u[:, 2] = u[:, 0]
    weight[:, 8:] = -2 * weight[:, :4]  # the third head takes away twice what the first adds
    mask = torch.arange(TOKENS) < torch.tensor([[TOKENS], [4]]) if masked else None
    found = read_heads(u, weight, mask)
    for sample in range(2):
        keep = slice(TOKENS if mask is None else int(mask[sample].sum()))
        added = [(u[sample, h, keep] @ weight[:, 4 * h : 4 * h + 4].T).flatten().numpy() for h in range(3)]
        norms = [np.linalg.norm(y) for y in added]
        twins = [
            max(abs(a @ b) / np.linalg.norm(a) / np.linalg.norm(b) for j, b in enumerate(added) if j != i)
            for i, a in enumerate(added)
        ]
        assert found["head_share"][sample].tolist() == pytest.approx(list(norms / np.mean(norms)), rel=1e-5)
        assert found["head_twin"][sample].tolist() == pytest.approx(twins, rel=1e-5)
        assert twins[0] == pytest.approx(1)


def test_norms_and_influence():
    x = torch.ones(2, 5, 3)
    x[0, 3] *= -8
    x[1, 0] *= 4
    valid = torch.ones(2, 5, dtype=torch.bool)
    found = read_norms(x, valid)
    assert found["norm_outlier"].tolist() == [8, 4]
    assert found["outlier_first"].tolist() == [0, 1]
    valid[0, 3] = False
    assert read_norms(x, valid)["norm_outlier"].tolist() == [1, 4]
    assert influence(x, 7 * x, valid).tolist() == pytest.approx([0, 0], abs=1e-6)
    turned = torch.stack([-x[..., 1], x[..., 0], torch.zeros(2, 5)], -1)
    cosines = torch.nn.functional.cosine_similarity(x, x + turned, dim=-1)
    assert influence(x, x + turned, torch.ones_like(valid)).tolist() == pytest.approx((1 - cosines.mean(1)).tolist())
    assert influence(x, x[:, :, :2], valid).isnan().all(), "a layer of another width has none"


def test_curves_are_those_of_the_hidden_states():
    torch.manual_seed(0)
    model = (
        ac.models.ViT(image_size=8, patch_size=2, in_chans=1, dim=24, depth=3, heads=3, num_classes=4).double().eval()
    )
    images = torch.randn(6, 1, 8, 8, dtype=torch.float64)
    states: list[torch.Tensor] = []
    hooks = [model.blocks[0].register_forward_pre_hook(lambda _, given: states.append(given[0]))]
    hooks += [block.register_forward_hook(lambda *given: states.append(given[2][0])) for block in model.blocks]
    hooks += [model.norm.register_forward_hook(lambda *given: states.append(given[2]))]
    with torch.no_grad():
        model(images)
    for hook in hooks:
        hook.remove()
    readings, profile, _ = read(model, images.split(4))
    pooled = [state.mean(1).numpy() for state in states]
    for layer, vectors in enumerate(pooled):
        unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        cosines = (unit @ unit.T)[~np.eye(6, dtype=bool)]
        sigma = np.linalg.svd(vectors, compute_uv=False)
        share = sigma / sigma.sum()
        assert readings["pooled_cosine"][layer] == pytest.approx(cosines.mean(), rel=1e-5)
        assert readings["pooled_rank"][layer] == pytest.approx(np.exp(-(share * np.log(share)).sum()), rel=1e-5)
    unit = [state[:, 1:] / state[:, 1:].norm(dim=-1, keepdim=True) for state in states]  # no class token
    grams = [patches @ patches.mT for patches in unit]
    drift = [(b - a).square().mean((1, 2)).sqrt().mean().item() for a, b in pairwise(grams[:4])]
    assert readings["patch_drift"].tolist() == pytest.approx(drift, rel=1e-4)
    assert readings["cosine"].tolist() == [
        value.mean for value in profile if (value.tap, value.metric) == ("block", "token_cosine")
    ]
    for layer, block in enumerate(model.blocks):  # what even attention would do to a mean token of random direction
        W_V, W_proj, gain = block.attn.qkv.weight[48:], block.attn.proj.weight, block.norm1.weight
        H = (W_proj @ W_V @ torch.diag(gain)).detach()
        x = states[layer] - states[layer].mean(-1, keepdim=True)
        s = (1 / x.square().mean(-1).sqrt()).mean()
        square = 1 + 2 * s * H.trace() / 24 + s**2 * H.square().sum() / 24
        assert readings["tendency"][layer] == pytest.approx(float(-square.log() / 2), rel=1e-5)
    for layer in ac.explain(model, images.split(4), progress=False).layers:
        assert readings["tendency"][layer.layer - 1] == pytest.approx(layer.tendency, rel=1e-6)
        for part, change in layer.change.parts.items():
            assert readings[f"change by {part}"][layer.layer - 1] == pytest.approx(change.mean, rel=1e-6)
    facts = {"samples": 6, "tokens": 17, "channels": 24, "causal": False, "images": True}
    assert facts.items() <= readings.facts.items()


def test_padding_changes_nothing():
    model = tiny("bert").eval()
    torch.manual_seed(3)
    long, short = torch.randint(0, 30, (1, 9)), torch.randint(0, 30, (1, 5))
    alone, *_ = read(model, [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in (long, short)])
    padded = torch.cat([long, torch.nn.functional.pad(short, (0, 4))])
    mask = torch.arange(9) < torch.tensor([[9], [5]])
    together, *_ = read(model, [{"input_ids": padded, "attention_mask": mask.long()}])
    assert alone.curves.keys() == together.curves.keys()
    for name in alone.curves:
        np.testing.assert_allclose(together[name], alone[name], rtol=2e-4, atol=1e-5, err_msg=name)
