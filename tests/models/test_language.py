import pytest
import torch
from small_models import seeded, words

import acutance as ac
from acutance.errors import AcutanceError
from acutance.models import LanguageModel


def test_parameters_are_those_of_the_paper():
    with torch.device("meta"):
        model = LanguageModel(mitigation="neutreno:0.4")
    counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
    embeddings = {"embed.weight", "softmax.bias", "softmax.cluster_weight", "softmax.cluster_bias"}
    assert sum(count for name, count in counts.items() if name not in embeddings) == 9_480_192
    assert (counts["embed.weight"], sum(counts.values())) == (267_735 * 128, 44_018_394)
    biased = [f"{part}.{kind}" for part in ("norm1", "norm2", "mlp.fc1", "mlp.fc2") for kind in ("weight", "bias")]
    names = ["attn.qkv.weight", "attn.proj.weight", *biased]
    assert set(counts) - embeddings == {f"blocks.{layer}.{name}" for layer in range(16) for name in names}
    assert model.blocks[0].attn.qkv.weight.shape == (384, 128)


@pytest.mark.parametrize("cutoffs", [(5, 9, 16), ()])
def test_words_may_miss_every_cluster_and_be_those_after_the_last_tokens_only(cutoffs):
    model = seeded("language", cutoffs=cutoffs).eval()
    logs = model.log_probabilities(words())
    torch.testing.assert_close(model(words(), torch.zeros(3, 7, dtype=torch.int64)), -logs[..., 0])
    whole = model(words(), words(seed=1))
    torch.testing.assert_close(model(words(), words(seed=1)[:, -2:]), whole[:, -2:])


def test_in_bfloat16_the_loss_is_summed_in_float32():
    model = seeded("language", dtype=torch.float32, spread=0.1).eval()
    expected = model(words(), words(seed=1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(words(), words(seed=1))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


def test_measured_explained_and_mitigated_through_its_sites():
    model = seeded("language").eval()
    assert [site.name for site in ac.sites.find(model)] == [f"blocks.{i}.attn" for i in range(3)]
    assert ac.sites.special_tokens(model).front == 0
    assert ac.sites.final_norm(model) is model.blocks[-1].norm2
    profile = ac.measure(model, [words()], metrics="all", tap=["block", "attention", "values", "final"], progress=False)
    assert {reading.layer for reading in profile.readings if reading.tap == "block"} == {0, 1, 2, 3}
    assert ac.explain(model, [words()], progress=False).layers[2].dominance is not None
    plain = model(words())
    with ac.mitigate(model, "neutreno:0.4"):
        assert torch.equal(model(words()), seeded("language", "neutreno:0.4").eval()(words()))
        assert model.config.mitigation == "neutreno:0.4"
    with pytest.raises(AcutanceError, match="the future"), ac.mitigate(model, "featscale"):
        model(words())
    assert torch.equal(model(words()), plain)
    assert model.config.mitigation is None
