"""The energy that attention descends, J(u) = ½ Σ_ij A_ij ‖u_i − u_j‖² (arXiv 2312.00751).

A is an `AttentionOperator`; u, v and f are (batch, heads, tokens, channels), with the operator's query heads
or, for grouped queries, its fewer key heads. Results are (batch, heads). `mask` (batch, tokens) drops query
rows; which keys a row may see is the operator's own mask. Nothing here forms the N×N matrix.
"""

import math
from math import inf

import torch
from torch import Tensor

from acutance.attention.kernels import attention_sums
from acutance.attention.operator import AttentionOperator
from acutance.attention.products import Tiles, accumulation_dtype, repeat_heads
from acutance.errors import ShapeError
from acutance.metrics.sums import masked_mean, metric, safe_logsumexp, split_mean, unit_vectors, valid_positions


@metric("A output", "sharper", (0, inf), "How much tokens differ from those they attend to.")
def nonlocal_energy(A: AttentionOperator, u: Tensor, mask: Tensor | None = None) -> Tensor:
    """J(u) = ½ Σ_ij A_ij ‖u_i − u_j‖² with the rows of A summing to one; a fully masked row adds 0."""
    A.require_weights("nonlocal_energy")
    _check_fits(A, u)
    valid = valid_positions(mask, A.q, heads=True)
    if attention_sums.is_available(A, u):
        energies = attention_sums.row_sums(A, u, mask).energies
    else:  # by one product with A: ‖u‖² travels as a channel
        A, u = _matched(A, u)
        _, u = split_mean(u, valid)  # differences are unchanged, cancellation shrinks
        squares = u.square().sum(-1, keepdim=True)
        mixed, row_sum = _mixed(A, torch.cat([u, squares], dim=-1))
        energies = row_sum * squares.squeeze(-1) + mixed[..., -1] - 2 * (u * mixed[..., :-1]).sum(-1)
        energies = energies.clamp_min(0)
    return (energies if mask is None else energies.masked_fill(~valid, 0)).sum(-1) / 2


@metric("A output", "sharper", (-inf, inf), "The same with the raw kernel, as a logarithm.")
def log_nonlocal_energy_raw(A: AttentionOperator, u: Tensor, mask: Tensor | None = None) -> Tensor:
    """log of ½ Σ_ij k_ij ‖u_i − u_j‖² with the raw kernel k, e.g. exp(s q_i·k_j); −inf when that is 0.

    It is summed in logarithms, pair by pair, a block of rows at a time. A row that sees little but itself may have the
    largest kernel and the smallest energy, which a difference of large sums would lose.
    """
    A.require_weights("log_nonlocal_energy_raw")
    A, u = _matched(A, u)
    tiles = Tiles(A)

    def log_sums(rows: slice) -> Tensor:  # log Σ_j k_ij ‖u_i − u_j‖²
        log_kernel, dead, top = tiles.log_weights(rows)
        others = u[..., : log_kernel.size(-1), :]  # a causal block leaves out the keys none of its rows may see
        squares = torch.cdist(u[..., rows, :], others, compute_mode="donot_use_mm_for_euclid_dist").square()
        differ = squares != 0 if dead is None else (squares != 0) & ~dead
        logs = log_kernel + top + torch.where(differ, squares, 1).log()
        return safe_logsumexp(logs.masked_fill(~differ, -torch.inf))

    logs = tiles.stack(log_sums, u)
    return safe_logsumexp(logs.masked_fill(~valid_positions(mask, A.q, heads=True), -torch.inf)) - math.log(2)


def fidelity(u: Tensor, f: Tensor, strength: float | Tensor, mask: Tensor | None = None) -> Tensor:
    """G(u, f) = λ/2 Σ_i ‖u_i − f_i‖², the fidelity term that NeuTRENO adds; λ is one number or one per head."""
    if u.ndim != 4 or f.shape[:1] + f.shape[2:] != u.shape[:1] + u.shape[2:] or u.shape[1] % f.shape[1] != 0:
        raise ShapeError(f"u {tuple(u.shape)}, f {tuple(f.shape)}: give the same (batch, heads, tokens, channels)")
    u, f = u.to(accumulation_dtype(u)), repeat_heads(f.to(accumulation_dtype(f)), u.shape[1])
    valid = valid_positions(mask, u, heads=True)
    return strength * (u - f).masked_fill(~valid.unsqueeze(-1), 0).square().sum((-2, -1)) / 2


