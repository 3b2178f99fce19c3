"""Helpers of the operator tests: the formulas written out in float64, and the sweep's cases."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from acutance import AttentionOperator

KERNELS = ("softmax", "symmetric", "rbf", "linear", "polynomial")
MASKINGS = ("none", "keys", "full", "causal", "causal+keys")


def formula(q, k, mask=None, causal=False, kernel="softmax", scale=0, sink=None, softcap=None):
    """The matrix and its log row sums, as a whole, in plain autograd and float64."""
    q, k, scale = q.double(), with_heads(k.double(), q.size(1)), scale or q.size(-1) ** -0.5
    q = k if kernel == "symmetric" else q
    if kernel in ("softmax", "symmetric"):
        logits = scale * q @ k.mT
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    elif kernel == "rbf":
        logits = -scale * (q[:, :, :, None] - k[:, :, None]).square().sum(-1) / 2
    elif kernel == "linear":
        logits = ((F.elu(q) + 1) @ (F.elu(k) + 1).mT).log()
    else:
        logits = (1 + scale * q @ k.mT).square().log()
    bias = torch.zeros_like(logits)
    if mask is not None:
        is_of_keys = mask.dtype == torch.bool and mask.shape == (k.size(0), k.size(-2))
        mask = mask[:, None, None, :] if is_of_keys else mask
        bias = bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask
    if causal:
        seen = torch.ones_like(logits, dtype=torch.bool).tril(k.size(-2) - q.size(-2))
        bias = bias.masked_fill(~seen, -torch.inf)
    top = bias.detach().amax(-1, keepdim=True)
    nothing = top == -torch.inf
    top = top.masked_fill(nothing, 0)
    logits = (logits + (bias - top)).masked_fill(nothing, 0)  # a low number in a whole row would round logits away
    sums = logits.logsumexp(-1, keepdim=True)
    weights = (logits - sums).exp().masked_fill(nothing, 0)
    sums = (sums + top).masked_fill(nothing, -torch.inf)
    weights = weights if sink is None else weights * torch.sigmoid(sums - sink.double()[:, None, None])
    return weights, sums.squeeze(-1)


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def with_heads(x, heads):
    return torch.stack([x[:, h // (heads // x.size(1))] for h in range(heads)], dim=1)


class Case(NamedTuple):
    kernel: str
    q: Tensor
    k: Tensor
    x: Tensor
    y: Tensor
    mask: Tensor | None
    causal: bool

    options = property(lambda self: {"mask": self.mask, "causal": self.causal, "kernel": self.kernel})
    operator = property(lambda self: AttentionOperator(self.q, self.k, **self.options))
    expected = property(lambda self: formula(self.q, self.k, **self.options))
    values = property(lambda self: with_heads(self.x.double(), self.q.size(1)))  # x, with the heads of the queries


def make_case(
    kernel, masking="none", grouped=False, *, tokens=11, width=6, dtype=torch.float64, device="cpu", sharpness=1.5
):
    """A random problem. With a bool mask, some rows see nothing."""
    generator = torch.Generator().manual_seed(len(kernel) + 7 * len(masking) + 3 * grouped)
    batch, heads, key_heads = 2, 4, 2 if grouped else 4

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)

    mask = draw(batch, heads, tokens, tokens) if masking == "bias" else None
    if "keys" in masking:
        mask = torch.rand(batch, tokens, generator=generator) > 0.4
        mask[0, 0] = False  # causal: the first row of this sequence sees nothing
        mask[:, 3] = True
    if masking == "full":
        mask = torch.rand(batch, heads, tokens, tokens, generator=generator) > 0.3
        mask[0, 1, 2] = False
    q, k, x, y = (draw(batch, h, tokens, width) for h in (heads, key_heads, key_heads, heads))
    return Case(kernel, sharpness * q, k, x, y, None if mask is None else mask.to(device), "causal" in masking)


# Parametrises `case` over kernels × masks × grouped heads, as arguments of `make_case`.
SWEEP = [(kernel, masking, grouped) for kernel in KERNELS for masking in MASKINGS for grouped in (False, True)]
sweep = pytest.mark.parametrize("case", SWEEP, ids=["-".join(map(str, case)) for case in SWEEP])


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor any operation returns, and all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.operation, self.operations = 0, "none", []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        self.operations.append(function)
        for leaf in tree_leaves(out):
            # A tensor expanded without a copy takes no memory.
            if isinstance(leaf, Tensor) and 0 not in leaf.stride() and leaf.numel() > self.elements:
                self.elements, self.operation = leaf.numel(), str(function)
        return out


@contextmanager
def assert_tensors_below(elements: int) -> Iterator[None]:
    with LargestTensor() as record:
        yield
    assert 0 < record.elements < elements, f"{record.operation} made {record.elements} elements"


def assert_close(actual: Tensor, expected: Any, tolerance: float = 1e-11) -> None:
    expected = torch.as_tensor(expected).to(actual.device)
    torch.testing.assert_close(actual.to(expected.dtype), expected, atol=tolerance, rtol=tolerance)


def assert_same_gradients(mine: Tensor, theirs: Tensor, inputs: list[Tensor], tolerance: float = 1e-10) -> None:
    """Equal values, and equal gradients along a random direction."""
    direction = torch.randn(mine.shape, dtype=mine.dtype, generator=torch.Generator().manual_seed(1))
    assert_close(mine, theirs.detach(), tolerance / 10)
    own, other = (
        torch.autograd.grad(result, inputs, direction, allow_unused=True, retain_graph=True)
        for result in (mine, theirs)
    )
    torch.testing.assert_close(own, other, rtol=tolerance, atol=tolerance)


def assert_is_matrix(A: AttentionOperator, expected: Any, x: Tensor, y: Tensor, inputs: Any = ()) -> None:
    """Products, entries and row sums of A are those of the matrix, and so are their gradients."""
    weights, sums = expected
    seen, found = sums > -torch.inf, A.logsumexp()
    assert torch.equal(found > -torch.inf, seen)
    pairs = [(found[seen], sums[seen]), (A.dense(), weights)]
    pairs += [(A @ x, weights @ with_heads(x, A.heads)), (A.T @ y, weights.mT @ y)]
    if A.shape[-2] == A.shape[-1]:
        pairs.append((A.diagonal(), weights.diagonal(dim1=-2, dim2=-1)))
    for mine, theirs in pairs:
        if inputs:
            assert_same_gradients(mine, theirs, inputs)
        else:
            assert_close(mine, theirs)


def assert_same_set(actual: Tensor, expected: np.ndarray, tolerance: float) -> None:
    """Equal as multisets: every eigenvalue is paired with a distinct one."""
    for mine, theirs in zip(actual.reshape(-1, actual.size(-1)), expected.reshape(-1, expected.shape[-1]), strict=True):
        left = list(theirs)
        for value in mine.tolist():
            nearest = min(left, key=lambda other: abs(other - value))
            assert abs(nearest - value) < tolerance
            left.remove(nearest)
