"""Any model's attention, seen as it runs: `scaled_dot_product_attention`, or a softmax and the product after it."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from acutance.attention.operator import AttentionOperator
from acutance.attention.products import with_bias
from acutance.errors import AcutanceError

# Tuples: Dynamo of torch 2.6 cannot look a function up in a set.
SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)
PRODUCT = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm)
CASTS = (Tensor.to, Tensor.type_as, Tensor.type, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.double)
SUMS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__iadd__, Tensor.add_)
FACTORS = (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__, Tensor.mul_)
QUOTIENTS = (torch.div, Tensor.div, Tensor.__truediv__, Tensor.__itruediv__, Tensor.div_)
SCALINGS = (*FACTORS, *QUOTIENTS)
FILLS = (torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_)
TANH = (torch.tanh, Tensor.tanh)
# Operations that leave the rows of a softmax what they are.
CARRY = (
    *(F.dropout, *CASTS),
    *(Tensor.view, Tensor.reshape, Tensor.contiguous, Tensor.__getitem__, torch.reshape, Tensor.flatten),
    *(Tensor.unflatten, Tensor.squeeze, Tensor.unsqueeze, Tensor.masked_fill, torch.nan_to_num, Tensor.nan_to_num),
)
MULTIHEAD = F.multi_head_attention_forward
WATCHED = (
    *(F.scaled_dot_product_attention, MULTIHEAD, torch.einsum, torch.baddbmm, Tensor.unflatten),
    *(*SOFTMAX, *PRODUCT, *FACTORS),
)
WATCHED_SET = frozenset(WATCHED)
AFTERWARDS = (F.scaled_dot_product_attention, MULTIHEAD, torch.einsum, F.dropout, Tensor.unflatten, *SOFTMAX, *PRODUCT)
SINKS = "its tokens may attend to nothing (sinks), so A's rows do not sum to one"
MIXED = "it mixes its heads before or after the softmax, so there is no attention operator per head"


# torch hands this function to a mode as a whole. The same code with other names shows what is inside: to the mode, by
# another answer to "is anybody looking?", or directly, by our own product, which spares the mode 40 operations.
# Without a __name__ Dynamo looks names up here; it does not trace the check of a mask's shape.
_NAMES = {name: vars(F)[name] for name in ("__builtins__", *MULTIHEAD.__code__.co_names) if name in vars(F)}
_NAMES |= {"has_torch_function": lambda _: False, "_check_key_padding_mask": lambda *_: None}


def _multihead_with(**names: Any) -> Callable[..., Any]:
    return FunctionType(MULTIHEAD.__code__, _NAMES | names, MULTIHEAD.__name__, MULTIHEAD.__defaults__)


_watched = _multihead_with()


class Product(NamedTuple):
    """One product A v as the model is about to compute it; v and u are (batch, heads, tokens, width)."""

    v: Tensor  # of fewer heads under grouped queries, unless the model repeats them itself
    own: Callable[..., Tensor]  # the model's own product
    back: Callable[[Tensor], Tensor]  # u as the model expects it
    about: dict[str, Any]  # what an `AttentionCall` takes beside these


class Scores(NamedTuple):
    """Products q kᵀ on their way to a softmax: c·tanh(s q kᵀ/c) + mask, as far as it has come."""

    logits: Tensor
    q: Tensor
    k: Tensor
    scale: float = 1.0
    softcap: float | None = None  # 0.0 between tanh and its factor
    mask: Tensor | None = None

    def after(self, func: Any, out: Tensor, args: Any) -> Scores | None:
        """The scores after one more operation; None where it is not one of the above."""
        scale, softcap, mask = self.scale, self.softcap, self.mask
        other: Any = args[1] if len(args) > 1 else None
        if func in TANH and softcap is None and mask is None:
            softcap = 0.0
        elif (func in SUMS or func in FILLS) and isinstance(other, Tensor) and softcap != 0.0:
            bias = other if func in SUMS else torch.zeros_like(other, dtype=out.dtype).masked_fill(other, args[2])
            mask = bias if mask is None else mask + bias
        elif func in SCALINGS and isinstance(other, (int, float)) and mask is None and not softcap:
            factor = 1 / other if func in QUOTIENTS else float(other)
            scale, softcap = scale * factor, None if softcap is None else factor
        elif func not in CASTS:
            return None
        return Scores(out, self.q, self.k, scale, softcap, mask)  # not by _replace, which Dynamo of 2.6 does not trace


class Map(NamedTuple):
    """A softmax's output, or what became of it."""

    weights: Tensor
    logits: Tensor
    is_mixed: bool = False
    dropout: float = 0.0
    scores: Scores | None = None  # where it is known how the logits are made of q and k


