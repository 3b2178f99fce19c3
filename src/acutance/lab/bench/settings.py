"""What all groups of `acutance bench` share: the device, the pace, and the steps that are timed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from acutance.attention.kernels import packed
from acutance.lab.bench.results import Row
from acutance.lab.bench.timing import Pace, Step


@dataclass(frozen=True)
class Settings:
    """Where and how long; on the CPU everything has toy size and nothing is compiled."""

    device: str
    quick: bool = False
    max_autotune: bool = False  # timm's ViT in that mode of torch.compile too

    @property
    def options(self) -> str:
        return " --quick" * self.quick + " --max-autotune" * self.max_autotune

    @property
    def on_gpu(self) -> bool:
        return torch.device(self.device).type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.on_gpu else torch.float32

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def modes(self) -> tuple[str, ...]:
        """Of `torch.compile`, in the order in which they are tried; the memory is read in the first."""
        return ("default", "reduce-overhead") if self.on_gpu else ("eager",)

    @property
    def baseline_modes(self) -> tuple[str, ...]:
        """Those of the baseline, which is to be as fast as it can be."""
        return (*self.modes, "max-autotune") if self.max_autotune and self.on_gpu else self.modes

    def pace(self, *, steps: int = 12, refresh: int = 2, repetitions: int = 7, calls: int = 1) -> Pace:
        """So often on a GPU, a third of it when quick, and as little as can be on the CPU."""
        if not self.on_gpu:
            return Pace(repetitions=2, steps=1, warm_up=1, refresh=0, calls=calls)
        if self.quick:  # of two repetitions there would be no spread: rather four shorter ones
            repetitions, steps = min(repetitions, 4), -(-steps // 2)
        return Pace(repetitions, steps, warm_up=2 * refresh + 1, refresh=refresh, calls=calls)


@dataclass(frozen=True)
class Table:
    """Rows under one title; `rows` gives all it has so far, again and again."""

    title: str
    rows: Callable[[], Iterable[list[Row]]]


def free() -> None:
    """Compiled code, the pools of CUDA graphs and cached memory of what came before."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def training_step(
    model: nn.Module,
    inputs: Sequence[Tensor],
    loss_of: Callable[[Any], Tensor],
    *,
    mode: str = "eager",
    dtype: torch.dtype = torch.float32,
) -> Step:
    """Forward in autocast, backward and fused AdamW, with no wait for the device in between."""
    model = model.to(inputs[0].device).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=inputs[0].is_cuda)
    loss = _forward(model, inputs, loss_of, mode, dtype)

    def step() -> None:
        loss().backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    return step


def inference_step(
    model: nn.Module, inputs: Sequence[Tensor], *, mode: str = "eager", dtype: torch.dtype = torch.float32
) -> Step:
    """A forward pass without gradients in autocast."""
    model = model.to(inputs[0].device).eval()
    return torch.no_grad()(_forward(model, inputs, lambda out: out, mode, dtype))


def _forward(
    model: nn.Module, inputs: Sequence[Tensor], then: Callable[[Any], Any], mode: str, dtype: torch.dtype
) -> Callable[[], Any]:
    """The model in autocast, by `torch.compile` in this mode; `eager` is as it is."""
    run: Any = model if mode == "eager" else torch.compile(model, dynamic=False, mode=mode)

    def call() -> Any:
        torch.compiler.cudagraph_mark_step_begin()  # the models take turns: none may count on another's memory
        with torch.autocast(inputs[0].device.type, dtype=dtype, enabled=dtype != torch.float32):
            return then(run(*inputs))

    return call


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
