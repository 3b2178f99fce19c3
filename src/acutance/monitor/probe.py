"""What keeps a reading apart from the training around it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from acutance.errors import AcutanceError

SEED = 0


def fixed_copy(probe: Any) -> Any:
    """The probe's own tensors, so that nobody can change them in the course of a training."""
    if isinstance(probe, (tuple, list)) and probe:
        return fixed_copy(probe[0])
    if isinstance(probe, Mapping) and any(isinstance(value, Tensor) for value in probe.values()):
        return {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in probe.items()}
    if isinstance(probe, Tensor) and probe.numel():
        return probe.detach().clone()
    raise AcutanceError(
        "the monitor needs a probe, one batch to read the model on: a tensor, a (tensor, …) tuple or a mapping of "
        f"arguments such as next(iter(loader)), not {type(probe).__name__}"
    )


def fitted(probe: Any, model: nn.Module) -> Any:
    """The probe on the model's device, its floating numbers in the model's dtype."""
    weights = next(model.parameters())

    def fit(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        both = value.is_floating_point() and weights.is_floating_point()
        return value.to(weights.device, weights.dtype if both else None)

    return {k: fit(v) for k, v in probe.items()} if isinstance(probe, Mapping) else fit(probe)


@contextmanager
def own_randomness() -> Iterator[None]:
    """Seeded inside, so that a model that draws at evaluation draws the same each time; outside, nothing was drawn."""
    cuda = torch.cuda.is_initialized()
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 # the global one
    devices = torch.cuda.get_rng_state_all() if cuda else []
    try:
        random.seed(SEED)
        np.random.seed(SEED)  # noqa: NPY002
        torch.default_generator.manual_seed(SEED)
        if cuda:
            torch.cuda.manual_seed_all(SEED)
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(devices)


@contextmanager
def autocast_seen(model: nn.Module, device: torch.device) -> Iterator[list[str | None]]:
    """The autocast dtype the model's parts really ran in, first part first: its forward may enter one of its own."""
    seen: list[str | None] = []

    def look(module: nn.Module, _args: object) -> None:
        if module is not model and not seen:
            on = torch.is_autocast_enabled(device.type)
            seen.append(str(torch.get_autocast_dtype(device.type)).removeprefix("torch.") if on else None)

    hook = register_module_forward_pre_hook(look)
    try:
        yield seen
    finally:
        hook.remove()
