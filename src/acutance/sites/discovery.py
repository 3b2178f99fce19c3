"""What a block and its attention do, found by running the block once on random tokens.

The run shows which norm's output enters the attention, and what happens to the attention's output before the residual
sum. Where the attention does not run without masks, positions or a cache, a stub returns random tokens in its place.
"""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from acutance.mitigations.projection import Projection
from acutance.sites.intercept import MIXED, Intercept, Product
from acutance.sites.patched import SITE
from acutance.sites.site import Stages
from acutance.sites.structure import evaluating, tokens_out

BATCH, TOKENS, GRID = 3, 4, (2, 2)  # of the random tokens: batch and tokens differ, so that a swap shows
SUMS = ("add", "radd", "iadd")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")
RETURNS: tuple[Callable[[Tensor], Any], ...] = (lambda y: (y, None), lambda y: (y, None, None), lambda y: y)


def is_norm(module: nn.Module) -> bool:
    """Whether the class is named as a norm and has no submodules (RobertaPreLayerNormAttention has)."""
    return "norm" in type(module).__name__.lower() and not module._modules


class Surroundings(TorchFunctionMode):
    """What a block does around its attention, followed from its tokens to the residual sum while it runs."""

    def __init__(self, block: nn.Module, tokens: Tensor) -> None:
        super().__init__()
        self.block = block
        self.source: nn.Module | None = None  # the norm whose output enters; the block if its own input does
        self.is_swapped: bool | None = None  # whether batch and tokens change places on the way in; None: not known
        self.post_norm: nn.Module | None = None  # between the output projection and the residual sum
        self.gain: Tensor | float | None = None  # what the branch is multiplied by, such as LayerScale's gain
        self.is_complete = False  # whether the branch was followed to the residual sum
        # Where the attention ran: x that entered it, its v and u, what it returned (y), what entered W_proj (merged),
        # and whether it mixes its heads.
        self.seen: dict[str, Any] = {}
        self._sources = [(block, tokens)]  # the block's input, and the outputs of norms
        self.branch: Tensor | None = None  # the branch's output so far
        self._in_norm = False
        # The residual sum and what sums and norms make of it, with those norms and what else was added, in order.
        self._stream: list[tuple[Tensor, tuple[nn.Module, ...], tuple[Tensor, ...]]] = []
        self._is_read = False  # whether anything but sums takes it, as a sequential MLP does
        self.stages: Stages | None = None  # None where they are not known

    def watch(self, attention: nn.Module, output: Projection, dim: int, returned: Callable[[Tensor], Any]) -> None:
        """Set the hooks and look at the attention; `_trial` takes all of it back."""
        seen, is_block = self.seen, attention is self.block
        inside = not is_block and output.module in set(attention.modules())
        width = dim if inside else output.shape()[1]  # of what the attention returns
        for module in filter(is_norm, self.block.modules()):
            module.register_forward_pre_hook(lambda *_: setattr(self, "_in_norm", True))
            module.register_forward_hook(self._leave_norm)
        output.module.register_forward_pre_hook(lambda _, args: seen.update({"merged": args[0]} if "u" in seen else {}))
        if not inside:
            output.module.register_forward_hook(lambda _module, _args, y: setattr(self, "branch", y))

        def attend(product: Product) -> Tensor:
            u = product.own(product.v)
            seen.update(v=product.v, u=u, is_mixed=product.about.get("refusal") == MIXED)
            return u

        def watched(*args: Any, **kwargs: Any) -> Any:
            entering = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            if not is_block:
                self._enter_attention(entering)
            try:
                with Intercept(attend, entering[0], ""):
                    result = type(attention).forward(attention, *args, **kwargs)
                seen.update(x=entering[0], y=tokens_out(result))
            except Exception:  # whatever someone's forward raises for arguments it cannot take
                if is_block:
                    raise
                seen.clear()
                self._in_norm = False
                result = returned(_random(self.block, *entering[0].shape[:-1], width, seed=1))
            self.branch = tokens_out(result) if inside else self.branch
            return result

        attention.forward = watched

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at the operations on the branch's output, up to the residual sum."""
        out, branch = func(*args, **kwargs or {}), self.branch
        if self.is_complete and not self._in_norm and isinstance(out, Tensor):
            self._follow(func.__name__.strip("_"), args, out)
        if branch is None or self._in_norm or self.is_complete or not any(x is branch for x in args):
            return out
        name, others = func.__name__.strip("_"), [x for x in args if x is not branch]
        if name in SUMS:
            self.is_complete = True
            self._stream = [(out, (), tuple(x for x in others if isinstance(x, Tensor)))]
        elif name in ("mul", "rmul", "imul") and len(others) == 1:
            factor = others[0]
            if isinstance(factor, (int, float)) or factor.numel() in (1, branch.shape[-1]):
                self.gain = factor if self.gain is None else self.gain * factor
                self.branch = out
        elif isinstance(out, Tensor) and same_values(out, branch):  # a view, windows put back, dropout in evaluation
            self.branch = out
        return out

    def _enter_attention(self, entering: list[Tensor]) -> None:
        for (source, known), x in product(reversed(self._sources), reversed(entering)):
            if self.source is None and same_values(known, x):
                self.source = source
                ways = {False: known, True: known.transpose(0, 1)}
                self.is_swapped = next((swaps for swaps, way in ways.items() if torch.equal(way, x)), None)

    def _follow(self, name: str, args: Any, out: Tensor) -> None:
        """Follow the stream from the residual sum on."""
        for x, norms, added in reversed(self._stream):
            if not any(given is x for given in args):
                continue
            if name in SUMS:
                others = tuple(given for given in args if given is not x and isinstance(given, Tensor))
                self._stream.append((out, norms, (*added, *others)))
            elif same_values(out, x):
                self._stream.append((out, norms, added))
            else:
                self._is_read = True
            return

    def leave(self, out: Any) -> None:
        """Say how the parts of the block follow one another, given what it returns."""
        found = next(((norms, added) for x, norms, added in reversed(self._stream) if x is tokens_out(out)), None)
        if found is None:
            return
        (_, tokens), (norms, added) = self._sources[0], found
        starts, rest = same_values(added[0], tokens) if added else False, "mlp" if len(added) == 2 else "rest"
        if starts and self._is_read and (not norms or (len(norms) == 2 and rest == "mlp")):
            self.stages = Stages(rest, norms=norms)
        elif not norms and not self._is_read and any(same_values(x, tokens) for x in added):
            self.stages = Stages(rest, parallel=True)

    def _leave_norm(self, module: nn.Module, args: Any, out: Any) -> None:
        self._in_norm = False
        if self.is_complete and isinstance(out, Tensor) and args:
            known = next(((norms, added) for x, norms, added in reversed(self._stream) if x is args[0]), None)
            if known is not None:
                self._is_read = True
                self._stream.append((out, (*known[0], module), known[1]))
        if self.branch is not None and args and args[0] is self.branch and not self.is_complete:
            self.post_norm, self.branch = module, out
        elif isinstance(out, Tensor):
            self._sources.append((module, out))


