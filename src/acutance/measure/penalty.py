"""Penalties: what a metric says of a model's tokens, as a term of the training loss, without a second forward pass."""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from functools import partial
from inspect import signature
from math import isfinite
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from acutance import sites
from acutance.attention import AttentionCall
from acutance.errors import AcutanceError, ShapeError
from acutance.measure import PREFIXES, TAPS
from acutance.measure.reader import chosen
from acutance.measure.samples import TokenLayout, possible_rows
from acutance.measure.walk import Visitor, set_hooks
from acutance.metrics import ATTENTION_METRICS, TOKEN_METRICS
from acutance.metrics.sums import masked_mean, mean_cosine, ratio, unit_vectors, valid_positions
from acutance.sites.structure import bare_module, evaluating


def mooscomp(tokens: Tensor, mask: Tensor | None, labels: Tensor) -> Tensor:
    """Σ_{i∈P, j∈D} cos(h_i, h_j) / (|P| |D|) of kept tokens P (label 1) and dropped D (0) (arXiv 2504.16786)."""
    unit, valid = _directions(tokens, mask)
    kept, dropped = (masked_mean(unit.mT, (valid & (labels == kind)).unsqueeze(-2)) for kind in (1, 0))
    return (kept * dropped).sum(-1)  # the mean over pairs is the product of the means; 0 without P or D


