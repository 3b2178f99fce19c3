"""Muon (https://kellerjordan.github.io/posts/muon/) for the matrices inside the blocks, AdamW for everything else.

A matrix moves by its momentum made nearly orthogonal, so that all directions move alike. `torch.optim.Muon` does so one
matrix after another, which costs as much as the model's own step; here the matrices of one shape go together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from acutance.errors import AcutanceError

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # lift small singular values fast; the result's lie around 1, not at 1
ITERATIONS = 5
AS_ADAMW = (
    0.2  # the entries' root mean square, which is AdamW's: both can use one rate (https://arxiv.org/abs/2502.16982)
)


class Muon(AdamW):
    """AdamW whose groups with `orthogonal` true hold matrices that are moved by Muon.

    A matrix whose rows are several projections, as in a joint one of queries, keys and values, is cut into squares.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Move the matrices, then all the others."""
        for group in self.param_groups:
            if group.get("orthogonal"):
                self._move(group)
        return super().step(closure)

    def _move(self, group: dict[str, Any]) -> None:
        moved = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not moved:
            return
        if hasattr(moved[0], "full_tensor"):
            raise AcutanceError("optim.name=muon needs whole matrices, which loop.strategy=fsdp shards: use ddp")
        grads = [parameter.grad for parameter in moved]
        momenta = [self._momentum(parameter) for parameter in moved]
        torch._foreach_lerp_(momenta, grads, 1 - MOMENTUM)
        torch._foreach_lerp_(grads, momenta, MOMENTUM)  # Nesterov's look ahead
        torch._foreach_mul_(moved, 1 - group["lr"] * group["weight_decay"])
        for parts in _of_one_shape((parameter, grad) for parameter, grad in zip(moved, grads, strict=True)):
            rows, columns = parts[0][1].shape
            directions = orthogonal(torch.stack([grad for _, grad in parts]))
            directions = directions * (group["lr"] * AS_ADAMW * max(rows, columns) ** 0.5)
            torch._foreach_sub_([weight for weight, _ in parts], list(directions.unbind()))
        for parameter in moved:
            parameter.grad = None  # AdamW leaves alone what has none

    def _momentum(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
            state["step"] = torch.zeros(())  # AdamW looks for a counter wherever there is a state
        found: Tensor = state["momentum"]
        return found


def orthogonal(matrices: Tensor) -> Tensor:
    """(count, rows, columns) with all singular values near 1, by a polynomial iteration in products of matrices."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x: Tensor = matrices.mT if tall else matrices
    if x.is_cuda:
        x = x.bfloat16()
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)


def is_orthogonal(name: str, parameter: nn.Parameter) -> bool:
    """Whether Muon moves it: the matrices of the blocks, not embeddings, heads or what a mitigation learns."""
    return parameter.ndim == 2 and ".mitigation." not in name and any(part in name for part in ("blocks.", "layers."))


def _of_one_shape(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Weights with what they are moved by, cut where a weight is several projections, gathered by shape."""
    found: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}
    for weight, grad in pairs:
        rows, columns = weight.shape
        several = rows // columns if rows in (2 * columns, 3 * columns) else 1
        for piece, direction in zip(weight.chunk(several), grad.chunk(several), strict=True):
            found.setdefault(piece.shape, []).append((piece, direction))
    yield from found.values()