def discover(
    block: nn.Module, attention: nn.Module, output: Projection, dim: int, root: nn.Module | None = None
) -> Surroundings:
    """Run the block on random tokens of `dim` channels, or in `root`, which makes masks and positions for it.

    `attention` is the block itself where it is written into the block. `output` is W_proj, in the attention or after.
    """
    # Any number of tokens, a grid of them, or as many as the block has positions for.
    positions = {p.shape[-2] for p in block.parameters() if p.ndim > 1 and p.shape[-1] == dim}
    grid: Any = getattr(block, "input_resolution", GRID)
    layouts = [(TOKENS,), tuple(grid), *((n,) for n in sorted(positions))]
    attempts = product(RETURNS, layouts, (None, GRID)) if root is None else [(RETURNS[0], layouts[0], None)]
    tried: list[Surroundings] = []
    for returned, shape, extra in attempts:
        tokens = _random(block, BATCH, *shape, dim)
        tried.append(found := Surroundings(block, tokens))
        with _trial(root or block), found:
            found.watch(attention, output, dim, returned)
            result = _run(root or block, tokens, extra)
            found.is_complete |= tokens_out(result) is found.branch  # the residual may be added outside
            found.leave(result)
        if found.is_complete:
            return found
    return next((found for found in tried if found.source is not None), tried[-1])


@contextmanager
def _trial(module: nn.Module) -> Iterator[None]:
    """Without hooks and our own patches, in evaluation mode; afterwards every submodule has the attributes it had."""
    kept = [
        (part, dict(vars(part)), {name: b.clone() for name, b in part._buffers.items() if b is not None})
        for part in module.modules()
    ]
    try:
        for part, _, _ in kept:
            vars(part).update({name: OrderedDict() for name in HOOKS})
            if vars(part).pop(SITE, None) is not None:
                vars(part).pop("forward")
        with torch.random.fork_rng(), evaluating(module):
            yield
    except Exception:  # as above
        pass
    finally:
        for part, attributes, buffers in kept:
            vars(part).clear()
            vars(part).update(attributes)
            for name, values in buffers.items():
                part.get_buffer(name).copy_(values)


def _run(module: nn.Module, tokens: Tensor, extra: Any) -> Any:
    """The module's forward, with a filler for each required argument after the tokens."""
    parameters = inspect.signature(type(module).forward).parameters
    if "inputs_embeds" in parameters:
        return module.forward(inputs_embeds=tokens)
    by_place = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in by_place if p.default is p.empty]
    # BEiT's layers make a position bias for an image of some size.
    size = {"resolution": (64, 64)} if "resolution" in parameters else {}
    return module.forward(tokens, *[extra] * (len(required) - 2), **size)


def _random(module: nn.Module, *shape: int, seed: int = 0) -> Tensor:
    like = next((p for p in module.parameters() if p.is_floating_point()), torch.empty(0))
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(like)


def same_values(one: Tensor, other: Tensor) -> bool:
    """Whether both hold the same numbers, in any order."""
    ordered = (x.detach().flatten().double().sort().values for x in (one, other))
    return one.numel() == other.numel() and torch.equal(*ordered)
