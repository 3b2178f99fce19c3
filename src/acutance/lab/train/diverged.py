"""Where a NaN or an infinity comes from: the weights, the batch, or the first module that puts one out."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from acutance.errors import NonFiniteError


class DivergedError(NonFiniteError):
    """The loss or the weights stopped being numbers; the message says at which step, where, and what is left."""


def nonfinite_names(tensors: Mapping[str, Tensor]) -> list[str]:
    """Which of them hold a NaN or an infinity."""
    return [name for name, value in tensors.items() if _nonfinite(value)]


def locate(model: nn.Module, forward: Callable[[], Tensor]) -> str:
    """Run a forward pass that gives the loss, look at every module, and say where it first goes wrong."""
    names = {module: name for name, module in model.named_modules()}
    found: list[str] = []

    def look_in(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not found and _nonfinite(inputs):
            found.append("in the batch, before any module has seen it")

    def look_out(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if not found and _nonfinite(output):
            found.append(f"in the output of {_described(names[module], module)}")

    handles = [model.register_forward_pre_hook(look_in)]
    handles += [module.register_forward_hook(look_out) for module in names]
    try:
        with torch.no_grad():
            loss = forward()
    finally:
        for handle in handles:
            handle.remove()
    if found:
        return found[0]
    if _nonfinite(loss):
        return f"in the loss itself: every module of the {type(model).__name__} puts out finite numbers"
    return "nowhere: replayed from the last good checkpoint, the step gives finite numbers (a race on the device?)"


def _described(name: str, module: nn.Module) -> str:
    """A module as `layer 4 (blocks.3.attn.proj, Linear)`: paths count from 0, layers from 1."""
    kind = type(module).__name__
    number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    if number is None:
        return f"{name or 'the model'} ({kind})"
    return f"layer {int(number[1]) + 1} ({name}, {kind})"


def _nonfinite(value: Any) -> bool:
    tensors = (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point())
    return any(not bool(tensor.isfinite().all()) for tensor in tensors)
