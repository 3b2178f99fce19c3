"""The language model: counts, names, and a second, plain implementation of it, gradients included."""

import json

import pytest
import torch
from plain_language import plain_log_probabilities

import acutance as ac
from acutance.errors import AcutanceError, ShapeError
from acutance.io.loading import load_model
from acutance.models import LanguageConfig, LanguageModel

TINY = {"vocabulary": 23, "dim": 12, "depth": 4, "heads": 3, "hidden": 20, "cutoffs": (5, 9, 16)}


def words(rows=3, length=7, seed=0):
    return torch.randint(23, (rows, length), generator=torch.Generator().manual_seed(seed))


def seeded(spread=0.4, dtype=torch.float64, **options):
    """In evaluation mode, with weights far from initialisation, so that nothing is uniform and nothing vanishes."""
    torch.manual_seed(0)
    model = LanguageModel(**{**TINY, **options}).to(dtype).eval()
    for parameter in model.parameters():
        parameter.data += spread * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("mitigation", [None, "neutreno:0.4"])
def test_parameters_are_those_of_the_paper(mitigation):
    with torch.device("meta"):
        model = LanguageModel(mitigation=mitigation)
    counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
    embeddings = {"embed.weight", "softmax.bias", "softmax.cluster_weight", "softmax.cluster_bias"}
    assert sum(count for name, count in counts.items() if name not in embeddings) == 9_480_192
    assert counts["embed.weight"] == 267_735 * 128
    assert sum(counts.values()) == 44_018_394  # 44.0 M
    assert set(counts) - embeddings == {
        f"blocks.{layer}.{name}"
        for layer in range(16)
        for name in [
            *("attn.qkv.weight", "attn.proj.weight"),
            *(f"norm{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias")),
            *(f"mlp.fc{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias")),
        ]
    }
    assert model.blocks[0].attn.qkv.weight.shape == (384, 128)


