"""What one forward pass of a stack of layers knows: above all v⁰, which blocks of other libraries do not pass on.

State belongs to a pass and its thread, never to a model. v⁰ of another pass, or v⁰ whose gradient does not reach the
first layer, would be silently wrong. Checkpointing runs a block again during the backward pass, perhaps after other
forward passes: the memory of the block's input, or of its attention's, tells which pass it belongs to.
"""

import threading
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from acutance.attention import AttentionCall
from acutance.errors import AcutanceError
from acutance.sites.structure import tokens_out

MOST_RESULTS = 500  # that are looked at in one block; after Ctrl-C nobody may say that it has ended
CHECKPOINT_ADVICE = (
    "v⁰, the first layer's values, did not come through this activation checkpointing, so gradients would be wrong: "
    "use the non-reentrant kind (use_reentrant=False) around whole blocks whose first argument is the tokens, and "
    "torch.compile around it, not inside"
)


class ForwardPass:
    """One forward pass of the layers that share a v⁰, or the part of one that checkpointing runs again."""

    def __init__(self, graph: int, outer: "ForwardPass | None", again: bool = False) -> None:
        self.v0: Tensor | None = None
        self.graph = graph  # the backward pass it runs in, −1 for none
        self.outer = outer  # what was under way before
        self.again = again  # whether it is a recomputation
        self.is_whole = False  # whether it has an end; blocks that are called one by one have none
        self.entered = self.attended = 0  # how many blocks ran, and how many of them reached `attend`
        self.last = 0  # the block that was entered last, from 1
        self.x: Tensor | None = None  # what entered it
        self.entering: Tensor | None = None  # what entered its attention
        self.behind = 0  # how many of its keys belong to other tokens, and stand last
        self.with_grad = True  # whether gradients were on in the block before
        self.lost = False  # whether v⁰ came out of blocks without its gradient
        self.call: AttentionCall | None = None  # until its W_proj has run
        self.attention: AttentionCall | None = None  # the same, until its block has run
        self.kept: dict[int, Any] = {}  # by layer: what it handed to the next one, without gradients
        self.order: TokenOrder | None = None  # of the tokens, in the first pass of a mitigation with v⁰

    def forget(self) -> None:
        """Hold no tensor longer than the pass, but for those that a recomputation needs."""
        self.x = self.entering = self.call = self.attention = None


class _Local(threading.local):  # not a ContextVar, which Dynamo cannot trace
    def __init__(self) -> None:
        # The one under way ("now"), and the last one that checkpointing ran again ("recomputed"): in a dict, whose
        # changes Dynamo follows also where it breaks its graph.
        self.passes: dict[str, ForwardPass | None] = {}


