"""Where a model's blocks, attention, special tokens and final norm are: the library that knows the model is asked."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn

from acutance.errors import TOKENS_REMAIN, AcutanceError, NoSitesError, SeveralStacksError
from acutance.mitigations import Mitigation
from acutance.sites.patched import make_sites
from acutance.sites.site import AttentionSite, Library
from acutance.sites.stream import StreamCheck
from acutance.sites.structure import (
    CONTAINERS,
    Layer,
    SpecialTokens,
    cached,
    grid_as_tokens,
    join,
    modules_of,
    name_one,
    outwards,
    path_of,
    refuse_other_rows,
    repeated_blocks,
    tokens_in,
    unwrapped,
)

NO_KIND = {cls for container in CONTAINERS for cls in container.__mro__}  # two such need not be alike
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
    return list(_sites(model))


@cached
def _sites(model: nn.Module) -> list[AttentionSite]:
    library = _library(model)
    return make_sites(library, model, _layers_by(library, model))


@cached
def _library(model: nn.Module) -> Library:
    """The library that knows the model's layers."""
    refusal: NoSitesError | None = None
    for library in LIBRARIES:
        try:
            found = _layers_by(library, model)
        except NoSitesError as error:  # it may hold a model of a library that comes later
            refusal = refusal or error
            continue
        if found:
            _refuse_layers_elsewhere(model, found)
            return library
    supported = ", ".join(library.name for library in LIBRARIES)
    raise refusal or NoSitesError(
        f"no attention found in {type(model).__module__}.{type(model).__qualname__}; models supported today: "
        f"{supported}. {TOKENS_REMAIN}"
    )


def _layers_by(library: Library, model: nn.Module) -> list[Layer]:
    return cached(library.layers)(model)


def _refuse_layers_elsewhere(model: nn.Module, found: Sequence[Layer]) -> None:
    """Layers of another library, or of none, must not be left out silently."""
    parts = _layers_beside(model, "", {site.attention for site in found}, {site.block for site in found})
    if parts:
        around = list(outwards(path_of(model, found[0].block)))[-2::-1]
        own = next(up for up in around if not any(f"{part}.".startswith(f"{up}.") for part in parts))
        raise SeveralStacksError(
            f"{type(model).__name__} holds layers that are not all known, or of several libraries "
            f"({own}, {', '.join(parts)}): {name_one(own)}",
            [own, *parts],
        )


def _layers_beside(module: nn.Module, path: str, known: set[nn.Module], blocks: set[nn.Module]) -> list[str]:
    parts = []
    for name, child in module.named_children():
        if known.intersection(child.modules()):
            parts += [] if child in blocks else _layers_beside(child, join(path, name), known, blocks)
        elif child not in blocks and any(map(_holds_attention_blocks, child.modules())):
            parts.append(join(path, name))
    return parts


def _holds_attention_blocks(module: nn.Module) -> bool:
    """Whether it lists several blocks of one class that have attention inside."""
    attending = [
        type(unwrapped(block))
        for block in (module.children() if isinstance(module, CONTAINERS) else ())
        if any(ATTENTION.search(type(inside).__name__) for inside in block.modules())
    ]
    return len(attending) > len(set(attending))


@cached
def blocks(model: nn.Module) -> list[tuple[int, nn.Module, Callable[[Tensor], Tensor]]]:
    """Layer, block, and how to bring what goes through the block to (batch, tokens, channels).

    Blocks without attention among those with one, as in Jamba, are layers too. Where attention is not known, the blocks
    are the model's largest list of equal modules.
    """
    try:
        library = _library(model)
    except NoSitesError:
        repeated = repeated_blocks(model)
        if not repeated:
            raise
        return [(layer, block, partial(grid_as_tokens, block)) for layer, (_, block) in enumerate(repeated, 1)]
    by_grid = getattr(library.site, "tokens", None) is AttentionSite.tokens  # others ask the site
    found: Sequence[Any] = _layers_by(library, model) if by_grid else find(model)
    as_tokens = {layer.block: getattr(layer, "tokens", partial(grid_as_tokens, layer.block)) for layer in found}
    kinds = {kind for block in as_tokens for kind in type(block).__mro__} - NO_KIND
    members = [unwrapped(member) for listed in _lists_of(model, as_tokens) for _, member in listed]
    every = [member for member in members if member in as_tokens or not kinds.isdisjoint(type(member).__mro__)]
    if not as_tokens.keys() <= set(every) or len(every) > len(set(every)):
        every = list(as_tokens)
    return [(layer, block, as_tokens.get(block, as_tokens[found[0].block])) for layer, block in enumerate(every, 1)]


