"""Products with A, its entries and its row sums, in linear memory.

A kernel k(q, k) is a few lines in `KERNELS`. It always has a logarithm (`log_weights`), from which the tiled products
follow. Two kinds are faster: A x of a kernel exp(scale · q'·k') is one `scaled_dot_product_attention` (`fused_apply`),
and products of a kernel φ(q)·φ(k) are associative (`associative_*`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from acutance.errors import AcutanceError, ShapeError

if TYPE_CHECKING:
    from acutance.attention.operator import AttentionOperator

FEWEST_ROWS = 16
CPU_TILE = 2**20  # entries of a tile, all heads together: it stays in the cache
GPU_TILE = 2**22  # it keeps the device busy
WIDEST = 256  # the largest head width of the flash back-ends


class Kernel(NamedTuple):
    """One attention kernel: log k(q, k), and the structure that makes products with it fast."""

    log_weights: Callable[[Tensor, Tensor, float], Tensor]  # (..., N, D), (..., M, D), scale -> (..., N, M)
    channels: Any = None  # q, k -> q', k', if k(q, k) = exp(scale · q'·k') up to a factor of each query
    queries_are_keys: bool = False


def _dot_product(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return (q * scale) @ k.mT


def _squared_distance(q: Tensor, k: Tensor, scale: float) -> Tensor:
    half_norms = (q.square().sum(-1).unsqueeze(-1) + k.square().sum(-1).unsqueeze(-2)) / 2
    return scale * (q @ k.mT - half_norms)


def _distance_channels(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """−‖q−k‖²/2 = q·k − ‖k‖²/2 − ‖q‖²/2: the middle term is one more channel, the last cancels in a row."""
    half_norm = k.to(accumulation_dtype(k)).square().sum(-1, keepdim=True) / 2
    leading = half_norm.to(k.dtype)
    remainder = (half_norm - leading).to(k.dtype)  # what half precision rounds away goes into a second channel
    ones = torch.ones_like(q[..., :1])
    return torch.cat([q, ones, ones], dim=-1), torch.cat([k, -leading, -remainder], dim=-1)


def _log_elu_plus_one(x: Tensor) -> Tensor:
    """The log of elu(x) + 1, which is x + 1 above zero and exp(x) below."""
    return torch.log1p(F.relu(x)) + x.clamp(max=0)


def _log_feature_product(q: Tensor, k: Tensor, _scale: float) -> Tensor:
    query_features, key_features, row_scale = _scaled_features(_log_elu_plus_one(q), _log_elu_plus_one(k))
    return _safe_log(query_features @ key_features.mT) + row_scale


def _safe_log(x: Tensor) -> Tensor:
    """A log whose value and gradient stay finite at zero."""
    return x.clamp(min=torch.finfo(x.dtype).tiny).log()


def _scaled_features(log_q: Tensor, log_k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Features φ(q), φ(k) scaled to lie in [0, 1], with the log factor that was taken out of each query.

    Every channel of the keys reaches one at some token, and every query has a channel of one, so the sum over keys is
    at least one. Masked keys have log φ = −∞.
    """
    key_scale = log_k.detach().amax(dim=-2, keepdim=True)
    key_scale = key_scale.masked_fill(key_scale == -torch.inf, 0.0)
    log_q = log_q + key_scale
    row_scale = log_q.detach().amax(dim=-1, keepdim=True)
    return (log_q - row_scale).exp(), (log_k - key_scale).exp(), row_scale


def accumulation_dtype(*tensors: Tensor) -> torch.dtype:
    """Float32 or better: what sums over tokens are accumulated in."""
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)


