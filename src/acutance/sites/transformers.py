"""Models of Hugging Face transformers."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

from torch import Tensor, nn

from acutance.attention.products import with_bias
from acutance.errors import AcutanceError
from acutance.sites import record, structure
from acutance.sites.intercept import SINKS, Product, causal_mask
from acutance.sites.named import NamedSite
from acutance.sites.patched import SITE
from acutance.sites.scans import scan_of
from acutance.sites.site import Library
from acutance.sites.structure import Layer, SpecialTokens, modules_of

NOTE = "acutance"  # where a configuration says what its model carries


class HuggingFaceSite(NamedSite):
    """The attention of one layer of a transformers model."""

    interface = False  # whether its forward calls attention through the library's interface
    checked = 1

    def refuse_first_values(self) -> str | None:
        if type(self.attention).__name__.startswith("Albert"):
            return "all its layers are one module, so there is no first layer to tell from the others"
        return super().refuse_first_values()

    def route(self) -> None:
        """Through the attention interface, or intercepted, where the model's function lets anybody look."""
        self._implementation()
        self.interface = "ALL_ATTENTION_FUNCTIONS" in inspect.unwrap(type(self.attention).forward).__code__.co_names
        take_over_sdpa()
        super().route()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A pickled model may be loaded where nobody has taken the interface over yet."""
        vars(self).update(state)
        take_over_sdpa()

    def is_called(self, arguments: Mapping[str, Any]) -> bool:
        """By the attention interface, unless the model was told to write its softmax out."""
        past = arguments.get("past_key_values", arguments.get("layer_past"))
        if self.mitigation is not None and getattr(past, "is_compileable", False):
            raise AcutanceError(
                f"{self.name}: a {type(past).__name__} has rows of no token: generate with the default dynamic cache"
            )
        return self._implementation() == "sdpa" and self.interface

    def keys_behind(self, arguments: Mapping[str, Any]) -> int:
        """Self-attention that is given an encoder's tokens too has their keys behind its own."""
        others = arguments.get("encoder_hidden_states")
        return others.shape[1] if isinstance(others, Tensor) else 0

    def _implementation(self) -> str | None:
        """Asked for at every call, since the model may be told another one."""
        implementation: str | None = getattr(getattr(self.attention, "config", None), "_attn_implementation", None)
        if implementation not in (None, "sdpa", "eager"):
            raise AcutanceError(
                f"attention by {implementation!r} cannot be watched: first model.set_attn_implementation('sdpa')"
            )
        return implementation


@cache
def take_over_sdpa() -> None:
    """Answer for "sdpa" from now on: modules that carry no site get the answer they always got."""
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    own: Callable[..., tuple[Tensor, Tensor | None]] = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def sdpa_attention_forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        site: Any = module.__dict__.get(SITE)
        if not getattr(site, "interface", False) or not site.is_active or site.stack.passes.current() is None:
            return own(module, query, key, value, attention_mask, **options)

        def product(values: Tensor, asked: Tensor = query, keys: Tensor = key, bias: Any = None) -> Tensor:
            given = mask if bias is None else with_bias(causal_mask(query, key) if about["causal"] else mask, bias)
            return own(module, asked, keys, values, given, **options)[0].transpose(1, 2)

        mask = None if attention_mask is None else attention_mask[..., : key.shape[2]]
        causal, position = options.get("is_causal"), options.get("position_bias")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        about: dict[str, Any] = {
            "q": query,
            "k": key,
            "mask": mask if position is None else with_bias(mask, position),
            # Causal by itself where no mask says it.
            "causal": bool(causal) and mask is None and query.shape[2] > 1,
            "scale": options.get("scaling"),
            "softcap": options.get("softcap"),
            "dropout": options.get("dropout", 0.0),
            "refusal": None if options.get("s_aux") is None else SINKS,
        }
        u: Tensor = site.attend(Product(value, product, lambda u: u, about))
        return u.transpose(1, 2), None

    AttentionInterface.register("sdpa", sdpa_attention_forward)


def _attends(module: nn.Module) -> bool:
    """By its class, which transformers names so without exception; a pooling head's is none of the layers'."""
    cls = type(module)
    named = "Attention" in cls.__name__ and "Pool" not in cls.__name__ and scan_of(module) is None
    named = named and next(module.parameters(), None) is not None
    return named and any(parent.__module__.startswith("transformers.") for parent in cls.__mro__)


def _crosses(path: str, module: nn.Module) -> bool:
    """Whether it attends to other tokens, by its name inside the block: the model's own name is its user's."""
    inside = re.split(r"\.\d+\.", path)[-1]
    return bool(structure.CROSS.search(inside)) or getattr(module, "is_cross_attention", False)


def _layers(model: nn.Module) -> list[Layer]:
    found = structure.innermost({path: module for path, module in modules_of(model).items() if _attends(module)})
    return structure.layers_in(model, {path: module for path, module in found.items() if not _crosses(path, module)})


def _special_tokens(model: nn.Module) -> SpecialTokens:
    """Those of the embeddings: pooling heads have such parameters too, which are no tokens. Text has none."""
    return structure.tokens_by_name(
        (path, p) for path, p in model.named_parameters() if "embeddings" in path.split(".")
    )


def is_pretrained(module: nn.Module) -> bool:
    """Whether this is a transformers model; asked without importing the library."""
    cls = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)
    return cls is not None and isinstance(module, cls)


def note(model: nn.Module) -> Callable[[], None]:
    """Write what the model carries into its configurations, which `save_pretrained` saves; the result undoes that.

    By class, with paths from there: a part that was mitigated by itself does not know the model around it.
    """
    inside, noted, undo = {type(module).__name__ for module in model.modules()}, set(), ExitStack()
    for module in model.modules():  # outer ones first, which may share their configuration with inner ones
        config = vars(module).get("config")
        if hasattr(config, "model_type") and id(config) not in noted:
            noted.add(id(config))
            before, own = vars(config).get(NOTE, {}), record(module)
            undo.callback(_write_note, config, before)
            others = {kind: specs for kind, specs in before.items() if kind not in inside}
            _write_note(config, others | ({type(module).__name__: own} if own else {}))
    return undo.close


def _write_note(config: Any, notes: dict[str, Any]) -> None:
    vars(config).pop(NOTE, None)
    if notes:
        setattr(config, NOTE, notes)


def notes_of(config: Any) -> dict[str, dict[str, str]]:
    """What a configuration and those inside it, such as CLIP's of its towers, say of mitigations."""
    inside = [notes_of(part) for part in vars(config).values() if hasattr(part, "model_type")]
    return {kind: specs for notes in (*inside, vars(config).get(NOTE, {})) for kind, specs in notes.items()}


@contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """With a cache a model takes packed documents for one, and keeps keys and values nobody asks for."""
    with ExitStack() as stack:
        configs: Iterator[Any] = (getattr(module, "config", None) for module in model.modules())
        for config in configs:
            if hasattr(config, "use_cache"):  # shared ones come several times
                stack.callback(setattr, config, "use_cache", config.use_cache)
                config.use_cache = False
        yield


LIBRARY = Library(
    name="transformers",
    layers=_layers,
    site=HuggingFaceSite,
    special_tokens=_special_tokens,
    reading=_without_cache,
    # Models from before the attention interface, whose blocks may pass something else on than tokens.
    is_watched=lambda model: any(getattr(m, "_supports_sdpa", None) is False for m in modules_of(model).values()),
)
