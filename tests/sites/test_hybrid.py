"""Models of which not every block attends: all blocks are read, and layers are those of the model."""

import pytest
import torch
from torch import nn

import acutance as ac
from acutance import metrics, sites
from acutance.errors import AcutanceWarning

SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"intermediate_size": 48, "vocab_size": 60, "pad_token_id": 0}
JAMBA = {"attn_layer_period": 4, "attn_layer_offset": 3, "use_mamba_kernels": False, "num_experts": 2}
HYBRID = {  # the options, and the layers that attend
    "Jamba": (JAMBA, [4]),
    "Lfm2": ({"layer_types": ["conv", "full_attention"] * 2}, [2, 4]),
}


@pytest.fixture(params=HYBRID)
def hybrid(request):
    import transformers

    options, layers = HYBRID[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, f"{request.param}Config")(**SIZES, **options)
    return getattr(transformers, f"{request.param}Model")(config).eval(), layers


def test_every_block_is_read_and_attention_where_there_is_one(hybrid):
    model, attending = hybrid
    ids = torch.randint(3, 60, (2, 9))
    profile = ac.measure(
        model, [ids], metrics=["token_cosine", "attention_entropy"], tap=["block", "attention"], progress=False
    )
    assert profile.layers("token_cosine", "block") == [0, 1, 2, 3, 4]
    assert profile.layers("token_cosine", "attention") == profile.layers("attention_entropy") == attending
    stream = model(ids, output_hidden_states=True).hidden_states
    # the library's own last state has gone through the final norm
    expected = [metrics.token_cosine(x).mean().item() for x in stream[:-1]]
    assert profile["token_cosine", "block"][:-1] == pytest.approx(expected)


def test_mitigations_count_the_layers_that_attend(hybrid):
    model, attending = hybrid
    assert [site.layer for site in sites.find(model)] == list(range(1, len(attending) + 1))
    with ac.mitigate(model, "attnscale") as handle:
        assert handle.layers == tuple(range(1, len(attending) + 1))


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x):
        return x + self.attention(x, x, x)[0]


class Convolving(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv1d(16, 16, 3, padding=1)

    def forward(self, x):
        return x + self.convolution(x.transpose(1, 2)).transpose(1, 2)


def test_what_stands_between_the_blocks_and_is_unlike_them_is_named():
    model = nn.Sequential(Attending(), Convolving(), nn.LayerNorm(16), Attending(), nn.Linear(16, 3))
    with pytest.warns(AcutanceWarning, match=r"not read, and not among the layers by number: 1, between"):
        profile = ac.measure(model, [torch.randn(2, 5, 16)], metrics="token_cosine", progress=False)
    assert profile.layers("token_cosine") == [0, 1, 2]
