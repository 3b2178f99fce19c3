"""Whether blocks that are told by structure alone are one residual stream, watched while the first batch runs.

Lists of equal modules are not always that: they may run side by side (CrossViT), be branches whose residual is added
outside (XLM's MLPs), or pass several kinds of tokens on. Of every tensor it is noted which block's output it was last
computed from, operation by operation: nothing else sees what a forward does between its blocks.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from acutance.errors import AcutanceError, ShapeError
from acutance.sites.structure import ADVICE, refuse_other_rows, tokens_in, tokens_out

SUMS = {torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor}


class Chain(TorchDispatchMode):
    """Refuses, in the with block in which a model runs, blocks that do not follow one another.

    Args:
        blocks: by their paths, in order.
        rows: how many samples the batch may be.
    """

    def __init__(self, blocks: Sequence[tuple[str, nn.Module]], rows: Container[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.blocks, self.rows = blocks, rows
        self.stage = 0  # 1 once tokens have entered the first block, one more after every block
        self.last = ""  # the path of the block that ran last
        self.running = 0  # how many blocks are running, one inside another
        self.branch: AcutanceError | None = None  # what is wrong if another block follows
        # By the memory of a tensor: the last stage that it was computed from.
        self._origins: dict[int, tuple[StorageWeakRef, int]] = {}
        self._hooks = ExitStack()

    def __enter__(self) -> Self:
        for path, block in self.blocks:
            entering = block.register_forward_pre_hook(partial(self._enter_block, path), with_kwargs=True)
            leaving = block.register_forward_hook(partial(self._leave_block, path))
            self._hooks.callback(entering.remove)
            self._hooks.callback(leaving.remove)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._hooks.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note what the results were computed from."""
        if func in SUMS and not self.running and self.branch is None:
            self.branch = self._residual_outside(*args[:2])
        origin = max(map(self._origin, _tensors((args, kwargs))), default=0)
        out = func(*args, **kwargs or {})
        if origin:
            for x in _tensors(out):
                self._note(x, origin)
        return out

    def _enter_block(self, path: str, block: nn.Module, args: Any, kwargs: Any) -> None:
        tokens = tokens_in(args, kwargs)
        if self.stage == 0:
            refuse_other_rows(f"{path} ({type(block).__name__})", tokens, self.rows)
            self.stage = 1
            self._note(tokens, self.stage)
        elif self.branch is not None:
            raise self.branch
        elif not self.running and self._origin(tokens) != self.stage:
            raise AcutanceError(
                f"{path} ({type(block).__name__}) is given {tuple(tokens.shape)}, which does not come from the block "
                f"that ran before it, {self.last}: the blocks do not follow one another. {ADVICE}"
            )
        self.running += 1

    def _leave_block(self, path: str, block: nn.Module, _args: Any, output: Any) -> None:
        _refuse_several(f"{path} ({type(block).__name__})", output)
        self.running -= 1
        self.stage, self.last = self.stage + 1, path
        for x in (tokens_out(output), *_tensors(output)):
            self._note(x, self.stage)

    def _residual_outside(self, one: Any, other: Any) -> AcutanceError | None:
        """What a block gives is added to what it, or one before it, was given; of use only if a block follows."""
        if not isinstance(one, Tensor) or not isinstance(other, Tensor) or one.shape != other.shape:
            return None
        older, newer = sorted((self._origin(one), self._origin(other)))
        if not 0 < older < newer == self.stage:
            return None
        return AcutanceError(
            f"what {self.last} gives, {tuple(one.shape)}, is added to earlier tokens outside of it: that is a branch's "
            f"output, not the residual stream. {ADVICE}"
        )

    def _origin(self, x: Tensor) -> int:
        memory = _memory(x)
        return 0 if memory is None else self._origins.get(memory._cdata, (None, 0))[1]

    def _note(self, x: Tensor, origin: int) -> None:
        memory = _memory(x)
        if memory is not None:  # the weak reference keeps its address from being used again
            self._origins[memory._cdata] = StorageWeakRef(memory), origin


def _refuse_several(where: str, output: Any) -> None:
    """Beside the tokens a block may return attention weights and states, but no second kind of tokens."""
    if isinstance(output, Tensor):
        return
    first, values = tokens_out(output), output.values() if isinstance(output, Mapping) else output
    shapes = [tuple(x.shape) for x in values if isinstance(x, Tensor) and _alike(x, first)]
    if len(shapes) > 1:
        raise ShapeError(
            f"{where} returns several tensors of tokens, {', '.join(map(str, shapes))}, so which are the residual "
            f"stream is not clear. {ADVICE}"
        )


def _alike(x: Tensor, tokens: Tensor) -> bool:
    return x.is_floating_point() and (x.shape == tokens.shape or x.ndim == tokens.ndim == 3)


def _memory(x: Tensor) -> torch.UntypedStorage | None:
    try:
        return x.untyped_storage()
    except (RuntimeError, NotImplementedError):  # sparse tensors have none
        return None


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
