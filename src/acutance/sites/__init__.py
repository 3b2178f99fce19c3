"""Where attention lives in a model: one file per library."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from itertools import accumulate
from typing import Any

from torch import Tensor, nn

from acutance.errors import AcutanceError, NoSitesError, SeveralStacksError
from acutance.samples import Rows
from acutance.sites import anybody, huggingface, reference, timm, torch_nn
from acutance.sites.base import AttentionSite, Library, Undo
from acutance.sites.blocks import (
    grid_as_tokens,
    holds_attention_blocks,
    name_one,
    others_between,
    path_of,
    repeated_blocks,
    walking_once,
    with_others_like_them,
)
from acutance.sites.chain import Chain, refuse_other_rows
from acutance.sites.ends import SpecialTokens
from acutance.sites.patched import PatchedSite, Stack, tokens_in, tokens_out

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
    "standing",
    "tokens_in",
    "tokens_out",
    "unread",
]

LIBRARIES: list[Library] = [
    reference.LIBRARY,
    huggingface.LIBRARY,
    timm.LIBRARY,
    torch_nn.LIBRARY,
    anybody.LIBRARY,
]
Located = tuple[Library, list[AttentionSite]]
_found_before: ContextVar[dict[nn.Module, Located] | None] = ContextVar("found_before", default=None)


def find(model: nn.Module) -> list[AttentionSite]:
    """The model's attention sites in depth order."""
    return list(_locate(model)[1])


@contextmanager
def standing() -> Iterator[None]:
    """For the time of a with block, in which nobody changes a model, look for its layers once: it takes a while."""
    if _found_before.get() is not None:
        yield
        return
    token = _found_before.set({})
    try:
        with walking_once():
            yield
    finally:
        _found_before.reset(token)


def blocks(model: nn.Module) -> list[tuple[int, nn.Module, Callable[[Tensor], Tensor]]]:
    """Layer, block, and how to bring what goes through the block to (batch, tokens, channels).

    Blocks without attention among those with one, as in Jamba, are layers too. Of a model whose attention is not known,
    the blocks are told by the model's structure.
    """
    try:
        sites = find(model)
    except NoSitesError:
        found = repeated_blocks(model)
        if not found:
            raise
        return [(layer, block, partial(grid_as_tokens, block)) for layer, (_, block) in enumerate(found, 1)]
    as_tokens = {site.block: site.tokens for site in sites}
    every = with_others_like_them(model, list(as_tokens))
    if len(every) == len(as_tokens):
        return [(site.layer, site.block, site.tokens) for site in sites]
    return [(layer, block, as_tokens.get(block, sites[0].tokens)) for layer, block in enumerate(every, 1)]


def layers_of(model: nn.Module) -> list[tuple[AttentionSite, int]]:
    """The sites, each with the number of its layer among all blocks: attention is not in all of them."""
    found, every = find(model), blocks(model)
    layers = {block: layer for layer, block, _ in every}
    return [(site, layers[site.block] if len(every) > len(found) else site.layer) for site in found]


def unread(model: nn.Module) -> list[str]:
    """The paths of what stands between the blocks and is no block, as far as anybody can tell."""
    return others_between(model, {block for _, block, _ in blocks(model)})


