"""Where a model's blocks, attention, special tokens and final norm are: the library that knows the model is asked.

There is one file per library, each with a `LIBRARY`. A site makes an `AttentionCall` of what its model does. No formula
of a metric or a mitigation stands here.
"""

import pkgutil
import re
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from acutance.errors import TOKENS_REMAIN, AcutanceError, NoSitesError, SeveralStacksError
from acutance.mitigations import Mitigation
from acutance.sites import structure
from acutance.sites.patched import PatchedSite, make_sites
from acutance.sites.scans import ScanSite, scans_in
from acutance.sites.site import AttentionSite, Library, Undo
from acutance.sites.stream import StreamCheck
from acutance.sites.structure import Layer, SpecialTokens, cached, cached_lookup, modules_of, tokens_in, tokens_out

__all__ = ["AttentionSite", "Layer", "Library", "NoSitesError", "PatchedSite", "SpecialTokens", "Undo"]
__all__ += ["cached_lookup", "tokens_in", "tokens_out"]
NO_KIND = {cls for container in structure.CONTAINERS for cls in container.__mro__}  # two such need not be alike
ATTENTION = re.compile("Attention|HeadAttn")  # in the names of classes; CaiT's is TalkingHeadAttn

LIBRARIES: list[Library] = []  # in the order they are asked


def part_of(model: nn.Module, path: str | None) -> nn.Module:
    """The submodule of that path; the model itself where none is named."""
    try:
        return model.get_submodule(path or "")
    except AttributeError as error:
        children = ", ".join(name for name, _ in model.named_children())
        raise AcutanceError(f"{type(model).__name__} has no part {path!r}; it is made of {children}") from error


def find(model: nn.Module) -> list[AttentionSite]:
    """The model's attention sites in depth order."""
    library, layers = _known(model)
    return list(cached(make_sites)(library, model, layers))


@cached
def _known(model: nn.Module) -> tuple[Library, tuple[Layer, ...]]:
    """The model's layers, and the library that knows them."""
    refusals: list[NoSitesError] = []
    for library in LIBRARIES:
        try:
            layers = tuple(library.layers(model))
        except NoSitesError as error:  # it may hold a model of a library that comes later
            refusals.append(error)
            continue
        if layers:
            _refuse_layers_elsewhere(model, layers)
            return library, layers
    kind, supported = type(model), ", ".join(library.name for library in LIBRARIES)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if not refusals and scans_in(model):
        what = f"{name} mixes tokens by scans, which have no softmax, queries and W_V to explain or mitigate"
        refusals.append(NoSitesError(f"{what}: measure reads them at the taps block, attention and values"))
    refusals.append(NoSitesError(f"no attention found in {name}; models supported: {supported}. {TOKENS_REMAIN}"))
    raise refusals[0]


def _library(model: nn.Module) -> Library:
    """The library that knows the model; the most general one where its attention is not known."""
    try:
        return _known(model)[0]
    except NoSitesError:
        return LIBRARIES[-1]


def _refuse_layers_elsewhere(model: nn.Module, found: Sequence[Layer]) -> None:
    """Layers of another library, or of none, must not be left out silently."""
    paths = {module: path for path, module in modules_of(model).items()}
    own = structure.outwards(paths[found[0].block])[-2::-1]
    inside = {paths[layer.block] for layer in found}
    around = {up for layer in found for up in structure.outwards(paths[layer.attention])}
    parts: dict[str, None] = {}
    for path, listed in structure.lists_in(model).items():
        if path not in around and inside.isdisjoint(structure.outwards(path)):
            kinds = [type(block) for block in listed.values() if _names_attention(block)]
            if len(kinds) > len(set(kinds)):
                parts[next(up for up in structure.outwards(path)[::-1] if up not in around)] = None
    if parts:
        first = next(up for up in own if not any(up in structure.outwards(part) for part in parts))
        raise structure.several_stacks(model, [first, *parts])


