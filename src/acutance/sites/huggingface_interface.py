"""transformers' attention interface: a road that is faster than looking at every operation."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from acutance.sites.intercept import SINKS, Product
from acutance.sites.patched import SITE


@cache
def take_over_sdpa() -> None:
    """Answer for "sdpa" from now on: modules that carry no site get the answer they always got."""
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    own = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def sdpa_attention_forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        site = module.__dict__.get(SITE)
        if site is None or not site.is_active or not site.is_called():
            answer: tuple[Tensor, Tensor | None] = own(module, query, key, value, attention_mask, **options)
            return answer
        u = site.attend(_product(own, module, query, key, value, attention_mask, options))
        return u.transpose(1, 2), None

    AttentionInterface.register("sdpa", sdpa_attention_forward)


def _product(
    own: Callable[..., Any],
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    options: dict[str, Any],
) -> Product:
    def attention(values: Tensor, other_q: Any = None, other_k: Any = None, bias: Tensor | None = None) -> Tensor:
        given = mask if bias is None else bias if mask is None else _added(mask, bias)
        asked, keys = q if other_q is None else other_q, k if other_k is None else other_k
        out: Tensor = own(module, asked, keys, values, given, **options)[0]
        return out.transpose(1, 2)

    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if mask is not None and mask.shape[-1] != k.shape[2]:
        mask = mask[..., : k.shape[2]]
    position = options.get("position_bias")
    about: dict[str, Any] = {
        "q": q,
        "k": k,
        "mask": mask if position is None else position if mask is None else _added(mask, position),
        # Causal by itself where no mask says it.
        "causal": bool(causal) and mask is None and q.shape[2] > 1,
        "scale": options.get("scaling"),
        "softcap": options.get("softcap"),
        "dropout": options.get("dropout", 0.0),
        "refusal": None if options.get("s_aux") is None else SINKS,
    }
    return Product(v, attention, _same, about)


def _added(mask: Tensor, bias: Tensor) -> Tensor:
    return torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else mask + bias


def _same(u: Tensor) -> Tensor:
    return u
