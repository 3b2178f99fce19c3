"""`nn.MultiheadAttention.forward`, written out so that our hooks stand where they must."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from acutance.errors import AcutanceError
from acutance.sites.intercept import Product

if TYPE_CHECKING:
    from acutance.sites.torch_nn_site import MultiheadSite

F: Any = functional  # some of what torch itself composes its forward of has no public name


def forward(
    site: MultiheadSite,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`nn.MultiheadAttention.forward` without its fast path, operation for operation, with our hooks in it."""
    if is_causal and attn_mask is None:
        raise AcutanceError(f"{site.name}: is_causal is a hint about attn_mask, which has to be passed too")
    if not _is_same(query, key):
        masks = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
        flags = {"need_weights": need_weights, "average_attn_weights": average_attn_weights, "is_causal": is_causal}
        return site.pass_through(query, key, value, **masks, **flags)
    mha = site.attention
    is_batched = F._mha_shape_check(query, key, value, key_padding_mask, attn_mask, mha.num_heads)
    padding = _as_bias("key_padding_mask", key_padding_mask, query.dtype, attn_mask)
    bias = _as_bias("attn_mask", attn_mask, query.dtype)
    entered = query
    query, key, value = _tokens_first(mha, query, key, value)
    tokens, batch, dim = query.shape
    q, k, v = (
        x.view(-1, batch * mha.num_heads, mha.head_dim).transpose(0, 1) for x in _project(mha, query, key, value)
    )
    by_head = (batch, mha.num_heads, tokens, mha.head_dim)
    q, k, v = q.view(by_head), k.view(by_head), v.view(by_head)
    causal = is_causal and padding is None and not need_weights  # the hint is taken only then
    mask = None if causal else _merged(bias, padding, batch, mha.num_heads)
    dropout = mha.dropout if mha.training else 0.0
    weights = _weights(q, k, mask, dropout) if need_weights else None

    def own(values: Tensor, other_q: Any = None, other_k: Any = None, bias: Tensor | None = None) -> Tensor:
        asked, keys = q if other_q is None else other_q, k if other_k is None else other_k
        given = mask if bias is None else bias if mask is None else mask + bias
        changed = other_q is not None or other_k is not None or bias is not None
        if weights is not None:
            A = _weights(asked, keys, given, dropout) if changed else weights
            return torch.bmm(A, values.flatten(0, 1)).view(by_head)
        if bias is not None and causal:
            raise AcutanceError(f"{site.name}: a bias on the logits beside is_causal: pass the mask without the hint")
        u: Tensor = F.scaled_dot_product_attention(asked, keys, values, given, dropout, causal)
        return u

    about = {"q": q, "k": k, "mask": mask, "causal": causal, "dropout": 0.0 if weights is not None else dropout}
    now = site.now(entered)
    now.entering = entered if mha.batch_first or entered.ndim == 2 else entered.transpose(0, 1)
    u = site.attend(Product(v, own, lambda u: u, about))
    merged = u.permute(2, 0, 1, 3).reshape(tokens * batch, dim)
    y = F.linear(merged, mha.out_proj.weight, mha.out_proj.bias).view(tokens, batch, dim)
    y = site.finish(y.transpose(0, 1), now)
    if weights is not None:
        weights = weights.view(batch, mha.num_heads, tokens, tokens)
        weights = weights.mean(dim=1) if average_attn_weights else weights
    if not is_batched:
        return y.squeeze(0), None if weights is None else weights.squeeze(0)
    return y if mha.batch_first else y.transpose(0, 1), weights


def _is_same(query: Tensor, key: Tensor) -> bool:
    """Whether the tokens attend to themselves; tensors of one content count, but cannot be compared when compiling."""
    if query is key:
        return True
    return query.shape == key.shape and not torch.compiler.is_compiling() and torch.equal(query, key)


def _as_bias(name: str, mask: Tensor | None, dtype: torch.dtype, other: Tensor | None = None) -> Tensor | None:
    """The mask as numbers added to the logits: a bool one is True where a key is hidden."""
    other_type = None if other is None else other.dtype
    bias: Tensor | None = F._canonical_mask(
        mask=mask, mask_name=name, other_type=other_type, other_name="attn_mask", target_type=dtype
    )
    return bias


def _tokens_first(mha: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """(tokens, batch, dim) each. Three that are one tensor stay one, as in torch: the projection looks at that."""
    if query.ndim == 2:
        return query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
    if not mha.batch_first:
        return query, key, value
    turned = query.transpose(0, 1)
    if query is key and key is value:
        return turned, turned, turned
    turned_key = key.transpose(0, 1)
    return turned, turned_key, turned_key if key is value else value.transpose(0, 1)


def _project(mha: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
    projected: Sequence[Tensor]
    joint = mha.in_proj_weight  # asked for once: a mitigation may make it
    if joint is not None:
        projected = F._in_projection_packed(query, key, value, joint, mha.in_proj_bias)
    else:
        weights = mha.q_proj_weight, mha.k_proj_weight, mha.v_proj_weight
        biases = (None, None, None) if mha.in_proj_bias is None else mha.in_proj_bias.chunk(3)
        projected = F._in_projection(query, key, value, *weights, *biases)
    return projected


def _merged(bias: Tensor | None, padding: Tensor | None, batch: int, heads: int) -> Tensor | None:
    """Both masks in one, broadcasting against (batch, heads, queries, keys)."""
    if bias is not None:
        bias = bias[None, None] if bias.ndim == 2 else bias.view(batch, heads, *bias.shape[1:])
    if padding is not None:
        padding = padding.view(batch, 1, 1, -1)
        return padding.expand(-1, heads, -1, -1) if bias is None else bias + padding
    return bias


def _weights(q: Tensor, k: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """A as torch makes it where it is asked for, (batch · heads, queries, keys)."""
    scaled = q.flatten(0, 1) * math.sqrt(1.0 / q.shape[-1])
    keys = k.flatten(0, 1).transpose(-2, -1)
    if mask is None:
        logits = torch.bmm(scaled, keys)
    else:
        logits = torch.baddbmm(mask.expand(*q.shape[:2], -1, -1).flatten(0, 1), scaled, keys)
    weights = logits.softmax(dim=-1)
    return F.dropout(weights, dropout) if dropout > 0.0 else weights
