"""Which attention back-end a model will use, found by asking for the very shapes it calls it with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode

from acutance.measure.monitor import own_randomness
from acutance.sites.structure import shards_put_back

WORDS = {
    SDPBackend.MATH: "SDPA math (forms the matrix)",
    SDPBackend.FLASH_ATTENTION: "SDPA flash",
    SDPBackend.EFFICIENT_ATTENTION: "SDPA memory-efficient",
    SDPBackend.CUDNN_ATTENTION: "SDPA cuDNN",
}
OWN = "no SDPA: tiles and sums of our own"


def attention_backend(model: nn.Module, forward: Callable[[], object]) -> str:
    """In words, from one forward pass without gradients that leaves no trace in the model.

    Args:
        model: uncompiled, in the mode it is trained in.
        forward: calls it on a batch of training.
    """
    buffers = [buffer.clone() for buffer in model.buffers()]
    spy = _Spy()
    with own_randomness(), shards_put_back(model), torch.no_grad(), spy:
        forward()
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(before)
    return ", ".join(_sentence(spy.calls.items())) or OWN


def _sentence(calls: Iterable[tuple[tuple[str, str], int]]) -> list[str]:
    return [f"{words} for {count} × {shape}" for (words, shape), count in calls]


class _Spy(TorchFunctionMode):
    """Notes what scaled_dot_product_attention would choose at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, str]] = Counter()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self._note(*args, **kwargs)
        return func(*args, **kwargs)

    def _note(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        q, k, v = (_as_trained(t) for t in (q, k, v))
        choice = torch._fused_sdp_choice(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        shape = f"{tuple(q.shape)} {str(q.dtype).removeprefix('torch.')}"
        self.calls[WORDS.get(SDPBackend(choice), str(choice)), shape] += 1


def _as_trained(x: Tensor) -> Tensor:
    """What SDPA sees in training: cast by autocast, and with a gradient, which some back-ends cannot give."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    return x.detach().requires_grad_()