class Intercept(TorchFunctionMode):
    """Hands the attention that runs inside to `attend`. One object per call, so threads share none.

    Args:
        attend: what is given the product and returns u.
        x: the tokens that enter the attention: their number tells heads that were folded into the batch.
        name: for error messages.
    """

    def __init__(self, attend: Callable[[Product], Tensor], x: Tensor, name: str) -> None:
        super().__init__()
        self.attend, self.x, self.name = attend, x, name
        self.watched: Any = WATCHED if torch.compiler.is_compiling() else WATCHED_SET
        self.maps: list[Map] = []
        self.used: list[Map] = []  # by the one product
        self.scores: Scores | None = None
        self.scaled: Any = (None, None, 1.0)  # the last tensor that was multiplied by a number, its source, the number
        self.products = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at one operation; at most of them in passing, which is what a layer pays for."""
        if func in self.watched or self.maps or self.scores is not None:
            return self._look(func, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)

    def _look(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is Tensor.unflatten:  # a method in Python, whose super() Dynamo does not trace here
            func = torch.unflatten
        if func is F.scaled_dot_product_attention:
            return self.sdpa(*args, **kwargs)
        if func is MULTIHEAD:
            return self._multihead(args, kwargs)
        found = self._of_maps(func, args, kwargs) if self.maps or self.used else None
        if found is not None:
            return found
        out = func(*args, **kwargs)
        if func in SOFTMAX and _over_last_axis(out, *args, **kwargs):
            known = self.scores if self.scores is not None and self.scores.logits is args[0] else None
            self.maps.append(Map(out, args[0], scores=known))
        elif func in PRODUCT or func is torch.baddbmm:
            *mask, q, k = args
            q, scale = self.scaled[1:] if self.scaled[0] is q else (q, 1.0)  # queries that were scaled before
            own = Scores(out, q, k.transpose(-2, -1), scale, mask=mask[0] if mask else None)
            self.scores = own if out.ndim > 2 else None
        elif self.scores is not None and isinstance(out, Tensor) and args and args[0] is self.scores.logits:
            self.scores = self.scores.after(func, out, args)
        elif func is torch.einsum:
            pair = _as_matmul(args[0], _operands(args))
            self.scores = None if pair is None else Scores(out, pair[0], pair[1].transpose(-2, -1))
        elif func in FACTORS and isinstance(args[1], float):
            self.scaled = (out, *args)
        return out

    def sdpa(self, *args: Any, **kwargs: Any) -> Tensor:
        """In place of `scaled_dot_product_attention`."""
        return self._attend(sdpa_product(self.x, *args, **kwargs))

    def _multihead(self, args: Any, kwargs: Any) -> Any:
        if kwargs.get("need_weights", True) or torch.compiler.is_compiling():
            with self:
                return _watched(*args, **kwargs)
        return _multihead_with(scaled_dot_product_attention=self.sdpa)(*args, **kwargs)

    def _of_maps(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What becomes of a softmax; None where the operation has none."""
        operands = _operands(args) if func is torch.einsum else args
        maps = (*self.maps, *self.used)
        found = [(known, place) for place, x in enumerate(operands[:2]) for known in maps if known.weights is x]
        if not found:
            return None
        known, place = found[0]
        if func is torch.einsum and (pair := _as_matmul(args[0], operands, place)) is not None:
            return self._attend(written_product(self.x, known, torch.matmul, pair[1])).permute(pair[2])
        if place == 0 and func in PRODUCT and args[1].ndim > 2 and args[1].shape[-2] == known.weights.shape[-1]:
            return self._attend(written_product(self.x, known, func, args[1]))
        out = func(*args, **kwargs)
        if isinstance(out, Tensor) and out.numel() >= known.weights.numel() // 2:
            drops = func is F.dropout and kwargs.get("training", args[2] if len(args) > 2 else True)
            rate = float(kwargs.get("p", args[1] if len(args) > 1 else 0.5)) if drops else known.dropout
            is_mixed = known.is_mixed or func not in CARRY
            self.maps.append(Map(out, known.logits, is_mixed, rate, known.scores))
        return out

    def _attend(self, product: Product) -> Tensor:
        self.products += 1
        if self.products > 1:
            raise AcutanceError(
                f"{self.name} runs several attention products in one pass: which is its self-attention is not clear"
            )
        self.maps, self.used, self.scores, self.scaled = [], self.maps, None, (None, None, 1.0)
        self.watched = AFTERWARDS
        return product.back(self.attend(product))


def _operands(args: Any) -> Any:
    """Of an einsum, which takes them as a list too."""
    return args[1] if isinstance(args[1], (list, tuple)) else args[1:]


def _over_last_axis(out: Tensor, _x: Any, dim: Any = None, *_rest: Any, **options: Any) -> bool:
    return out.ndim > 2 and options.get("dim", dim) in (-1, out.ndim - 1)