@contextmanager
def checking_blocks(model: nn.Module, rows: Rows) -> Iterator[None]:
    """For the time of a with block, in which a batch of so many rows runs: refuse what is not its samples' tokens."""
    try:
        library, found = _locate(model)
    except NoSitesError:
        library, found = anybody.LIBRARY, []
    if library is anybody.LIBRARY or (library is huggingface.LIBRARY and not huggingface.uses_interface(model)):
        with Chain(repeated_blocks(model), rows.told):
            yield
        return
    first = found[0]

    def refuse(block: nn.Module, args: Any, kwargs: Any) -> None:
        tokens = first.tokens(tokens_in(args, kwargs))
        if len(tokens) > rows.most:  # fewer are known from codebooks, which are rows of their own
            refuse_other_rows(f"the block of {first.name} ({type(block).__name__})", tokens, rows.told)

    hook = first.block.register_forward_pre_hook(refuse, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def special_tokens(model: nn.Module, part: str | None = None) -> SpecialTokens:
    """How many tokens stand in front of the content (class, distillation, registers) and behind it (detection).

    Of a part, those of the models around it that have no other stack: embeddings are outside of an encoder.
    """
    path = part or ""
    while True:
        around = model.get_submodule(path)
        try:
            library = _locate(around)[0]
        except SeveralStacksError:
            return SpecialTokens()
        found = SpecialTokens(library.prefix_tokens(around), library.suffix_tokens(around))
        if any(found) or not path:
            return found
        path = path.rpartition(".")[0]


def prefix_tokens(model: nn.Module, part: str | None = None) -> int:
    """How many of the special tokens stand in front of the content."""
    return special_tokens(model, part).front


def part_of(model: nn.Module, path: str | None) -> nn.Module:
    """The submodule of that path; the model itself where none is named."""
    try:
        return model.get_submodule(path or "")
    except AttributeError as error:
        children = ", ".join(name for name, _ in model.named_children())
        raise AcutanceError(f"{type(model).__name__} has no part {path!r}; it is made of {children}") from error


def reads_images(model: nn.Module, part: str | None) -> bool:
    """Whether the part, or what is nearest around it and says so, takes images: a text's mask is not its."""
    path = part or ""
    while True:
        taken = getattr(model.get_submodule(path), "main_input_name", None)
        if taken is not None or not path:
            return taken == "pixel_values"
        path = path.rpartition(".")[0]


def in_decoder(model: nn.Module, part: str | None) -> bool:
    """Whether the layers are a decoder's, by their path: its padding has a mask of its own."""
    _, block, _ = blocks(part_of(model, part))[0]
    names = re.findall("encoder|decoder", path_of(model, block))
    return bool(names) and names[-1] == "decoder"


def sides(model: nn.Module, part: str | None) -> dict[str, Any]:
    """Which of the masks in a batch are about the part's tokens, as `Samples.of` takes it."""
    return {"decoder": in_decoder(model, part), "images": reads_images(model, part)}


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


def remember() -> None:
    """What models carry is from now on noted wherever their libraries save them."""
    for library in LIBRARIES:
        library.remember()


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


def _locate(model: nn.Module) -> Located:
    before = _found_before.get()
    if before is None:
        with walking_once():
            return _look(model)
    if model not in before:
        before[model] = _look(model)
    return before[model]


def _look(model: nn.Module) -> Located:
    refusal: NoSitesError | None = None
    for library in LIBRARIES:
        try:
            found = library.sites(model)
        except NoSitesError as error:  # it may hold a model of a library that comes later
            refusal = refusal or error
            continue
        if found:
            _refuse_layers_elsewhere(model, found)
            return library, found
    supported = ", ".join(library.name for library in LIBRARIES)
    raise refusal or NoSitesError(
        f"no attention found in {type(model).__module__}.{type(model).__qualname__}; models supported today: "
        f"{supported}"
    )


def _refuse_layers_elsewhere(model: nn.Module, found: list[AttentionSite]) -> None:
    """Layers of another library, or of none, beside those that were found would be left out without a word."""
    parts = _layers_beside(model, "", {site.attention for site in found}, {site.block for site in found})
    if parts:
        own = _apart_from(parts, path_of(model, found[0].block))
        raise SeveralStacksError(
            f"{type(model).__name__} holds layers that are not all known, or of several libraries "
            f"({own}, {', '.join(parts)}): {name_one(own)}",
            [own, *parts],
        )


def _apart_from(parts: list[str], path: str) -> str:
    """The shortest path around this one that has none of the parts inside."""
    around = list(accumulate(path.split("."), "{}.{}".format))
    return next(up for up in around if not any(f"{part}.".startswith(f"{up}.") for part in parts))


def _layers_beside(module: nn.Module, path: str, known: set[nn.Module], blocks: set[nn.Module]) -> list[str]:
    parts = []
    for name, child in module.named_children():
        where = f"{path}.{name}" if path else name
        if child in blocks:
            continue
        if known.intersection(child.modules()):
            parts += _layers_beside(child, where, known, blocks)
        elif child._modules and _holds_layers(child):  # a module without others inside is no layer and holds none
            parts.append(where)
    return parts


def _holds_layers(module: nn.Module) -> bool:
    for library in LIBRARIES:
        if library is anybody.LIBRARY:  # whose rule is asked below
            continue
        try:
            if len(library.sites(module)) > 1:  # one alone is a pooling head's
                return True
        except SeveralStacksError:
            return True
        except AcutanceError:
            continue
    return holds_attention_blocks(module)
