"""Models made of nn.MultiheadAttention: torch's own, and such as people write."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

DIM, HEADS, DEPTH, BATCH, TOKENS = 12, 2, 3, 4, 5


def shaken(module, seed=0):
    """Every parameter drawn anew, norms and biases too, and different in every layer."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3
        parameter.data.copy_(1 + noise if "norm" in name and name.endswith("weight") else noise)
    return module


def encoder(depth=DEPTH, norm=False, nested=False, dtype=torch.float64, **options):
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 16, **{"dropout": 0.0, "batch_first": True, **options})
    final = nn.LayerNorm(DIM) if norm else None
    return shaken(nn.TransformerEncoder(layer, depth, norm=final, enable_nested_tensor=nested).to(dtype))


def decoder(**options):
    layer = nn.TransformerDecoderLayer(DIM, HEADS, 16, **{"dropout": 0.0, "batch_first": True, **options})
    return shaken(nn.TransformerDecoder(layer, DEPTH).double())


def tokens(seed=1, batch=BATCH, dtype=torch.float64):
    return torch.randn(batch, TOKENS, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def inventory(model):
    """All that the modules' dictionaries say: attributes, hooks, submodules, parameters, configurations."""
    return {name: {key: repr(value) for key, value in vars(m).items()} for name, m in model.named_modules()}


def padding():
    """True where a key is padding."""
    mask = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
    mask[1, 3:] = mask[2, 4:] = True
    return mask


class Checkpointed(nn.Module):
    """Layers run through activation checkpointing."""

    def __init__(self, layers, reentrant):
        super().__init__()
        self.layers, self.reentrant = nn.ModuleList(layers), reentrant

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


class SelfAttention(nn.Module):
    """Somebody's wrapper around nn.MultiheadAttention."""

    def __init__(self, batch_first):
        super().__init__()
        self.mha = nn.MultiheadAttention(DIM, HEADS, batch_first=batch_first)

    def forward(self, x):
        return self.mha(x, x, x, need_weights=False)[0]


class Block(nn.Module):
    """A pre-norm block with LayerScale; `turn` makes it batch-first around an attention that is not."""

    def __init__(self, turn=False, batch_first=True):
        super().__init__()
        self.turn = turn
        self.norm1 = nn.LayerNorm(DIM)
        self.attention = SelfAttention(batch_first)
        self.gain = nn.Parameter(torch.ones(DIM))
        self.norm2 = nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 16), nn.ReLU(), nn.Linear(16, DIM))

    def forward(self, x):
        h = self.norm1(x)
        y = self.attention(h.transpose(0, 1)).transpose(0, 1) if self.turn else self.attention(h)
        x = x + self.gain * y
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """A backbone of blocks, with embedding, class token, final norm and head around it."""

    def __init__(self, block=Block, depth=DEPTH):
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, DIM))
        self.embed = nn.Linear(DIM, DIM)
        self.blocks = nn.Sequential(*(block() for _ in range(depth)))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, 3)

    def forward(self, x):
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), self.embed(x)], dim=1)
        return self.head(self.norm(self.blocks(x))[:, 0])


def cross_attention():
    return nn.MultiheadAttention(DIM, HEADS, batch_first=True)


class PostNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.norm = SelfAttention(True), nn.LayerNorm(DIM)

    def forward(self, x):
        return self.norm(x + self.attention(x))


class WithPositions(nn.Module):
    """As in detection Transformers: positions are added to queries and keys alone."""

    def __init__(self):
        super().__init__()
        self.attn, self.norm = nn.MultiheadAttention(DIM, HEADS, batch_first=True), nn.LayerNorm(DIM)
        self.positions = nn.Parameter(torch.ones(TOKENS, DIM))

    def forward(self, x):
        h = self.norm(x)
        q = self.positions + h
        return x + self.attn(q, q, h)[0]
