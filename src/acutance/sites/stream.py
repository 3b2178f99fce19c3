"""How v⁰ reaches the later layers of models whose blocks do not pass it on.

The first layer's values are kept on the side for the time of one forward pass. Two things could make that silently
wrong, and are excluded here: values of another forward pass, and a gradient that does not reach the first layer.
Checkpointing runs a block again during the backward pass, perhaps after other forward passes: the block's input,
whose memory checkpointing keeps, tells which forward pass it belongs to.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from acutance.errors import AcutanceError

CHECKPOINT_ADVICE = (
    "v⁰, the first layer's values, did not come through this activation checkpointing, so gradients would be wrong: "
    "use the non-reentrant kind (use_reentrant=False) around whole blocks whose first argument is the tokens, and "
    "torch.compile around it, not inside"
)


class ForwardPass:
    """The first layer's values of one forward pass."""

    def __init__(self) -> None:
        self.first: Tensor | None = None


class Stream:
    """The first layer's values on their way through one stack of blocks, numbered from 1."""

    def __init__(self) -> None:
        self._pass: ForwardPass | None = None
        self._last = 0  # the block that was entered last
        self._with_grad = True  # whether gradients were on in it
        self._lost = False  # whether v⁰ came out of blocks without its gradient
        # By the memory of a block's input; None where it was the input in several forward passes.
        self._passes: dict[int, tuple[StorageWeakRef, ForwardPass | None]] = {}

    def begin(self) -> None:
        """A forward pass of the whole stack starts, or has ended: no values of another one may be used in it."""
        self._pass, self._last, self._lost = None, 0, False

    def enter(self, block: int, x: Tensor) -> None:
        """Block number `block` is about to run on x."""
        if block == 1:
            self._pass, self._lost = ForwardPass(), False
            if not torch.compiler.is_compiling():
                self._forget_finished()
        elif not torch.compiler.is_compiling() and in_backward():
            self._pass = self._pass_of(x, follows=self._last == block - 1)
        elif torch.is_grad_enabled():
            # Re-entrant checkpointing of the blocks before: they ran without gradients, and yet x has one.
            self._lost |= not self._with_grad and x.requires_grad
            if self._pass is not None and not torch.compiler.is_compiling():
                self._remember(x)
        self._last, self._with_grad = block, torch.is_grad_enabled()

    def keep(self, v: Tensor) -> None:
        """These are the first layer's values."""
        self._with_grad = torch.is_grad_enabled()  # off in re-entrant checkpointing, even inside of the block
        if self._pass is not None:
            self._pass.first = v

    def peek(self) -> Tensor | None:
        """v⁰ of the forward pass under way, if it has come so far."""
        return None if self._pass is None else self._pass.first

    def first_values(self, name: str) -> Tensor:
        """v⁰ for the attention called `name`, which cannot do without."""
        first = self.peek()
        if self._lost or (first is None and not torch.compiler.is_compiling() and in_backward()):
            raise AcutanceError(CHECKPOINT_ADVICE)
        if first is None:
            raise AcutanceError(
                f"{name} needs v⁰, but the first layer has not run before it in this forward pass. Layers that are "
                "dropped at random, or blocks called one by one, cannot be used with this mitigation"
            )
        return first

    def _remember(self, x: Tensor) -> None:
        """x belongs to the forward pass under way, and to no other: a mask that is reused says nothing."""
        storage = x.untyped_storage()
        _, known = self._passes.get(storage._cdata, (None, self._pass))
        self._passes[storage._cdata] = StorageWeakRef(storage), self._pass if known is self._pass else None

    def _pass_of(self, x: Tensor, follows: bool) -> ForwardPass | None:
        """The forward pass that a block run again on x belongs to; x of the second block of a segment is new."""
        _, found = self._passes.get(x.untyped_storage()._cdata, (None, None))
        return self._pass if found is None and follows else found

    def _forget_finished(self) -> None:
        """Drop passes whose inputs are gone; the weak reference keeps an address from being used twice before."""
        self._passes = {key: entry for key, entry in self._passes.items() if not entry[0].expired()}

    def __deepcopy__(self, memo: dict[int, Any]) -> Stream:
        return Stream()  # a copied model has no forward pass under way


def in_backward() -> bool:
    """Whether a backward pass is under way, as where checkpointing runs a block again."""
    return torch._C._current_graph_task_id() != -1
