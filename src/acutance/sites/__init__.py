"""Where attention lives in a model: one file per library."""

from __future__ import annotations

from acutance.errors import NoSitesError
from acutance.sites import anybody, reference, timm, torch_nn, transformers
from acutance.sites.base import AttentionSite, Library, Undo
from acutance.sites.patched import PatchedSite, Stack
from acutance.sites.structure import (
    LIBRARIES,
    SpecialTokens,
    blocks,
    cached_lookup,
    checking_blocks,
    everywhere,
    final_norm,
    find,
    in_decoder,
    layers_of,
    mitigation_spec,
    part_of,
    prefix_tokens,
    reading,
    reads_images,
    record,
    remember,
    sides,
    special_tokens,
    tokens_in,
    tokens_out,
    unread,
)

__all__ = [
    "LIBRARIES",
    "AttentionSite",
    "Library",
    "NoSitesError",
    "PatchedSite",
    "SpecialTokens",
    "Stack",
    "Undo",
    "blocks",
    "cached_lookup",
    "checking_blocks",
    "everywhere",
    "final_norm",
    "find",
    "in_decoder",
    "layers_of",
    "mitigation_spec",
    "part_of",
    "prefix_tokens",
    "reading",
    "reads_images",
    "record",
    "remember",
    "sides",
    "special_tokens",
    "tokens_in",
    "tokens_out",
    "unread",
]

LIBRARIES += [transformers.LIBRARY, reference.LIBRARY, timm.LIBRARY, torch_nn.LIBRARY, anybody.LIBRARY]
