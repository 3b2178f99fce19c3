"""Where a NaN or an infinity comes from: the weights, the batch, or the first module that puts one out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from acutance.errors import NonFiniteError


class DivergedError(NonFiniteError):
    """The loss or the weights stopped being numbers; the message says at which step, where, and what is left."""


def nonfinite_names(tensors: Mapping[str, Tensor]) -> list[str]:
    """Which of them hold a NaN or an infinity."""
    return [name for name, value in tensors.items() if value.is_floating_point() and not bool(value.isfinite().all())]


def locate(model: nn.Module, forward: Callable[[], Tensor]) -> str:
    """Run a forward pass with a look at every module, and say in words where it first goes wrong.

    Args:
        model: the module whose parts are watched; it is called in `forward`, uncompiled.
        forward: gives the loss.
    """
    with torch.no_grad(), _watched(model) as found:
        loss = forward()
    if found:
        return found[0]
    if bool(loss.isfinite().all()):
        return "nowhere: replayed from the last good checkpoint, the step gives finite numbers (a race on the device?)"
    return f"in the loss itself: every module of the {type(model).__name__} puts out finite numbers"


@contextmanager
def _watched(model: nn.Module) -> Iterator[list[str]]:
    names = {module: name for name, module in model.named_modules()}
    found: list[str] = []

    def look_in(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not found and module is model and _any_nonfinite(inputs):
            found.append("in the batch, before any module has seen it")

    def look_out(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if not found and _any_nonfinite(output):
            found.append(f"in the output of {describe(names[module], module)}")

    handles = [model.register_forward_pre_hook(look_in)]
    handles += [module.register_forward_hook(look_out) for module in names]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def describe(name: str, module: nn.Module) -> str:
    """A module as `layer 4 (blocks.3.attn.proj, Linear)`: paths count from 0, layers from 1."""
    kind = type(module).__name__
    number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    if number is None:
        return f"{name or 'the model'} ({kind})"
    return f"layer {int(number[1]) + 1} ({name}, {kind})"


def _any_nonfinite(value: Any) -> bool:
    return any(t.is_floating_point() and not bool(t.isfinite().all()) for t in _tensors(value))


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _tensors(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _tensors(entry)
