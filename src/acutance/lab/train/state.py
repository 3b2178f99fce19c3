"""What a run carries from step to step: weights, optimiser and running mean, whole whatever they are sharded over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from acutance.errors import AcutanceError
from acutance.lab.train.checkpoint import Tensors
from acutance.lab.train.ema import Ema

MODEL, OPTIMISER, EMA = "model.safetensors", "optimiser.safetensors", "ema.safetensors"


@dataclass
class TrainState:
    """Saved gathered, so that a run can go on with another number of processes or another strategy.

    Every process calls `gather` and `restore`: sharded tensors need all of them.
    """

    model: nn.Module
    optimiser: Optimizer
    ema: Ema | None

    def gather(self) -> dict[str, dict[str, Tensor]]:
        """All tensors on the CPU, as one process would have them."""
        moments = {
            f"{name}/{key}": value
            for name, parameter in self._optimised()
            for key, value in self.optimiser.state.get(parameter, {}).items()
        }
        parts = {MODEL: _gathered(dict(persistent(self.model))), OPTIMISER: _gathered(moments)}
        return parts if self.ema is None else {**parts, EMA: _gathered(self.ema.mean)}

    def restore(self, tensors: Tensors) -> None:
        """Take over what `gather` gave."""
        restore_model(self.model, tensors[MODEL])
        self._restore_optimiser(tensors[OPTIMISER])
        if self.ema is not None:
            if EMA not in tensors:
                raise AcutanceError(
                    "the checkpoint has no running mean of the weights: leave loop.ema unset, as it was"
                )
            _copy(self.ema.mean, tensors[EMA])

    def _restore_optimiser(self, tensors: Mapping[str, Tensor]) -> None:
        """Through `load_state_dict`, which knows where each optimiser keeps its counters."""
        state: dict[int, dict[str, Tensor]] = {}
        found: dict[str, dict[str, Tensor]] = {}
        for full_name, value in tensors.items():
            name, _, key = full_name.rpartition("/")
            found.setdefault(name, {})[key] = value
        for index, (name, parameter) in enumerate(self._optimised()):
            if name in found:
                state[index] = {key: _like(value, parameter) for key, value in found[name].items()}
        groups = self.optimiser.state_dict()["param_groups"]
        self.optimiser.load_state_dict({"state": state, "param_groups": groups})

    def _optimised(self) -> Iterator[tuple[str, Tensor]]:
        """Names and parameters in the optimiser's order."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        for group in self.optimiser.param_groups:
            yield from ((names[parameter], parameter) for parameter in group["params"])


def persistent(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, shared ones once, and the buffers that belong to the weights."""
    yield from model.named_parameters()
    saved = model.state_dict()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


def restore_model(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy whole weights into a model, sharded or not."""
    _copy(dict(persistent(model)), tensors)


def _gathered(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: _whole(value.detach()).cpu() for name, value in tensors.items()}


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


@torch.no_grad()
def _copy(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    if own.keys() != tensors.keys():
        other = sorted(own.keys() ^ tensors.keys())
        raise AcutanceError(
            f"the checkpoint is of another model: {', '.join(other[:4])}{' …' if len(other) > 4 else ''} are in one of "
            "them only. Go on with the configuration it was trained with, or start anew in another folder"
        )
    for name, value in own.items():
        if value.shape != tensors[name].shape:
            raise AcutanceError(f"{name} is {tuple(tensors[name].shape)} in the checkpoint, {tuple(value.shape)} here")
        value.copy_(_like(tensors[name], value))


def _like(value: Tensor, other: Tensor) -> Tensor:
    """Where the other is, and sharded like it if it has the same shape; a counter stays as it is."""
    if value.shape != other.shape:
        return value
    if not isinstance(other, DTensor):
        return value.to(other.device)
    return distribute_tensor(value.to(other.device), other.device_mesh, other.placements)
