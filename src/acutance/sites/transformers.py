"""Models of Hugging Face transformers."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from acutance.errors import AcutanceError, NoSitesError
from acutance.sites.base import TOKENS_REMAIN, AttentionSite, Library
from acutance.sites.huggingface_notes import is_pretrained, remember
from acutance.sites.intercept import SINKS, Product
from acutance.sites.named import NamedSite
from acutance.sites.patched import SITE, WINDOWS_APART, WINDOWS_MOVE, Stack, caller_of, known_sites
from acutance.sites.structure import (
    Layer,
    SpecialTokens,
    cached,
    modules_of,
    norm_after,
    places_of,
    tokens_by_name,
    unwrapped,
)

CROSS = re.compile("cross|encoder_attn|encdec", re.IGNORECASE)


class HuggingFaceSite(NamedSite):
    """The attention of one layer of a transformers model."""

    stage: str  # path of the container that holds the block
    interface: bool  # whether the model promises to call its attention through transformers' interface

    def refuse_first_values(self) -> str | None:
        """Layers that share a module, windows that move, stages that merge tokens."""
        if type(self.attention).__name__.startswith("Albert"):
            return "all its layers are one module, so there is no first layer to tell from the others"
        if _has_windows(self.attention):
            return WINDOWS_MOVE
        if any((site.dim, cast(HuggingFaceSite, site).stage) != (self.dim, self.stage) for site in self.stack.sites):
            return "the model merges tokens between its stages, so v⁰ does not fit: name one stage with part="
        if hasattr(self.attention, "sequence_reduction"):  # SegFormer's, where its ratio is over one
            return "it merges tokens before making keys and values, so v⁰, v and u do not match"
        return None

    def refuse_average(self) -> str | None:
        """Windows, and the future."""
        if _has_windows(self.attention):
            return WINDOWS_APART
        if getattr(self.attention, "is_causal", False):
            return "its attention is causal, and the mean over tokens would show them the future"
        return None

    def route(self) -> Callable[[], None]:
        """Through the attention interface, or intercepted, where the model's function lets anybody look."""
        self._refuse_implementation()
        if self.interface:
            take_over_sdpa()
        return super().route()

    def is_called(self) -> bool:
        """By the attention interface, unless the model was told to write its softmax out."""
        return self.interface and self._implementation() == "sdpa"

    def _implementation(self) -> str | None:
        implementation: str | None = getattr(getattr(self.attention, "config", None), "_attn_implementation", None)
        return implementation

    def _refuse_implementation(self) -> None:
        """Asked at every call, since the model may be told another one."""
        implementation = self._implementation()
        if implementation not in (None, "sdpa", "eager"):
            raise AcutanceError(
                f"the model runs its attention by {implementation!r}, where nobody can look: call "
                "model.set_attn_implementation('sdpa') first"
            )

    def refuse_arguments(self, kwargs: Mapping[str, Any]) -> None:
        """In a static cache the last rows are not the newest tokens."""
        self._refuse_implementation()
        past = kwargs.get("past_key_values", kwargs.get("layer_past"))
        if self.mitigation is not None and getattr(past, "is_compileable", False):
            raise AcutanceError(
                f"{self.name}: a {type(past).__name__} keeps empty rows behind the newest token, which v⁰ − v cannot "
                "be matched to: generate with the default dynamic cache"
            )


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


def _has_windows(attention: nn.Module) -> bool:
    return type(attention).__name__.startswith(("Swin", "ClapAudio"))


def _attentions(model: nn.Module) -> dict[str, nn.Module]:
    return {
        name: module
        for name, module in modules_of(model).items()
        if _attends(module)
        and not any(_attends(child) for child in module.modules() if child is not module)
        and not CROSS.search(re.split(r"\.\d+\.", name)[-1])  # inside the block: the model's own name is its user's
        and not getattr(module, "is_cross_attention", False)
    }


def _attends(module: nn.Module) -> bool:
    """By its class, which transformers names so without exception; a pooling head's is none of the layers'."""
    cls = type(module)
    named = "Attention" in cls.__name__ and "Pool" not in cls.__name__ and next(module.parameters(), None) is not None
    return named and any(parent.__module__.startswith("transformers.") for parent in cls.__mro__)


@cached
def _layers(model: nn.Module) -> list[Layer]:
    found = _attentions(model) if "transformers" in sys.modules else {}
    if not found:
        pretrained = next(filter(is_pretrained, modules_of(model).values()), None)
        if pretrained is None:
            return []
        raise NoSitesError(
            f"no attention found in {type(pretrained).__name__}, so there is none to mitigate or to measure. "
            f"{TOKENS_REMAIN}"
        )
    places = places_of(model, found)
    blocks = [place.block for place in places.values()]
    if any(place.block == name for name, place in places.items()):
        raise NoSitesError(
            f"the attentions of {type(model).__name__} stand in a list of their own ({places[blocks[0]].stage}), so "
            f"the residual stream around them is not known. {TOKENS_REMAIN}"
        )
    twice = next((block for block in blocks if blocks.count(block) > 1), None)
    if twice is not None:
        names = ", ".join(name for name, place in places.items() if place.block == twice)
        raise AcutanceError(f"the block {twice} holds several self-attentions ({names}): which is meant is not clear")
    return [
        Layer(layer, name, unwrapped(model.get_submodule(place.block)), found[name], place.stage)
        for layer, (name, place) in enumerate(places.items(), 1)
    ]


def _sites(model: nn.Module) -> list[AttentionSite]:
    layers = _layers(model)
    known = known_sites([layer.attention for layer in layers])
    if known is not None:
        return list(known)
    stack = Stack(caller_of(model, [layer.stage for layer in layers]))
    interface = all(getattr(module, "_supports_attention_backend", True) for module in modules_of(model).values())
    for layer, name, block, attention, stage in layers:
        site = HuggingFaceSite(stack, layer, name, block, attention)
        site.stage, site.interface = stage, interface
    return list(stack.sites)


def _is_watched(model: nn.Module) -> bool:
    """Models from before transformers' attention interface, whose blocks may pass something else on than tokens."""
    supported = [getattr(module, "_supports_sdpa", None) for module in modules_of(model).values()]
    return False in supported


def _special_tokens(model: nn.Module) -> SpecialTokens:
    """Those of the embeddings: pooling heads have such parameters too, which are no tokens. Text has none."""
    return tokens_by_name((path, p) for path, p in model.named_parameters() if "embeddings" in path.split("."))


def _final_norm(model: nn.Module) -> nn.Module:
    return norm_after(model, list(_attentions(model).values())[-1])


@contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """With a cache a model takes packed documents for one, and keeps keys and values nobody asks for."""
    found: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    kept = [(config, config.use_cache) for config in found if hasattr(config, "use_cache")]
    try:
        for config, _ in kept:
            config.use_cache = False
        yield
    finally:
        for config, use_cache in kept:  # shared ones come several times, each time with what they had
            config.use_cache = use_cache


LIBRARY = Library(
    name="transformers",
    sites=_sites,
    prefix_tokens=lambda model: _special_tokens(model).front,
    final_norm=_final_norm,
    layers=_layers,
    suffix_tokens=lambda model: _special_tokens(model).back,
    reading=_without_cache,
    is_watched=_is_watched,
    remember=remember,
)
