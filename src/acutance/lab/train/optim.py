"""Learning rate, optimiser, weight decay, and the running mean of the weights."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from acutance.errors import AcutanceError
from acutance.lab.train.config import OptimConfig, ScheduleConfig

# Of Muon, beside optim.momentum.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # lift small singular values fast; the results lie around 1, not at 1
ITERATIONS = 5
# The root mean square of an update's entries. It is AdamW's, so both share a rate (https://arxiv.org/abs/2502.16982).
AS_ADAMW = 0.2


def learning_rate(config: ScheduleConfig, peak: float, step: int, steps_per_epoch: int, total_steps: int) -> float:
    """The learning rate of a step; the first step is 0. It has no state to save."""
    if config.per == "epoch":
        step -= step % steps_per_epoch
    warm = config.warmup * steps_per_epoch
    if step < warm:
        return config.start + (peak - config.start) * step / warm
    begin = 0.0 if config.warmup_inside else warm
    progress = min(1.0, (step - begin) / max(1.0, total_steps - begin))
    cosine, poly = 0.5 * (1 + math.cos(math.pi * progress)), float((1 - progress) ** config.power)
    return config.final + (peak - config.final) * {"cosine": cosine, "poly": poly, "constant": 1.0}[config.name]


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices with weight decay, then the rest without: vectors, and what a module's `no_weight_decay()` names.

    Frozen parameters are in neither group.
    """
    spared: set[str] = set()
    for prefix, module in model.named_modules():
        if callable(tell := getattr(module, "no_weight_decay", None)):
            spared |= {f"{prefix}.{name}".lstrip(".") for name in tell()}
    decayed: dict[str, Any] = {"params": [], "weight_decay": weight_decay}
    others: dict[str, Any] = {"params": [], "weight_decay": 0.0}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (others if parameter.ndim <= 1 or name in spared else decayed)["params"].append(parameter)
    return [decayed, others]


def build_optimiser(model: nn.Module, config: OptimConfig, *, graph: bool = False) -> Optimizer:
    """An optimiser over all trained parameters; on CUDA it is fused.

    For a step in a CUDA graph, the learning rate lives on the device, where it can be changed.
    """
    groups = [group for group in parameter_groups(model, config.weight_decay) if group["params"]]
    if config.name == "muon":
        groups = _muon_groups(model, groups, config.momentum)
    fused = all(parameter.is_cuda for group in groups for parameter in group["params"])
    rate: Any = torch.tensor(config.lr, device=groups[0]["params"][0].device) if graph else config.lr
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=config.momentum, nesterov=config.momentum > 0, fused=fused)
    kinds: dict[str, type[torch.optim.Adam]] = {"adamw": AdamW, "adam": torch.optim.Adam, "muon": Muon}
    return kinds[config.name](groups, lr=rate, betas=config.betas, eps=config.eps, fused=fused, capturable=graph)


def set_learning_rate(optimiser: Optimizer, rate: float) -> None:
    """The same rate for every group. On the device the groups share one tensor, so one fill is enough."""
    for shared in {group["lr"] for group in optimiser.param_groups if isinstance(group["lr"], Tensor)}:
        shared.fill_(rate)
    for group in optimiser.param_groups:
        group["lr"] = group["lr"] if isinstance(group["lr"], Tensor) else rate


def _muon_groups(model: nn.Module, groups: list[dict[str, Any]], momentum: float) -> list[dict[str, Any]]:
    """The groups, with the matrices that Muon updates in groups of their own."""
    pieces = {parameter: _muon_pieces(name, parameter) for name, parameter in model.named_parameters()}
    if any(isinstance(parameter, DTensor) for parameter in pieces):
        raise AcutanceError(
            "optim.name=muon needs whole matrices, which loop.strategy=fsdp shards: choose ddp, or optim.name=adamw"
        )
    return [
        {**group, "params": chosen, "pieces": count, "momentum": momentum}
        for group in groups
        for count in sorted(set(pieces.values()), reverse=True)
        if (chosen := [parameter for parameter in group["params"] if pieces[parameter] == count])
    ]


