"""Models of other libraries: a norm behind the attention, and an H of lower rank than the tokens have channels."""

import numpy as np
import pytest
import torch

from acutance import sites
from acutance.errors import AcutanceWarning
from acutance.explain import explain

pytest.importorskip("transformers")


def decoder(family, **options):
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 48, "vocab_size": 60, "head_dim": 8, "pad_token_id": 0}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes, **options)
    model = getattr(transformers, f"{family}Model")(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def steps(block):
    """What enters the block, and what is handed to the second half of it, or to its norm."""
    seen = {}
    block.register_forward_pre_hook(lambda _, args, kwargs: seen.update(start=args[0]), with_kwargs=True)
    norm = getattr(block, "pre_feedforward_layernorm", None)
    inner = block.mlp if norm is None else norm
    inner.register_forward_pre_hook(lambda _, args: seen.update(middle=args[0]))
    return seen


@pytest.mark.parametrize("family", ["Gemma2", "Gemma3Text", "Olmo2", "Llama"])
def test_what_is_added_is_what_the_model_adds(family):
    model, ids = decoder(family), torch.randint(3, 60, (2, 7))
    site = sites.find(model)[1]
    if family == "Llama":
        site.block.pre_feedforward_layernorm = site.block.post_attention_layernorm  # under the name `steps` looks for
        seen = steps(site.block)
        del site.block.pre_feedforward_layernorm
    else:
        seen = steps(site.block)
    records = []
    with site.observe(records.append), torch.no_grad():
        model(ids)
        assert (site.post_norm() is None) == (family == "Llama")
        torch.testing.assert_close(site.update(records[0].branch), seen["middle"] - seen["start"], rtol=1e-5, atol=1e-6)


def test_a_norm_behind_the_attention_is_warned_of():
    with pytest.warns(AcutanceWarning, match="normalises what its attention adds"):
        explain(decoder("Gemma2"))


def test_zeros_of_a_lower_rank_are_no_eigenvalues_to_count():
    layer = explain(decoder("Llama"))[1]
    assert len(layer.eigenvalues) == 32
    assert len(layer.spectrum) == 16  # two value heads of eight channels
    site = sites.find(decoder("Llama"))[0]
    gain = site.pre_norm_gain().detach()
    value = (site.value_weight() * gain).detach().unflatten(0, (2, 8)).repeat_interleave(2, 0).flatten(0, 1)
    whole = torch.linalg.eigvals(site.projection_weight().detach() @ value).numpy()
    learnt = whole[np.abs(whole) > 1e-9]
    assert layer.negative_share == pytest.approx((learnt.real < 0).mean())
