"""Distances from a symmetric positive definite kernel, against matrices written out."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor

from acutance import metrics, sites
from acutance.errors import AcutanceError
from acutance.laboratory import kernel_assumptions
from acutance.laboratory.assumptions import MEASURES, KernelAssumptions, _of_weights, asymmetry, negative_share
from acutance.mitigations import parse
from acutance.models import ViT
from acutance.statistics import rank_correlation

OPTIONS = {"image_size": 8, "patch_size": 2, "in_chans": 1, "dim": 12, "depth": 2, "heads": 3, "num_classes": 4}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def vit(**options) -> ViT:
    torch.manual_seed(0)
    model = ViT(**OPTIONS, **options).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def negative_oracle(S: np.ndarray) -> float:
    values = np.linalg.eigvalsh(S + S.T)
    return np.abs(values[values < 0]).sum() / np.abs(values).sum()


def asymmetry_oracle(S: np.ndarray) -> float:
    return np.linalg.norm(S - S.T) / np.linalg.norm(S + S.T)


@pytest.mark.parametrize("tokens", [3, 9, 40])
def test_grams_give_what_the_matrix_gives(tokens: int) -> None:
    q, k = normal(2, tokens, 4), normal(2, tokens, 4, seed=1)
    for sample in range(2):
        S = (q[sample] @ k[sample].mT).numpy()
        assert asymmetry(q, k)[sample].item() == pytest.approx(asymmetry_oracle(S), rel=1e-9)
        assert negative_share(q, k)[sample].item() == pytest.approx(negative_oracle(S), abs=1e-7)


def test_known_values() -> None:
    x = normal(9, 4)
    assert asymmetry(x, x).item() == pytest.approx(0, abs=1e-7)
    assert negative_share(x, x).item() == pytest.approx(0, abs=1e-7)
    assert negative_share(x, -x).item() == pytest.approx(1, abs=1e-7)
    turn = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    assert asymmetry(normal(9, 2), normal(9, 2) @ (turn + 1e-3 * torch.eye(2))).item() > 100


def test_readings_are_those_of_each_layer_and_head() -> None:
    model, images = vit(), normal(5, 1, 8, 8)
    found = kernel_assumptions(model, [images[:3], images[3:]])
    assert found.alignment.shape == (2, 5, 3)
    records = []
    site = sites.find(model)[1]
    with torch.no_grad(), site.observe(records.append):
        model(images)
    A = records[0].operator
    S = (A.q[4, 2] @ A.k[4, 2].mT).numpy()
    kernel = np.exp(S * A.scale)
    expected = {
        "logits_asymmetry": asymmetry_oracle(S),
        "logits_negative": negative_oracle(S),
        "kernel_asymmetry": asymmetry_oracle(kernel),
        "kernel_negative": negative_oracle(kernel),
        "alignment": metrics.gradient_alignment(A, records[0].values)[4, 2].item(),
    }
    for name, value in expected.items():
        assert found.samples[name][1, 4, 2] == pytest.approx(value, abs=1e-7)
    query, key = site.attention.qkv.weight[8:12].detach(), site.attention.qkv.weight[20:24].detach()
    form = (query.mT @ key).numpy()
    assert found.weights_asymmetry[1, 2] == pytest.approx(asymmetry_oracle(form))
    assert found.weights_negative[1, 2] == pytest.approx(negative_oracle(form), abs=1e-7)


def test_symmetric_attention_meets_every_assumption() -> None:
    found = kernel_assumptions(vit(attention="symmetric"), [normal(3, 1, 8, 8)])
    for row in found.rows():
        assert row["alignment"] == pytest.approx(1, abs=1e-6)
        deviations = [row[name] for name in row if name not in ("layer", "head", "alignment")]
        np.testing.assert_allclose(deviations, 0, atol=1e-6)


def test_weights_are_found_also_where_a_mitigation_took_the_values_over() -> None:
    plain, steered = vit(), vit()
    for site in sites.find(steered):
        site.install(parse("eigen:negative").for_layer(site.shape()).double())
    both = [kernel_assumptions(model, [normal(2, 1, 8, 8)]) for model in (plain, steered)]
    np.testing.assert_allclose(both[0].weights_asymmetry, both[1].weights_asymmetry)


def test_grouped_queries_share_their_key_weights() -> None:
    """Four query heads, two key heads: the first two belong to the first."""
    site = SimpleNamespace(heads=4, kv_heads=2, head_dim=3)
    query, key = normal(12, 8), normal(6, 8, seed=1)
    site.query_weight, site.key_weight = lambda: query, lambda: key
    found = _of_weights(site)
    for head in range(4):
        first = 3 * (head // 2)
        form = (query[3 * head : 3 * head + 3].mT @ key[first : first + 3]).numpy()
        assert found[0, head] == pytest.approx(asymmetry_oracle(form))
        assert found[1, head] == pytest.approx(negative_oracle(form), abs=1e-7)


def test_weights_a_site_does_not_know_are_left_open() -> None:
    def refuse() -> Tensor:
        raise AcutanceError("does not know where W_Q is")

    assert np.isnan(_of_weights(SimpleNamespace(heads=4, query_weight=refuse))).all()


def test_correlations_within_a_layer_do_not_see_the_depth() -> None:
    """In each layer the measure falls with the alignment; layers are shifted so that pooled it seems to rise."""
    alignment = np.linspace(0, 0.1, 6).reshape(1, 3, 2) + np.array([0.0, 0.5]).reshape(2, 1, 1)
    measure = -np.linspace(0, 0.1, 6).reshape(1, 3, 2) + np.array([0.3, 0.9]).reshape(2, 1, 1)
    weights = np.zeros((2, 2))
    found = KernelAssumptions({**dict.fromkeys(MEASURES, measure), "alignment": alignment}, weights, weights)
    assert found.correlations()["kernel_asymmetry"] > 0.4
    np.testing.assert_allclose(found.layer_correlations()["kernel_asymmetry"], [-1, -1])


def test_correlations_within_a_layer_are_spearmans() -> None:
    found = kernel_assumptions(vit(), [normal(4, 1, 8, 8)])
    for layer in range(2):
        expected = spearmanr(found.samples["logits_negative"][layer].ravel(), found.alignment[layer].ravel()).statistic
        assert found.layer_correlations()["logits_negative"][layer] == pytest.approx(expected)


def test_rounding_has_no_correlation() -> None:
    noise, weights = normal(2, 4, 3).numpy(), np.zeros((2, 3))
    samples = {**dict.fromkeys(MEASURES, 1e-8 * noise), "alignment": 1 + 1e-7 * noise}
    found = KernelAssumptions(samples, weights, weights)
    assert np.isnan(list(found.correlations().values())).all()
    assert all(np.isnan(values).all() for values in found.layer_correlations().values())


def test_tables_hold_means_over_samples_and_the_model_is_left_alone() -> None:
    model = vit().train()
    found = kernel_assumptions(model, [normal(4, 1, 8, 8)])
    assert model.training
    assert all(site.attention.observer is None for site in sites.find(model))
    frame = found.to_frame()
    assert frame["layer"].tolist() == [1, 1, 1, 2, 2, 2]
    assert frame["kernel_negative"][4] == pytest.approx(found.samples["kernel_negative"][1, :, 1].mean())
    expected = spearmanr(found.samples["kernel_asymmetry"].ravel(), found.alignment.ravel()).statistic
    assert found.correlations()["kernel_asymmetry"] == pytest.approx(expected)
    assert f"{expected:+.2f}" in found.table().caption


def test_rank_correlation_shares_ties() -> None:
    a, b = np.array([1.0, 2.0, 2.0, 5.0, 0.0]), np.array([3.0, 3.0, 1.0, 9.0, 2.0])
    assert rank_correlation(a, b) == pytest.approx(spearmanr(a, b).statistic)
    assert np.isnan(rank_correlation(a, np.ones(5)))


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(AcutanceError, match="softmax self-attention"):
        kernel_assumptions(vit(attention="linear"), [normal(2, 1, 8, 8)])
    with pytest.raises(AcutanceError, match="no batches"):
        kernel_assumptions(vit(), [])