def sdpa_product(
    x: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Product:
    """The product of `scaled_dot_product_attention`, called with these in an attention that was given x."""
    split, join = _four_axes(query, x)
    q, k, v = split(query), split(key), split(value)

    def own(values: Tensor, asked: Tensor = q, keys: Tensor = k, bias: Tensor | None = None) -> Tensor:
        mask = attn_mask if bias is None else with_bias(causal_mask(q, k) if is_causal else attn_mask, bias)
        given = join(asked), join(keys), join(values), mask, dropout_p, is_causal and bias is None
        return split(F.scaled_dot_product_attention(*given, scale=scale, enable_gqa=enable_gqa))

    about: dict[str, Any] = {"q": q, "k": k, "scale": scale, "dropout": dropout_p}
    if is_causal and q.shape[-2] != k.shape[-2]:  # torch counts from the first key, the operator from the last
        about["mask"] = causal_mask(q, k)[None, None]
    else:
        about["causal"], about["mask"] = is_causal, None if attn_mask is None else _mask(attn_mask, query, split)
    return Product(v, own, join, about)


def _mask(mask: Tensor, query: Tensor, split: Callable[[Tensor], Tensor]) -> Tensor:
    """With four axes; of two it would pass for one of keys."""
    if query.ndim == 4 or mask.ndim < 3:
        return mask[(None,) * (4 - mask.ndim)] if mask.ndim < 4 else mask
    return split(mask) if mask.shape[0] == query.shape[0] else mask[:, None]


def causal_mask(q: Tensor, k: Tensor) -> Tensor:
    """True where torch's `is_causal` lets a query see a key."""
    return torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()


def written_product(x: Tensor, known: Map, func: Any, value: Tensor) -> Product:
    """The product of a softmax that was written out, in an attention that was given x."""
    split, join = _four_axes(known.weights, x)
    about = _about(known, split)

    q, k = about.get("q"), about.get("k")

    def own(values: Tensor, asked: Any = q, keys: Any = k, bias: Tensor | None = None) -> Tensor:
        weights = known.weights
        if asked is not q or keys is not k:
            if q is None:
                raise AcutanceError(
                    "how this written softmax gets its logits from q and k is not known: change the logits instead"
                )
            mask = about["mask"] if bias is None else with_bias(about["mask"], bias)
            A = AttentionOperator(asked, keys, mask=mask, scale=about["scale"], softcap=about["softcap"])
            return A.apply(values, known.dropout)
        if bias is not None:
            if known.is_mixed or known.logits.shape != weights.shape:
                raise AcutanceError("a bias on logits needs a softmax that is used as it is, without sinks")
            changed = (split(known.logits) + bias).softmax(-1).to(weights.dtype)
            weights = join(F.dropout(changed, known.dropout))
        return split(func(weights, join(values)))

    return Product(split(value), own, join, about)


def _about(known: Map, split: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    weights, logits, scores = known.weights, known.logits, known.scores
    about: dict[str, Any] = {"weights": split(weights), "dropout": known.dropout, "logits": None}
    if logits.shape[-1] != weights.shape[-1]:
        about["refusal"] = MIXED if known.is_mixed else SINKS
        return about
    logits = logits.reshape(weights.shape)
    about["logits"] = split(logits)
    if known.is_mixed:
        about["refusal"] = MIXED
    elif scores is not None and scores.softcap != 0.0 and scores.q.shape[:-2] == logits.shape[:-2]:
        about["q"], about["k"] = split(scores.q), split(scores.k)
        about["scale"], about["softcap"] = scores.scale, scores.softcap
        about["mask"] = None if scores.mask is None else _mask(scores.mask, logits, split)
    return about


def _four_axes(like: Tensor, x: Tensor) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """How to bring a tensor like this, (…, tokens, any), to four axes, and how to bring it back.

    Heads that were folded into the batch stand sample by sample, as everybody writes it.
    """
    if like.ndim == 4:
        return _same, _same
    if like.ndim > 4:
        lead = like.shape[:-3]
        return lambda t: t.flatten(0, -4), lambda t: t.unflatten(0, lead)
    tokens_first = x.ndim == 3 and x.shape[1] != like.shape[-2] and x.shape[0] == like.shape[-2]
    batch = x.shape[1] if tokens_first else x.shape[0] if x.ndim > 2 else like.shape[0]
    batch = like.shape[0] if like.shape[0] % batch else batch
    return lambda t: t.unflatten(0, (batch, -1)), lambda t: t.flatten(0, 1)


def _same(t: Tensor) -> Tensor:
    return t


def _as_matmul(equation: Any, operands: Any, place: int | None = None) -> tuple[Tensor, Tensor, list[int]] | None:
    """An einsum of two operands as a product of matrices: both of them, and how to permute what it gives.

    The operand at `place` comes first and must be (…, rows, summed) as it is; without one, the output must.
    """
    labels = equation.replace(" ", "").replace("->", ",").split(",") if isinstance(equation, str) else []
    if len(labels) != 3 or len(operands) != 2 or "." in equation or not 3 <= len(labels[2]) <= 4:
        return None
    first, out = place or 0, labels[2]
    one, other, fixed = labels[first], labels[1 - first], out if place is None else labels[first]
    batch = [label for label in fixed if label in one and label in other and label in out]
    rows, columns = [x for x in one if x not in other], [x for x in other if x not in one]
    summed = [x for x in one if x in other and x not in out]
    made, ends = [*batch, *rows, *columns], columns if place is None else summed
    if len(rows) != 1 or len(columns) != 1 or len(summed) != 1 or [*batch, *rows, *ends] != list(fixed):
        return None
    left = operands[first].permute([one.index(label) for label in (*batch, *rows, *summed)])
    right = operands[1 - first].permute([other.index(label) for label in (*batch, *summed, *columns)])
    return left, right, [made.index(label) for label in out]
