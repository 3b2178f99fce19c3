"""Whether blocks that were found by structure alone are one residual stream, checked while the first batch runs.

Lists of equal modules may also run side by side (CrossViT), be branches whose residual is added outside (XLM's MLPs),
or pass several kinds of tokens on. So every tensor is traced to the last block that it was computed from.
"""

from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from acutance.errors import AcutanceError, ShapeError
from acutance.sites.structure import ADVICE, refuse_other_rows, tokens_in, tokens_out

SUMS = {torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor}


class StreamCheck(TorchDispatchMode):
    """Refuses blocks that do not follow one another, given hooks on all of them; `rows` are possible batch sizes."""

    def __init__(self, *rows: Container[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows = rows
        self.stage = 0  # 1 once tokens have entered the first block, one more after every block
        self.last = ""  # the path of the block that ran last
        self.running = 0  # how many blocks are running, one inside another
        self.branch = ""  # what is wrong if another block follows
        # The stage of a tensor by its storage; the weak reference keeps the address from being used again.
        self.stages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Results are of the latest stage among the arguments'."""
        given = _tensors((args, kwargs))
        stages = [self._stage(x) for x in given]
        is_sum = func in SUMS and len(given) == 2 and given[0].shape == given[1].shape and not self.running
        if is_sum and not self.branch and 0 < min(stages) < max(stages) == self.stage:
            self.branch = (
                f"what {self.last} gives, {tuple(given[0].shape)}, is added to earlier tokens outside of it: that is a "
                f"branch's output, not the residual stream. {ADVICE}"
            )
        out = func(*args, **kwargs or {})
        if any(stages):
            self._note(out, max(stages))
        return out

    def enter_block(self, path: str, block: nn.Module, args: Any, kwargs: Any) -> None:
        """A hook: what the block at that path is given must come from the block before."""
        tokens, where = tokens_in(args, kwargs), f"{path} ({type(block).__name__})"
        if self.stage == 0:
            refuse_other_rows(where, tokens, *self.rows)
            self.stage = 1
            self._note(tokens, self.stage)
        elif self.branch:  # after the last block a sum is none of our business
            raise AcutanceError(self.branch)
        elif not self.running and self._stage(tokens) != self.stage:
            raise AcutanceError(
                f"{where} is given {tuple(tokens.shape)}, which does not come from the block {self.last}. {ADVICE}"
            )
        self.running += 1

    def leave_block(self, path: str, block: nn.Module, _args: Any, output: Any) -> None:
        """A hook: beside its tokens a block may return attention weights and states, but no second kind of tokens."""
        first, values = tokens_out(output), output.values() if isinstance(output, Mapping) else output
        beside = [] if isinstance(output, Tensor) else [x for x in values if isinstance(x, Tensor)]
        alike = [x for x in beside if x.is_floating_point() and (x.shape == first.shape or x.ndim == first.ndim == 3)]
        if len(alike) > 1:
            shapes = ", ".join(str(tuple(x.shape)) for x in alike)
            raise ShapeError(f"{path} ({type(block).__name__}) returns several tensors of tokens, {shapes}. {ADVICE}")
        self.running -= 1
        self.stage, self.last = self.stage + 1, path
        self._note((first, output), self.stage)

    def _stage(self, x: Tensor) -> int:
        return self.stages.get(_storage(x)._cdata, (None, 0))[1]

    def _note(self, tree: Any, stage: int) -> None:
        for storage in map(_storage, _tensors(tree)):
            self.stages[storage._cdata] = StorageWeakRef(storage), stage


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _storage(x: Tensor) -> torch.UntypedStorage:
    try:
        return x.untyped_storage()
    except (RuntimeError, NotImplementedError):  # sparse tensors have none
        return torch.UntypedStorage()