def energy(A: AttentionOperator, u: Tensor, f: Tensor, strength: float | Tensor, mask: Tensor | None = None) -> Tensor:
    """E(u, f) = J(u) + G(u, f), the energy that NeuTRENO descends, with the rows of A summing to one."""
    return nonlocal_energy(A, u, mask) + fidelity(u, f, strength, mask)


@metric("A values", "neither", (-1, 1), "Whether attention descends the energy of its symmetric kernel.")
def gradient_alignment(A: AttentionOperator, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean cosine between ∇J by the symmetric kernel k(k_i, k_j) and by A's own k(q_i, k_j) (Table 4).

    At position i the gradient is Σ_j (v_i − v_j) K_ij = d_i (v_i − (Av)_i). The positive row sum d_i cancels in the
    cosine, so large logits do no harm. A gradient that is zero up to rounding has cosine 0. Fully masked rows are
    skipped.
    """
    A.require_weights("gradient_alignment")
    A, v = _matched(A, v)
    valid = valid_positions(mask, A.q, heads=True)
    mean, v = split_mean(v, valid)
    # A difference of values below this length (batch, heads, 1, 1) is rounding and has no direction.
    offset, spread = (torch.linalg.vector_norm(x.detach(), dim=-1).amax(-1)[..., None, None] for x in (mean, v))
    floor = 32 * torch.finfo(v.dtype).eps * (spread + torch.finfo(v.dtype).eps * offset)
    own, sees_keys = _gradient_direction(A, v, floor)
    symmetric, _ = _gradient_direction(A.symmetrised(), v, floor)
    return masked_mean((own * symmetric).sum(-1).clamp(-1, 1), valid & sees_keys)


def _matched(A: AttentionOperator, x: Tensor) -> tuple[AttentionOperator, Tensor]:
    """Operator and tokens in one dtype, float32 or better, with the tokens repeated for every query head."""
    _check_fits(A, x)
    A = A.to(accumulation_dtype(A.q, A.k, x))
    return A, repeat_heads(x, A.heads).to(A.dtype)


def _check_fits(A: AttentionOperator, x: Tensor) -> None:
    batch, heads, queries, keys = A.shape
    if queries != keys:
        raise ShapeError(f"{queries} queries and {keys} keys: cross-attention and cached generation have no energy")
    if x.ndim != 4 or x.shape[:1] + x.shape[2:3] != (batch, keys) or x.shape[1] not in (heads, A.key_heads):
        raise ShapeError(f"tokens {tuple(x.shape)} do not fit A {A.shape}: give ({batch}, {heads}, {keys}, any)")


def _gradient_direction(A: AttentionOperator, v: Tensor, floor: Tensor) -> tuple[Tensor, Tensor]:
    """The direction of v_i − (Av)_i, zero where it is rounding alone, and which rows see any key."""
    mixed, row_sum = _mixed(A, v)
    gradient = row_sum.unsqueeze(-1) * v - mixed
    vanishes = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True) <= floor
    return unit_vectors(gradient.masked_fill(vanishes, 0)), row_sum != 0


def _mixed(A: AttentionOperator, x: Tensor) -> tuple[Tensor, Tensor]:
    """A x in the dtype of A and x, even under autocast, and the row sums: 0 for a fully masked row."""
    with torch.autocast(A.device.type, enabled=False):
        rows = A @ torch.cat([x, torch.ones_like(x[..., :1])], dim=-1)
    # The flash kernel on CPU answers a NaN query with zeros, which would pass for a fully masked row.
    rows = torch.where(torch.isfinite(A.q).all(-1, keepdim=True), rows, torch.nan)
    return rows[..., :-1], rows[..., -1]
