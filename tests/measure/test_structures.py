"""Models of no library: which modules are their layers, right or refused or said."""

import warnings

import pytest
import torch
from torch import nn

import acutance as ac

DIM = 16


class Block(nn.Module):
    def __init__(self, dim=DIM):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(dim), nn.Linear(dim, dim)

    def forward(self, x):
        return x + self.fc(self.norm(x)).tanh() + x.mean(1, keepdim=True)


class Other(Block):
    pass


class Chunk(nn.ModuleList):
    """As DINOv2 cuts its blocks into chunks, with identities in place of those of other chunks."""

    def forward(self, x):
        for block in self:
            x = block(x)
        return x


class Staged(nn.Module):
    """Four lists side by side, with fewer and wider tokens from one to the next."""

    def __init__(self):
        super().__init__()
        for stage, depth in enumerate((2, 2, 6, 2)):
            setattr(self, f"stage{stage}", nn.ModuleList(Block(DIM * 2**stage) for _ in range(depth)))
        self.merge = nn.ModuleList(nn.Linear(DIM * 2**stage, DIM * 2 ** (stage + 1)) for stage in range(3))

    def forward(self, x):
        for stage in range(4):
            for block in getattr(self, f"stage{stage}"):
                x = block(x)
            x = x if stage == 3 else self.merge[stage](x[:, ::2])
        return x


class Coder(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Both(nn.Module):
    def __init__(self, encoder, decoder):
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def forward(self, x):
        return self.decoder(self.encoder(x))


class Alignment(Coder):
    """(batch, rows, columns) as (rows, columns, batch, channels) inside, like ESM's MSA Transformer."""

    def __init__(self):
        super().__init__(Block() for _ in range(3))
        self.embed = nn.Embedding(9, DIM)

    def forward(self, ids):
        return super().forward(self.embed(ids).permute(1, 2, 0, 3))


def layers_of(model, x, part=None):
    """The mean cosine by layer, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        profile = ac.measure(model, [x], metrics=["token_cosine"], tap="block", part=part, progress=False)
    return profile["token_cosine"], [str(warning.message) for warning in caught]


def expected(model, x):
    """The same by hooks on every block, in the order that they run."""
    seen = [x]
    hooks = [m.register_forward_hook(lambda *a: seen.append(a[-1])) for m in model.modules() if isinstance(m, Block)]
    with torch.no_grad():
        model(x)
    for hook in hooks:
        hook.remove()
    return [ac.metrics.token_cosine(tokens).mean().item() for tokens in seen]


@pytest.fixture
def x():
    return torch.randn(3, 16, DIM, generator=torch.Generator().manual_seed(0))


def chunked():
    return nn.Sequential(*(Chunk([nn.Identity()] * 3 * i + [Block() for _ in range(3)]) for i in range(4)))


@pytest.mark.parametrize("make", [chunked, Staged])
def test_every_block_is_a_layer_and_nothing_else_is(make, x):
    model = make()
    found, warned = layers_of(model, x)
    assert found == pytest.approx(expected(model, x), abs=1e-6)
    assert len(found) == 1 + 12
    assert all("merge" in words for words in warned)  # which is as large as these small blocks


def test_blocks_elsewhere_are_named(x):
    model = Both(Coder(Block() for _ in range(4)), Coder(Block() for _ in range(2)))
    with pytest.raises(ac.AcutanceError, match=r"encoder\.blocks, decoder\.blocks.*part='encoder'"):
        layers_of(model, x)
    assert len(layers_of(model, x, part="decoder")[0]) == 1 + 2


def test_a_list_of_other_blocks_is_said_to_be_left_out(x):
    model = Both(Coder(Block() for _ in range(4)), Coder(Other() for _ in range(2)))
    found, (warned,) = layers_of(model, x)
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
    with pytest.raises(ac.errors.ShapeError, match=message):
        layers_of(Alignment(), torch.randint(0, 9, shape))
