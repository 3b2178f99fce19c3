"""Small random attention problems: an operator, and the same thing in NumPy for the oracles."""

from dataclasses import dataclass
from functools import cache

import metric_oracles as oracles
import numpy as np
import torch
from torch import Tensor

from acutance.attention.operator import AttentionOperator

KERNELS = ("softmax", "symmetric", "rbf", "linear", "polynomial")
MASKS = ("none", "keys", "rows", "entries", "causal", "causal keys", "bias")
BATCH, HEADS, TOKENS, WIDTH = 2, 4, 6, 3
# Every kernel with every mask; every second one with grouped queries.
COMBINATIONS = [
    (kernel, mask, HEADS if (i + j) % 2 else HEADS // 2)
    for i, kernel in enumerate(KERNELS)
    for j, mask in enumerate(MASKS)
    if mask != "bias" or kernel not in ("linear", "polynomial")
]


@dataclass(frozen=True)
class World:
    A: AttentionOperator
    logs: np.ndarray  # log of the raw kernel, −inf where masked
    symmetric_logs: np.ndarray  # the same with q := k
    u: Tensor  # (batch, heads, tokens, width)
    v: Tensor  # (batch, key heads, tokens, width)
    rows: Tensor  # a query mask (batch, tokens)

    @property
    def weights(self):
        return oracles.normalised(self.logs)

    def per_head(self, function):
        """function(b, h) for every sample and head, as a tensor."""
        batch, heads = self.logs.shape[:2]
        return torch.tensor([[function(b, h) for h in range(heads)] for b in range(batch)], dtype=torch.float64)


@cache
def world(kernel="softmax", mask="none", key_heads=HEADS, sharpness=1.0) -> World:
    generator = torch.Generator().manual_seed(hash_of(kernel, mask, key_heads))

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q = sharpness * random(BATCH, HEADS, TOKENS, WIDTH)
    k = sharpness * random(BATCH, key_heads, TOKENS, WIDTH)
    given = mask_of(mask, generator)
    causal = mask.startswith("causal")
    A = AttentionOperator(q, k, mask=given, causal=causal, kernel=kernel)
    four_axes = given[:, None, None, :] if given is not None and given.ndim == 2 else given
    options = {
        "kernel": kernel,
        "mask": None if four_axes is None else four_axes.numpy(),
        "causal": causal,
    }
    keys_as_queries = np.repeat(k.numpy(), HEADS // key_heads, axis=1)
    return World(
        A,
        oracles.log_kernel_matrix(q.numpy(), k.numpy(), **options),
        oracles.log_kernel_matrix(keys_as_queries, k.numpy(), **options),
        u=random(BATCH, HEADS, TOKENS, WIDTH),
        v=random(BATCH, key_heads, TOKENS, WIDTH),
        rows=torch.tensor([[True, False, True, True, False, True], [False, False, True, True, True, True]]),
    )


def mask_of(kind, generator):
    if kind.endswith("keys"):  # padding on the left: with causality the first rows see nothing
        return torch.tensor([[False, True, True, True, True, True], [False, False, True, False, True, True]])
    if kind == "rows":  # one row of zeros
        mask = torch.rand(1, 1, TOKENS, TOKENS, generator=generator) > 0.3
        mask[..., 2, :] = False
        return mask
    if kind == "entries":
        mask = torch.rand(BATCH, HEADS, TOKENS, TOKENS, generator=generator) > 0.3
        mask[1, 2] = False  # a head that sees nothing at all
        return mask
    if kind == "bias":
        bias = torch.randn(BATCH, HEADS, TOKENS, TOKENS, generator=generator, dtype=torch.float64)
        bias[..., 1, 3] = -torch.inf
        bias[..., 4, :] = -torch.inf
        return bias
    return None


def hash_of(*parts):
    """A seed that is the same in every process."""
    return sum(ord(c) * 31**i for i, c in enumerate(repr(parts))) % 2**32
