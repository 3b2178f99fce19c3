"""What stands around the attention in somebody's block, told by tracing the block symbolically, without running it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

ADDITIONS = {operator.add, operator.iadd, torch.add, "add", "add_"}
PRODUCTS = {operator.mul, operator.imul, torch.mul, "mul", "mul_"}
REARRANGEMENTS = {"reshape", "view", "flatten", "unflatten", "rearrange", "unsqueeze", "squeeze", "movedim", "roll"}


@dataclass(frozen=True)
class Surroundings:
    """The way of the tokens from the block's input to its attention, and from there to the residual sum."""

    pre_norm: nn.Module | None  # the norm right before the attention
    gain: Tensor | None  # what the attention's output is multiplied by, such as LayerScale's gain
    swaps: bool | None  # whether batch and tokens change places on the way in; None where it cannot be told


def surroundings(block: nn.Module, attention: str) -> Surroundings | None:
    """What stands around the attention at the path `attention` inside the block; None where tracing fails."""
    if attention == "":
        return Surroundings(None, None, False)
    try:
        with torch.random.fork_rng(devices=[]):  # a forward may draw numbers that are no traced tensor's
            graph = fx.Tracer().trace(block)
    except Exception:  # whatever somebody's forward does with what is not a tensor yet
        return None
    calls = [node for node in graph.nodes if node.op == "call_module" and node.target == attention]
    if len(calls) != 1:
        return None
    way_in = list(_way_in(block, calls[0]))
    if any("norm" in _name(node) for node in way_in if node.op != "call_module"):
        return None  # a functional norm: its weight is no module's
    return Surroundings(_pre_norm(block, way_in), _gain(block, calls[0]), _swaps(block, way_in))


def is_norm(module: nn.Module) -> bool:
    """LayerNorm, RMSNorm, and what others call by such names."""
    return "norm" in type(module).__name__.lower()


def _way_in(block: nn.Module, call: fx.Node) -> Iterator[fx.Node]:
    """From the attention's query back to the block's input; positions that are added come from elsewhere."""
    node = call.args[0] if call.args else call.kwargs.get("query")
    while isinstance(node, fx.Node) and node.op != "placeholder":
        yield node
        inputs = [before for before in node.all_input_nodes if before.op != "get_attr"]
        normed = [n for n in inputs if n.op == "call_module" and is_norm(block.get_submodule(str(n.target)))]
        node = next(iter(normed or inputs), None)


def _pre_norm(block: nn.Module, way_in: list[fx.Node]) -> nn.Module | None:
    """The first module on the way back, if it is a norm: dropout may stand between, another layer may not."""
    for node in way_in:
        if node.op == "call_module":
            module = block.get_submodule(str(node.target))
            if not isinstance(module, (nn.Dropout, nn.Identity)):
                return module if is_norm(module) else None
    return None


def _swaps(block: nn.Module, way_in: list[fx.Node]) -> bool | None:
    count = 0
    for node in way_in:
        if node.op == "call_module":
            if isinstance(block.get_submodule(str(node.target)), (nn.Flatten, nn.Unflatten)):
                return None
            continue
        if _name(node) in REARRANGEMENTS:
            return None
        if _name(node) in ("transpose", "swapaxes", "permute", "t", "einsum"):
            swapped = _swapped(node)
            if swapped is None:
                return None
            count += swapped
    return count % 2 == 1


def _swapped(node: fx.Node) -> bool | None:
    """Whether an operation exchanges the first two of three axes; None where it does something else to them."""
    axes: list[Any] = []
    for argument in node.args[1:]:
        axes += argument if isinstance(argument, (tuple, list)) else [argument]
    if _name(node) in ("transpose", "swapaxes"):
        return True if set(axes) in ({0, 1}, {-3, -2}) else None
    return {(1, 0, 2): True, (0, 1, 2): False}.get(tuple(axes)) if _name(node) == "permute" else None


def _gain(block: nn.Module, call: fx.Node) -> Tensor | None:
    """The first parameter that the attention's output is multiplied by before it is added to the residual stream."""
    node: fx.Node | None = call
    while node is not None and node.target not in ADDITIONS:
        for factor in node.all_input_nodes if node.target in PRODUCTS else ():
            if factor.op == "get_attr":
                return _attribute(block, str(factor.target))
        node = next((user for user in node.users), None)
    return None


def _attribute(block: nn.Module, path: str) -> Tensor | None:
    where, _, name = path.rpartition(".")
    value = getattr(block.get_submodule(where), name)
    return value if isinstance(value, Tensor) else None


def _name(node: fx.Node) -> str:
    target: str | Callable[..., Any] = node.target
    return target if isinstance(target, str) else getattr(target, "__name__", "")