def _names_attention(block: nn.Module) -> bool:
    return any(ATTENTION.search(type(inside).__name__) for inside in block.modules())


@cached
def blocks(model: nn.Module) -> list[tuple[int, nn.Module, Callable[[Tensor], Tensor]]]:
    """Layer, block, and how to bring what goes through the block to (batch, tokens, channels).

    Blocks without attention among those with one, as in Jamba, are layers too. Where attention is not known, the blocks
    are the model's largest list of equal modules.
    """
    try:
        library, layers = _known(model)
    except NoSitesError:
        repeated = structure.blocks_in_order(model).values()
        if not repeated:
            raise
        return [(layer, block, partial(structure.grid_as_tokens, block)) for layer, block in enumerate(repeated, 1)]
    by_grid = getattr(library.site, "tokens", None) is AttentionSite.tokens  # others ask the site
    found: Sequence[Any] = layers if by_grid else find(model)
    as_tokens = {
        layer.block: getattr(layer, "tokens", partial(structure.grid_as_tokens, layer.block)) for layer in found
    }
    kinds = {kind for block in as_tokens for kind in type(block).__mro__} - NO_KIND
    lists = [listed.values() for listed in structure.lists_in(model).values()]
    members = [member for listed in lists if not as_tokens.keys().isdisjoint(listed) for member in listed]
    every = [member for member in members if member in as_tokens or not kinds.isdisjoint(type(member).__mro__)]
    if not as_tokens.keys() <= set(every) or len(every) > len(set(every)):
        every = list(as_tokens)
    return [(layer, block, as_tokens.get(block, as_tokens[found[0].block])) for layer, block in enumerate(every, 1)]


def modules_unread(model: nn.Module) -> list[str]:
    """The paths of what learns something and is no block: between the blocks, or a list of others as large."""
    known = {block for _, block, _ in blocks(model)}
    is_by_structure = _library(model).is_watched(model)
    found = structure.other_blocks(model, known) if is_by_structure else []
    for listed in structure.lists_in(model).values():
        places = [place for place, member in enumerate(listed.values()) if member in known] or [0]
        between = list(listed.items())[places[0] : places[-1]]
        found += [path for path, m in between if m not in known and any(p.ndim > 1 for p in m.parameters())]
    return found


def layers_of(model: nn.Module) -> list[tuple[AttentionSite, int]]:
    """The sites, each with the number of its layer among all blocks: attention is not in all of them."""
    layers = {block: layer for layer, block, _ in blocks(model)}
    return [(site, layers[site.block]) for site in find(model)]


def readable_layers(model: nn.Module) -> list[tuple[AttentionSite | ScanSite, int]]:
    """Where an operator A can be read, each with its layer among all blocks: attention, or else a scan."""
    found: list[tuple[AttentionSite | ScanSite, int]] = []
    try:
        found += layers_of(model)
    except NoSitesError:
        if not scans_in(model):
            raise
    attending, paths = {number for _, number in found}, {module: path for path, module in modules_of(model).items()}
    for number, block, _ in blocks(model):
        if number not in attending and (mixers := scans_in(block)):
            mixer = mixers[structure.self_attention_in("", mixers)]
            found.append((ScanSite(paths[mixer], block, mixer), number))
    return sorted(found, key=lambda one: one[1])


@cached
def special_tokens(model: nn.Module, part: str | None = None) -> SpecialTokens:
    """How many tokens stand in front of the content (class, distillation, registers) and behind it (detection).

    Of a part, those of the models around it that have no other stack: embeddings are outside of an encoder.
    """
    with suppress(SeveralStacksError):
        for around in map(model.get_submodule, structure.outwards(part)):
            if any(found := _known(around)[0].special_tokens(around)):
                return found
    return SpecialTokens()


