"""The sums that the cheap token metrics need, in one pass over the tokens.

Every sample has eight numbers (`FIELDS`) in float64: sums of 16- or 32-bit numbers have no visible rounding there, and
their squares stay in range. The first counted token is subtracted from all tokens, so that nearly equal ones keep their
differences.
"""

from __future__ import annotations

import warnings
from functools import cache

import torch
from torch import Tensor

from acutance.attention.kernels import packed
from acutance.attention.kernels.sizes import tiles_of
from acutance.errors import AcutanceWarning

FIELDS = (
    "count",  # n, the number of counted tokens
    "bad",  # how many of them hold NaN or infinity; if any does, nothing below is valid but
    "first_bad",  # the place of the first
    "pairs",  # Σ_{i≠j} x̂_i·x̂_j, of tokens divided by their norms
    "high",  # Σ ‖x_i − x̄‖²
    "low",  # n ‖x̄‖²
    "norm_mean",  # of ‖x_i‖
    "norm_variance",
)
WIDEST = 8192  # channels: one token is held in registers
OLDEST_GPU = (8, 0)
PROGRAMS = 264  # at most: two for each of Hopper's 132 multiprocessors


def is_available(tokens: Tensor, mask: Tensor | None) -> bool:
    """Whether the kernels take tokens (samples, tokens, channels) and this mask."""
    return (
        packed.TRITON
        and type(tokens) is Tensor
        and tokens.ndim == 3
        and tokens.numel() > 0
        and tokens.shape[-1] <= WIDEST
        and tokens.dtype in packed.DTYPES
        and (mask is None or (mask.dtype == torch.bool and mask.shape == tokens.shape[:2]))
        and (packed.INTERPRETED or (tokens.is_cuda and _is_known(tokens.device)))
    )


@cache
def _is_known(gpu: torch.device) -> bool:
    """Whether the kernels agree with PyTorch on this GPU: tried once on a few tokens, as we tested few GPUs."""
    if torch.cuda.get_device_capability(gpu) < OLDEST_GPU:
        return False
    try:
        reason = None if _agrees(gpu) else "its sums are wrong"
    except Exception as error:  # no C compiler, no headers, a GPU that Triton does not know
        reason = f"{type(error).__name__}: {error}"
    if reason is not None:
        warnings.warn(
            f"the kernel that sums up tokens does not run on {torch.cuda.get_device_name(gpu)} ({reason}); measuring "
            "goes on with PyTorch's operations, which take longer",
            AcutanceWarning,
            stacklevel=2,
        )
    return reason is None


def _agrees(device: torch.device, samples: int = PROGRAMS + 1) -> bool:
    """Compare on many samples, which stay whole, then on two that are cut into parts, with some tokens masked out."""
    tokens = torch.arange(samples * 40 * 48, device=device).sin().mul(5).to(torch.bfloat16).view(samples, 40, 48)
    mask = (torch.arange(80, device=device) % 3 > 0).view(2, 40)
    tried = [(tokens, None), (tokens[:2], mask)] * 2  # the second launch calls the compiled code directly
    return all(torch.allclose(token_sums(*each), plain_sums(*each), rtol=1e-9, atol=1e-9) for each in tried)


def plain_sums(tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """The same by PyTorch in float64, for finite tokens. The kernels are compared with it."""
    counts = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device) if mask is None else mask
    x = tokens.double().masked_fill(~counts[..., None], 0)
    count, norms = counts.sum(1), x.norm(dim=-1)
    n = count.clamp_min(1)
    mean, norm_mean = x.sum(1) / n[:, None], norms.sum(1) / n
    directions = x / torch.where(norms > 0, norms, 1)[..., None]
    found = {
        "count": count,
        "bad": torch.zeros_like(count),
        "first_bad": torch.full_like(count, tokens.shape[1]),
        "pairs": directions.sum(1).square().sum(1) - (norms > 0).sum(1),
        "high": (x - mean[:, None]).masked_fill(~counts[..., None], 0).square().sum((1, 2)),
        "low": n * mean.square().sum(1),
        "norm_mean": norm_mean,
        "norm_variance": (norms - norm_mean[:, None]).masked_fill(~counts, 0).square().sum(1) / n,
    }
    return torch.stack([found[name].double() for name in FIELDS], 1)


def token_sums(tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """The `FIELDS` of every sample (samples, fields) in float64, without waiting for the device.

    It is no custom op: `measure` reads eagerly without gradients, and a custom op would cost as much as the kernel
    saves.

    Args:
        tokens: (samples, tokens, channels).
        mask: bool (samples, tokens), True where a token counts; None for all.
    """
    from acutance.metrics.kernels import token_sums_rows

    return token_sums_rows.token_sums(tokens, mask)


def parts_of(samples: int, tokens: int, rows: int) -> int:
    """Into how many parts a sample is cut, with `rows` tokens at a time, so that the GPU has enough to do."""
    return max(1, min(PROGRAMS // samples, tiles_of(tokens, rows)))