class Passes:
    """The forward passes of one stack: which is under way in this thread, and which a recomputation belongs to."""

    def __init__(self) -> None:
        self._local = _Local()
        self._lock = threading.Lock()
        # By the memory of an input: its pass; None where it was the input in several, as a frozen embedding may be.
        self._by_input: dict[int, tuple[StorageWeakRef, ForwardPass | None]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Passes, ()  # a copied model has no forward pass under way

    def current(self) -> ForwardPass | None:
        """The one under way in this thread."""
        return self._local.passes.get("now")

    def begin(self, *, whole: bool = False) -> ForwardPass:
        """A forward pass starts, of the whole stack or of blocks that somebody calls one by one."""
        before = self.current()
        started = ForwardPass(_graph(), before if whole or before is None else before.outer)
        started.is_whole = whole
        self._local.passes["now"], self._local.passes["recomputed"] = started, None
        if not torch.compiler.is_compiling() and self._by_input:
            with self._lock:  # the weak reference keeps an address from being used twice before it is dropped here
                self._by_input = {key: entry for key, entry in self._by_input.items() if not entry[0].expired()}
        return started

    def end(self) -> ForwardPass | None:
        """It has ended, v⁰ does not outlive it; what was under way before goes on."""
        ended = self.current()
        self._local.passes["now"] = None if ended is None else ended.outer
        if ended is not None:
            ended.forget()
        return ended

    def enter(self, block: int, x: Tensor) -> ForwardPass:
        """Block number `block`, from 1, is about to run on x."""
        now, graph, with_grad = self.current(), _graph(), torch.is_grad_enabled()
        if torch.compiler.is_compiling():
            now = self.begin() if now is None else now
        elif graph != -1 and (now is None or now.graph != graph):
            now = self._recompute(block, x)
        elif now is None or now.graph != graph or (block == 1 and not now.is_whole and not now.again):
            now = self.begin()
        elif with_grad:
            # Re-entrant checkpointing of the blocks before: they ran without gradients, and yet x has one.
            now.lost |= not now.with_grad and x.requires_grad
            if block > 1:
                self.remember(x, now)
        now.entered += 1
        now.with_grad, now.last, now.x = with_grad, block, x
        now.call = now.attention = None
        return now

    def leave(self) -> None:
        """A block has run, or was stopped: after a recomputation, what was under way before goes on."""
        now = self.current()
        if now is not None and now.again:
            self._local.passes["now"], self._local.passes["recomputed"] = now.outer, now
            now.forget()

    def recompute_attention(self, x: Tensor) -> bool:
        """Whether attention alone is run again on x; then its pass is the current one until `leave`."""
        now, graph = self.current(), _graph()
        if graph == -1 or (now is not None and now.graph == graph):
            return False
        self._again(self._pass_of(x))
        return True

    def remember(self, x: Tensor, now: ForwardPass) -> None:
        """x belongs to this pass, and to no other: a mask that is reused says nothing.

        Not for the first layer, which makes v⁰ anew: v⁰'s own graph holds that input, so it would never be forgotten.
        """
        storage = x.untyped_storage()
        with self._lock:
            _, known = self._by_input.get(storage._cdata, (None, now))
            self._by_input[storage._cdata] = StorageWeakRef(storage), now if known is now else None

    def _recompute(self, block: int, x: Tensor) -> ForwardPass:
        """The first block makes v⁰ anew; the second of a checkpointed segment goes on with what the one before had."""
        found, before = self._pass_of(x) if block > 1 else None, self._local.passes.get("recomputed")
        follows = before is not None and before.graph == _graph() and before.last == block - 1
        return self._again(before if found is None and block > 1 and follows else found)

    def _again(self, found: ForwardPass | None) -> ForwardPass:
        again = ForwardPass(_graph(), self.current(), again=True)
        if found is not None:
            again.v0, again.lost, again.last, again.kept = found.v0, found.lost, found.last, found.kept
        self._local.passes["now"] = again
        return again

    def _pass_of(self, x: Tensor) -> ForwardPass | None:
        return self._by_input.get(x.untyped_storage()._cdata, (None, None))[1]


def first_values(now: ForwardPass, name: str) -> Tensor:
    """v⁰ for the attention called `name`, which cannot do without."""
    if now.lost or (now.v0 is None and now.again):
        raise AcutanceError(CHECKPOINT_ADVICE)
    if now.v0 is None:
        raise AcutanceError(
            f"{name} needs v⁰, but the first layer has not run in this forward pass: blocks cannot be dropped or "
            "called one by one with it. With activation checkpointing, put torch.compile around it, not inside"
        )
    return now.v0


def _graph() -> int:
    """The backward pass under way in this thread, as where checkpointing runs a block again; −1 for none."""
    return -1 if torch.compiler.is_compiling() else torch._C._current_graph_task_id()


class TokenOrder:
    """Whether tokens keep their places from layer to layer, checked in the first pass after a mitigation came in.

    v⁰ − v compares tokens by their places. A model that shuffles or shifts its tokens outside of attention would have
    each token pulled to the first values of another one. Tokens are recognised by a number made of their bits, and
    followed as long as they are only moved. Nothing waits for the device before `refuse_moved`.
    """

    def __init__(self) -> None:
        # Numbers of tokens in ascending order, where they were, and the tokens' places; first those of the stream.
        self.seen: list[tuple[Tensor, Tensor, Tensor]] = []
        self.first: Tensor | None = None  # the places of what entered the first attention
        self.moved: dict[str, Tensor] = {}  # by the attention's name: whether its tokens stand elsewhere
        self.results: Any = Results(self)

    def enter_block(self, x: Tensor) -> None:
        """The stream enters a block, whose results are looked at from now on."""
        self.look(x)
        del self.seen[:-1]
        if not torch.compiler.is_compiling():
            self.results.__enter__()

    def leave_block(self, output: Any) -> None:
        """The block has run; its output is None if it failed."""
        if not torch.compiler.is_compiling():
            self.results.__exit__(None, None, None)
        if output is not None:
            self.look(tokens_out(output))

    def look(self, x: Tensor) -> Tensor:
        """The places of the tokens of x: the stream's, unless x holds the same tokens as something seen, but moved."""
        bits = x.detach().contiguous().view(torch.uint8).long()
        factors = torch.randint(2**62, bits.shape[-1:], generator=torch.Generator().manual_seed(0)).to(x.device)
        numbers, order = (bits * factors).sum(-1).flatten().sort(stable=True)
        rank = order.argsort()
        alike = [[part.to(x.device) for part in seen] for seen in self.seen if len(seen[0]) == len(numbers)]
        places = alike[0][2] if alike else torch.arange(len(numbers), device=x.device)
        for others, from_order, stood in alike:
            places = torch.where((others == numbers).all(), stood[from_order][rank], places)
        self.seen.append((numbers, order, places))
        return places

    def attend(self, name: str, x: Tensor) -> None:
        """The tokens enter the attention of this name."""
        places = self.look(x)
        if self.first is None:
            self.first = places
        elif len(places) == len(self.first):  # fewer tokens are refused by their shape
            self.moved[name] = (places != self.first.to(places.device)).any()

    def refuse_moved(self) -> None:
        """Raise if some layer has its tokens in another order than the first."""
        moved = [name for name, is_moved in self.moved.items() if not is_moved.is_meta and is_moved]
        if moved:
            raise AcutanceError(
                f"the tokens of {moved[0]} stand in another order than the first layer's: v⁰ cannot be used here"
            )


class Results(TorchFunctionMode):
    """Shows an order all results of a block that are as many tokens as the block was given."""

    def __init__(self, order: TokenOrder) -> None:
        super().__init__()
        self.order = order

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and look at what it gives."""
        out, seen = func(*args, **kwargs or {}), self.order.seen
        is_data = isinstance(out, Tensor) and out.is_floating_point() and out.ndim > 1
        if is_data and len(seen) < MOST_RESULTS and out.numel() == out.shape[-1] * len(seen[0][0]):
            self.order.look(out)
        return out
