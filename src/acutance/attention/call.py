"""One layer's attention in one forward pass, made the same way for every model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from acutance.attention.operator import AttentionOperator
from acutance.attention.products import repeat_heads
from acutance.errors import AcutanceError, ShapeError

# What `v0` holds where the first layer's values are not to be had.
MISSING = object()


class AttentionCall:
    """What a site tells, what hooks receive, what observers read.

    Slots and plain properties: Dynamo traces them, but no `cached_property`, and no `A @ x` under `fullgraph`.

    Attributes:
        layer: depth; 1 is the first. Layers that share a module go on counting.
        name: path of the attention module in the model.
        x: the tokens that enter the branch, after the norm; None where not known.
        residual: the tokens that enter the block; None where not known.
        q: queries (batch, heads, queries, width); None where the model wrote its softmax out.
        k: keys (batch, key heads, keys, width); None likewise.
        v: values (batch, key heads, keys, head_dim), all rows.
        mask: as `AttentionOperator` takes it.
        causal: whether row i sees keys up to i + keys − queries.
        scale: of the dot product; None is 1/√width.
        softcap: logits s become c·tanh(s/c).
        sink: one logit per head that takes part in the softmax and has no value; None where there is none.
        kernel: of the operator.
        logits: what entered a softmax that was written out (batch, heads, queries, keys).
        weights: A itself, where the model formed it.
        refusal: why there is no A, where there is none.
        dropout: on the attention weights in this pass.
        packed: q, k and v side by side (batch, tokens, 3 · dim), where they are one tensor.
        previous: what the layer before handed to `keep`.
        values: w, what A was applied to. Set for observers.
        output: u, the heads' outputs after mitigation. Set for observers.
        branch: y, the branch's output (batch, tokens, dim). Set for observers.
    """

    __slots__ = (
        "_A",
        "_first",
        "_own",
        "_products",
        "branch",
        "causal",
        "dropout",
        "k",
        "kept",
        "kernel",
        "layer",
        "logits",
        "mask",
        "name",
        "output",
        "packed",
        "previous",
        "q",
        "refusal",
        "residual",
        "scale",
        "sink",
        "softcap",
        "v",
        "values",
        "weights",
        "x",
    )

    values: Tensor
    output: Tensor
    branch: Tensor

    def __init__(
        self,
        layer: int = 1,
        *,
        v: Tensor,
        own: Callable[..., Tensor] | None = None,
        v0: Any = None,
        q: Tensor | None = None,
        k: Tensor | None = None,
        name: str = "",
        x: Tensor | None = None,
        residual: Tensor | None = None,
        mask: Tensor | None = None,
        causal: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
        sink: Tensor | None = None,
        kernel: str = "softmax",
        logits: Tensor | None = None,
        weights: Tensor | None = None,
        refusal: str | None = None,
        dropout: float = 0.0,
        packed: Tensor | None = None,
        previous: Any = None,
        A: AttentionOperator | None = None,
        values: Any = None,
        output: Any = None,
        branch: Any = None,
    ) -> None:
        self.layer, self.name, self.x, self.residual = layer, name, x, residual
        self.q, self.k, self.v, self._first, self._own = q, k, v, v0, own
        self.mask, self.causal, self.scale, self.softcap, self.kernel = mask, causal, scale, softcap, kernel
        self.sink = sink
        self.logits, self.weights, self.refusal, self.dropout, self.packed = logits, weights, refusal, dropout, packed
        self.previous, self.kept, self._products, self._A = previous, None, 0, A
        self.values, self.output, self.branch = values, output, branch

    @property
    def v0(self) -> Tensor | None:
        """The first layer's values, like v; None in the first layer, whose own they are."""
        if self._first is MISSING:
            raise AcutanceError(
                f"{self.name}: the first layer's values are not known here. A mitigation that looks at call.v0 says "
                'so: requires = ("first_values",)'
            )
        first: Tensor | None = self._first
        return first

    def own(
        self, values: Tensor, q: Tensor | None = None, k: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        """A w by the model's own product: bit-exact, with its sinks, cache and dropout.

        Args:
            values: w (batch, key heads, keys, any), all rows.
            q: other queries, of a mitigation that changes scores.
            k: other keys.
            bias: added to the logits.
        """
        assert self._own is not None, "a record has no product"
        self._products += 1
        if self._products > 1 and self.dropout > 0 and self.weights is None:
            raise AcutanceError(
                f"{self.name}: attention dropout ({self.dropout:g}) draws anew in every product, and this mitigation "
                "needs several of one A: set the attention's dropout to 0, or train in evaluation mode"
            )
        if q is None and k is None and bias is None:
            return self._own(values)
        return self._own(values, q, k, bias)

    def keep(self, x: Any) -> None:
        """Hand something to the next layer, which finds it in `previous`."""
        self.kept = x

    @property
    def A(self) -> AttentionOperator:  # noqa: N802
        """The operator, made when it is first asked for."""
        if self._A is None:
            self._A = self._operator()
        return self._A

    def _operator(self) -> AttentionOperator:
        self._refuse_operator()
        if self.q is not None and self.k is not None:
            return AttentionOperator(
                self.q,
                self.k,
                mask=self.mask,
                causal=self.causal,
                scale=self.scale,
                kernel=self.kernel,
                softcap=self.softcap,
                sink=self.sink,
            )
        assert self.logits is not None, "a written softmax has its logits"
        made = AttentionOperator.from_logits(self.logits, self.sink)
        made.key_heads = self.v.shape[1]
        return made

    def _refuse_operator(self) -> None:
        if self.refusal is not None:
            raise AcutanceError(f"{self.name}: {self.refusal}")

    def rows(self, values: Tensor, u: Tensor) -> Tensor:
        """Values brought to the heads and rows of u.

        Grouped queries: each head of the values is repeated for the query heads that share it. With a cache the
        values reach further back than u: the last rows are u's own. Without one they must have u's rows: a model that
        drops tokens between layers is refused here.
        """
        heads, kv_heads, rows = u.shape[1], values.shape[1], u.shape[2]
        if heads % kv_heads or values.shape[2] < rows or values.shape[0] != u.shape[0]:
            raise ShapeError(f"values {tuple(values.shape)} cannot be matched to an attention output {tuple(u.shape)}")
        if values.shape[2] > rows:
            if self.v.shape[2] == rows:
                raise ShapeError(
                    f"{self.name}: the first layer's values {tuple(values.shape)} and this layer's "
                    f"{tuple(self.v.shape)} are not of the same tokens: tokens were dropped or merged on the way"
                )
            values = values[:, :, -rows:]
        return repeat_heads(values, heads)

    def visible(self) -> Tensor | None:
        """Which keys each query sees, bool (batch, heads, queries, keys) or broadcasting; None: all, or as `causal`."""
        if self.q is None and self.logits is not None:
            return _shown(self.logits)
        mask = self.A.mask4
        return mask if mask is None or not mask.is_floating_point() else _shown(mask)

    def visible_mean(self, w: Tensor) -> Tensor:
        """U w: the mean of the values that each query can see; one row where all see the same."""
        if self.q is None:
            self._refuse_operator()
            visible = self.visible()
            assert visible is not None, "read off the logits"
            shown = visible.to(w.dtype)
            return shown @ repeat_heads(w, shown.shape[1]) / shown.sum(-1, keepdim=True).clamp_min(1)
        w = repeat_heads(w, self.q.shape[1])
        if self.mask is None and not self.causal:
            return w.mean(dim=-2, keepdim=True)
        A = self.A
        uniform = AttentionOperator(torch.zeros_like(A.q), A.k.detach(), mask=self.visible(), causal=self.causal)
        return uniform.apply(w)

    def refuse_hidden(self, spec: str) -> None:
        """Refuse a mean over all tokens where some of them are hidden from others."""
        hides = self.causal
        if not hides and (self.mask is not None or self.q is None):
            visible = self.visible()
            hides = visible is not None and (torch.compiler.is_compiling() or not bool(visible.all()))
        if hides:
            raise AcutanceError(
                f"{spec} averages over all tokens, but a mask hides some of them (padding, another document, the "
                "future, what is out of reach), which the mean would let through: use it on batches without padding, "
                "uncompiled if there is a mask all the same; attnscale knows masks"
            )


def _shown(logits: Tensor) -> Tensor:
    """What is hidden has −∞ for a logit, or the lowest number there is."""
    return logits > torch.finfo(logits.dtype).min / 2
