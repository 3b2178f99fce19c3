"""Blocks told by structure alone: what is not one residual stream of the samples' tokens is refused, by name."""

import hf_zoo
import pytest
import torch
from tiny_models import Made, left_alone
from torch import nn
from torch.nn.functional import layer_norm

import acutance as ac
from acutance import metrics
from acutance.errors import AcutanceError, ShapeError

IDS = torch.randint(5, 55, (3, 12), generator=torch.Generator().manual_seed(0))


class Mixer(Made):
    """A block without any attention."""

    def __init__(self, run=lambda self, x: x + self.linear(self.norm(x)).mean(1, keepdim=True)):
        super().__init__(run, norm=nn.LayerNorm(16), linear=nn.Linear(16, 16))


def branch():
    return Mixer(lambda self, x: self.linear(self.norm(x)))


def twofold():
    return Mixer(lambda self, x: (x + self.linear(self.norm(x)), x.mean(1, keepdim=True)))


def stack(run, kind=Mixer, between=None):
    return Made(run, blocks=nn.ModuleList(kind() for _ in range(3)), between=between)


def one_after_another(model, x, step=lambda block, x: block(x)):
    for block in model.blocks:
        x = step(block, x)
        x = x if model.between is None else model.between(x)
    return x


def two_streams(model, x):
    a, b = x[:, :5], x[:, 5:]
    for block in model.blocks:
        a, b = b, block(a)
    return torch.cat([a, b], dim=1)


def features_added_at_the_end(model, x):
    features = []
    for block in model.blocks:
        x = block(x)
        features.append(x)
    return torch.stack(features).sum(0) + features[0] + features[-1]


def tokens(rows=2, count=10):
    return torch.randn(rows, count, 16, generator=torch.Generator().manual_seed(0))


def measured(model, *batches, **options):
    return ac.measure(model, batches, **{"metrics": ["token_cosine"], "progress": False, **options})