def _muon_pieces(name: str, parameter: nn.Parameter) -> int:
    """How many projections a matrix holds that Muon updates; 0 for all else.

    Muon updates the matrices inside the blocks, not embeddings, heads or a mitigation's parameters.
    """
    inside = any(part in name for part in ("blocks.", "layers.")) and ".mitigation." not in name
    if parameter.ndim != 2 or not inside:
        return 0
    # If a mitigation makes W_V, only the rows of the other projections are a parameter, called original0.
    joint = name.replace(".parametrizations.weight.original0", ".weight").endswith(("qkv.weight", "kv.weight"))
    return max(1, parameter.shape[0] // parameter.shape[1]) if joint else 1


class Muon(AdamW):
    """Muon (https://kellerjordan.github.io/posts/muon/) for groups with `pieces`, AdamW for everything else.

    A matrix's update is its momentum, made nearly orthogonal. `pieces` is the number of projections stacked in a
    matrix, such as a joint one for queries, keys and values; each gets its own update. Unlike `torch.optim.Muon`, this
    updates all matrices of one shape, transposed or not, at once.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the matrices, then all other parameters."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        # In float32 on the device and on the host, so that a CUDA graph gives the same bits.
        rate = torch.as_tensor(self.param_groups[0]["lr"], dtype=torch.float32)
        by_shape: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}  # weights and their momentum
        for group in self.param_groups:
            moved = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not moved or not group.get("pieces"):
                continue
            grads = [parameter.grad for parameter in moved]
            for parameter in moved:
                if not self.state[parameter]:  # AdamW looks for a counter wherever there is a state
                    self.state[parameter] = {"momentum": torch.zeros_like(parameter), "step": torch.zeros(())}
            momenta = [self.state[parameter]["momentum"] for parameter in moved]
            torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
            torch._foreach_lerp_(grads, momenta, group["momentum"])  # Nesterov's look ahead
            torch._foreach_mul_(moved, _scalar(1 - rate * group["weight_decay"]))
            for parameter, grad in zip(moved, grads, strict=True):
                parameter.grad = None  # AdamW skips parameters without a gradient
                for pair in zip(parameter.chunk(group["pieces"]), grad.chunk(group["pieces"]), strict=True):
                    by_shape.setdefault(tuple(sorted(pair[0].shape)), []).append(pair)
        for pairs in by_shape.values():
            self._move(pairs, rate)
        super().step()
        return loss

    def _move(self, pairs: list[tuple[Tensor, Tensor]], rate: Tensor) -> None:
        lying = [(weight, grad) for weight, grad in pairs if weight.shape[0] <= weight.shape[1]]
        upright = [(weight, grad) for weight, grad in pairs if weight.shape[0] > weight.shape[1]]
        directions = orthogonal(torch.stack([grad for _, grad in lying] + [grad.mT for _, grad in upright]))
        directions = directions * _scalar(rate * (AS_ADAMW * directions.shape[-1] ** 0.5))
        ours, turned = directions.split([len(lying), len(upright)])
        # In the weights' layout; otherwise each update would be a launch of its own.
        moves = [*ours.unbind(), *turned.mT.contiguous().unbind()]
        torch._foreach_sub_([weight for weight, _ in lying + upright], moves)


def _scalar(value: Tensor) -> Any:
    """A host tensor as a Python number, which goes to any device. A tensor on the device stays there."""
    return value if value.is_cuda else value.item()


def orthogonal(matrices: Tensor) -> Tensor:
    """Matrices (count, rows ≤ columns) with all singular values brought near 1, by products alone."""
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.to(matrices.dtype)


def persistent(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, shared ones once, and the buffers that are saved with them."""
    saved = model.state_dict()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return dict(model.named_parameters()) | buffers


class Ema:
    """mean ← d · mean + (1 − d) · weights after every step, for parameters and floating buffers.

    d = min(decay, (1 + t) / (10 + t)) in step t = 0, 1, …: the mean soon forgets the initial weights, also in a run
    that is shorter than the decay's memory. Make it after sharding, so that sharded weights have a sharded mean.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._weights = {name: value for name, value in persistent(model).items() if value.is_floating_point()}
        self.mean = {name: value.detach().clone() for name, value in self._weights.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Include the weights as they are after this step."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.mean.values()), list(self._weights.values()), 1 - decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside, the model has the mean. Afterwards it has its own weights again, bit for bit."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for mean, weight in zip(self.mean.values(), self._weights.values(), strict=True):
            own = weight.clone()
            weight.copy_(mean)
            mean.copy_(own)
