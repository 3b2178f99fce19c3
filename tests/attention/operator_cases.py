"""What the operator tests share: a NumPy float64 oracle written from the formulas, and the sweep's cases."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from acutance.attention.operator import AttentionOperator

KERNELS = ("softmax", "symmetric", "rbf", "linear", "polynomial")
EXPONENTIAL = KERNELS[:3]
MASKINGS = ("none", "keys", "full", "causal", "causal+keys")


def oracle(
    q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float, kernel: str
) -> tuple[np.ndarray, np.ndarray]:
    """The matrix and its log row sums, row by row: loops over batch, heads and queries, nothing shared."""
    q_, k_ = q.detach().double().numpy(), k.detach().double().numpy()
    batch, heads, queries, _ = q_.shape
    keys = k_.shape[-2]
    weights, sums = np.zeros((batch, heads, queries, keys)), np.zeros((batch, heads, queries))
    seen = np.ones((batch, heads, queries, keys), dtype=bool)
    bias = np.zeros((batch, heads, queries, keys))
    if mask is not None and mask.dtype == torch.bool:
        array = mask.numpy()
        seen &= np.broadcast_to(array[:, None, None, :] if array.shape == (batch, keys) else array, seen.shape)
    elif mask is not None:
        bias = bias + mask.double().numpy()
    for b, h, i in np.ndindex(batch, heads, queries):
        keys_of_head = k_[b, h // (heads // k_.shape[1])]
        query = keys_of_head[i] if kernel == "symmetric" else q_[b, h, i]
        row = seen[b, h, i].copy()
        if causal:
            row &= np.arange(keys) <= i + keys - queries
        value = kernel_oracle(query, keys_of_head, scale, kernel) * np.exp(bias[b, h, i]) * row
        sums[b, h, i] = value.sum()
        if value.sum() > 0:
            weights[b, h, i] = value / value.sum()
    with np.errstate(divide="ignore"):
        return weights, np.log(sums)


def kernel_oracle(query: np.ndarray, keys: np.ndarray, scale: float, kernel: str) -> np.ndarray:
    if kernel in ("softmax", "symmetric"):
        return np.exp(scale * keys @ query)
    if kernel == "rbf":
        return np.exp(-scale * ((keys - query) ** 2).sum(-1) / 2)
    if kernel == "linear":
        return elu_plus_one(keys) @ elu_plus_one(query)
    assert kernel == "polynomial"
    return (1 + scale * keys @ query) ** 2


def elu_plus_one(x: np.ndarray) -> np.ndarray:
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


@dataclass
class Case:
    kernel: str
    q: Tensor
    k: Tensor
    x: Tensor
    y: Tensor
    mask: Tensor | None
    causal: bool

    @property
    def options(self) -> dict[str, Any]:
        return {"mask": self.mask, "causal": self.causal, "kernel": self.kernel}

    @property
    def operator(self) -> AttentionOperator:
        return AttentionOperator(self.q, self.k, **self.options)

    def with_heads(self, x: Tensor) -> Tensor:
        heads = self.q.size(1)
        return torch.stack([x[:, h // (heads // x.size(1))] for h in range(heads)], dim=1)


def make_case(
    kernel: str,
    masking: str = "none",
    grouped: bool = False,
    *,
    tokens: int = 11,
    width: int = 6,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    sharpness: float = 1.5,
) -> Case:
    """A random problem; with a mask, some rows of it see nothing at all."""
    generator = torch.Generator().manual_seed(len(kernel) + 7 * len(masking) + 3 * grouped)
    batch, heads, key_heads = 2, 4, 2 if grouped else 4

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)

    mask = None
    if "keys" in masking:
        mask = torch.rand(batch, tokens, generator=generator) > 0.4
        mask[0, 0] = False  # causal: the first row of this sequence sees nothing
        mask[:, 3] = True
    if masking == "full":
        mask = torch.rand(batch, heads, tokens, tokens, generator=generator) > 0.3
        mask[0, 1, 2] = False
    return Case(
        kernel,
        q=sharpness * draw(batch, heads, tokens, width),
        k=draw(batch, key_heads, tokens, width),
        x=draw(batch, key_heads, tokens, width),
        y=draw(batch, heads, tokens, width),
        mask=None if mask is None else mask.to(device),
        causal="causal" in masking,
    )


sweep = pytest.mark.parametrize(
    "case",
    [
        pytest.param((kernel, masking, grouped), id=f"{kernel}-{masking}-{'grouped' if grouped else 'equal'}")
        for kernel in KERNELS
        for masking in MASKINGS
        for grouped in (False, True)
    ],
)
"""Parametrises `case` over kernels × masks × grouped heads, as arguments of `make_case`."""


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.operation = 0, "none"

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            # What is expanded without a copy occupies nothing.
            if isinstance(leaf, Tensor) and 0 not in leaf.stride() and leaf.numel() > self.elements:
                self.elements, self.operation = leaf.numel(), str(function)
        return out


@contextmanager
def assert_tensors_below(elements: int) -> Iterator[None]:
    with LargestTensor() as record:
        yield
    assert 0 < record.elements < elements, f"{record.operation} made {record.elements} elements"


def assert_close(actual: Tensor, expected: Tensor | np.ndarray, tolerance: float = 1e-11) -> None:
    expected = torch.as_tensor(expected).to(actual.device)
    torch.testing.assert_close(actual.to(expected.dtype), expected, atol=tolerance, rtol=tolerance)