REFUSED = {
    "swapped": (
        *(Mixer, lambda model, x: one_after_another(model, x.transpose(0, 1))),
        r"blocks\.0 \(Mixer\) is given \(10, 2, 16\), whose first axis is not the batch",
    ),
    "windows": (
        *(Mixer, lambda model, x: one_after_another(model, x.unflatten(1, (2, -1)).flatten(0, 1))),
        r"blocks\.0 \(Mixer\) is given \(4, 5, 16\), whose first axis is not the batch",
    ),
    "side by side": (
        *(Mixer, lambda model, x: sum(block(x) for block in model.blocks)),
        r"blocks\.1 \(Mixer\) is given \(2, 10, 16\), which does not come from .* blocks\.0",
    ),
    "two streams": (Mixer, two_streams, r"blocks\.1 \(Mixer\) is given \(2, 5, 16\), which does not come from"),
    "residual outside": (
        *(branch, lambda model, x: one_after_another(model, x, lambda block, x: x + block(x))),
        r"what blocks\.0 gives, \(2, 10, 16\), is added to earlier tokens outside",
    ),
    "residual before a norm": (
        *(branch, lambda model, x: one_after_another(model, x, lambda block, x: x + block(layer_norm(x, (16,))))),
        r"what blocks\.1 gives, \(2, 10, 16\), is added to earlier tokens outside",
    ),
    "first of several": (
        *(twofold, lambda model, x: one_after_another(model, x, lambda block, x: block(x)[0])),
        r"blocks\.0 \(Mixer\) returns several tensors .*\(2, 10, 16\), \(2, 1, 16\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_stream_of_tokens_is_refused_and_leaves_no_hook(case):
    kind, run, match = REFUSED[case]
    model = stack(run, kind)
    with left_alone(model), pytest.raises(AcutanceError, match=match):
        measured(model, tokens())


def merge(self, x):
    """Two tokens into one, behind a norm."""
    x = self.norm(x)
    return self.linear(x.unflatten(1, (-1, 2)).flatten(2)) if x.shape[1] % 2 == 0 else x


BETWEEN = [
    *(None, nn.LayerNorm(16)),
    Made(lambda self, x: x + self.conv(x.mT).mT, conv=nn.Conv1d(16, 16, 3, padding=1)),  # positions, as in Twins
    Made(merge, norm=nn.LayerNorm(16), linear=nn.Linear(32, 16)),
]


@pytest.mark.parametrize("between", BETWEEN)
def test_norms_positions_and_merging_may_stand_between_blocks(between):
    model, stream = stack(one_after_another, between=between), []
    for block in model.blocks:
        block.register_forward_hook(lambda _block, _args, out: stream.append(out))
    model(tokens())
    profile = measured(model, tokens())
    assert profile.context["samples"] == 2
    assert measured(stack(features_added_at_the_end), tokens()).layers("token_cosine") == [0, 1, 2, 3]
    assert profile["token_cosine"][1:] == pytest.approx([metrics.token_cosine(x).mean().item() for x in stream[:3]])


def test_as_many_samples_as_tokens_do_not_tell_which_is_which():
    model = stack(one_after_another)
    with pytest.raises(ShapeError, match=r"\(10, 10, 16\), so which axis is the batch is not clear.*another size"):
        measured(model, tokens(10))
    assert measured(model, tokens(2), tokens(10)).context["samples"] == 12  # told by the first batch


def test_blocks_are_watched_in_the_first_batch_only():
    seen = []

    def run(model, x):
        seen.append(sum(len(block._forward_hooks) for block in model.blocks))
        return one_after_another(model, x)

    measured(stack(run), tokens(), tokens(), tokens())
    assert seen == [6, 3, 3]


@pytest.mark.parametrize(
    ("name", "sizes", "match"),
    [
        ("XLNet", {"d_model": 32, "n_layer": 3, "n_head": 4, "d_inner": 64}, r"XLNetLayer\) is given \(12, 3, 32\)"),
        ("XLM", {"emb_dim": 32, "n_layers": 2, "n_heads": 4}, r"ffns\.0 gives, \(3, 12, 32\), is added"),
        ("SqueezeBert", hf_zoo.TEXT | {"embedding_size": 32}, "nothing was read: no block .* was called as a module"),
    ],
)
def test_models_of_other_structure_are_refused(name, sizes, match):
    with pytest.raises(AcutanceError, match=match):
        measured(hf_zoo.tiny(f"{name}Model", **sizes), {"input_ids": IDS})


def test_lists_of_lists_are_read_layer_by_layer():
    sizes = {"block_sizes": [2, 2], "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64}
    model = hf_zoo.tiny("FunnelBaseModel", **sizes)
    hidden = model(IDS, output_hidden_states=True).hidden_states
    expected = [metrics.token_cosine(x).mean().item() for x in hidden]
    assert measured(model, {"input_ids": IDS})["token_cosine"] == pytest.approx(expected)


def test_where_keys_are_not_known_what_needs_them_says_so():
    model, batch = hf_zoo.tiny("DebertaModel", **hf_zoo.TEXT), {"input_ids": IDS}
    with pytest.raises(AcutanceError, match="the symmetric kernel needs the keys"):
        measured(model, batch, tap="block", metrics="all")
    assert len(measured(model, batch, metrics=["attention_entropy"]).readings) == 3
    assert measured(model, batch).context["samples"] == 3


def test_choices_and_views_are_samples_of_their_own():
    model = hf_zoo.tiny("BertForMultipleChoice", **hf_zoo.TEXT)
    assert measured(model, {"input_ids": IDS.repeat(2, 1).reshape(2, 3, 12)}).context["samples"] == 6
    views = stack(lambda model, x: one_after_another(model, x.flatten(0, 1).flatten(1, 2)))
    assert measured(views, torch.randn(2, 3, 4, 2, 16)).context["samples"] == 6


def quarters(self, x):
    """Attends in each quarter of the image by itself, as MobileViT does; x is (batch, 16, 8, 8)."""
    return self.encoder(x.unfold(2, 4, 4).unfold(3, 4, 4).flatten(4).permute(0, 2, 3, 4, 1).flatten(0, 2))


def test_attention_over_parts_of_an_image_is_no_sample_either():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = Made(quarters, encoder=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    with pytest.raises(ShapeError, match=r"encoder\.layers\.0\.self_attn \(TransformerEncoderLayer\) is given \(8, 16"):
        measured(model, torch.randn(2, 16, 8, 8))
