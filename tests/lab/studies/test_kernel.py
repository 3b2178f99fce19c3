"""Distances from a symmetric positive definite kernel against matrices written out, and the study of several runs."""

import json
from functools import partial
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import torch
from layers import normal
from scipy.stats import spearmanr

import acutance as ac
from acutance import metrics, sites
from acutance.errors import AcutanceError, NonFiniteError
from acutance.explain.spectral_theory import rank_correlation
from acutance.io.loading import load_model
from acutance.lab.data import digits
from acutance.lab.studies import kernel, kernel_assumptions, kernel_study
from acutance.lab.studies.kernel import MEASURES, permuted
from sites.hf_zoo import build
from tiny_folders import DECLARATION, tiny_tokenizer


def vit(seed=0, **options):
    torch.manual_seed(seed)
    model = ac.models.vit_digits(dim=12, depth=2, heads=3, **options)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def oracle(S):
    """Asymmetry and negative share."""
    values = np.linalg.eigvalsh(S + S.T)
    negative = np.abs(values[values < 0]).sum() / np.abs(values).sum()
    return np.linalg.norm(S - S.T) / np.linalg.norm(S + S.T), negative


IDS = torch.arange(14).reshape(2, 7)
CAPPED = {"head_dim": 8, "attn_logit_softcapping": 0.5, "attn_implementation": "eager"}
MODELS = {
    "vit": (lambda: vit().double(), normal(3, 1, 8, 8)),
    "causal, grouped, rotated": (partial(build, "llama"), {"input_ids": IDS}),
    "causal, eager": (partial(build, "llama", attn_implementation="eager"), {"input_ids": IDS}),
    "capped": (partial(build, "gemma2", **CAPPED), {"input_ids": IDS}),
}


