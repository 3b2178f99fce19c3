"""What a block does around its attention, found by running the block once on random tokens.

A stub stands in for the attention, so the block needs neither masks nor positions nor a cache. The run shows which
norm's output enters the attention, and what happens to the attention's output before the residual sum.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from acutance.sites.intercept import Intercept, Product
from acutance.sites.structure import evaluating, tokens_in

BATCH, TOKENS, GRID = 3, 4, (2, 2)  # of the random tokens: batch and tokens differ, so that a swap shows
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")
RETURNS: tuple[Callable[[Tensor], Any], ...] = (lambda y: (y, None), lambda y: (y, None, None), lambda y: y)


@dataclass
class Surroundings:
    """What a block does around its attention."""

    source: nn.Module | None = None  # the norm whose output enters; the block if its own input does; None: not known
    is_swapped: bool | None = None  # whether batch and tokens change places on the way in; None: not known
    post_norm: nn.Module | None = None  # between the output projection and the residual sum
    gain: Tensor | float | None = None  # what the branch is multiplied by, such as LayerScale's gain
    is_complete: bool = False  # whether the branch was followed to the residual sum


def is_norm(module: nn.Module) -> bool:
    """Whether the class is named as a norm and has no submodules (RobertaPreLayerNormAttention has)."""
    return "norm" in type(module).__name__.lower() and not module._modules


def discover(
    block: nn.Module, attention: nn.Module, projection: nn.Module | None, dim: int, width: int
) -> Surroundings:
    """Run the block on random tokens of `dim` channels until the residual sum.

    `attention` is the block itself where it is written into the block. `projection` is the module of W_proj if the
    block runs it after the attention, which returns `width` channels.
    """
    if attention is block and projection is None:
        return Surroundings(source=block, is_swapped=False, is_complete=True)
    # Any number of tokens, a grid of them, or as many as the block has positions for.
    positions = {p.shape[-2] for p in block.parameters() if p.ndim > 1 and p.shape[-1] == dim}
    grid: Any = getattr(block, "input_resolution", GRID)
    layouts = [(TOKENS,), tuple(grid), *((n,) for n in sorted(positions))]
    # BEiT's layers need an image size to make a position bias, which the stub ignores.
    size = {"resolution": (64, 64)} if "resolution" in inspect.signature(block.forward).parameters else {}
    best = Surroundings()
    for returned, shape, extra in product(RETURNS, layouts, (None, GRID)):
        tokens = _random(block, BATCH, *shape, dim)
        follower = _Follower(block, tokens)
        with _trial(block):
            follower.watch(attention, projection, width, returned)
            with follower:
                output = block.forward(tokens, *_filled(block, extra), **size)
            output = output[0] if isinstance(output, (tuple, list)) else output
            if follower.branch is not None and output is follower.branch:  # it returns the branch itself
                follower.found.is_complete = True
        if follower.found.is_complete:
            return follower.found
        best = follower.found if best.source is None else best
    return best


class _Follower(TorchFunctionMode):
    """Follows the tokens into the attention, and its output to the residual sum."""

    def __init__(self, block: nn.Module, tokens: Tensor) -> None:
        super().__init__()
        self.block, self.found = block, Surroundings()
        self.sources = [(block, tokens)]  # the block's input, and the outputs of norms
        self.branch: Tensor | None = None  # the branch's output so far
        self.in_norm = False

    def watch(
        self, attention: nn.Module, projection: nn.Module | None, width: int, returned: Callable[[Tensor], Any]
    ) -> None:
        """Put the stub and the hooks in place; `_trial` removes them."""
        for module in filter(is_norm, self.block.modules()):
            module.register_forward_pre_hook(lambda *_: setattr(self, "in_norm", True))
            module.register_forward_hook(self._leave_norm)
        if projection is not None:
            projection.register_forward_hook(lambda _module, _args, y: setattr(self, "branch", y))

        def stub(*args: Any, **kwargs: Any) -> Any:
            entering = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            if self.found.source is None:
                self._enter_attention(entering)
            y = _random(self.block, *entering[0].shape[:-1], width, seed=1)
            self.branch = y if projection is None else self.branch
            return returned(y)

        if attention is not self.block:
            attention.forward = stub

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at the operations on the branch's output, up to the residual sum."""
        out, branch, found = func(*args, **kwargs or {}), self.branch, self.found
        if branch is None or self.in_norm or found.is_complete or not any(x is branch for x in args):
            return out
        name, others = func.__name__.strip("_"), [x for x in args if x is not branch]
        if name in ("add", "radd", "iadd"):
            found.is_complete = True
        elif name in ("mul", "rmul", "imul") and len(others) == 1:
            factor = others[0]
            if isinstance(factor, (int, float)) or factor.numel() in (1, branch.shape[-1]):
                found.gain = factor if found.gain is None else found.gain * factor
                self.branch = out
        elif isinstance(out, Tensor) and _same_values(out, branch):  # a view, windows put back, dropout in evaluation
            self.branch = out
        return out

    def _enter_attention(self, entering: Sequence[Tensor]) -> None:
        for (source, known), x in product(reversed(self.sources), reversed(entering)):
            if _same_values(known, x):
                self.found.source = source
                for swaps, seen in ((False, known), (True, known.transpose(0, 1))):
                    if seen.shape == x.shape and torch.equal(seen, x):
                        self.found.is_swapped = swaps
                return

    def _leave_norm(self, module: nn.Module, args: Any, out: Any) -> None:
        self.in_norm = False
        if self.branch is not None and args and args[0] is self.branch and not self.found.is_complete:
            self.found.post_norm, self.branch = module, out
        elif isinstance(out, Tensor):
            self.sources.append((module, out))


