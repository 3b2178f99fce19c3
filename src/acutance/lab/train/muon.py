"""Muon (https://kellerjordan.github.io/posts/muon/) for the matrices inside the blocks, AdamW for everything else.

A matrix moves by its momentum made nearly orthogonal, so that all directions move alike. `torch.optim.Muon` does so one
matrix after another, a few dozen launches each; here the matrices of one shape, upright or lying, go together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # lift small singular values fast; the result's lie around 1, not at 1
ITERATIONS = 5
# The root mean square of a direction's entries, which is AdamW's: one rate for both (https://arxiv.org/abs/2502.16982).
AS_ADAMW = 0.2

Pairs = list[tuple[Tensor, Tensor]]  # weights, and what they are moved by


class Muon(AdamW):
    """AdamW whose groups with `pieces` hold matrices that are moved by Muon.

    `pieces` says how many projections a matrix holds one below the other, as a joint one of queries, keys and values
    does: each is moved by itself.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Move the matrices, then all the others."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for of_one_shape in self._gathered():
            self._move(of_one_shape)
        for group in self._groups():
            for parameter in group["params"]:
                parameter.grad = None  # AdamW leaves alone what has none
        super().step()
        return loss

    def _groups(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group.get("pieces")]

    def _gathered(self) -> list[Pairs]:
        """All matrices shrunk by their decay, with their momenta, those of one shape or its transpose together."""
        found: dict[tuple[int, ...], Pairs] = {}
        for group in self._groups():
            moved = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not moved:
                continue
            grads = [parameter.grad for parameter in moved]
            momenta = [self._momentum(parameter) for parameter in moved]
            torch._foreach_lerp_(momenta, grads, 1 - MOMENTUM)
            torch._foreach_lerp_(grads, momenta, MOMENTUM)  # Nesterov's look ahead
            torch._foreach_mul_(moved, _scalar(1 - self._rate() * group["weight_decay"]))
            for parameter, grad in zip(moved, grads, strict=True):
                for pair in zip(parameter.chunk(group["pieces"]), grad.chunk(group["pieces"]), strict=True):
                    found.setdefault(tuple(sorted(pair[0].shape)), []).append(pair)
        return list(found.values())

    def _move(self, pairs: Pairs) -> None:
        lying = [(weight, grad) for weight, grad in pairs if weight.shape[0] <= weight.shape[1]]
        upright = [(weight, grad) for weight, grad in pairs if weight.shape[0] > weight.shape[1]]
        directions = orthogonal(torch.stack([grad for _, grad in lying] + [grad.mT for _, grad in upright]))
        directions = directions * _scalar(self._rate() * (AS_ADAMW * directions.shape[-1] ** 0.5))
        ours, turned = directions.split([len(lying), len(upright)])
        # In the weights' layout, or each would be moved by a launch of its own.
        moves = [*ours.unbind(), *turned.mT.contiguous().unbind()]
        torch._foreach_sub_([weight for weight, _ in lying + upright], moves)

    def _rate(self) -> Tensor:
        """In float32, where it is on the device and where it is not: a recorded step gives the same bits."""
        rate = self.param_groups[0]["lr"]
        return rate if isinstance(rate, Tensor) else torch.tensor(rate, dtype=torch.float32)

    def _momentum(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
            state["step"] = torch.zeros(())  # AdamW looks for a counter wherever there is a state
        found: Tensor = state["momentum"]
        return found


def _scalar(value: Tensor) -> Any:
    """A number of the host as one, so that it goes to any device; one on the device stays there."""
    return value if value.is_cuda else value.item()


def orthogonal(matrices: Tensor) -> Tensor:
    """(count, rows, columns), at most as many rows as columns, with all singular values near 1, by products alone."""
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.to(matrices.dtype)


def pieces_of(name: str, parameter: nn.Parameter) -> int:
    """How many projections a matrix that Muon moves holds; 0 for all else.

    Muon moves the matrices inside the blocks, not embeddings, heads or what a mitigation learns.
    """
    inside = any(part in name for part in ("blocks.", "layers.")) and ".mitigation." not in name
    if parameter.ndim != 2 or not inside:
        return 0
    module, made, _ = name.partition(".parametrizations.")  # where a mitigation makes W_V, the others alone
    pieces = {"qkv": 3, "kv": 2}.get(module.split(".")[-1 if made else -2], 1)
    return pieces - 1 if made else pieces
