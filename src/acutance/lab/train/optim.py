"""The optimiser of a configuration, and which parameters it decays."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from acutance.errors import AcutanceError
from acutance.lab.train.config import OptimConfig
from acutance.lab.train.muon import Muon, pieces_of


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices are decayed; vectors and whatever a part's `no_weight_decay()` names are not.

    The group that is not decayed comes last. Frozen parameters are in neither.
    """
    spared = undecayed_names(model)
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (others if parameter.ndim <= 1 or name in spared else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def undecayed_names(model: nn.Module) -> set[str]:
    """Full names of what the model or a part of it wants to be spared from weight decay."""
    names: set[str] = set()
    for prefix, module in model.named_modules():
        tell = getattr(module, "no_weight_decay", None)
        if callable(tell):
            names |= {f"{prefix}.{name}" if prefix else name for name in tell()}
    return names


def build_optimiser(model: nn.Module, config: OptimConfig, *, recorded: bool = False) -> Optimizer:
    """An optimiser over all parameters that are trained; on CUDA one kernel does the whole step.

    For a step that is recorded as a CUDA graph the learning rate is on the device, where it can be changed.
    """
    groups = [group for group in parameter_groups(model, config.weight_decay) if group["params"]]
    if config.name == "muon":
        groups = _by_muon(model, groups)
    fused = all(parameter.is_cuda for group in groups for parameter in group["params"])
    rate: Any = torch.tensor(config.lr, device=groups[0]["params"][0].device) if recorded else config.lr
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=config.momentum, nesterov=config.momentum > 0, fused=fused)
    kinds: dict[str, type[torch.optim.Adam]] = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "muon": Muon}
    kind = kinds[config.name]
    return kind(groups, lr=rate, betas=config.betas, eps=config.eps, fused=fused, capturable=recorded)


def _by_muon(model: nn.Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups with the matrices that Muon moves in groups of their own."""
    pieces = {parameter: pieces_of(name, parameter) for name, parameter in model.named_parameters()}
    if any(isinstance(parameter, DTensor) for parameter in pieces):
        raise AcutanceError(
            "optim.name=muon needs whole matrices, which loop.strategy=fsdp shards: choose ddp, or optim.name=adamw"
        )
    return [
        {**group, "params": chosen, "pieces": count}
        for group in groups
        for count in (3, 2, 1, 0)
        if (chosen := [parameter for parameter in group["params"] if pieces[parameter] == count])
    ]


def set_learning_rate(optimiser: Optimizer, rate: float) -> None:
    """The same rate for every group; on the device one fill, since the groups share one tensor."""
    shared = {id(group["lr"]): group["lr"] for group in optimiser.param_groups if isinstance(group["lr"], Tensor)}
    for tensor in shared.values():
        tensor.fill_(rate)
    for group in optimiser.param_groups:
        if not isinstance(group["lr"], Tensor):
            group["lr"] = rate
