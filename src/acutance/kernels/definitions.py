"""The kernels k(q, k) that attention can be made of; each is a few lines in a registry.

A kernel always says its logarithm (`log_weights`), from which the tiled path computes everything. It may say
more, and then products are faster: `channels`, when it is exp(scale · q'·k') up to a factor per query, goes
through `scaled_dot_product_attention`; `log_features`, when it is φ(q)·φ(k), through associativity.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import relu

from acutance.errors import AcutanceError


@dataclass(frozen=True)
class Kernel:
    """One attention kernel: log k(q, k), and the structure that makes products with it fast."""

    name: str
    log_weights: Callable[[Tensor, Tensor, float], Tensor]  # (..., N, D), (..., M, D), scale -> (..., N, M)
    channels: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None  # q, k -> q', k'
    log_features: Callable[[Tensor], Tensor] | None = None  # x -> log φ(x)
    queries_are_keys: bool = False
    softcap: float | None = None  # logits s become c·tanh(s/c)

    @property
    def is_exponential(self) -> bool:
        """Whether the kernel is an exponential of logits, to which a bias can be added."""
        return self.channels is not None or self.softcap is not None

    def capped(self, softcap: float) -> Kernel:
        """The kernel with its logits kept within ±softcap, as in Gemma 2; products then go by tiles."""
        if not self.is_exponential:
            raise AcutanceError(f"softcap is for kernels that are an exponential of logits, not for {self.name!r}")
        if not softcap > 0:
            raise AcutanceError(f"softcap must be positive, not {softcap}")
        plain = self.log_weights

        def log_weights(q: Tensor, k: Tensor, scale: float) -> Tensor:
            return softcap * torch.tanh(plain(q, k, scale) / softcap)

        return replace(self, log_weights=log_weights, channels=None, softcap=softcap)


def _dot_product(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return (q * scale) @ k.mT


def _unchanged(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return q, k


def _squared_distance(q: Tensor, k: Tensor, scale: float) -> Tensor:
    half_norms = (q.square().sum(-1).unsqueeze(-1) + k.square().sum(-1).unsqueeze(-2)) / 2
    return scale * (q @ k.mT - half_norms)


def _distance_channels(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """−‖q−k‖²/2 = q·k − ‖k‖²/2 − ‖q‖²/2: the middle term is one more channel, the last cancels in a row."""
    half_norm = k.to(accumulation_dtype(k)).square().sum(-1, keepdim=True) / 2
    leading = half_norm.to(k.dtype)
    # What half precision rounds away of ‖k‖²/2 goes into a second channel: the padding has room for it.
    remainder = (half_norm - leading).to(k.dtype)
    spare = -(q.size(-1) + 2) % 8
    ones = torch.ones_like(q[..., :1])
    q = torch.cat([q, ones, ones, q.new_zeros(*q.shape[:-1], spare)], dim=-1)
    k = torch.cat([k, -leading, -remainder, k.new_zeros(*k.shape[:-1], spare)], dim=-1)
    return q, k


def _log_elu_plus_one(x: Tensor) -> Tensor:
    """The log of elu(x) + 1, which is x + 1 above zero and exp(x) below."""
    return torch.log1p(relu(x)) + x.clamp(max=0)


def _log_feature_product(q: Tensor, k: Tensor, scale: float) -> Tensor:
    del scale  # φ(q)·φ(k) has none
    query_features, key_features, row_scale = scaled_features(_log_elu_plus_one(q), _log_elu_plus_one(k))
    return _safe_log(query_features @ key_features.mT) + row_scale


def _log_square(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return 2 * _safe_log((1 + (q * scale) @ k.mT).abs())


def _safe_log(x: Tensor) -> Tensor:
    """A log whose value and gradient stay finite at zero."""
    return x.clamp(min=torch.finfo(x.dtype).tiny).log()


def scaled_features(log_q: Tensor, log_k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Features φ(q), φ(k) scaled to lie in [0, 1], with the log factor that was taken out of each query.

    Every channel of the keys reaches one at some token, and every query has a channel equal to one, so that
    the sum over keys is at least one whatever the size of the inputs. Masked keys have log φ = −∞.
    """
    key_scale = log_k.detach().amax(dim=-2, keepdim=True)
    key_scale = key_scale.masked_fill(key_scale == -torch.inf, 0.0)
    log_q = log_q + key_scale
    row_scale = log_q.detach().amax(dim=-1, keepdim=True)
    return (log_q - row_scale).exp(), (log_k - key_scale).exp(), row_scale


def accumulation_dtype(*tensors: Tensor) -> torch.dtype:
    """Float32 or better: what sums over tokens are accumulated in."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Kernel("softmax", _dot_product, channels=_unchanged),
        Kernel("symmetric", _dot_product, channels=_unchanged, queries_are_keys=True),
        Kernel("rbf", _squared_distance, channels=_distance_channels),
        Kernel("linear", _log_feature_product, log_features=_log_elu_plus_one),
        Kernel("polynomial", _log_square),
    )
}


def get_kernel(name: str) -> Kernel:
    """The kernel of that name."""
    if name not in KERNELS:
        raise AcutanceError(f"unknown kernel {name!r}; the known ones are {', '.join(sorted(KERNELS))}")
    return KERNELS[name]
