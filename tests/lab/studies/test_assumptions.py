"""Distances from a symmetric positive definite kernel, against matrices written out."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor

from acutance import metrics, sites
from acutance.errors import AcutanceError
from acutance.explain.verdict import rank_correlation
from acutance.lab.studies import kernel_assumptions
from acutance.lab.studies.kernel import (
    MEASURES,
    PERMUTED,
    KernelAssumptions,
    _of_weights,
    asymmetry,
    matrix_asymmetry,
    matrix_negative_share,
    negative_share,
    permuted,
)  # fmt: skip
from acutance.mitigations import parse
from acutance.models import ViT

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
    A = records[0].A
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
        deviations = [row[name] for name in (*MEASURES, "weights_asymmetry", "weights_negative")]
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
    found = KernelAssumptions({**dict.fromkeys(MEASURES + PERMUTED, measure), "alignment": alignment}, weights, weights)
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


def test_rank_correlation_shares_ties() -> None:
    a, b = np.array([1.0, 2.0, 2.0, 5.0, 0.0]), np.array([3.0, 3.0, 1.0, 9.0, 2.0])
    assert rank_correlation(a, b) == pytest.approx(spearmanr(a, b).statistic)
    assert np.isnan(rank_correlation(a, np.ones(5)))


def llama(**options) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaModel

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 50}
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, **options)
    model = LlamaModel(config).double().eval()
    for layer in model.layers:  # from the start, all attention is nearly uniform
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            torch.nn.init.normal_(projection.weight, std=0.5)
    return model


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_causal_models_affinities_are_read_before_the_mask(implementation: str) -> None:
    """Both halves of exp(q·k/√d), also the one that the model never uses; grouped queries, rotated by position."""
    model, ids = llama(attn_implementation=implementation), torch.arange(14).reshape(2, 7)
    found = kernel_assumptions(model, [{"input_ids": ids}])
    records = []
    with torch.no_grad(), sites.find(model)[1].observe(records.append):
        model(ids)
    A = records[0].A
    for head in range(4):
        S = (A.q[1, head] @ A.k[1, head // 2].mT).numpy()
        kernel = np.exp(S * A.scale)
        assert found.samples["logits_asymmetry"][1, 1, head] == pytest.approx(asymmetry_oracle(S), abs=1e-7)
        assert found.samples["kernel_asymmetry"][1, 1, head] == pytest.approx(asymmetry_oracle(kernel), abs=1e-7)
        assert found.samples["kernel_negative"][1, 1, head] == pytest.approx(negative_oracle(kernel), abs=1e-7)
    used = metrics.gradient_alignment(A, records[0].values)
    np.testing.assert_allclose(found.alignment[1], used, atol=1e-7)
    assert np.isfinite(found.weights_asymmetry).all()


def test_padding_and_packed_documents_change_nothing() -> None:
    model, ids = llama(), torch.arange(12).reshape(2, 6)
    alone = [kernel_assumptions(model, [{"input_ids": row}]) for row in (ids[:1], ids[1:, :4])]
    padding = torch.ones_like(ids)
    padding[1, 4:] = 0
    padded = kernel_assumptions(model, [{"input_ids": ids, "attention_mask": padding}])
    packed = {
        "input_ids": torch.cat([ids[0], ids[1, :4]])[None],
        "position_ids": torch.tensor([[*range(6), *range(4)]]),
    }
    for found in (padded, kernel_assumptions(model, [packed])):
        for name in (*MEASURES, "alignment"):
            for sample in (0, 1):
                np.testing.assert_allclose(found.samples[name][:, sample], alone[sample].samples[name][:, 0], atol=1e-7)


def test_capped_logits_are_the_kernels() -> None:
    from transformers import Gemma2Config, Gemma2Model

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 50, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "attn_logit_softcapping": 0.5}
    model = Gemma2Model(Gemma2Config(**sizes, **heads, attn_implementation="eager")).double().eval()
    torch.nn.init.normal_(model.layers[0].self_attn.q_proj.weight)
    records, ids = [], torch.arange(6)[None]
    with torch.no_grad(), sites.find(model)[0].observe(records.append):
        model(ids)
    A = records[0].A
    capped = np.exp(0.5 * np.tanh((A.q[0, 1] @ A.k[0, 1].mT).numpy() * A.scale / 0.5))
    found = kernel_assumptions(model, [{"input_ids": ids}])
    assert found.samples["kernel_asymmetry"][0, 0, 1] == pytest.approx(asymmetry_oracle(capped), abs=1e-7)


# Entries in random order


def test_permuting_keeps_the_entries_inside_and_leaves_the_rest_alone() -> None:
    S, counts = normal(2, 3, 5, 5), torch.tensor([[True] * 5, [True, True, False, True, False]])
    pairs = counts[:, :, None] & counts[:, None, :]
    S = S * pairs[:, None]
    mixed = permuted(S, pairs, torch.Generator().manual_seed(0))
    assert not torch.equal(mixed, S)
    for sample in (0, 1):
        for head in range(3):
            inside = pairs[sample]
            assert (mixed[sample, head][~inside] == 0).all()
            assert torch.equal(mixed[sample, head][inside].sort().values, S[sample, head][inside].sort().values)
    again = permuted(S, pairs, torch.Generator().manual_seed(0))
    assert torch.equal(mixed, again)


def test_every_place_is_as_likely() -> None:
    """The first entry of a 3 × 3 matrix, over 9000 draws: 1000 ± 30 times in each place."""
    S = torch.zeros(9000, 1, 3, 3)
    S[..., 0, 0] = 1
    where = permuted(S, torch.ones(9000, 3, 3, dtype=torch.bool), torch.Generator().manual_seed(0)).sum(0).flatten()
    assert (where - 1000).abs().max() < 5 * 30


def test_permuted_entries_of_a_symmetric_kernel_are_what_chance_gives() -> None:
    """A Gram matrix is symmetric and positive definite by its arrangement, not by its entries."""
    x = normal(1, 1, 60, 60)
    S = x @ x.mT
    S = S - S.mean()  # without a mean: asymmetry 1, share ½ but for the diagonal's chance
    mixed = permuted(S, torch.ones(1, 60, 60, dtype=torch.bool), torch.Generator().manual_seed(0))
    assert matrix_asymmetry(S).item() == pytest.approx(0, abs=1e-9)
    assert matrix_asymmetry(mixed).item() == pytest.approx(1, abs=0.1)
    assert matrix_negative_share(mixed).item() == pytest.approx(0.5, abs=0.05)


def test_the_baselines_are_those_of_the_permuted_logits() -> None:
    model, images = vit(), normal(3, 1, 8, 8)
    found = kernel_assumptions(model, [images])
    records = []
    with torch.no_grad(), sites.find(model)[0].observe(records.append):
        model(images)
    A = records[0].A
    everywhere = torch.ones(3, A.shape[2], A.shape[2], dtype=torch.bool)
    mixed = permuted(A.q @ A.k.mT * A.scale, everywhere, torch.Generator().manual_seed(0))  # layer 1 draws first
    for name, S in (("logits", mixed), ("kernel", mixed.exp())):
        for sample, head in np.ndindex(3, 3):
            matrix = S[sample, head].numpy()
            expected = {"asymmetry": asymmetry_oracle(matrix), "negative": negative_oracle(matrix)}
            for measure, value in expected.items():
                read = found.samples[f"{name}_{measure}_permuted"][0, sample, head]
                assert read == pytest.approx(value, abs=1e-7)


def test_a_bias_between_tokens_is_refused() -> None:
    from transformers import T5Config, T5EncoderModel

    sizes = {"d_model": 16, "d_ff": 16, "d_kv": 4, "num_layers": 1, "num_heads": 4, "vocab_size": 50}
    with pytest.raises(AcutanceError, match="bias is added"):
        kernel_assumptions(T5EncoderModel(T5Config(**sizes)), [{"input_ids": torch.arange(6)[None]}])


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(AcutanceError, match="softmax self-attention"):
        kernel_assumptions(vit(attention="linear"), [normal(2, 1, 8, 8)])
    with pytest.raises(AcutanceError, match="no batches"):
        kernel_assumptions(vit(), [])
