"""Models of Hugging Face transformers, through its attention interface."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from acutance.errors import AcutanceError, NoSitesError
from acutance.sites.base import TOKENS_REMAIN, AttentionSite, Library
from acutance.sites.blocks import modules_of, places_of, unwrapped
from acutance.sites.ends import SpecialTokens, final_norm, special_tokens
from acutance.sites.huggingface_interface import (
    asks_for_the_name,
    changes_output,
    config_of,
    dispatching_class,
    diverted_view,
    eager_function,
    implementation_of,
    register,
)
from acutance.sites.huggingface_norms import adds_one
from acutance.sites.huggingface_notes import is_pretrained, remember
from acutance.sites.huggingface_weights import Weights, find_weights
from acutance.sites.patched import WINDOWS_APART, WINDOWS_MOVE, PatchedSite, Stack, caller_of, known_sites

CROSS = re.compile("cross|encoder_attn|encdec", re.IGNORECASE)
NORMS_AROUND_THE_MLP = ("pre_feedforward_layernorm", "post_feedforward_layernorm")  # then that of the attention is too


class HuggingFaceSite(PatchedSite):
    """The attention of one layer of a transformers model."""

    def __init__(self, stack: Stack, layer: int, name: str, block: nn.Module, attention: nn.Module, stage: str) -> None:
        super().__init__(stack, layer, name, block, attention)
        self.stage = stage
        self.weights: Weights = find_weights(name, block, attention)
        self.heads, self.kv_heads, self.head_dim = self.weights.heads, self.weights.kv_heads, self.weights.head_dim
        self.dim = self.weights.dim
        cls: Any = type(attention)
        self.eager = eager_function(cls)
        if asks_for_the_name(cls) and not hasattr(attention, "reorder_and_upcast_attn"):  # GPT-2's: see `divert`
            raise NoSitesError(
                f"{name} ({cls.__name__}) does something else depending on the name of its attention function, which "
                f"ours would change. {TOKENS_REMAIN}"
            )

    def value_weight(self) -> Tensor:
        """W_V, a copy where the library stores the heads interleaved."""
        return self.weights.value()

    def projection_weight(self) -> Tensor:
        """W_proj."""
        return self.weights.projection_weight()

    def query_weight(self) -> Tensor:
        """W_Q."""
        return self.weights.query()

    def key_weight(self) -> Tensor:
        """W_K."""
        return self.weights.key()

    def value_bias(self) -> Tensor | None:
        """The values' bias, if the model has one."""
        return self.weights.value_bias()

    def projection_bias(self) -> Tensor | None:
        """The bias of the output projection, if the model has one."""
        return self.weights.projection_bias()

    def pre_norm(self) -> nn.Module | None:
        """The norm before the attention; None in Post-LN models such as BERT."""
        return self.weights.pre_norm

    def pre_norm_gain(self) -> Tensor | None:
        """Gemma's norms, and those of some others, store how far their gain is from one."""
        gain, norm = super().pre_norm_gain(), self.pre_norm()
        return gain if gain is None or norm is None or not adds_one(norm) else 1 + gain

    def between(self) -> str | None:
        """Told by the code that calls the attention."""
        cls: Any = type(self.attention)
        return f"what {cls.__name__} does before W_proj, a norm or a gate," if changes_output(cls) else None

    def post_norm(self) -> nn.Module | None:
        """Gemma 2 and 3, OLMo 2 and GLM-4 normalise what the attention adds."""
        own = getattr(self.block, "post_self_attn_layernorm", None)
        if own is None and any(hasattr(self.block, name) for name in NORMS_AROUND_THE_MLP):
            own = getattr(self.block, "post_attention_layernorm", None)  # elsewhere a name for the norm before the MLP
        return own if isinstance(own, nn.Module) else None

    def branch_gain(self) -> Tensor | None:
        """LayerScale's, if the model has it."""
        return self.weights.branch_gain()

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

    def divert(self) -> Callable[[], None]:
        """Give the attention module a view of its configuration that names our function."""
        register()
        own = config_of(self.attention)
        if implementation_of(own) == "eager" and getattr(self.attention, "reorder_and_upcast_attn", False):
            raise AcutanceError(
                f"{self.name} reorders and upcasts its own attention, past the attention interface: "
                "set reorder_and_upcast_attn=False in the configuration, or use 'sdpa'"
            )
        hooks = (
            self.attention.register_forward_pre_hook(self.enter_attention, with_kwargs=True),
            self.weights.projection.register_forward_hook(self.finish_projection),
        )
        self.attention.config = diverted_view(own)
        return partial(_undivert, self.attention, own, hooks)

    def enter_attention(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Refuse what would be silently wrong: in a static cache the last rows are not the newest tokens."""
        super().enter_attention(module, args, kwargs)
        past = kwargs.get("past_key_values", kwargs.get("layer_past"))
        if self.mitigation is not None and getattr(past, "is_compileable", False):
            raise AcutanceError(
                f"{self.name}: a {type(past).__name__} keeps empty rows behind the newest token, which v⁰ − v cannot "
                "be matched to: generate with the default dynamic cache"
            )


def _has_windows(attention: nn.Module) -> bool:
    return type(attention).__name__.startswith(("Swin", "ClapAudio"))


def _undivert(attention: nn.Module, config: Any, hooks: tuple[Any, ...]) -> None:
    attention.config = config
    for hook in hooks:
        hook.remove()


def _dispatches(module: nn.Module) -> bool:
    cls: Any = type(module)
    return dispatching_class(cls) is not None


def _attentions(model: nn.Module) -> dict[str, nn.Module]:
    return {
        name: module
        for name, module in modules_of(model).items()
        if hasattr(module, "config")
        and not is_pretrained(module)
        and _dispatches(module)
        and not CROSS.search(re.split(r"\.\d+\.", name)[-1])  # inside the block: the model's own name is its user's
        and not getattr(module, "is_cross_attention", False)
    }


def _sites(model: nn.Module) -> list[AttentionSite]:
    found = _attentions(model) if "transformers" in sys.modules else {}
    if not found:
        pretrained = next(filter(is_pretrained, modules_of(model).values()), None)
        if pretrained is None:
            return []
        raise NoSitesError(
            f"{type(pretrained).__name__} does not call its attention through transformers' attention interface, so "
            f"mitigations and attention metrics would not see it. {TOKENS_REMAIN}"
        )
    known = known_sites(found.values())
    if known is not None:
        return list(known)
    places = places_of(model, found)
    blocks = [place.block for place in places.values()]
    twice = next((block for block in blocks if blocks.count(block) > 1), None)
    if twice is not None:
        names = ", ".join(name for name, place in places.items() if place.block == twice)
        raise AcutanceError(f"the block {twice} holds several self-attentions ({names}): which is meant is not clear")
    stack = Stack(caller_of(model, blocks))
    for layer, (name, place) in enumerate(places.items(), 1):
        block = unwrapped(model.get_submodule(place.block))
        HuggingFaceSite(stack, layer, name, block, found[name], place.stage)
    return list(stack.sites)


def _special_tokens(model: nn.Module) -> SpecialTokens:
    """Those of the embeddings: pooling heads have such parameters too, which are no tokens. Text has none."""
    return special_tokens((path, p) for path, p in model.named_parameters() if "embeddings" in path.split("."))


def _final_norm(model: nn.Module) -> nn.Module:
    return final_norm(model, list(_attentions(model).values())[-1])


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
    suffix_tokens=lambda model: _special_tokens(model).back,
    reading=_without_cache,
    remember=remember,
)
