"""Models made of `nn.MultiheadAttention`: torch's own Transformer layers, and anybody's blocks that hold one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn

from acutance.errors import AcutanceError, NoSitesError
from acutance.sites.base import AttentionSite, Library
from acutance.sites.discovery import is_norm
from acutance.sites.patched import Stack, caller_of, known_sites
from acutance.sites.structure import (
    Place,
    modules_of,
    norm_after,
    place_of,
    refuse_several_stacks,
    tokens_by_name,
    unwrapped,
)
from acutance.sites.torch_nn_site import MultiheadSite

CROSS = re.compile("cross|multihead_attn|enc.*attn|memory", re.IGNORECASE)  # beside a self-attention in one block
TORCH_STACKS = (nn.TransformerEncoder, nn.TransformerDecoder)


def _sites(model: nn.Module) -> list[AttentionSite]:
    found = {name: m for name, m in modules_of(model).items() if isinstance(m, nn.MultiheadAttention)}
    if not found:
        return []
    places = _self_attentions(_in_stacks(model, {name: _place(model, name) for name in found}), found)
    refuse_several_stacks(model, places.values())
    known = known_sites(found[name] for name in places)
    if known is not None:
        return list(known)
    stack = Stack(caller_of(model, [place.block for place in places.values()]))
    for layer, (name, place) in enumerate(places.items(), 1):
        block, encoder = _block(model, place.block), _encoder_around(model, name)
        MultiheadSite(stack, layer, name, block, found[name], stage=place.stage, encoder=encoder)
    return list(stack.sites)


def _place(model: nn.Module, name: str) -> Place:
    """Where the attention stands; outside of any list of blocks its parent is the block."""
    return place_of(model, name) or Place(block=name.rpartition(".")[0], stage="", stack="")


def _in_stacks(model: nn.Module, places: Mapping[str, Place]) -> dict[str, Place]:
    """Those in the innermost stacks: one beside a stack, such as a pooling head's, is none of its layers."""
    stacks = {place.stack for place in places.values()}
    outer = {a for a in stacks for b in stacks if a != b and (a == "" or b.startswith(f"{a}."))}
    inside = {name: place for name, place in places.items() if place.stack not in outer}
    kinds = {type(model.get_submodule(place.block)) for place in inside.values()}
    for name in places.keys() - inside.keys():
        if type(model.get_submodule(places[name].block)) in kinds:
            raise AcutanceError(
                f"{name} is in a block like those of {', '.join(stacks - outer)}, but outside of it, so its depth is "
                "not known: put all blocks into one nn.ModuleList, or describe the model in a Library of its own"
            )
    return inside


def _self_attentions(places: Mapping[str, Place], found: Mapping[str, nn.MultiheadAttention]) -> dict[str, Place]:
    """One per block: beside a self-attention, a decoder's block holds its cross-attention."""
    chosen = {}
    for block in dict.fromkeys(place.block for place in places.values()):
        names = [name for name, place in places.items() if place.block == block]
        own = [name for name in names if not CROSS.search(name[len(block) :])] if len(names) > 1 else names
        if len(own) != 1:
            readable = all(found[name].batch_first for name in names)  # tokens can be measured without any site
            raise (NoSitesError if readable else AcutanceError)(
                f"the block {block!r} holds several attentions ({', '.join(names)}), and which is its self-attention "
                "is not clear: describe the model in a Library of its own"
            )
        chosen[own[0]] = places[own[0]]
    return chosen


def _block(model: nn.Module, path: str) -> nn.Module:
    """The block itself, inside what checkpointing, compiling or sharding wraps around it."""
    block = unwrapped(model.get_submodule(path))
    if isinstance(block, nn.ModuleList):
        raise AcutanceError(f"the block {path} is a list of modules without a forward: make it a module that has one")
    return block


def _encoder_around(model: nn.Module, path: str) -> nn.TransformerEncoder | None:
    while path:
        path = path.rpartition(".")[0]
        module = model.get_submodule(path)
        if isinstance(module, nn.TransformerEncoder):
            return module
    return None


def _prefix_tokens(model: nn.Module) -> int:
    return tokens_by_name(model.named_parameters()).front


def _final_norm(model: nn.Module) -> nn.Module:
    """By the order of definition: anybody's names say nothing."""
    last = cast(MultiheadSite, _sites(model)[-1])

    def choose(holder: nn.Module, blocks: str) -> nn.Module | None:
        if not last.block_is_batch_first() and not isinstance(holder, TORCH_STACKS):
            return None  # whether its norm is given (tokens, batch, dim) too is not known
        names = [name for name, _ in holder.named_children()]
        later = (holder.get_submodule(name) for name in names[names.index(blocks) + 1 :])
        return next((module for module in later if is_norm(module)), None)

    return norm_after(model, last.attention, choose)


@contextmanager
def _without_fast_path(_model: nn.Module) -> Iterator[None]:
    """Read without hooks on the attention too, blocks must not hand nested tensors to one another."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


LIBRARY = Library(
    name="torch.nn",
    sites=_sites,
    prefix_tokens=_prefix_tokens,
    final_norm=_final_norm,
    reading=_without_fast_path,
)
