"""Where attention lives in a model: one file per library."""

from __future__ import annotations

from torch import nn

from acutance.errors import AcutanceError
from acutance.sites import reference
from acutance.sites.base import AttentionSite, Library, Undo

__all__ = [
    "LIBRARIES",
    "AttentionSite",
    "Library",
    "Undo",
    "final_norm",
    "find",
    "mitigation_spec",
    "prefix_tokens",
]

LIBRARIES: list[Library] = [reference.LIBRARY]


def find(model: nn.Module) -> list[AttentionSite]:
    """The model's attention sites in depth order."""
    return _locate(model)[1]


def prefix_tokens(model: nn.Module) -> int:
    """How many tokens stand in front of the content: class, distillation, registers."""
    return _locate(model)[0].prefix_tokens(model)


def final_norm(model: nn.Module) -> nn.Module:
    """The norm after the last block."""
    return _locate(model)[0].final_norm(model)


def mitigation_spec(model: nn.Module) -> str | None:
    """What the model carries, e.g. `neutreno:0.6`; layers are named when it is not all of them."""
    sites = find(model)
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
    raise AcutanceError(
        f"no attention found in {type(model).__module__}.{type(model).__qualname__}; models supported today: "
        f"{supported}"
    )
