"""What a block does around its attention, found by running the block once on random tokens.

A stub stands in for the attention, so the block needs neither masks nor positions nor a cache. The run shows which
norm's output enters the attention, and what happens to the attention's output before the residual sum.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from acutance.sites.intercept import Intercept, Product
from acutance.sites.structure import evaluating

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


class _DoneError(Exception):
    """The residual sum is reached."""


def is_norm(module: nn.Module) -> bool:
    """Whether the class is named as a norm and has no submodules (RobertaPreLayerNormAttention has)."""
    return "norm" in type(module).__name__.lower() and not module._modules


def discover(
    block: nn.Module, attention: nn.Module, projection: nn.Module | None, dim: int, width: int
) -> Surroundings:
    """Run the block on random tokens until the residual sum.

    Args:
        block: the module that adds the attention branch to the residual stream.
        attention: the attention inside it; the block itself if the attention is written into the block.
        projection: the module of W_proj, if the block runs it after the attention; else None.
        dim: channels of the residual stream.
        width: channels that the attention returns.
    """
    best = Surroundings()
    if attention is block and projection is None:
        return Surroundings(source=block, is_swapped=False, is_complete=True)
    extras, layouts = (None, GRID), _layouts(block, dim)
    for returned, shape, extra in product(RETURNS, layouts, extras):
        tokens = _random(block, *shape)
        follower = _Follower(block, attention, tokens)
        with _untouched(block), torch.random.fork_rng(), evaluating(block):
            follower.watch(projection, width, returned)
            try:
                with follower:
                    output = block.forward(tokens, *(extra for _ in _required(block)), **_image_size(block))
                follower.leave(output)
            except _DoneError:
                return follower.found
            except Exception:  # whatever someone's forward raises for arguments it cannot take
                continue
        if follower.found.is_complete:
            return follower.found
        best = follower.found if best.source is None else best
    return best


class _Follower(TorchFunctionMode):
    """Follows the tokens into the attention, and its output to the residual sum."""

    def __init__(self, block: nn.Module, attention: nn.Module, tokens: Tensor) -> None:
        super().__init__()
        self.block, self.attention = block, attention
        self.found = Surroundings()
        self.sources = [(block, tokens)]  # the block's input, and the outputs of norms
        self.branch: Tensor | None = None  # the branch's output so far
        self.norm: nn.Module | None = None  # the norm that is running

    def watch(self, projection: nn.Module | None, width: int, returned: Callable[[Tensor], Any]) -> None:
        """Put the stub and the hooks in place; `_untouched` removes them."""
        for module in filter(is_norm, self.block.modules()):
            module.register_forward_pre_hook(self._enter_norm)
            module.register_forward_hook(self._leave_norm)
        if projection is not None:
            projection.register_forward_hook(self._project)

        def stub(*args: Any, **kwargs: Any) -> Any:
            entering = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            if self.found.source is None:
                self._enter_attention(entering)
            y = _random(self.block, *entering[0].shape[:-1], width, seed=1)
            self.branch = y if projection is None else self.branch
            return returned(y)

        if self.attention is not self.block:
            self.attention.forward = stub

    def leave(self, output: Any) -> None:
        """The block returned without a residual sum; it may return the branch itself."""
        output = output[0] if isinstance(output, (tuple, list)) else output
        self.found.is_complete = self.branch is not None and output is self.branch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at the operations on the branch's output."""
        out = func(*args, **kwargs or {})
        branch = self.branch
        if branch is None or self.norm is not None or not isinstance(out, Tensor):
            return out
        if any(x is branch for x in args):
            self._follow(func.__name__.strip("_"), [x for x in args if x is not branch], branch, out)
        return out

    def _follow(self, name: str, others: Sequence[Any], branch: Tensor, out: Tensor) -> None:
        if name in ("add", "radd", "iadd"):
            self.found.is_complete = True
            raise _DoneError
        if name in ("mul", "rmul", "imul") and len(others) == 1:
            factor = others[0]
            if isinstance(factor, (int, float)) or factor.numel() in (1, branch.shape[-1]):
                self.found.gain = factor if self.found.gain is None else self.found.gain * factor
                self.branch = out
        elif _same_values(out, branch):  # a view, a transpose, windows put back, dropout in evaluation mode
            self.branch = out

    def _enter_attention(self, entering: Sequence[Tensor]) -> None:
        for (source, known), x in product(reversed(self.sources), reversed(entering)):
            if _same_values(known, x):
                self.found.source = source
                if known.shape == x.shape:
                    self.found.is_swapped = False if torch.equal(known, x) else None
                elif known.ndim == 3 and known.transpose(0, 1).shape == x.shape:
                    self.found.is_swapped = True if torch.equal(known.transpose(0, 1), x) else None
                return

    def _enter_norm(self, module: nn.Module, _args: Any) -> None:
        self.norm = module

    def _leave_norm(self, module: nn.Module, args: Any, out: Any) -> None:
        self.norm = None
        if self.branch is not None and args and args[0] is self.branch:
            self.found.post_norm, self.branch = module, out
        elif isinstance(out, Tensor):
            self.sources.append((module, out))

    def _project(self, _module: nn.Module, _args: Any, y: Any) -> None:
        self.branch = y


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
        with Intercept(attend, next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), ""):
            return type(attention).forward(attention, *args, **kwargs)

    def project(_module: nn.Module, args: Any) -> None:
        if seen:
            seen.append(args[0])
            raise _DoneError

    names = inspect.signature(root.forward).parameters
    tokens = _random(attention, BATCH, TOKENS, dim)
    embedded = {"inputs_embeds": tokens} if "inputs_embeds" in names else {next(iter(names)): tokens}
    alone = [(module, extra) for module in (attention, block) for extra in (None, GRID)]
    for module, extra in (*alone, (root, None)):
        seen.clear()
        with _untouched(root), torch.random.fork_rng(), evaluating(root):
            projection.register_forward_pre_hook(project)
            attention.forward = watched
            try:
                if module is root:
                    root.forward(**embedded)
                else:
                    module.forward(tokens, *(extra for _ in _required(module)))
            except Exception:  # `_DoneError`, or whatever someone's forward raises for arguments it cannot take
                pass
        if len(seen) == 2:
            return not _same_values(*seen)
    return None


