"""Exponential kernels through `scaled_dot_product_attention`, kept on its linear-memory back-ends."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from acutance.kernels.heads import repeat_heads
from acutance.kernels.masks import mask_rows, seen_keys, without_dead_rows
from acutance.kernels.tiled import row_blocks, stack_blocks

if TYPE_CHECKING:
    from acutance.operator import AttentionOperator

WIDEST = 256  # the largest head width of the flash back-ends


def is_available(A: AttentionOperator, x: Tensor, dropout: float = 0.0) -> bool:
    """Whether a fused back-end would take this product; otherwise SDPA forms the whole matrix."""
    if A.definition.channels is None:
        return False
    if A.device.type == "cpu":
        return dropout == 0.0
    return x.dtype != torch.float64


def apply(A: AttentionOperator, x: Tensor, dropout: float = 0.0) -> Tensor:
    """A x. Without a mask, and with values as wide as the keys, this is one plain SDPA call."""
    assert A.definition.channels is not None
    q, k = A.definition.channels(A.q, A.k)
    q, k, pieces = _one_width(q, k, x)
    out = [_attend(A, q, k, piece, dropout) for piece in pieces]
    if len(out) == 1 and out[0].size(-1) == x.size(-1):
        return out[0]
    return torch.cat(out, dim=-1)[..., : x.size(-1)]


def apply_transpose(A: AttentionOperator, y: Tensor) -> Tensor:
    """Aᵀ y, outside autograd: the vector-Jacobian product of A with respect to its values."""
    # Inference tensors cannot be differentiated; their copies made outside inference mode can.
    with torch.inference_mode(False), torch.enable_grad():
        A, y = A.map(_constant), _constant(y)
        values = y.new_zeros(*A.shape[:2], A.shape[-1], y.size(-1)).requires_grad_()
        (product,) = torch.autograd.grad(apply(A, values), values, y)
    return product


def _constant(x: Tensor) -> Tensor:
    return x.clone() if x.is_inference() else x.detach()


def _one_width(q: Tensor, k: Tensor, x: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """What the fused back-ends take: queries, keys and pieces of the values of one width, rows contiguous."""
    q, k, x = _contiguous_rows(q), _contiguous_rows(k), _contiguous_rows(x)
    aligned = x.device.type == "cpu" or x.size(-1) % 8 == 0
    if q.size(-1) == x.size(-1) and aligned:
        return q, k, [x]
    width = max(q.size(-1), min(x.size(-1), WIDEST))
    width += -width % 8
    pieces = [_pad(piece, width) for piece in torch.split(x, width, dim=-1)]
    return _pad(q, width), _pad(k, width), pieces


def _contiguous_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _pad(x: Tensor, width: int) -> Tensor:
    return x if x.size(-1) == width else pad(x, (0, width - x.size(-1)))


def _attend(A: AttentionOperator, q: Tensor, k: Tensor, x: Tensor, dropout: float) -> Tensor:
    queries, keys = A.shape[-2:]
    if not A.causal or queries == 1:
        return _sdpa(q, k, x, A.mask4, A.scale, dropout)
    if A.mask4 is None and queries == keys:
        return _sdpa(q, k, x, None, A.scale, dropout, causal=True)
    if A.mask4 is None and queries > keys:  # the first queries see nothing, the others form a square
        square = _sdpa(q[..., queries - keys :, :], k, x, None, A.scale, dropout, causal=True)
        return pad(square, (0, 0, queries - keys, 0))
    return _attend_by_rows(A, q, k, x, dropout)


def _attend_by_rows(A: AttentionOperator, q: Tensor, k: Tensor, x: Tensor, dropout: float) -> Tensor:
    """Causality with a mask or with a cache, which SDPA does not know: as one mask per block of rows."""
    masks = 1 if A.mask4 is None else A.mask4.size(0) * A.mask4.size(1)
    blocks = row_blocks(A, masks * A.shape[-1])

    def attend(rows: slice, q: Tensor, k: Tensor, x: Tensor) -> Tensor:
        seen = seen_keys(A, rows)
        mask = mask_rows(A, rows)
        with _any_shape_at_once(A):
            return _sdpa(q[..., rows, :], k[..., :seen, :], x[..., :seen, :], mask, A.scale, dropout)

    return stack_blocks(attend, blocks, q, k, x, dim=-2)


def _any_shape_at_once(A: AttentionOperator) -> AbstractContextManager[None]:
    """On CUDA without cuDNN, which plans for a while at each new shape: here every block has its own."""
    if A.device.type != "cuda":
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def _sdpa(
    q: Tensor, k: Tensor, x: Tensor, mask: Tensor | None, scale: float, dropout: float, causal: bool = False
) -> Tensor:
    heads = q.size(1)
    # Grouped heads: of the linear-memory back-ends only flash on CUDA knows them in every version of PyTorch (older
    # CPU ones fall back to the whole matrix), and it knows neither masks nor float32. Elsewhere, repeat the heads.
    knows_groups = q.device.type == "cuda" and mask is None and q.dtype != torch.float32
    grouped = knows_groups and k.size(1) == x.size(1) != heads
    if not grouped:
        k, x = repeat_heads(k, heads), repeat_heads(x, heads)
    dead = None
    if mask is not None:
        mask, dead = without_dead_rows(mask)
        mask = mask if mask.dtype == torch.bool else mask.to(q.dtype)
    out = scaled_dot_product_attention(
        q, k, x, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    return out if dead is None else out.masked_fill(dead, 0.0)
