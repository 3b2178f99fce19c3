"""Where attention lives in a model: one file per library."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from torch import Tensor, nn

from acutance.errors import NoSitesError, SeveralStacksError
from acutance.sites import huggingface, reference, timm, torch_nn
from acutance.sites.base import AttentionSite, Library, Undo
from acutance.sites.blocks import grid_as_tokens, repeated_blocks
from acutance.sites.patched import PatchedSite, Stack, tokens_in, tokens_out

__all__ = [
    "LIBRARIES",
    "AttentionSite",
    "Library",
    "NoSitesError",
    "PatchedSite",
    "Stack",
    "Undo",
    "blocks",
    "everywhere",
    "final_norm",
    "find",
    "mitigation_spec",
    "prefix_tokens",
    "reading",
    "record",
    "remember",
    "tokens_in",
    "tokens_out",
]

LIBRARIES: list[Library] = [reference.LIBRARY, huggingface.LIBRARY, timm.LIBRARY, torch_nn.LIBRARY]


def find(model: nn.Module) -> list[AttentionSite]:
    """The model's attention sites in depth order."""
    return _locate(model)[1]


def blocks(model: nn.Module) -> list[tuple[int, nn.Module, Callable[[Tensor], Tensor]]]:
    """Layer, block, and how to bring what goes through the block to (batch, tokens, channels).

    Of a model whose attention is not known, the blocks are told by the model's structure.
    """
    try:
        return [(site.layer, site.block, site.tokens) for site in find(model)]
    except NoSitesError:
        found = repeated_blocks(model)
        if not found:
            raise
        return [(layer, block, partial(grid_as_tokens, block)) for layer, (_, block) in enumerate(found, 1)]


def prefix_tokens(model: nn.Module) -> int:
    """How many tokens stand in front of the content: class, distillation, registers."""
    return _locate(model)[0].prefix_tokens(model)


def final_norm(model: nn.Module) -> nn.Module:
    """The norm after the last block."""
    return _locate(model)[0].final_norm(model)


def reading(model: nn.Module) -> AbstractContextManager[None]:
    """The state the library's models should be read in, for the time of a with block."""
    try:
        return _locate(model)[0].reading(model)
    except NoSitesError:
        return nullcontext()


def everywhere(model: nn.Module) -> dict[str, AttentionSite]:
    """The sites of all stacks by the paths of their attention; none in a model whose attention is not known."""
    try:
        found = find(model)
    except NoSitesError:
        return {}
    except SeveralStacksError as error:
        inside = [everywhere(model.get_submodule(part)) for part in error.parts if part]
        found = [site for sites in inside for site in sites.values()]
    paths = {module: path for path, module in model.named_modules()}  # a site may have been found in a part before
    return {paths[site.attention]: site for site in found}


def record(model: nn.Module) -> dict[str, str]:
    """What the model carries: the spec of every mitigated attention by its path."""
    return {name: site.mitigation.spec for name, site in everywhere(model).items() if site.mitigation is not None}


def remember(model: nn.Module) -> None:
    """Note what the model carries where its library would save it."""
    for library in LIBRARIES:
        library.remember(model, record(model))


def mitigation_spec(model: nn.Module) -> str | None:
    """What the model carries, e.g. `neutreno:0.6`; layers are named when it is not all of them."""
    try:
        sites = find(model)
    except NoSitesError:
        return None
    specs = {site.layer: site.mitigation.spec for site in sites if site.mitigation is not None}
    if len(specs) == len(sites) and len(set(specs.values())) == 1:
        return specs[1]
    where = {spec: [str(n) for n in specs if specs[n] == spec] for spec in specs.values()}
    return "; ".join(f"{spec} in layers {', '.join(layers)}" for spec, layers in where.items()) or None


def _locate(model: nn.Module) -> tuple[Library, list[AttentionSite]]:
    for library in LIBRARIES:
        if sites := library.sites(model):
            return library, sites
    supported = ", ".join(library.name for library in LIBRARIES)
    raise NoSitesError(
        f"no attention found in {type(model).__module__}.{type(model).__qualname__}; models supported today: "
        f"{supported}"
    )
