"""Which modules of a model are its layers, and which rows and tokens are samples: right, refused or said."""

import warnings

import pytest
import torch
import transformers
from torch import nn

import acutance as ac
from sites.tiny_models import Made

DIM = 16


class Block(Made):
    def __init__(self, dim=DIM):
        run = lambda self, x: x + self.fc(self.norm(x)).tanh() + x.mean(1, keepdim=True)  # noqa: E731
        super().__init__(run, norm=nn.LayerNorm(dim), fc=nn.Linear(dim, dim))


class Chunk(nn.ModuleList):
    """As DINOv2 cuts its blocks into chunks, with identities in place of those of other chunks."""

    def forward(self, x):
        return nn.Sequential(*self)(x)


def several(kind, count, *sizes):
    return nn.Sequential(*(kind(*sizes) for _ in range(count)))


def chunked():
    return nn.Sequential(*(Chunk([nn.Identity()] * 3 * place + [*several(Block, 3)]) for place in range(4)))


def staged():
    """Four lists side by side, with fewer and wider tokens from one to the next."""

    def run(self, x):
        for stage in range(4):
            x = getattr(self, f"stage{stage}")(x if stage == 0 else self.merge[stage - 1](x[:, ::2]))
        return x

    stages = {f"stage{n}": several(Block, depth, DIM * 2**n) for n, depth in enumerate((2, 2, 6, 2))}
    merge = nn.ModuleList(nn.Linear(DIM * 2**stage, DIM * 2 ** (stage + 1)) for stage in range(3))
    return Made(run, **stages, merge=merge)


def coders(first, second):
    """An encoder and a decoder, each of a kind, number and width of blocks."""
    both = (Made(lambda self, x: self.blocks(x), blocks=several(*blocks)) for blocks in (first, second))
    run = lambda self, x: self.decoder(self.encoder(x)[..., : (*second, DIM)[2]])  # noqa: E731
    return Made(run, **dict(zip(("encoder", "decoder"), both, strict=True)))


def layers_of(model, x, part=None):
    """The mean cosine by layer, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        profile = ac.measure(model, [x], metrics=["token_cosine"], tap="block", part=part, progress=False)
    return profile["token_cosine"], [str(warning.message) for warning in caught]


X = torch.randn(3, 16, DIM, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("make", [chunked, staged])
@torch.no_grad()
def test_every_block_is_a_layer_and_nothing_else_is(make):
    model, seen = make(), [X]
    found, warned = layers_of(model, X)
    for module in model.modules():
        if isinstance(module, Block):
            module.register_forward_hook(lambda *given: seen.append(given[-1]))
    model(X)
    assert found == pytest.approx([ac.metrics.token_cosine(tokens).mean().item() for tokens in seen], abs=1e-6)
    assert len(found) == 1 + 12
    assert all("merge" in words for words in warned)  # which is as large as these small blocks


def test_blocks_elsewhere_are_named():
    model = coders((Block, 4), (Block, 2))
    with pytest.raises(ac.AcutanceError, match=r"encoder\.blocks, decoder\.blocks.*part='encoder'"):
        layers_of(model, X)
    assert len(layers_of(model, X, part="decoder")[0]) == 1 + 2


@pytest.mark.parametrize("width", [DIM, 2])  # a decoder may be far smaller
def test_a_list_of_other_blocks_is_said_to_be_left_out(width):
    found, (warned,) = layers_of(coders((Block, 4), (type("Other", (Block,), {}), 2, width)), X)
    assert len(found) == 1 + 4
    assert "not counted as layers: decoder.blocks" in warned


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 5, 7), "whose first axis is not the batch"),
        ((2, 5, 7), "whose first axis is not the batch"),
        ((5, 5, 7), "which axis is the batch is not clear"),
    ],
)
def test_rows_of_an_alignment_are_no_samples(shape, message):
    """(batch, rows, columns) as (rows, columns, batch, channels) inside, like ESM's MSA Transformer."""
    run = lambda self, ids: self.blocks(self.embed(ids).permute(1, 2, 0, 3))  # noqa: E731
    model = Made(run, embed=nn.Embedding(9, DIM), blocks=several(Block, 3))
    with pytest.raises(ac.errors.ShapeError, match=message):
        layers_of(model, torch.randint(0, 9, shape))


@torch.no_grad()
@pytest.mark.parametrize("form", ["tensor", "mapping", "with a mask"])
def test_padding_that_a_model_adds_inside_does_not_count(form):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.LongformerConfig(**sizes, vocab_size=99, attention_window=32, max_position_embeddings=70)
    torch.manual_seed(0)
    model = transformers.LongformerModel(config).eval()
    ids, mask = torch.randint(5, 90, (2, 20)), torch.ones(2, 20, dtype=torch.long)
    mask[1, 15:] = 0 if form == "with a mask" else 1
    batch = {"tensor": ids, "mapping": {"input_ids": ids}}.get(form, {"input_ids": ids, "attention_mask": mask})
    found = ac.measure(model, [batch], metrics=["token_cosine"], tap="block", progress=False)["token_cosine"]
    states = model(ids, attention_mask=mask, output_hidden_states=True).hidden_states
    assert found == pytest.approx([ac.metrics.token_cosine(x, mask.bool()).mean().item() for x in states], abs=1e-5)
