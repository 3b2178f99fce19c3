"""transformers' attention interface: our function in it, and who calls it."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from acutance.errors import AcutanceError
from acutance.operator import AttentionOperator
from acutance.sites.base import TOKENS_REMAIN
from acutance.sites.patched import SITE

NAME = "acutance"  # of our function in the attention interface
VIEWED = "_acutance_viewed"  # where a view of a configuration keeps the configuration itself
OWN_FUNCTIONS = ("sdpa", "eager")  # whose masks we know how to read

AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]


@cache
def register() -> None:
    """Our function, and a mask function beside it: a name without one loses masks silently."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def diverted_view(config: Any) -> Any:
    """The same configuration, sharing all its state, except that the attention function it names is ours.

    Only the attention modules see it: the model goes on making the masks of its own attention function.
    """
    cls: Any = type(config)
    view = object.__new__(_diverted_class(cls))
    view.__dict__ = config.__dict__
    object.__setattr__(view, VIEWED, config)
    return view


@cache
def _diverted_class(cls: Any) -> Any:
    diverted: Any = type(cls.__name__, (cls,), {"__module__": cls.__module__, "__slots__": (VIEWED,)})
    diverted._attn_implementation = property(lambda view: NAME)
    # A copied model's views show the copied configuration.
    diverted.__reduce_ex__ = lambda view, protocol: (diverted_view, (getattr(view, VIEWED),))
    return diverted


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """What the attention interface calls: the model's own function, with our hooks around it."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    site: Any = module.__dict__[SITE]
    own = ALL_ATTENTION_FUNCTIONS.get_interface(implementation_of(config_of(module)), site.eager)
    weights: Tensor | None = None

    def attention(values: Tensor) -> Tensor:
        nonlocal weights
        out: Tensor
        out, weights = own(module, query, key, values, attention_mask, **options)
        return out.transpose(1, 2)

    u = site.attend(value, attention, lambda: _operator(module, query, key, attention_mask, options))
    return u.transpose(1, 2), weights


def config_of(attention: nn.Module) -> Any:
    """The attention module's configuration."""
    return attention.config


def implementation_of(config: Any) -> str:
    """The attention function that the model was told to use; asked at every call, since it may be told another."""
    implementation: str = config._attn_implementation_internal
    if implementation not in OWN_FUNCTIONS:
        raise AcutanceError(
            f"the model runs its attention by {implementation!r}, whose masks cannot be read here: "
            "call model.set_attn_implementation('sdpa') first"
        )
    return implementation


def _operator(
    module: nn.Module, q: Tensor, k: Tensor, mask: Tensor | None, options: Mapping[str, Any]
) -> AttentionOperator:
    """The A that the model's own function applies."""
    if options.get("s_aux") is not None:
        raise AcutanceError(
            f"{type(module).__name__} lets tokens attend to nothing (sinks), so A's rows do not sum to one. "
            f"{TOKENS_REMAIN}"
        )
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    # The eager functions know masks only; the others are causal by themselves where no mask says it.
    causal = bool(causal) and mask is None and q.shape[2] > 1 and implementation_of(config_of(module)) != "eager"
    if mask is not None:
        mask = mask[..., : k.shape[2]]
    bias = options.get("position_bias")
    if bias is not None:
        mask = (
            bias if mask is None else torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else mask + bias
        )
    scale, softcap = options.get("scaling"), options.get("softcap")
    return AttentionOperator(q, k, mask=mask, causal=causal, scale=scale, softcap=softcap)


@cache
def dispatching_class(cls: Any) -> Any:
    """The class whose forward looks its attention function up in the interface, or None."""
    owner = next((parent for parent in cls.__mro__ if "forward" in vars(parent)), None)
    try:
        source = "" if owner is None else inspect.getsource(owner.forward)
    except (OSError, TypeError):  # no source to look at
        return None
    return owner if "ALL_ATTENTION_FUNCTIONS.get_interface(" in source else None


@cache
def eager_function(cls: Any) -> AttentionFunction:
    """What the class falls back to for "eager": the second argument it gives the interface."""
    owner = dispatching_class(cls)
    name = re.search(r"get_interface\([^,]+,\s*(\w+)", inspect.getsource(owner.forward))
    assert name is not None, "the class was found by this call"
    found: AttentionFunction = getattr(sys.modules[owner.__module__], name[1])
    return found


@cache
def changes_output(cls: Any) -> bool:
    """Whether the class normalises or gates what came out of its attention, as BitNet and Qwen3-Next do."""
    source = inspect.getsource(dispatching_class(cls).forward)
    return re.search(r"self\.\w*norm\w*\(\s*attn_output|attn_output\s*\*(?!\*)", source) is not None


@cache
def asks_for_the_name(cls: Any) -> bool:
    """Some give their sparse masks to "eager" and "sdpa" alone: under our name they would lose them silently."""
    asks = re.search(r"""_attn_implementation\s*(==|!=|in|not in)[^\n]*["'](eager|sdpa)["']""", inspect.getsource(cls))
    return asks is not None