def patch_diversity(tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """Σ_{i≠j} |cos(h_i, h_j)| / (n (n − 1)), the patch-wise cosine loss (arXiv 2104.12753)."""
    unit, valid = _directions(tokens, mask)
    cosines = (unit @ unit.mT).abs()
    pairs = cosines.sum((-2, -1)) - cosines.diagonal(dim1=-2, dim2=-1).sum(-1)
    return mean_cosine(pairs, valid.sum(-1).to(pairs.dtype))


def gram_anchor(tokens: Tensor, mask: Tensor | None, teacher: Tensor) -> Tensor:
    """‖X Xᵀ − Y Yᵀ‖_F² / n² of the tokens and the teacher's, all of length one (DINOv3, arXiv 2508.10104)."""
    if tokens.shape[:-1] != teacher.shape[:-1]:
        raise ShapeError(f"the teacher's tokens are {tuple(teacher.shape)}, the model's {tuple(tokens.shape)}")
    (x, valid), (y, _) = _directions(tokens, mask), _directions(teacher, mask)
    return ratio((x @ x.mT - y @ y.mT).square().sum((-2, -1)), valid.sum(-1).square())


def _directions(tokens: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Tokens divided by their length, in float32 or better, zero where masked out; and which of them count."""
    valid = valid_positions(mask, tokens)
    wide = tokens.to(torch.promote_types(torch.float32, tokens.dtype))
    return unit_vectors(wide.masked_fill(~valid.unsqueeze(-1), 0)), valid


class Term(NamedTuple):
    """A function that gives one number per sample, of tokens (samples, tokens, channels) or a call, and a mask."""

    function: Callable[..., Tensor]
    prefix: str = "in"  # whether special tokens count if nobody says
    needs: str = ""  # "call" in place of tokens; "labels" or "teacher" as a third argument


TERMS = {name: Term(function) for name, function in TOKEN_METRICS.items()}
TERMS |= {name: Term(function, needs="call") for name, function in ATTENTION_METRICS.items()}
TERMS["mooscomp"] = Term(mooscomp, needs="labels")
TERMS["patch_diversity"] = Term(patch_diversity, "out")
TERMS["gram_anchor"] = Term(gram_anchor, "out", "teacher")


class Taps(Visitor):
    """Keeps what one tap gives at some layers in a forward pass, and as layer 0 what enters the first."""

    is_on = False  # whether a forward pass is under way that counts

    def __init__(self, model: nn.Module, tap: str, layers: Sequence[int]) -> None:
        depth = sites.blocks(model)[-1][0]
        method = {"block": "leave", "final": "final"}.get(tap, "attend")
        known = [number for _, number in sites.layers_of(model)] if method == "attend" else [*range(1, depth + 1)]
        known = known[-1:] if method == "final" else known
        self.layers = [depth + 1 + layer if layer < 0 else layer for layer in layers]
        if unknown := sorted(set(self.layers) - set(known)):
            raise AcutanceError(f"layers {unknown} have no tap {tap!r}: name some of {known}")
        self.needs, self.seen = {"enter": (1,), method: self.layers}, list[tuple[int, Any]]()

    def enter(self, layer: int, tokens: Tensor) -> None:
        if self.is_on and self.seen and self.seen[-1][0] > 1:
            raise AcutanceError("layer 1 ran again after a later layer: a penalty needs a model that runs them once")
        self.leave(0, tokens)

    def leave(self, layer: int, tokens: Any) -> None:
        if self.is_on:
            self.seen.append((layer, tokens))

    attend = final = leave  # type: ignore[assignment]


class Penalty:
    """A term of the training loss: weight · Σ over layers of a metric's mean over the batch's samples.

    `attach(model)` makes it watch a model that trains. Calling it then gives the term of the last forward pass, with
    gradients. Tokens count as in `measure`. In distributed training the samples are those of the process.

    Args:
        of: a metric of `measure`, `mooscomp`, `patch_diversity`, `gram_anchor`, or a function of tokens (samples,
            tokens, channels) and a mask (samples, tokens) or None, which gives one number per sample.
        weight: its factor; a negative one rewards. It may be changed during training.
        layers: layer numbers, 1 being the first and −1 the last.
        tap: where tokens are read, as in `measure`. Attention metrics read the operator.
        prefix: class and other special tokens `in` or `out`; by default out for `patch_diversity` and `gram_anchor`.
        part: path of the submodule to read, where a model has several stacks of layers.
        teacher: for `gram_anchor`, a model that is given the same inputs, in evaluation mode and without gradients.
    """

    def __init__(
        self,
        of: str | Callable[[Tensor, Tensor | None], Tensor],
        *,
        weight: float,
        layers: Sequence[int] = (-1,),
        tap: str = "block",
        prefix: Literal["in", "out"] | None = None,
        part: str | None = None,
        teacher: nn.Module | None = None,
    ) -> None:
        self.name = chosen("penalty", of, list(TERMS))[0] if isinstance(of, str) else getattr(of, "__name__", repr(of))
        self.term = TERMS[self.name] if isinstance(of, str) else Term(of)
        (self.prefix,) = chosen("prefix", self.term.prefix if prefix is None else prefix, PREFIXES)
        (self.tap,) = chosen("tap", "attention" if self.term.needs == "call" else tap, TAPS)
        self.weight, self.layers, self.part, self.teacher = weight, layers, part, teacher
        if not isfinite(weight):
            raise AcutanceError(f"weight={weight} is not finite")
        if isinstance(layers, (int, str)) or not layers or not all(type(layer) is int for layer in layers):
            raise AcutanceError(f"layers={layers!r}: give a list of whole numbers, such as [6, 12]")
        if isinstance(teacher, nn.Module) != (self.term.needs == "teacher") or isinstance(teacher, str):
            raise AcutanceError(
                f"teacher={teacher!r}: gram_anchor needs a model, as of ac.load(path); others take none"
            )
        self._taps: list[Taps] = []  # while attached: the model's, and the teacher's
        self._check = ExitStack()  # around the first forward pass
        self._given: tuple[Any, Any] = (), {}  # to the model in the last one

    def __repr__(self) -> str:
        return f"<penalty {self.weight:g} · {self.name} at {self.tap} of layers {', '.join(map(str, self.layers))}>"

    def __deepcopy__(self, _memo: Any) -> Self:
        return self  # a copy of the model, such as an average of its weights, has hooks that report here

    def attach(self, model: nn.Module, *, add_to_loss: bool = False) -> sites.Undo:
        """Watch the model's forward passes with gradients until the handle is removed, or its with block is left.

        `add_to_loss` adds the term to the `loss` that the model returns, which is all that transformers' Trainer needs.
        """
        if self._taps:
            raise AcutanceError(f"{self!r} is attached already: call remove() on its handle first")
        if any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in model.modules()):
            raise AcutanceError("compiled code would not see the penalty's hooks: attach, then torch.compile")
        self._bare, self._adds, self._is_checked = bare_module(model), add_to_loss, False
        read = [self._bare] if self.teacher is None else [self._bare, bare_module(self.teacher)]
        if read[1:] == [self._bare]:
            raise AcutanceError("the teacher is the model itself: give a copy, such as copy.deepcopy(model)")
        with ExitStack() as hooks, sites.cached_lookup():
            hooks.callback(self._taps.clear)
            for part in [sites.part_of(module, self.part) for module in read]:
                self._taps.append(Taps(part, self.tap, self.layers))
                set_hooks(part, self._taps[-1:], hooks)
            skip = sites.special_tokens(self._bare, self.part) if self.prefix == "out" else (0, 0)
            kind: Any = sites.token_kind(self._bare, self.part) | {"special": self.prefix == "in"}
            self._layout: Callable[[Any], TokenLayout] = partial(TokenLayout.of, special_token_counts=skip, **kind)
            hooks.callback(self._bare.register_forward_pre_hook(self._begin, with_kwargs=True).remove)
            hooks.callback(self._bare.register_forward_hook(self._end, always_call=True).remove)
            return sites.Undo(hooks.pop_all().close)

    def __call__(self, labels: Tensor | None = None) -> Tensor:
        """The term of the last forward pass with gradients, once; `mooscomp` takes labels, or the model's argument."""
        seen = self._taps[0].seen if self._taps and torch.is_grad_enabled() else []
        if not seen:
            raise AcutanceError(f"{self!r} has no value: attach it, run the model with gradients, then call it once")
        given, self._given, self._taps[0].seen = self._given, ((), {}), []
        named, taught = _named(self._bare, *given), self._taught(*given)
        layout, labels = self._layout(named), named.get("labels") if labels is None else labels
        if self.term.needs == "labels" and (not isinstance(labels, Tensor) or labels.ndim != 2):
            raise ShapeError(f"{self.name} needs labels (batch, tokens): give them to the model, or to the penalty")
        total, third = torch.zeros((), device=next(self._bare.parameters()).device), list[Tensor]()
        for layer, x in seen:
            tokens, mask = self._tokens(x, layout)
            if layer == 0:  # it only tells which tokens are special
                continue
            if self.term.needs == "teacher":
                third = [self._tokens(taught[layer], layout)[0]]
            elif self.term.needs == "labels" and labels is not None:
                third = [layout.tokens(labels.to(tokens.device)[..., None])[0][..., 0]]
            with torch.autocast(tokens.device.type, enabled=False):
                read = layout.record(x) if self.term.needs == "call" else tokens
                term = self._mean(self.term.function(read, mask, *third), tokens, layout)
            if not term.requires_grad:
                why = "it is frozen, in torch.no_grad(), or in re-entrant checkpointing: give that use_reentrant=False"
                raise AcutanceError(f"{self!r} has no gradient at layer {layer}: {why}")
            total = total + term
        return self.weight * total

    def _begin(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if getattr(model, "_is_replica", False):
            raise AcutanceError("nn.DataParallel runs copies of the model in threads: use DistributedDataParallel")
        self._taps[0].is_on = torch.is_grad_enabled()
        if not self._taps[0].is_on:
            return  # what was kept before stays
        self._taps[0].seen, self._given = [], (args, kwargs)
        if not self._is_checked and not torch.compiler.is_compiling():
            self._is_checked, rows = True, possible_rows(_named(model, args, kwargs))
            self._check.enter_context(sites.checking_blocks(sites.part_of(model, self.part), *rows))

    def _end(self, model: nn.Module, _args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self._check.close()
        was_on, self._taps[0].is_on = self._taps[0].is_on, False
        if not (was_on and self._adds) or output is None:  # None: an error is on its way
            return
        loss, named = output.get("loss") if isinstance(output, MutableMapping) else None, _named(model, *self._given)
        if not isinstance(loss, Tensor):
            raise AcutanceError(f"{type(model).__name__} returned no 'loss': give it labels, or add penalty() to yours")
        # transformers divide by the labels of all accumulated batches, which the Trainer adds up: this is one of them.
        items, shifts = named.get("num_items_in_batch"), getattr(model, "loss_type", None) == "ForCausalLM"
        share = 1.0 if items is None else (named["labels"][..., int(shifts) :] != -100).sum() / items
        output["loss"] = loss + share * self()

    def _taught(self, args: Any, kwargs: Any) -> dict[int, Any]:
        """What the teacher's taps give for the same arguments, by the model's layers."""
        if self.teacher is None:
            return {}
        own, taps = self._taps
        teacher = bare_module(self.teacher).to(next(self._bare.parameters()).device)
        with evaluating(teacher):
            taps.is_on = True
            teacher(*args, **kwargs)
        taps.is_on, seen, taps.seen = False, taps.seen, []
        layers = dict(zip(taps.layers, own.layers, strict=True))
        return {layers[layer]: x for layer, x in seen if layer > 0}

    def _tokens(self, x: Any, layout: TokenLayout) -> tuple[Tensor, Tensor | None]:
        """What a tap gave as (samples, tokens, channels), and which of the tokens count."""
        if isinstance(x, AttentionCall):
            merged = x.values.transpose(1, 2).flatten(2)
            # Pyramids have fewer keys than queries; their prefix and padding are none.
            layout = layout if self.tap == "attention" or merged.shape[1] == x.branch.shape[1] else TokenLayout()
            x = x.branch if self.tap == "attention" else merged
        return layout.tokens(x)

    def _mean(self, values: Tensor, tokens: Tensor, layout: TokenLayout) -> Tensor:
        """The mean over the samples that have a token that counts, and over their heads."""
        if self.term.needs != "call" and values.shape != tokens.shape[:1]:
            raise ShapeError(f"{self.name} gave {tuple(values.shape)} for {tuple(tokens.shape)}: one number per sample")
        if layout.filled is not None:
            values = values.reshape(len(layout.filled), -1)[torch.from_numpy(layout.filled).to(values.device)]
        return values.sum() / max(values.numel(), 1)


penalty = Penalty  # a verb, as `measure` and `mitigate` are


def _named(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a forward pass by their names, of which some tell padding."""
    found = signature(type(model).forward).parameters.values()
    names = [p.name for p in found if p.kind is p.POSITIONAL_OR_KEYWORD][1:] or ["input"]
    if len(args) > len(names):
        raise AcutanceError(f"{type(model).__name__} was given {len(args)} arguments without names: name the masks")
    return dict(zip(names, args, strict=False)) | dict(kwargs)