@pytest.mark.parametrize("cutoffs", [(5, 9, 16), (22,), ()])
@pytest.mark.parametrize(
    ("mitigation", "strength"),
    [(None, 0.0), ("neutreno:0.4", 0.4), ("neutreno:0.4,learn=layer", 0.0), ("neutreno:0.4,learn=head", 0.0)],
)
def test_equals_the_plain_model_with_all_gradients(mitigation, strength, cutoffs):
    model = seeded(mitigation=mitigation, cutoffs=cutoffs)
    text = words(length=8)
    tokens, targets = text[:, :-1], text[:, 1:]
    state = {name: tensor.detach().clone().requires_grad_() for name, tensor in model.state_dict().items()}
    plain = plain_log_probabilities(state, tokens, heads=3, cutoffs=cutoffs, strength=strength)
    torch.testing.assert_close(model.log_probabilities(tokens), plain, rtol=1e-10, atol=1e-10)
    expected = -plain.gather(-1, targets[..., None]).squeeze(-1)
    found = model(tokens, targets)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    direction = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    (found * direction).sum().backward()
    (expected * direction).sum().backward()
    for name, parameter in model.named_parameters():
        assert torch.count_nonzero(state[name].grad), name
        torch.testing.assert_close(
            parameter.grad, state[name].grad, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("cutoffs", [(5, 9, 16), ()])
def test_probabilities_sum_to_one_even_where_no_word_falls_into_a_cluster(cutoffs):
    model = seeded(cutoffs=cutoffs)
    torch.testing.assert_close(model.log_probabilities(words()).exp().sum(-1), torch.ones(3, 7, dtype=torch.float64))
    common = torch.zeros(3, 7, dtype=torch.int64)
    expected = -model.log_probabilities(words())[..., 0]
    torch.testing.assert_close(model(words(), common), expected)


@pytest.mark.parametrize("mitigation", [None, "neutreno:0.4", "attnscale"])
def test_the_future_is_not_seen(mitigation):
    model = seeded(mitigation=mitigation)
    features = model.forward_features(words())
    changed = words()
    changed[:, 4:] = (changed[:, 4:] + 1) % 23
    torch.testing.assert_close(model.forward_features(changed)[:, :4], features[:, :4], rtol=0, atol=1e-12)
    assert not torch.allclose(model.forward_features(changed)[:, 4:], features[:, 4:])


def test_featscale_would_see_the_future_and_is_refused():
    with pytest.raises(AcutanceError, match="the future"):
        seeded(mitigation="featscale")(words())


def test_targets_of_the_last_tokens_only():
    model = seeded()
    whole = model(words(), words(seed=1))
    assert torch.equal(model(words(), words(seed=1)[:, -2:]), whole[:, -2:])


def test_zero_strength_is_the_plain_model_bit_for_bit():
    assert torch.equal(seeded(mitigation="neutreno:0")(words()), seeded()(words()))


@pytest.mark.parametrize("mitigation", ["neutreno:0.4", "neutreno:0.4,learn=head"])
def test_gradient_checkpointing_changes_nothing(mitigation):
    model = seeded(mitigation=mitigation, dropout=0.3).train()

    def gradients():
        model.zero_grad()
        torch.manual_seed(5)
        model(words(), words(seed=1)).mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = gradients()
    model.set_grad_checkpointing()
    torch.testing.assert_close(gradients(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_compiled_it_has_the_same_gradients():
    model = seeded(mitigation="neutreno:0.4", depth=2)
    model(words(), words(seed=1)).mean().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    torch._dynamo.reset()
    torch.compile(model, backend="aot_eager")(words(), words(seed=1)).mean().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], expected, rtol=1e-10, atol=1e-12)


def test_in_bfloat16_the_loss_is_summed_in_float32():
    model = seeded(dtype=torch.float32, spread=0.1)
    expected = model(words(), words(seed=1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(words(), words(seed=1))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


def test_measured_explained_and_mitigated_through_its_sites():
    model = seeded()
    assert [site.name for site in ac.sites.find(model)] == [f"blocks.{i}.attn" for i in range(4)]
    assert ac.sites.special_tokens(model).front == 0
    assert ac.sites.final_norm(model) is model.blocks[-1].norm2
    profile = ac.measure(model, [words()], metrics="all", tap=["block", "attention", "values", "final"], progress=False)
    assert {reading.layer for reading in profile.readings if reading.tap == "block"} == {0, 1, 2, 3, 4}
    assert ac.explain(model, [words()], progress=False).layers[3].dominance is not None
    plain = model(words())
    with ac.mitigate(model, "neutreno:0.4"):
        assert torch.equal(model(words()), seeded(mitigation="neutreno:0.4")(words()))
        assert model.config.mitigation == "neutreno:0.4"
    assert torch.equal(model(words()), plain)
    assert model.config.mitigation is None


def test_its_records_hold_causal_operators():
    model, records = seeded(mitigation="neutreno:0.4"), []
    with ac.sites.find(model)[2].observe(records.append):
        model(words())
    assert records[0].A.causal
    assert not records[0].A.dense().triu(1).any()


def test_saved_and_loaded(tmp_path):
    model = seeded(mitigation="neutreno:0.4,learn=head", mitigation_layers=(2, 3), dtype=torch.float32)
    path = ac.save(model, tmp_path / "language.safetensors")
    again = ac.load(path).eval()
    assert again.config == model.config
    assert torch.equal(again(words()), model(words()))
    assert len(ac.explain(load_model(str(path)).model, progress=False).layers) == 4


def test_the_configuration_survives_json():
    config = LanguageConfig(**TINY, mitigation="neutreno:0.4", mitigation_layers=[2, 1])
    again = LanguageConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert LanguageModel(**config.to_dict()).config == config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cutoffs": (20_000, 40_000)}, r"stay below the vocabulary of 23: \(\) is a plain softmax"),
        ({"cutoffs": (9, 5)}, "must grow"),
        ({"heads": 5}, "cannot be shared out among 5 heads"),
        ({"dim": 9}, "dim 9 must be even"),
        ({"hidden": 0}, "hidden must be at least 1"),
    ],
)
def test_impossible_choices_are_refused(options, message):
    with pytest.raises(AcutanceError, match=message):
        LanguageModel(**{**TINY, **options})


def test_wrong_shapes_are_named():
    model = seeded()
    with pytest.raises(ShapeError, match=r"tokens \(7,\)"):
        model(words()[0])
    with pytest.raises(ShapeError, match=r"targets \(3, 8\) are not the words after tokens \(3, 7\)"):
        model(words(), words(length=8))