@cached
def token_kind(model: nn.Module, part: str | None) -> dict[str, bool]:
    """Whether the part's tokens are a decoder's, by its path, an image's, or padded inside (Longformer, BigBird).

    As `TokenLayout.of` takes it.
    """
    _, block, _ = blocks(part_of(model, part))[0]
    pads = any(name.startswith("_pad_to_") for kind in {*map(type, model.modules())} for name in dir(kind))
    names = re.findall("encoder|decoder", structure.path_of(model, block))
    inputs = (getattr(model.get_submodule(path), "main_input_name", None) for path in structure.outwards(part))
    images = next(filter(None, inputs), None) == "pixel_values"
    return {"decoder": names[-1:] == ["decoder"], "images": images, "pads": pads}


def reading(model: nn.Module) -> AbstractContextManager[None]:
    """A context in which the library's models can be read, e.g. without a cache."""
    return _library(model).reading(model)


def final_norm(model: nn.Module) -> nn.Module:
    """The norm after the last block."""
    library, layers = _known(model)
    return library.final_norm(model) if library.final_norm else structure.norm_after(model, layers[-1].attention)


def all_sites(model: nn.Module) -> dict[str, AttentionSite]:
    """The sites of all stacks by the paths of their attention; none in a model whose attention is not known."""
    try:
        found = find(model)
    except NoSitesError:
        return {}
    except SeveralStacksError as error:
        inside = [all_sites(model.get_submodule(part)) for part in error.parts if part]
        found = [site for sites in inside for site in sites.values()]
    paths = {module: path for path, module in modules_of(model).items()}  # a site may have been found in a part before
    return {paths[site.attention]: site for site in found}


def record(model: nn.Module) -> dict[str, str]:
    """What the model carries: the spec of every mitigated attention by its path."""
    installed = {path: module._modules.get("mitigation") for path, module in modules_of(model).items()}
    return {p: m.spec for p, m in installed.items() if isinstance(m, Mitigation) and type(m) is not Mitigation}


def mitigation_spec(model: nn.Module) -> str | None:
    """What the model carries, e.g. `neutreno:0.6`; layers are named when it is not all of them."""
    if not record(model):
        return None
    sites = find(model)
    specs = {site.layer: site.mitigation.spec for site in sites if site.mitigation is not None}
    if len(specs) == len(sites) and len(set(specs.values())) == 1:
        return specs[1]
    where = {spec: [str(n) for n in specs if specs[n] == spec] for spec in specs.values()}
    return "; ".join(f"{spec} in layers {', '.join(layers)}" for spec, layers in where.items())


@contextmanager
def checking_blocks(model: nn.Module, rows: Container[int], of_grids: Container[int], most: int) -> Iterator[None]:
    """While a batch runs in a with block, refuse blocks that are not given its samples' tokens."""

    def refuse(block: nn.Module, args: Any, kwargs: Any) -> None:
        tokens = as_tokens(tokens_in(args, kwargs))
        if len(tokens) > most:  # fewer are known from codebooks, which are rows of their own
            structure.refuse_other_rows(
                f"the block of {layers[0].name} ({type(block).__name__})", tokens, rows, of_grids
            )

    with ExitStack() as stack:
        if _library(model).is_watched(model):
            check = stack.enter_context(StreamCheck(rows, of_grids))
            for path, block in structure.blocks_in_order(model).items():
                enter, leave = partial(check.enter_block, path), partial(check.leave_block, path)
                stack.callback(block.register_forward_pre_hook(enter, with_kwargs=True).remove)
                stack.callback(block.register_forward_hook(leave).remove)
        else:
            (_, layers), (_, _, as_tokens) = _known(model), blocks(model)[0]
            stack.callback(layers[0].block.register_forward_pre_hook(refuse, with_kwargs=True).remove)
        yield


_FILES = [import_module(f"{__name__}.{file.name}") for file in pkgutil.iter_modules(__path__)]
LIBRARIES += sorted((file.LIBRARY for file in _FILES if hasattr(file, "LIBRARY")), key=lambda one: one.generality)
