"""The optimiser of a configuration, and which parameters it decays."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from acutance.train.config import OptimConfig


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


def build_optimiser(model: nn.Module, config: OptimConfig) -> Optimizer:
    """An optimiser over all parameters that are trained; on CUDA one kernel does the whole step."""
    groups = [group for group in parameter_groups(model, config.weight_decay) if group["params"]]
    fused = all(parameter.is_cuda for group in groups for parameter in group["params"])
    if config.name == "sgd":
        return torch.optim.SGD(
            groups, lr=config.lr, momentum=config.momentum, nesterov=config.momentum > 0, fused=fused
        )
    kind = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
    return kind(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)


def set_learning_rate(optimiser: Optimizer, rate: float) -> None:
    """The same rate for every group."""
    for group in optimiser.param_groups:
        group["lr"] = rate