@pytest.mark.parametrize("name", MODELS)
def test_readings_are_those_of_each_layer_and_head_before_any_mask(name):
    """Both halves of exp(q·k/√d), also the one that a causal model never uses."""
    make, batch = MODELS[name]
    model, records = make(), []
    found = kernel_assumptions(model, [batch])
    with torch.no_grad(), sites.find(model)[1].observe(records.append):
        model(**batch) if isinstance(batch, dict) else model(batch)
    A, site = records[0].A, sites.find(model)[1]
    group = A.q.shape[1] // A.k.shape[1]
    query, key = (w.unflatten(0, (-1, site.head_dim)).detach() for w in (site.query_weight(), site.key_weight()))
    for head in range(A.q.shape[1]):
        logits = (A.q[1, head] @ A.k[1, head // group].mT).double().numpy() * A.scale
        affinity = np.exp(logits if A.softcap is None else A.softcap * np.tanh(logits / A.softcap))
        read = [found.samples[measure][1, 1, head] for measure in MEASURES]
        assert read == pytest.approx([*oracle(logits), *oracle(affinity)], abs=1e-7)
        form = oracle((query[head].mT @ key[head * site.kv_heads // site.heads]).numpy())
        assert (found.weights_asymmetry[1, head], found.weights_negative[1, head]) == pytest.approx(form, abs=1e-7)
    used = metrics.gradient_alignment(A, records[0].values)
    np.testing.assert_allclose(found.alignment[1], used, atol=1e-7)


def test_the_baselines_are_those_of_the_permuted_logits_and_symmetric_attention_meets_every_assumption():
    model, images, records = vit(attention="symmetric").double(), normal(3, 1, 8, 8), []
    found = kernel_assumptions(model, [images])
    with torch.no_grad(), sites.find(model)[0].observe(records.append):
        model(images)
    A = records[0].A
    everywhere = torch.ones(3, A.shape[2], A.shape[2], dtype=torch.bool)
    mixed = permuted(A.q @ A.k.mT * A.scale, everywhere, torch.Generator().manual_seed(0))  # layer 1 draws first
    for sample, head in np.ndindex(3, 3):
        expected = [*oracle(mixed[sample, head].numpy()), *oracle(mixed[sample, head].exp().numpy())]
        assert [found.samples[name][0, sample, head] for name in kernel.PERMUTED] == pytest.approx(expected, abs=1e-7)
    for row in found.rows():
        assert row["alignment"] == pytest.approx(1, abs=1e-6)
        deviations = [row[name] for name in (*MEASURES, "weights_asymmetry", "weights_negative")]
        np.testing.assert_allclose(deviations, 0, atol=1e-6)


def test_correlations_share_ties_and_within_a_layer_do_not_see_the_depth():
    """In each layer the measure falls with the alignment; layers are shifted so that pooled it seems to rise."""
    alignment = np.linspace(0, 0.1, 6).reshape(1, 3, 2) + np.array([0.0, 0.5]).reshape(2, 1, 1)
    measure = -np.linspace(0, 0.1, 6).reshape(1, 3, 2) + np.array([0.3, 0.9]).reshape(2, 1, 1)
    weights = np.zeros((2, 2))
    found = kernel.KernelAssumptions({**dict.fromkeys(MEASURES, measure), "alignment": alignment}, weights, weights)
    expected = spearmanr(measure.ravel(), alignment.ravel()).statistic
    assert found.correlations()["kernel_asymmetry"] == pytest.approx(expected)
    assert expected > 0.4
    np.testing.assert_allclose(found.layer_correlations()["kernel_asymmetry"], [-1, -1])
    a, b = np.array([1.0, 2.0, 2.0, 5.0, 0.0]), np.array([3.0, 3.0, 1.0, 9.0, 2.0])
    assert rank_correlation(a, b) == pytest.approx(spearmanr(a, b).statistic)
    assert np.isnan(rank_correlation(a, np.ones(5)))
    rounding = {**dict.fromkeys(MEASURES, 1e-8 * measure), "alignment": 1 + 1e-7 * alignment}
    assert np.isnan(list(kernel.KernelAssumptions(rounding, weights, weights).correlations().values())).all()


def test_padding_and_packed_documents_change_nothing():
    model, ids = build("llama"), torch.arange(12).reshape(2, 6)
    alone = [kernel_assumptions(model, [{"input_ids": row}]) for row in (ids[:1], ids[1:, :4])]
    padded = {"input_ids": ids, "attention_mask": torch.tensor([[1] * 6, [1] * 4 + [0] * 2])}
    positions = torch.tensor([[*range(6), *range(4)]])
    for batch in (padded, {"input_ids": torch.cat([ids[0], ids[1, :4]])[None], "position_ids": positions}):
        found = kernel_assumptions(model, [batch])
        for name in (*MEASURES, "alignment"):
            for sample in (0, 1):
                np.testing.assert_allclose(found.samples[name][:, sample], alone[sample].samples[name][:, 0], atol=1e-7)


def test_permuting_keeps_the_entries_inside_and_leaves_the_rest_alone():
    S, counts = normal(2, 3, 5, 5), torch.tensor([[True] * 5, [True, True, False, True, False]])
    pairs = counts[:, :, None] & counts[:, None, :]
    S = S * pairs[:, None]
    mixed = permuted(S, pairs, torch.Generator().manual_seed(0))
    assert not torch.equal(mixed, S)
    for sample, head in np.ndindex(2, 3):
        before, after, inside = S[sample, head], mixed[sample, head], pairs[sample]
        assert (after[~inside] == 0).all()
        assert torch.equal(after[inside].sort().values, before[inside].sort().values)
    assert torch.equal(mixed, permuted(S, pairs, torch.Generator().manual_seed(0)))


def test_what_cannot_be_compared_is_refused_and_weights_that_are_not_known_are_nan():
    site = Mock(heads=4, query_weight=Mock(side_effect=AcutanceError("keeps W_Q under an unknown name")))
    assert np.isnan(kernel._of_weights(site)).all()
    with pytest.raises(AcutanceError, match="bias is added"):
        kernel_assumptions(build("t5_encoder"), [{"input_ids": IDS}])
    with pytest.raises(AcutanceError, match="softmax self-attention"):
        kernel_assumptions(vit(attention="linear"), [torch.randn(2, 1, 8, 8)])
    with pytest.raises(AcutanceError, match="no batches"):
        kernel_assumptions(vit(), [])
    with pytest.raises(AcutanceError, match="sample 1 of a batch has no token that counts"):
        kernel_assumptions(build("bert"), [{"input_ids": IDS, "attention_mask": torch.arange(len(IDS))[:, None] * IDS}])


@pytest.mark.parametrize(("row", "named"), [(0, "layer 2: .*q holds NaN"), (12, "layer 2: .*k holds NaN")])
def test_a_layer_that_is_not_finite_is_named(row, named):
    model = vit()
    with torch.no_grad():
        model.blocks[1].attn.qkv.weight[row] = torch.nan
    with pytest.raises(NonFiniteError, match=named):
        kernel_assumptions(model, [torch.randn(2, 1, 8, 8)])


@pytest.fixture
def runs(tmp_path):
    for seed in (0, 1):
        ac.save(vit(seed), tmp_path / f"plain-seed{seed}" / "model.safetensors")
        ac.save(vit(seed, attention="symmetric"), tmp_path / f"even-seed{seed}" / "model.safetensors")
    return tmp_path


def test_the_command_writes_what_a_direct_reading_gives(runs, command):
    names = [runs / "plain-seed0", runs / "plain-seed1" / "model.safetensors", runs / "even-seed0", runs / "even-seed1"]
    out = runs / "kernel"
    assert "plain, 2 runs" in command("lab", "kernel", *names, "--samples", "9", "--out", out)
    table = pd.read_csv(out / "kernel.csv")
    assert len(table) == 4 * 2 * 2 * 3  # runs, data, layers, heads
    split = digits()[1]
    images = split.images[torch.linspace(0, len(split) - 1, 9).round().long()]
    direct = [kernel_assumptions(ac.load(runs / f"plain-seed{n}/model.safetensors"), [images]) for n in (0, 1)]
    chosen = table.query("run == 'plain-seed1' and data == 'test'").reset_index()
    expected = direct[1].to_frame()
    pd.testing.assert_frame_equal(chosen[expected.columns], expected, rtol=1e-3, atol=1e-6)
    found = direct[1].layer_correlations()["kernel_asymmetry"]
    assert chosen["correlation_kernel_asymmetry"].iloc[-1] == pytest.approx(found[1], rel=1e-3)
    body = json.loads((out / "kernel.json").read_text())
    assert (body["paper"], body["samples"]) == (kernel.PAPER, {"train": 9, "test": 9})
    assert {"command", "hardware", "versions"} <= body.keys()
    summary = {(row["variant"], row["data"]): row for row in body["summary"]}
    means = [found.alignment.mean() for found in direct]
    assert summary["plain", "test"]["alignment"]["mean"] == pytest.approx(np.mean(means))
    assert summary["plain", "test"]["alignment"]["spread"] == pytest.approx(np.std(means, ddof=1))
    for kind, read in (("pooled", "correlations"), ("within", "layer_correlations")):
        values = [np.mean(getattr(found, read)()["kernel_negative"]) for found in direct]
        assert summary["plain", "test"][kind]["kernel_negative"]["mean"] == pytest.approx(np.mean(values))
    assert summary["even", "test"]["pooled"]["kernel_negative"]["mean"] is None  # nothing varies
    assert (out / "kernel.png").stat().st_size > 10_000
    assert "</svg>" in (out / "kernel.svg").read_text()


def test_every_model_is_read_and_only_when_its_turn_comes():
    passes, before = [], []

    def load(seed):
        before.append(len(passes))
        model = vit(seed)
        model.register_forward_hook(lambda *args: passes.append(seed))
        return model

    study = kernel_study({f"a-seed{n}": partial(load, n) for n in (0, 1)}, samples=70)
    assert (before, passes) == ([0, 4], [0] * 4 + [1] * 4), "two batches of training images, two of test images"
    assert study.runs["a-seed1", "test"].alignment.shape == (2, 70, 3)
    assert list(map(kernel.variant_of, ("neutreno-featscale-seed12", "seed3-a"))) == ["neutreno-featscale", "seed3-a"]


def test_a_causal_model_is_read_on_text(tmp_path, command):
    folder, out = tmp_path / "causal-seed0", tmp_path / "out"
    tokenizer = tiny_tokenizer(special=False)
    tokenizer.save_pretrained(folder)
    build("llama", vocab_size=len(tokenizer)).float().save_pretrained(folder)
    command("lab", "kernel", f"hf:{folder}", "--text", DECLARATION, "--tokens", 6, "--samples", 5, "--out", out)
    body = json.loads((out / "kernel.json").read_text())
    assert body["samples"] == {DECLARATION.name: 5}
    loaded = load_model(f"hf:{folder}")
    direct = kernel_assumptions(loaded.model, loaded.text_batches(DECLARATION, tokens=6, limit=5))
    (row,) = body["summary"]
    assert row["kernel_negative"]["mean"] == pytest.approx(direct.samples["kernel_negative"].mean(), rel=1e-5)
    assert row["weights_asymmetry"]["mean"] == pytest.approx(direct.weights_asymmetry.mean(), rel=1e-5)


def test_wrong_options_are_named(runs, command):
    command, even = partial(command, "lab", "kernel"), runs / "even-seed0"
    for words, call in {
        "no models": partial(kernel_study, {}),
        "bare ViT, without the tokenizer": partial(kernel_study, {"a": vit}, text="a.txt"),
        "needs --text": partial(command, even, "--tokens", 8),
        "the same name: even-seed0, even-seed0": partial(command, even, even / "model.safetensors"),
    }.items():
        with pytest.raises(AcutanceError, match=words):
            call()
