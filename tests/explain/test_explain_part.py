"""explain reads one stack of a model that has several."""

import pytest
import torch
from torch import nn

import acutance as ac
from acutance.errors import AcutanceError


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Transformer(16, 2, 2, 2, 32, batch_first=True).eval()


def test_a_part_is_read_by_weights_and_by_data(model):
    with pytest.raises(AcutanceError, match=r"several stacks of layers .*part='encoder'"):
        ac.explain(model, progress=False)
    alone, part = (ac.explain(m, part=p, progress=False) for m, p in ((model.encoder, None), (model, "encoder")))
    assert part.layers[1].heads == pytest.approx(alone.layers[1].heads)
    assert part.context["part"] == "encoder"
    batch = {"src": torch.randn(3, 5, 16), "tgt": torch.randn(3, 7, 16)}
    assert ac.explain(model, [batch], part="decoder", progress=False).context["samples"] == 3


def test_the_decoders_own_padding_counts(model):
    src, tgt = torch.randn(3, 5, 16), torch.randn(3, 7, 16)
    padding = torch.zeros(3, 7, dtype=torch.bool)
    padding[:, 5:] = True
    padded = {"src": src, "tgt": tgt, "tgt_key_padding_mask": padding, "src_key_padding_mask": padding[:, :5]}
    found = [ac.explain(model, [b], part="decoder", progress=False) for b in (padded, {"src": src, "tgt": tgt[:, :5]})]
    one, other = (spectrum.layers[1].dominance.mu_min_by_sample for spectrum in found)
    assert one == pytest.approx(other, abs=1e-5)


def test_a_sample_without_tokens_is_refused(model):
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[1] = True
    with pytest.raises(AcutanceError, match="sample 2 of a batch has no token that counts"):
        ac.explain(model.encoder, [{"src": torch.randn(3, 5, 16), "src_key_padding_mask": padding}], progress=False)
