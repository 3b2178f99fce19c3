"""Models of timm, and anybody's models that are built of timm's blocks."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, cast

from torch import nn

from acutance.errors import NoSitesError
from acutance.sites.base import TOKENS_REMAIN, AttentionSite, Library
from acutance.sites.patched import Stack, caller_of, known_sites
from acutance.sites.structure import CONTAINERS, modules_of, norm_after, places_of, repeated_blocks, tokens_by_name
from acutance.sites.timm_site import TimmSite

# Attentions whose layers are numbered and whose weights are read here, by the class that wrote their forward.
KNOWN = {
    *("timm.layers.attention.Attention", "timm.layers.attention.AttentionRope", "timm.models.eva.EvaAttention"),
    *("timm.models.beit.Attention", "timm.models.vision_transformer_relpos.RelPosAttention"),
    *("timm.models.swin_transformer.WindowAttention", "timm.models.pvt_v2.Attention"),
    "timm.models.cait.TalkingHeadAttn",
}


@cache
def _is_known(attention: Any) -> bool:
    """A subclass with a forward of its own is unknown."""
    cls = next(cls for cls in attention.__mro__ if "forward" in vars(cls))
    return f"{cls.__module__}.{cls.__qualname__}" in KNOWN


def _sites(model: nn.Module) -> list[AttentionSite]:
    if "timm" not in sys.modules:
        return []
    modules = modules_of(model)
    classes: dict[str, Any] = {name: type(module) for name, module in modules.items()}
    found = [name for name, cls in classes.items() if _is_known(cls)]
    if not found:
        _refuse_unknown(model)
        return []
    attentions = {name: modules[name] for name in found}
    known = known_sites(attentions.values())
    if known is not None:
        return list(known)
    if any(type(module).__name__ == "CrossVit" for module in modules.values()):
        raise NoSitesError("the layers of CrossVit run in branches side by side, so they have no one order")
    blocks = {name: _block(model, name) for name in found}
    places = places_of(model, found)
    stack = Stack(caller_of(model, [place.stage for place in places.values()]))
    for layer, name in enumerate(found, 1):
        TimmSite(stack, layer, name, blocks[name], attentions[name]).stage = places[name].stage
    return list(stack.sites)


def _block(model: nn.Module, name: str) -> nn.Module:
    block = model.get_submodule(name.rpartition(".")[0])
    if isinstance(block, CONTAINERS):
        raise NoSitesError(f"{name} stands beside others in one layer, which mitigations and measures are not made for")
    return block


def _refuse_unknown(model: nn.Module) -> None:
    """Name what a model of timm is made of, if none of it is known here."""
    if not _is_from_timm(model):
        return
    attentions = {type(module) for module in model.modules() if "Att" in type(module).__name__}
    parts = attentions or {type(block) for _, block in repeated_blocks(model)}
    names = ", ".join(sorted(f"{cls.__module__}.{cls.__qualname__}" for cls in parts))
    raise NoSitesError(
        f"the attention of {type(model).__name__} is not known, if it has any ({names or 'no repeated blocks'}); of "
        f"timm these are known: {', '.join(sorted(KNOWN))}. {TOKENS_REMAIN}"
    )


def _root(model: nn.Module) -> Any:
    return cast(TimmSite, _sites(model)[0]).stack.root


def _prefix_tokens(model: nn.Module) -> int:
    """As the model says, or else by the names that timm gives such tokens."""
    root: Any = model if hasattr(model, "num_prefix_tokens") else _root(model)
    if hasattr(root, "num_prefix_tokens"):
        return int(root.num_prefix_tokens)
    if type(root).__name__ == "Cait":  # its class token joins the others after these layers
        return 0
    return tokens_by_name(root.named_parameters(recurse=False)).front


def _final_norm(model: nn.Module) -> nn.Module:
    """Of the model, or of its last stage."""
    return norm_after(model, _sites(model)[-1].attention)


def _is_from_timm(model: nn.Module) -> bool:
    return any(cls.__module__.startswith("timm.") for cls in type(model).__mro__)


LIBRARY = Library(name="timm", sites=_sites, prefix_tokens=_prefix_tokens, final_norm=_final_norm)
