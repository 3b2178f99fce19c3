from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from acutance.attention.operator import AttentionOperator
from acutance.mitigations.projection import Projection, Projections
from acutance.models import ViT
from acutance.sites import AttentionSite, find
from attention.operator_cases import assert_same_set
from measure.measured_vit import small_vit as any_vit
from sites.tiny_models import recorded

DIM = 12
small_vit = partial(any_vit, patch_size=4, dim=DIM)


def set_branch(model: ViT, layer: int, H: Tensor) -> None:
    """W_V = I and W_proj = Hᵀ in the paper's letters; layer 1 is the first."""
    attention = model.blocks[layer - 1].attn
    with torch.no_grad():
        attention.qkv.weight[-DIM:] = torch.eye(DIM)
        attention.proj.weight.copy_(H)


class BareSite(AttentionSite):
    """A site that is only weights, of any shape: grouped queries, any inner width, with or without a norm."""

    mitigation = None

    def __init__(self, dim: int, heads: int, kv_heads: int, head_dim: int, norm: nn.Module | None = None) -> None:
        self.layer, self.name = 1, "bare"
        self.dim, self.heads, self.kv_heads, self.head_dim, self.norm = dim, heads, kv_heads, head_dim, norm
        generator = torch.Generator().manual_seed(dim + heads + kv_heads)
        self.value = torch.randn(kv_heads * head_dim, dim, dtype=torch.float64, generator=generator) / dim**0.5
        self.projection = torch.randn(dim, heads * head_dim, dtype=torch.float64, generator=generator) / dim**0.5

    def projections(self) -> Projections:
        layers = []
        for weight in (self.value, self.projection):
            layers.append(nn.Linear(*reversed(weight.shape), bias=False))
            layers[-1].weight = nn.Parameter(weight, requires_grad=False)
        return Projections(None, None, *map(Projection, layers))

    def pre_norm(self) -> nn.Module | None:
        return self.norm

    observe = replace = None  # abstract


def random_layer(shape: tuple[int, int, int, int], shift: float) -> BareSite:
    """A random layer with its spectrum shifted, as far as its rank allows."""
    site = BareSite(*shape)
    inverse = torch.linalg.pinv(site.value).unflatten(1, (site.kv_heads, site.head_dim))
    group = site.heads // site.kv_heads
    site.projection = 0.4 * site.projection + shift / group * inverse.repeat_interleave(group, dim=1).flatten(1)
    return site


def head_matrices(site: AttentionSite) -> list[np.ndarray]:
    """H_h, each dim × dim, by the plain definition."""
    value, projection, size = site.value_weight().numpy(), site.projection_weight().numpy(), site.head_dim
    group = site.heads // site.kv_heads
    return [
        projection[:, h * size : (h + 1) * size] @ value[h // group * size : (h // group + 1) * size]
        for h in range(site.heads)
    ]


def layer_modes(site: AttentionSite, A: AttentionOperator) -> tuple[float, np.ndarray]:
    """The largest |eigenvalue| of I + Σ_h H_h⊗A_h: on constant tokens, and per sample on tokens up to a constant.

    This is the exact value. `explain` approximates it by |1 + λμ|, with λ of the whole H and μ of each A_h.
    """
    H, tokens = head_matrices(site), A.shape[-1]
    basis = np.linalg.qr(np.column_stack([np.ones(tokens), np.eye(tokens)[:, 1:]]))[0][:, 1:]  # zero mean
    layers = [
        sum(np.kron(h, basis.T @ a @ basis) for h, a in zip(H, sample, strict=True)) for sample in A.dense().numpy()
    ]
    constant, varying = (np.abs(1 + np.linalg.eigvals(M)).max(-1) for M in (sum(H), np.array(layers)))
    return float(constant), varying


def assert_same_eigenvalues(found: np.ndarray, H: np.ndarray, atol: float = 1e-7) -> None:
    assert_same_set(torch.from_numpy(found.reshape(1, -1)), np.linalg.eigvals(H)[None], atol)


def watch(model: ViT, images: torch.Tensor) -> tuple[dict, dict]:
    """The attention record of every layer, and the tokens before and after it."""
    stream = {}
    for layer, block in enumerate(model.blocks, 1):
        block.register_forward_hook(lambda _, args, out, layer=layer: stream.update({layer: (args[0], out[0])}))
    with torch.no_grad():
        _, records = recorded(lambda: model.eval()(images), find(model))
    return dict(enumerate(records, 1)), stream