@contextmanager
def _untouched(module: nn.Module) -> Iterator[None]:
    """Without hooks; afterwards every attribute of every submodule is what it was."""
    kept = [
        (part, dict(vars(part)), {name: b.clone() for name, b in part._buffers.items() if b is not None})
        for part in module.modules()
    ]
    try:
        for part, _, _ in kept:
            for name in HOOKS:
                part.__dict__[name] = OrderedDict()
        yield
    finally:
        for part, attributes, buffers in kept:
            part.__dict__.clear()
            part.__dict__.update(attributes)
            for name, values in buffers.items():
                part.get_buffer(name).copy_(values)


def _layouts(block: nn.Module, dim: int) -> list[tuple[int, ...]]:
    """Shapes of tokens to try: any number, as many as the block has positions for, a grid of them."""
    positions = {p.shape[-2] for p in block.parameters() if p.ndim > 1 and p.shape[-1] == dim}
    grid: Any = getattr(block, "input_resolution", GRID)
    return [(BATCH, TOKENS, dim), (BATCH, *grid, dim), *((BATCH, n, dim) for n in sorted(positions))]


def _required(module: nn.Module) -> list[str]:
    """The arguments of the module's forward that have no default, but for the tokens."""
    parameters: Mapping[str, inspect.Parameter] = inspect.signature(type(module).forward).parameters
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, p in parameters.items() if p.kind in kinds and p.default is p.empty][2:]


def _image_size(block: nn.Module) -> dict[str, tuple[int, int]]:
    """BEiT's layers ask for it to make a position bias, which the stub ignores."""
    return {"resolution": (64, 64)} if "resolution" in inspect.signature(block.forward).parameters else {}


def _random(module: nn.Module, *shape: int, seed: int = 0) -> Tensor:
    like = next((p for p in module.parameters() if p.is_floating_point()), torch.empty(0))
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(like)


def _same_values(one: Tensor, other: Tensor) -> bool:
    """Whether both hold the same numbers, in any order."""
    if one.numel() != other.numel():
        return False
    return torch.equal(*(x.detach().flatten().double().sort().values for x in (one, other)))
