"""The steps that are timed: training and inference on fixed random data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from acutance.attention.kernels import packed
from acutance.lab.bench.timing import Step


def compiled(model: nn.Module, mode: str) -> Any:
    """By `torch.compile` in this mode; `eager` is as it is."""
    return model if mode == "eager" else torch.compile(model, dynamic=False, mode=mode)


def training_step(
    model: nn.Module,
    inputs: Sequence[Tensor],
    loss_of: Callable[[Any], Tensor],
    *,
    mode: str = "eager",
    dtype: torch.dtype = torch.float32,
) -> Step:
    """Forward in autocast, backward and fused AdamW, with no wait for the device in between."""
    device = inputs[0].device.type
    model = model.to(inputs[0].device).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
    run = compiled(model, mode)

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()  # the models take turns: none may count on another's memory
        with torch.autocast(device, dtype=dtype, enabled=dtype != torch.float32):
            loss = loss_of(run(*inputs))
        loss.backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    return step


def inference_step(
    model: nn.Module, inputs: Sequence[Tensor], *, mode: str = "eager", dtype: torch.dtype = torch.float32
) -> Step:
    """A forward pass without gradients in autocast."""
    device = inputs[0].device.type
    model = model.to(inputs[0].device).eval()
    run = compiled(model, mode)

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad(), torch.autocast(device, dtype=dtype, enabled=dtype != torch.float32):
            run(*inputs)

    return step


def without_fused_kernel() -> AbstractContextManager[Any]:
    """Inside, the reference models compute attention by the operator, as they do where the kernel is not available."""
    return mock.patch.object(packed, "is_available", _never)


def unfused(step: Step) -> Step:
    """The step with the kernel off in every call: compiled code is guarded on which function decides."""

    def run() -> None:
        with without_fused_kernel():
            step()

    return run


def _never(_qkv: Tensor, _heads: int, _kv_heads: int | None = None) -> bool:
    return False