def changes_output(
    root: nn.Module, block: nn.Module, attention: nn.Module, projection: nn.Module, dim: int
) -> bool | None:
    """Whether the attention's output is changed before W_proj, by a norm or a gate; None where it is not known.

    The attention itself runs on random tokens: alone, in its block, or in `root`, which makes positions and masks.
    """
    seen: list[Tensor] = []

    def attend(product: Product) -> Tensor:
        seen.append(product.own(product.v))
        return seen[0]

    def watched(*args: Any, **kwargs: Any) -> Any:
        with Intercept(attend, tokens_in(args, kwargs), ""):
            return type(attention).forward(attention, *args, **kwargs)

    tokens = _random(attention, BATCH, TOKENS, dim)
    embeds = "inputs_embeds" in inspect.signature(root.forward).parameters
    runs: list[tuple[nn.Module, Sequence[Any], dict[str, Any]]] = [
        (module, (tokens, *_filled(module, extra)), {}) for module in (attention, block) for extra in (None, GRID)
    ]
    runs.append((root, () if embeds else (tokens,), {"inputs_embeds": tokens} if embeds else {}))
    for module, args, kwargs in runs:
        seen.clear()
        with _trial(root):
            projection.register_forward_pre_hook(lambda _module, given: seen.extend(given[:1] if seen else ()))
            attention.forward = watched
            module.forward(*args, **kwargs)
        if len(seen) > 1:
            return not _same_values(*seen[:2])
    return None


@contextmanager
def _trial(module: nn.Module) -> Iterator[None]:
    """Without hooks and in evaluation mode; afterwards every attribute of every submodule is what it was."""
    kept = [
        (part, dict(vars(part)), {name: b.clone() for name, b in part._buffers.items() if b is not None})
        for part in module.modules()
    ]
    try:
        for part, _, _ in kept:
            vars(part).update({name: OrderedDict() for name in HOOKS})
        with torch.random.fork_rng(), evaluating(module):
            yield
    except Exception:  # whatever someone's forward raises for arguments it cannot take
        pass
    finally:
        for part, attributes, buffers in kept:
            vars(part).clear()
            vars(part).update(attributes)
            for name, values in buffers.items():
                part.get_buffer(name).copy_(values)


def _filled(module: nn.Module, extra: Any) -> list[Any]:
    """A filler for each required argument of the module's forward after the tokens."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(type(module).forward).parameters.values()
    return [extra for p in parameters if p.kind in kinds and p.default is p.empty][2:]


def _random(module: nn.Module, *shape: int, seed: int = 0) -> Tensor:
    like = next((p for p in module.parameters() if p.is_floating_point()), torch.empty(0))
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(like)


def _same_values(one: Tensor, other: Tensor) -> bool:
    """Whether both hold the same numbers, in any order."""
    if one.numel() != other.numel():
        return False
    return torch.equal(*(x.detach().flatten().double().sort().values for x in (one, other)))
