"""v⁰ and v must be of the same tokens: right, or refused, whatever the model does with its tokens."""

import warnings

import pytest
import tiny_models as models
import torch
import transformers
from tiny_models import DIM, HEADS, Made, encoder, left_alone
from torch import nn

import acutance as ac

TOKENS = 9
ORDER = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(0))


def reading(self, x):
    y = self.norm1(x)
    return x + self.attn(y if self.inside is None else y[:, self.inside])


def through(self, x):
    for block in self.blocks:
        x = block(x)
        x = x if block.after is None else x[:, block.after]
    return x


def shuffling(*options):
    """Blocks that may read their tokens in another order, and give fewer or moved ones."""
    blocks = nn.ModuleList()
    for each in options:
        attention = models.separate_attention(models.sdpa, heads=HEADS, key_heads=HEADS, width=DIM // HEADS)
        blocks.append(models.block(attention, reading))
        blocks[-1].inside, blocks[-1].after = each.get("inside"), each.get("after")
    return Made(through, blocks=blocks)


@pytest.fixture
def x():
    return torch.randn(2, TOKENS, DIM, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("blocks", "is_moved"),
    [
        ([{}, {}, {}], False),
        ([{"inside": ORDER}, {"inside": ORDER}], False),  # all layers alike: v⁰ and v are of the same tokens
        ([{"after": ORDER}, {}], True),
        ([{"after": ORDER.flip(0)}, {"after": ORDER}, {"inside": ORDER}], True),
        ([{}, {}, {"inside": ORDER}], True),
    ],
)
def test_tokens_that_change_places_are_found_in_the_first_pass(x, blocks, is_moved):
    model = shuffling(*blocks)
    ac.mitigate(model, "neutreno:0.4")
    for _ in range(2):  # a refusal goes on
        if is_moved:
            with pytest.raises(ac.AcutanceError, match=r"blocks\.\d\.attn stand in another order"):
                model(x)
        else:
            assert model(x).isfinite().all()
    assert not any(part._forward_hooks for block in model.blocks for part in (block.norm1, block.attn.out_proj))


def test_tokens_that_are_alike_or_come_first_stand_where_they_stood(x):
    model = shuffling({}, {}, {})
    ac.mitigate(model, "neutreno:0.4")
    assert model(x[:, :1].expand(-1, TOKENS, -1)).isfinite().all()
    tokens_first = encoder(norm_first=True, batch_first=False, dtype=torch.float32)
    ac.mitigate(tokens_first, "neutreno:0.4")
    assert tokens_first(x.transpose(0, 1)).isfinite().all()


@pytest.mark.parametrize("kept", [slice(0, 4), slice(5, TOKENS)])
def test_dropped_tokens_are_refused_in_every_pass(x, kept):
    model = shuffling({"after": kept}, {})
    ac.mitigate(model, "neutreno:0.4")
    for _ in range(2):
        with pytest.raises(ac.errors.ShapeError, match=r"\(2, 2, 9, 6\).*\(2, 2, 4, 6\)"):
            model(x)


TEXT = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
TEXT |= {"intermediate_size": 48, "vocab_size": 99, "sliding_window": 6}


@torch.no_grad()
def test_a_merged_attention_is_pulled_to_the_decoders_own_values():
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    vision |= {"image_size": 32, "patch_size": 8}
    encoder = {"text_config": TEXT, "vision_config": vision, "boi_token_index": 90, "eoi_token_index": 91}
    config = transformers.T5Gemma2Config(encoder=encoder | {"image_token_index": 92}, decoder=TEXT, eoi_token_index=91)
    torch.manual_seed(0)
    model = transformers.T5Gemma2ForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2)
    attentions = [layer.self_attn for layer in model.model.decoder.layers]
    values, outputs = {}, {}
    for i, attention in enumerate(attentions):  # W_V is called for the decoder's tokens first, then for the encoder's
        attention.v_proj.register_forward_hook(lambda _, __, v, i=i: values.update({i: values.get(i, v)}))
        attention.o_proj.register_forward_pre_hook(lambda _, given, i=i: outputs.__setitem__(i, given[0]))
    tokens = torch.randint(5, 80, (1, 17), generator=torch.Generator().manual_seed(0))
    fed = {"input_ids": tokens[:, :10], "decoder_input_ids": tokens[:, 10:], "use_cache": False}
    model(**fed)
    plain = outputs[1]
    ac.mitigate(model, ac.NeuTRENO(0.4), part="model.decoder", layers=[2])
    model(**fed)
    term = (0.4 * (values[0] - values[1])).view(1, 7, 2, 8).repeat_interleave(2, dim=2).flatten(2)
    torch.testing.assert_close(outputs[1] - plain, term)
    generated = [model.generate(tokens, max_new_tokens=8, do_sample=False, use_cache=cache) for cache in (True, False)]
    assert torch.equal(*generated)


def test_heads_of_other_widths_are_refused_when_mitigate_is_called():
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 0}
    sizes = {"global_head_dim": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 99}
    model = transformers.Gemma4TextModel(
        transformers.Gemma4TextConfig(**TEXT | kinds | sizes | {"num_hidden_layers": 4})
    )
    match = r"2 heads of 16 channels.*has 2 of 8.*layers=\[1, 3\]"
    with left_alone(model), pytest.raises(ac.AcutanceError, match=match):
        ac.mitigate(model, "neutreno:0.4")
    ac.mitigate(model, "neutreno:0.4", layers=[1, 3])
    assert model(torch.randint(5, 90, (2, 10))).last_hidden_state.isfinite().all()


@pytest.mark.parametrize(
    ("depth", "spec", "layers", "said"),
    [
        (1, "neutreno:0.4", None, "no other attention layer"),
        (3, "neutreno:0.4", [1], "in layer 1 alone"),
        (3, "neutreno:0.4+attnscale", [1], "Name later layers"),
        (3, "neutreno:0.4", None, None),
        (3, "neutreno:0.4", [1, 2], None),
        (3, "neutreno:0", None, "neutreno:0.0 changes nothing"),
        (3, "none", None, "none changes nothing"),
        (3, "neutreno:0+attnscale", None, None),
        (1, "attnscale", None, None),
    ],
)
def test_what_changes_nothing_is_said(depth, spec, layers, said):
    model = encoder(depth)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ac.mitigate(model, spec, layers=layers)
    assert [said in str(warning.message) for warning in caught] == [True] * (said is not None)
