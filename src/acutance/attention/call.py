"""One layer's attention in one forward pass, made the same way for every model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from acutance.attention.operator import HIDDEN, OPTIONS, AttentionOperator, is_visible
from acutance.attention.products import as_four_axes, repeat_heads, with_bias
from acutance.errors import AcutanceError, ShapeError

MISSING = object()  # what `first` holds where the first layer's values are not known
MOST_TOKENS = 1024  # of a matrix that a mitigation forms, unless it is told to
CACHE = "A cache keeps no earlier outputs: generate with use_cache=False"


@dataclass(slots=True, eq=False, repr=False, kw_only=True)
class AttentionCall:
    """What a site tells, what hooks receive, what observers read.

    Slots and plain properties: Dynamo traces them, but no `cached_property`, and no `A @ x` under `fullgraph`.
    """

    layer: int = 1  # depth; 1 is the first, and layers that share a module go on counting
    v: Tensor  # values (batch, key heads, keys, head_dim), all rows
    q: Tensor | None = None  # queries (batch, heads, queries, width); None where the model wrote its softmax out
    k: Tensor | None = None  # keys (batch, key heads, keys, width); None likewise
    first: Any = None  # the first layer's values, see `v0`
    product: Callable[..., Tensor] | None = None  # the model's own, see `own`
    name: str = ""  # path of the attention module in the model
    x: Tensor | None = None  # the tokens that enter the branch, after the norm; None where not known
    residual: Tensor | None = None  # the tokens that enter the block; None where not known
    mask: Tensor | None = None  # this and the next five as `AttentionOperator` takes them
    causal: bool = False
    scale: float | None = None
    softcap: float | None = None
    sink: Tensor | None = None
    kernel: str = "softmax"
    logits: Tensor | None = None  # what entered a softmax that was written out (batch, heads, queries, keys)
    weights: Tensor | None = None  # A itself, where the model formed it
    refusal: str | None = None  # why there is no operator, where there is none
    dropout: float = 0.0  # on the attention weights in this pass
    packed: Tensor | None = None  # q, k and v side by side (batch, tokens, 3 · dim), where they are one tensor
    behind: int = 0  # how many of the keys belong to other tokens, and stand last
    scored: tuple[Any, Any, Any] | None = (
        None  # queries, keys and a bias on the logits, where a mitigation changed them
    )
    previous: Any = None  # what the layer before handed to `keep`
    kept: Any = None  # what this layer handed to it
    operator: AttentionOperator | None = None  # see `A`
    values: Any = None  # w, what A was applied to; set for observers, as are the next two
    output: Any = None  # u, the heads' outputs after mitigation; None where A is a scan
    branch: Any = None  # y, the branch's output (batch, tokens, dim)
    products: int = 0  # how often `own` was called

    @property
    def v0(self) -> Tensor | None:
        """The first layer's values, like v; None in the first layer, whose own they are."""
        if self.first is MISSING:
            raise AcutanceError(f'{self.name}: call.v0 is unknown: a mitigation asks by requires = ("first_values",)')
        return self.first  # type: ignore[no-any-return]

    def first_like(self, v: Tensor) -> Tensor:
        """v⁰, which must have the heads, rows and channels of v: it is never broadcast."""
        if self.v0 is None or self.v0.shape != v.shape:
            given = None if self.v0 is None else tuple(self.v0.shape)
            raise ShapeError(f"{self.name or f'layer {self.layer}'}: v⁰ {given} cannot stand beside v {tuple(v.shape)}")
        return self.v0

    def own(self, values: Tensor) -> Tensor:
        """A w by the model's own product: bit-exact, with its sinks, cache and dropout.

        w is (batch, key heads, keys, any), all rows. Where a mitigation changed the scores, A is what they make.
        """
        assert self.product is not None, "a record has no product"
        self.products += 1
        if self.products > 1 and self.dropout > 0 and self.weights is None:
            why = "draws anew in every product, and this mitigation needs several of one A: set it to 0"
            raise AcutanceError(f"{self.name}: attention dropout ({self.dropout:g}) {why}, or train in evaluation mode")
        u: Tensor = self.product(values, *(self.scored or ()))
        return u

    def again(self, u: Tensor) -> Tensor:
        """A u for u (batch, heads, tokens, any), each head by its own A.

        Under grouped queries the heads that share a key head go through its product side by side.
        """
        heads, kv_heads, group = u.shape[1], self.v.shape[1], u.shape[1] // self.v.shape[1]
        if group == 1:
            return self.own(u)
        side_by_side = u.unflatten(1, (kv_heads, group)).transpose(2, 3).flatten(3)
        found = self.own(side_by_side).unflatten(-1, (group, -1))  # (batch, heads, tokens, group, any)
        places = (torch.arange(heads, device=u.device) % group)[None, :, None, None, None]
        return found.gather(3, places.expand(*found.shape[:3], 1, found.shape[-1])).squeeze(3)  # type: ignore[no-any-return]

    def keep(self, x: Any) -> None:
        """Hand something to the next layer, which finds it in `previous`; a tensor without its gradient."""
        self.kept = x.detach() if isinstance(x, Tensor) else x

    @property
    def A(self) -> AttentionOperator:  # noqa: N802
        """The operator, made when it is first asked for."""
        if self.operator is None:
            if self.refusal is not None:
                raise AcutanceError(f"{self.name}: {self.refusal}")
            q, k, bias = self.scored or (self.q, self.k, None)
            if q is None or k is None:
                assert self.logits is not None, "a written softmax has its logits"
                logits = self.logits if bias is None else self.logits + bias
                self.operator = AttentionOperator.from_logits(logits, self.sink, self.v.shape[1])
            else:
                options = {name: getattr(self, name) for name in OPTIONS}
                if bias is not None:
                    shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
                    mask = None if self.mask is None else as_four_axes(self.mask, shape, True)
                    options["mask"] = with_bias(mask, bias)
                self.operator = AttentionOperator(q, k, **options)
        return self.operator

    def matrix(self, mitigation: Any) -> Tensor:
        """A itself, with this pass's dropout, for a mitigation that cannot do without; refused for many tokens."""
        tokens = self.v.shape[2]
        if tokens > MOST_TOKENS and not mitigation.large:
            gib = self.A.shape[0] * self.A.heads * tokens**2 * 4 / 2**30
            raise AcutanceError(
                f"{mitigation.spec} forms the whole attention matrix, {gib:.1f} GiB a layer for {tokens} tokens: write "
                f"{mitigation.name}:large=true to have it above {MOST_TOKENS} tokens"
            )
        return F.dropout(self.A.dense(), self.dropout)

    def rows(self, values: Tensor, u: Tensor) -> Tensor:
        """Values brought to the heads and rows of u.

        With grouped queries each head of the values is repeated. With a cache the last rows are u's, before those of
        other tokens. A model that drops tokens between layers is refused.
        """
        heads, kv_heads, rows = u.shape[1], values.shape[1], u.shape[2]
        if heads % kv_heads or values.shape[2] < rows or values.shape[::3] != u.shape[::3]:
            raise ShapeError(f"values {tuple(values.shape)} cannot be matched to an attention output {tuple(u.shape)}")
        if values.shape[2] > rows:
            if self.v.shape[2] == rows:
                why = f"v⁰ {tuple(values.shape)} and v {tuple(self.v.shape)} are not of the same tokens"
                raise ShapeError(f"{self.name or f'layer {self.layer}'}: {why}: some were dropped or merged on the way")
            end = values.shape[2] - self.behind
            values = values[:, :, end - rows : end]
        return repeat_heads(values, heads)

    def visible(self) -> Tensor | None:
        """Which keys each query sees, bool (batch, heads, queries, keys) or broadcasting; None: all, or as `causal`."""
        if self.q is not None and self.k is not None:
            mask = None if self.mask is None else as_four_axes(self.mask, (*self.q.shape[:3], self.k.shape[2]), True)
        elif self.logits is not None:
            return is_visible(self.logits)
        else:
            mask = self.A.mask4
        return mask if mask is None or mask.dtype == torch.bool else mask > HIDDEN

    def visible_mean(self, w: Tensor) -> Tensor:
        """U w: the mean of the values that each query can see; one row where all see the same."""
        seen = self.visible()
        heads, rows = (self.A.q if self.q is None else self.q).shape[1:3]  # the refusal of mixed heads included
        if seen is None and not self.causal:
            return repeat_heads(w, heads).mean(dim=-2, keepdim=True)
        alike = w.new_zeros(w.shape[0], heads, rows, 1), w.new_zeros(*w.shape[:3], 1)  # queries and keys
        return AttentionOperator(*alike, mask=seen, causal=self.causal).apply(w)

    def among_seen(self, q: Tensor, k: Tensor, scale: float = 1.0) -> AttentionOperator:
        """Attention of one head among tokens (batch, tokens, any), over those that each sees in the model's own."""
        seen = self.visible()
        first = None if seen is None else seen[:, :1]
        return AttentionOperator(q[:, None], k[:, None], mask=first, causal=self.causal, scale=scale)

    def seen_mean(self, x: Tensor) -> Tensor:
        """The mean of the tokens x (batch, tokens, dim) that each token can see; one row where all see the same."""
        if not self.causal and self.visible() is None:
            return x.mean(dim=-2, keepdim=True)
        zeros = torch.zeros_like(x[..., :1])
        return self.among_seen(zeros, zeros).apply(x[:, None])[:, 0]

    def check(self, mitigation: Any) -> None:
        """Refuse a mitigation where this pass does not have what it requires."""
        if "all_visible" in mitigation.requires:
            self._refuse_hidden(mitigation)
        asked = self.q if self.q is not None else self.logits
        if "square" in mitigation.requires and asked is not None and asked.shape[2] != self.v.shape[2]:
            why = f"{asked.shape[2]} queries have {self.v.shape[2]} keys"
            raise AcutanceError(
                f"{self.name}: {mitigation.spec} needs keys of the queries' tokens alone, but {why}. {CACHE}"
            )
        if "previous_values" in mitigation.requires and self.previous is None and self.layer > 1:
            raise AcutanceError(
                f"{self.name}: {mitigation.spec} needs the layer before, which has none of it: name consecutive layers "
                "from the first, and keep checkpointing to whole blocks"
            )

    def _refuse_hidden(self, mitigation: Any) -> None:
        """Refuse a mean over all tokens where some of them are hidden from others."""
        visible = None if self.causal else self.visible()
        if self.causal or (visible is not None and (torch.compiler.is_compiling() or not bool(visible.all()))):
            why = "a mask hides some (padding, the future): give batches without padding, uncompiled if there is a mask"
            raise AcutanceError(f"{mitigation.spec} averages over all tokens, but {why}; attnscale knows masks")