def _lists_of(model: nn.Module, blocks: Collection[nn.Module]) -> Iterator[list[tuple[str, nn.Module]]]:
    """The lists that hold some of the blocks, their members by path."""
    for path, module in modules_of(model).items():
        if isinstance(module, CONTAINERS):
            members = [(join(path, name), child) for name, child in module.named_children()]
            if any(unwrapped(member) in blocks for _, member in members):
                yield members


def modules_between(model: nn.Module) -> list[str]:
    """The paths of what stands between the blocks, learns something, and is neither a block nor a norm."""
    known, found = {block for _, block, _ in blocks(model)}, []
    for members in _lists_of(model, known):
        places = [place for place, (_, member) in enumerate(members) if unwrapped(member) in known]
        between = [(path, member) for path, member in members[places[0] : places[-1]] if unwrapped(member) not in known]
        found += [path for path, member in between if any(p.ndim > 1 for p in member.parameters())]
    return found


def layers_of(model: nn.Module) -> list[tuple[AttentionSite, int]]:
    """The sites, each with the number of its layer among all blocks: attention is not in all of them."""
    layers = {block: layer for layer, block, _ in blocks(model)}
    return [(site, layers[site.block]) for site in find(model)]


@cached
def special_tokens(model: nn.Module, part: str | None = None) -> SpecialTokens:
    """How many tokens stand in front of the content (class, distillation, registers) and behind it (detection).

    Of a part, those of the models around it that have no other stack: embeddings are outside of an encoder.
    """
    found = SpecialTokens()
    for path in outwards(part):
        around = model.get_submodule(path)
        try:
            library = _library(around)
        except SeveralStacksError:
            break
        found = library.special_tokens(around)
        if any(found):
            break
    return found


@cached
def token_kind(model: nn.Module, part: str | None) -> dict[str, bool]:
    """Whether the part's tokens are a decoder's, by its path, or an image's, as `TokenLayout.of` takes it."""
    _, block, _ = blocks(part_of(model, part))[0]
    names = re.findall("encoder|decoder", path_of(model, block))
    inputs = (getattr(model.get_submodule(path), "main_input_name", None) for path in outwards(part))
    return {"decoder": names[-1:] == ["decoder"], "images": next(filter(None, inputs), None) == "pixel_values"}


def reading(model: nn.Module) -> AbstractContextManager[None]:
    """A context in which the library's models can be read, e.g. without a cache."""
    try:
        return _library(model).reading(model)
    except NoSitesError:
        return nullcontext()


def final_norm(model: nn.Module) -> nn.Module:
    """The norm after the last block."""
    return _library(model).final_norm(model)


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
def checking_blocks(model: nn.Module, possible: Container[int], most: int) -> Iterator[None]:
    """While a batch runs in a with block, refuse blocks that are not given its samples' tokens."""
    try:
        library = _library(model)
    except NoSitesError:
        library = None
    if library is None or library.is_watched(model):
        with StreamCheck(repeated_blocks(model), possible):
            yield
        return
    first, (_, _, as_tokens) = _layers_by(library, model)[0], blocks(model)[0]

    def refuse(block: nn.Module, args: Any, kwargs: Any) -> None:
        tokens = as_tokens(tokens_in(args, kwargs))
        if len(tokens) > most:  # fewer are known from codebooks, which are rows of their own
            refuse_other_rows(f"the block of {first.name} ({type(block).__name__})", tokens, possible)

    hook = first.block.register_forward_pre_hook(refuse, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
