"""Models of no known library: blocks told by structure, attention by its name, and what it does as it runs."""

from __future__ import annotations

import re
from functools import cached_property

import torch
from torch import Tensor, nn

from acutance.errors import NoSitesError
from acutance.mitigations.projection import Projections
from acutance.sites.intercept import Intercept, Product
from acutance.sites.named import JOINT, SEPARATE, NamedSite, Sizes, by_names
from acutance.sites.site import TOKENS_REMAIN, Library
from acutance.sites.structure import (
    PARAMETRIZATIONS,
    Layer,
    evaluating,
    modules_of,
    norm_after,
    path_of,
    repeated_blocks,
    tokens_by_name,
    tokens_out,
    unwrapped,
)

ATTENTION = re.compile("attention|attn|mhsa", re.IGNORECASE)
CROSS = re.compile("cross|enc.*attn|memory", re.IGNORECASE)


class AnybodySite(NamedSite):
    """An attention that nobody described: what it returns is the branch's output."""

    def output_projection(self) -> nn.Module | None:
        """Asked for only where the attention is written into its block."""
        return super().output_projection() if self.block is self.attention else None

    def refuse_first_values(self) -> str | None:
        return None  # told by the shapes of a forward pass

    @cached_property
    def _found(self) -> tuple[Projections, Sizes]:
        found = by_names(self.name, self.block, self.attention)
        if self.block is not self.attention:
            self._verify(*found)
        return found

    def _verify(self, projections: Projections, sizes: Sizes) -> None:
        """Names promise nothing: some tokens run through the attention alone, if it takes them alone."""
        weight = projections.output.matrix()
        x = torch.randn(2, 3, sizes.dim, generator=torch.Generator().manual_seed(0)).to(weight)
        seen: list[Tensor] = []

        def attend(product: Product) -> Tensor:
            u = product.own(product.v)
            seen.extend((product.v, u))
            return u

        try:
            with evaluating(self.attention), Intercept(attend, x, self.name):
                y = tokens_out(type(self.attention).forward(self.attention, x))
        except Exception:  # whatever somebody's forward raises for what it does not take
            return
        if not seen:
            return
        checks = (projections.value, x, seen[0]), (projections.output, seen[1], y)
        for projection, source, made in checks:
            given, got = (t.transpose(1, 2).flatten(2) if t.ndim == 4 else t for t in (source, made))
            offset = projection.offset()
            wanted = given @ projection.matrix().T + (0 if offset is None else offset)
            tolerance = torch.finfo(wanted.dtype).eps ** 0.5
            if got.shape != wanted.shape or not torch.allclose(got, wanted, rtol=tolerance, atol=tolerance):
                raise NoSitesError(
                    f"{self.name} ({type(self.attention).__name__}) does more to its tokens than multiply them by the "
                    "weights that are called W_V and W_proj: describe the model in a Library of its own. "
                    f"{TOKENS_REMAIN}"
                )


def _layers(model: nn.Module) -> list[Layer]:
    blocks = [(path, unwrapped(block)) for path, block in repeated_blocks(model)]
    found = [_attention_of(path, block) for path, block in blocks]
    return [
        Layer(layer, path_of(model, attention), block, attention, path.rpartition(".")[0])
        for layer, ((path, block), attention) in enumerate(zip(blocks, found, strict=True), 1)
        if attention is not None and None not in found  # blocks without attention need a library of their own
    ]


def _attention_of(path: str, block: nn.Module) -> nn.Module | None:
    """The innermost module that is called an attention, or the block itself where it holds the projections."""
    named = {name: m for name, m in modules_of(block).items() if name and _is_called_so(name, m)}
    inner = {name: m for name, m in named.items() if not any(other.startswith(f"{name}.") for other in named)}
    if len(inner) > 1:
        inner = {name: m for name, m in inner.items() if not CROSS.search(f"{name} {type(m).__name__}")}
    if len(inner) > 1:
        raise NoSitesError(
            f"the block {path} holds several attentions ({', '.join(inner)}), and which is its self-attention is not "
            "clear: describe the model in a Library of its own"
        )
    if inner:
        return next(iter(inner.values()))
    children = {name for name, _ in block.named_children()}
    return block if children.intersection((*JOINT, *SEPARATE["value"])) else None


def _is_called_so(name: str, module: nn.Module) -> bool:
    """By its class, or by where it stands; a norm or dropout of an attention has no parts."""
    if not module._modules.keys() - {PARAMETRIZATIONS}:
        return False
    return ATTENTION.search(type(module).__name__) is not None or ATTENTION.search(name.rpartition(".")[2]) is not None


LIBRARY = Library(
    name="any model whose blocks are a list",
    generality=3,
    layers=_layers,
    site=AnybodySite,
    final_norm=lambda model: norm_after(model, _layers(model)[-1].attention),
    special_tokens=lambda model: tokens_by_name(model.named_parameters()),
    is_watched=lambda model: True,
)