KERNELS = {
    "softmax": Kernel(_dot_product, channels=lambda q, k: (q, k)),
    "symmetric": Kernel(_dot_product, channels=lambda q, k: (q, k), queries_are_keys=True),
    "rbf": Kernel(_squared_distance, channels=_distance_channels),
    "linear": Kernel(_log_feature_product),
    "polynomial": Kernel(lambda q, k, scale: 2 * _safe_log((1 + _dot_product(q, k, scale)).abs())),
}


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """The tensor with each of its heads repeated for the group of query heads that share it."""
    return x if x.size(1) == heads else x.repeat_interleave(heads // x.size(1), dim=1)


def as_four_axes(mask: Tensor, shape: tuple[int, int, int, int], exponential: bool) -> Tensor:
    """A view of the mask that broadcasts against (B, H, N, M); a (B, M) bool mask is a mask of the keys."""
    batch, _, _, keys = shape
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise AcutanceError(f"the mask is {mask.dtype}; give mask.bool(), True where a token takes part")
    if mask.is_floating_point() and not exponential:
        raise AcutanceError("an additive float mask needs an exponential kernel; give a bool mask instead")
    if mask.dtype == torch.bool and tuple(mask.shape) == (batch, keys):
        return mask[:, None, None, :]
    axes = (1,) * (4 - mask.ndim) + tuple(mask.shape)
    if len(axes) != 4 or any(size not in (1, full) for size, full in zip(axes, shape, strict=True)):
        wanted = f"(batch, keys) = {(batch, keys)} nor broadcastable to (batch, heads, queries, keys) = {tuple(shape)}"
        raise ShapeError(f"mask {tuple(mask.shape)} is neither a key mask {wanted}")
    return mask.view(axes).expand(-1, -1, -1, keys)


def with_bias(mask: Tensor | None, bias: Tensor) -> Tensor:
    """A mask with numbers added to what it shows."""
    if mask is None:
        return bias
    return torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else mask + bias


def open_rows(mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | float]:
    """The mask with fully masked rows opened, where those rows are, and what was taken from the biases of each row.

    A softmax over nothing would be NaN, in some back-ends only in its gradient, so the output of a fully masked row is
    set to zero afterwards. A softmax does not change with a constant, so the largest bias of a row becomes 0: a row of
    very low numbers would swallow its logits.
    """
    if mask.dtype == torch.bool:
        dead = ~mask.any(dim=-1, keepdim=True)
        return mask | dead, dead, 0.0
    mask = mask.to(torch.promote_types(mask.dtype, dtype))
    top = mask.amax(dim=-1, keepdim=True)
    dead = top == -torch.inf
    top = top.masked_fill(dead, 0.0)
    opened = (mask - top).masked_fill(dead, 0.0)
    return opened.to(dtype), dead, top.clamp(min=torch.finfo(dtype).min).to(dtype)


def add_mask(log_weights: Tensor, mask: Tensor | None) -> Tensor:
    """Log-weights with masked entries at −∞, or with the bias added."""
    if mask is None:
        return log_weights
    return log_weights.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else log_weights + mask


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd would record an operation on these tensors."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def row_blocks(A: AttentionOperator, rows: int | None = None) -> list[slice]:
    """Blocks of query rows that are as long as this, or whose entries make a tile."""
    (batch, heads, queries, keys), on_cpu = A.shape, A.device.type == "cpu"
    # Short blocks on a GPU are bound by their launches: one may be as large as queries and keys together.
    fewest = FEWEST_ROWS if on_cpu else max(FEWEST_ROWS, 2 * A.q.size(-1))
    rows = rows or max(fewest, (CPU_TILE if on_cpu else GPU_TILE) // (batch * heads * keys))
    return [slice(start, min(start + rows, queries)) for start in range(0, queries, rows)]


class Tiles:
    """The operator's entries, one block of query rows at a time, in float32 or better; and what is made of them.

    A block stays linear in the number of keys.
    """

    def __init__(self, A: AttentionOperator, rows: int | None = None) -> None:
        self.blocks = row_blocks(A, rows)
        self.operator, dtype = A, accumulation_dtype(A.q, A.k)
        self.q, self.k = A.q.to(dtype), repeat_heads(A.k, A.heads).to(dtype)

    def log_weights(self, rows: slice) -> tuple[Tensor, Tensor | None, Tensor | float]:
        """Log-weights of some rows and the keys they may see; `open_rows` says what the others are."""
        A, mask, keys = self.operator, self.operator.mask4, self.k.size(-2)
        ahead = keys - A.shape[-2]  # causality ends at the last key
        keys = min(keys, max(1, rows.stop + ahead)) if A.causal else keys
        with torch.autocast(A.device.type, enabled=False):  # rounded, they would be wrong by the size of the logits
            log_weights = KERNELS[A.kernel].log_weights(self.q[..., rows, :], self.k[..., :keys, :], A.scale)
            log_weights = log_weights if A.softcap is None else A.softcap * torch.tanh(log_weights / A.softcap)
        if mask is not None:
            mask = mask[..., :keys] if mask.size(-2) == 1 else mask[..., rows, :keys]
        if A.causal:
            last_seen = torch.arange(rows.start, rows.stop, device=A.device) + ahead
            seen = torch.arange(keys, device=A.device) <= last_seen[:, None]
            hidden = -torch.inf if mask is not None and mask.is_floating_point() else False
            mask = seen if mask is None else mask.masked_fill(~seen, hidden)
        if mask is None:
            return log_weights, None, 0.0
        mask, dead, top = open_rows(mask, self.q.dtype)
        return add_mask(log_weights, mask), dead, top

    def weights(self, rows: slice) -> Tensor:
        """Entries of some rows and the keys they may see; a fully masked row is zero."""
        log_weights, dead, top = self.log_weights(rows)
        weights = log_weights.softmax(dim=-1)
        if self.operator.sink is not None:
            weights = weights * beside_sink(self.operator.sink, log_weights.logsumexp(dim=-1, keepdim=True) + top)
        return weights if dead is None else weights.masked_fill(dead, 0.0)

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        for rows in self.blocks:
            weights = self.weights(rows)
            yield rows, F.pad(weights, (0, self.k.size(-2) - weights.size(-1)))

    def each(self, function: Callable[[slice], Tensor], *others: Tensor) -> Iterator[Tensor]:
        """The function of every block. Of several, none is kept for the backward pass, which computes it again.

        `others` are the tensors that the function uses beside A.
        """
        several = len(self.blocks) > 1 and needs_grad(*self.operator.tensors, *others)
        for rows in self.blocks:
            yield checkpoint(function, rows, use_reentrant=False) if several else function(rows)

    def stack(self, function: Callable[[slice], Tensor], *others: Tensor) -> Tensor:
        parts = self.each(function, *others)
        if len(self.blocks) == 1 or needs_grad(*self.operator.tensors, *others):
            return torch.cat(list(parts), dim=2)
        out: Tensor | None = None  # one buffer: small results kept between large freed ones would fragment the heap
        for rows, part in zip(self.blocks, parts, strict=True):
            out = part.new_empty(*part.shape[:2], self.q.size(2), *part.shape[3:]) if out is None else out
            out[:, :, rows] = part
        assert out is not None, "there is a row"
        return out

    def logsumexp(self) -> Tensor:
        def sums(rows: slice) -> Tensor:
            log_weights, dead, top = self.log_weights(rows)
            found = log_weights.logsumexp(dim=-1, keepdim=True) + top
            return (found if dead is None else found.masked_fill(dead, -torch.inf)).squeeze(-1)

        return self.stack(sums)

    def diagonal(self) -> Tensor:
        return self.stack(lambda rows: self.weights(rows).diagonal(rows.start, -2, -1))

    def apply(self, x: Tensor, dropout: float = 0.0) -> Tensor:
        """A x, in the dtype of x."""
        values = repeat_heads(x, self.operator.heads).to(accumulation_dtype(self.q, x))

        def product(rows: slice) -> Tensor:
            weights = F.dropout(self.weights(rows), dropout)
            with torch.autocast(self.k.device.type, enabled=False):
                return weights @ values[..., : weights.size(-1), :]

        return self.stack(product, values).to(x.dtype)

    def apply_transpose(self, y: Tensor) -> Tensor:
        """Aᵀ y, in the dtype of y."""
        values = y.to(accumulation_dtype(self.q, y))

        def product(rows: slice) -> Tensor:
            weights = self.weights(rows)
            with torch.autocast(self.k.device.type, enabled=False):
                return F.pad(weights.mT @ values[..., rows, :], (0, 0, 0, self.k.size(-2) - weights.size(-1)))

        total = values.new_zeros(*self.k.shape[:3], y.size(-1))
        for part in self.each(product, values):
            total = total + part
        return total.to(y.dtype)


def beside_sink(sink: Tensor, sums: Tensor) -> Tensor:
    """σ(sums − sink): what a sink leaves to the keys of rows, given their log sums (batch, heads, rows, 1)."""
    lowest = torch.finfo(sums.dtype).min  # a sink of −∞ would make a row without keys NaN
    return torch.sigmoid(sums - sink.to(sums.dtype).clamp(min=lowest)[:, None, None])


def can_fuse(A: AttentionOperator, x: Tensor, dropout: float = 0.0) -> bool:
    """Whether a fused back-end would take A x; otherwise SDPA forms the whole matrix."""
    queries, keys = A.shape[-2:]
    plain = not A.causal or queries == 1 or (A.mask4 is None and queries == keys)  # SDPA's causality is of a square
    on_device = dropout == 0.0 if A.device.type == "cpu" else x.dtype != torch.float64
    return A.is_exponential and A.softcap is None and plain and on_device


def fused_apply(A: AttentionOperator, x: Tensor, dropout: float = 0.0) -> Tensor:
    """A x. Without mask and sink, and with values as wide as the keys, this is one plain SDPA call."""
    q, k = KERNELS[A.kernel].channels(A.q, A.k)
    # The fused back-ends take contiguous rows, and queries, keys and values of one width.
    q, k, x = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (q, k, x))
    if q.size(-1) == x.size(-1) and (x.device.type == "cpu" or x.size(-1) % 8 == 0):
        product = _sdpa(A, q, k, x, dropout)
    else:
        width = max(q.size(-1), min(x.size(-1), WIDEST))
        width += -width % 8
        q, k, *pieces = (F.pad(tensor, (0, width - tensor.size(-1))) for tensor in (q, k, *x.split(width, dim=-1)))
        product = torch.cat([_sdpa(A, q, k, piece, dropout) for piece in pieces], dim=-1)[..., : x.size(-1)]
    return product if A.sink is None else (A.row_scale * product).to(product.dtype)


def fused_transpose(A: AttentionOperator, y: Tensor) -> Tensor:
    """Aᵀ y, outside autograd: the vector-Jacobian product of A with respect to its values."""
    # Inference tensors cannot be differentiated; their copies made outside inference mode can.
    with torch.inference_mode(False), torch.enable_grad():
        given: Any = (x if x is None else x.clone() if x.is_inference() else x.detach() for x in (*A.tensors, y))
        q, k, mask, sink, y = given
        A = A.replace(q=q, k=k, mask=mask, sink=sink)
        values = y.new_zeros(*A.shape[:2], A.shape[-1], y.size(-1)).requires_grad_()
        return torch.autograd.grad(fused_apply(A, values), values, y)[0]


def _sdpa(A: AttentionOperator, q: Tensor, k: Tensor, x: Tensor, dropout: float) -> Tensor:
    heads, mask, dead = A.heads, A.mask4, None
    causal = False if A.shape[-2] == 1 else A.causal  # one query sees all keys; `and` with a traced size is no bool
    # Grouped heads: of the linear-memory back-ends only flash on CUDA knows them in every version of PyTorch (older
    # CPU ones fall back to the whole matrix), and it knows neither masks nor float32. Elsewhere, repeat the heads.
    knows_groups = q.device.type == "cuda" and mask is None and q.dtype != torch.float32
    grouped = knows_groups and k.size(1) == x.size(1) != heads
    if not grouped:
        k, x = repeat_heads(k, heads), repeat_heads(x, heads)
    if mask is not None:
        mask, dead, _ = open_rows(mask, accumulation_dtype(q))
        mask = mask if mask.dtype == torch.bool else mask.to(q.dtype)
    out = scaled_dot_product_attention(q, k, x, mask, dropout, causal, scale=A.scale, enable_gqa=grouped)
    return out if dead is None else out.masked_fill(dead, 0.0)


def associative_apply(A: AttentionOperator, x: Tensor, *, transposed: bool = False) -> Tensor:
    """A x, or Aᵀ x, in the dtype of x."""
    dtype = accumulation_dtype(A.q, A.k)
    with torch.autocast(A.device.type, enabled=False):
        log_q, log_k = (_log_elu_plus_one(t.to(dtype)) for t in (A.q, repeat_heads(A.k, A.heads)))
        log_k = add_mask(log_k, None if A.mask4 is None else A.mask4.mT)
        query_features, key_features, _ = _scaled_features(log_q, log_k)
        row_sums = query_features @ key_features.sum(dim=-2, keepdim=True).mT
        row_sums = row_sums.clamp(min=0.5)  # at least one, or zero where no key is seen, and so are the products
        values = repeat_heads(x, A.heads).to(accumulation_dtype(query_features, x))
        if transposed:
            return (key_features @ (query_features.mT @ (values / row_sums))).to(x.dtype)
        return (query_features @ (key_features.mT @ values) / row_sums).to(x.dtype)
