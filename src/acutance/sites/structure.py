"""The structure of a model, found once: its blocks, its parts, its special tokens, its final norm.

Told by modules alone. Sites, which know where attention and weights are, are made for whoever asks for them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, wraps
from itertools import accumulate
from typing import Any, NamedTuple, ParamSpec, TypeVar

from torch import Tensor, nn

from acutance.errors import AcutanceError, NoSitesError, SeveralStacksError, ShapeError
from acutance.mitigations import Mitigation
from acutance.sites.base import AttentionSite, Library

CONTAINERS = (nn.ModuleList, nn.Sequential)
NO_KIND = {cls for container in CONTAINERS for cls in container.__mro__}  # two such need not be alike
PARAMETRIZATIONS = "parametrizations"  # what torch.nn.utils.parametrize adds to a module
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
# The names of the parameters that special tokens are kept in.
IN_FRONT = (
    *("cls_token", "class_token", "class_embedding", "cls_register_token"),
    *("dist_token", "distillation_token", "reg_token", "register_tokens"),
)
BEHIND = ("detection_tokens",)  # YOLOS
FINAL_NORMS = ("norm", "layernorm", "layer_norm", "final_layernorm", "final_layer_norm", "final_norm", "ln_f")
ADVICE = "Describe the model in a Library of its own"

LIBRARIES: list[Library] = []  # in the order they are asked
Found = TypeVar("Found")
Given = ParamSpec("Given")
_seen: ContextVar[dict[tuple[Any, ...], Any] | None] = ContextVar("seen", default=None)


@contextmanager
def cached_lookup() -> Iterator[None]:
    """For the time of a with block, in which nobody changes a model, look at it once: it takes a while."""
    if _seen.get() is not None:
        yield
        return
    token = _seen.set({})
    try:
        yield
    finally:
        _seen.reset(token)


def once(look: Callable[Given, Found]) -> Callable[Given, Found]:
    """Look at the same model once while it stands."""

    @wraps(look)
    def looked(*args: Given.args, **options: Given.kwargs) -> Found:
        seen, key = _seen.get(), (look, *args, *options.items())
        if seen is None:
            with cached_lookup():
                return looked(*args, **options)
        if key not in seen:
            seen[key] = look(*args, **options)
        found: Found = seen[key]
        return found

    return looked


@once
def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Its modules by their paths, itself first; not those that make a weight of one of them."""
    return {path: module for path, module in model.named_modules() if PARAMETRIZATIONS not in path.split(".")}


class Layer(NamedTuple):
    """A block with attention, told by modules alone; sites have the same fields."""

    layer: int  # depth; 1 is the first
    name: str  # path of the attention
    block: nn.Module
    attention: nn.Module
    stage: str  # path of the container that holds the block


class SpecialTokens(NamedTuple):
    """How many tokens that are no content stand before and after it."""

    front: int = 0  # class, distillation, registers
    back: int = 0  # detection

    def __str__(self) -> str:
        return f"{self.front} prefix {f'and {self.back} trailing ' if self.back else ''}tokens"


def find(model: nn.Module) -> list[AttentionSite]:
    """The model's attention sites in depth order."""
    return list(_sites(model))


@once
def _sites(model: nn.Module) -> list[AttentionSite]:
    library = _locate(model)
    return library.sites(model) if library.layers is not None else _layers_by(library, model)


@once
def blocks(model: nn.Module) -> list[tuple[int, nn.Module, Callable[[Tensor], Tensor]]]:
    """Layer, block, and how to bring what goes through the block to (batch, tokens, channels).

    Blocks without attention among those with one, as in Jamba, are layers too. Of a model whose attention is not known,
    the blocks are told by the model's structure.
    """
    try:
        found = _layers_by(_locate(model), model)
    except NoSitesError:
        repeated = repeated_blocks(model)
        if not repeated:
            raise
        return [(layer, block, partial(grid_as_tokens, block)) for layer, (_, block) in enumerate(repeated, 1)]
    as_tokens = {layer.block: _as_tokens(model, place, layer) for place, layer in enumerate(found)}
    every = with_others_like_them(model, list(as_tokens))
    if len(every) == len(as_tokens):
        return [(layer.layer, layer.block, as_tokens[layer.block]) for layer in found]
    return [(layer, block, as_tokens.get(block, as_tokens[found[0].block])) for layer, block in enumerate(every, 1)]


def _as_tokens(model: nn.Module, place: int, layer: Layer | AttentionSite) -> Callable[[Tensor], Tensor]:
    """How to bring what goes through a block to (batch, tokens, channels); only for a grid a site is asked."""
    if isinstance(layer, AttentionSite):
        return layer.tokens
    return lambda x: find(model)[place].tokens(x) if x.ndim == 4 else x


def layers_of(model: nn.Module) -> list[tuple[AttentionSite, int]]:
    """The sites, each with the number of its layer among all blocks: attention is not in all of them."""
    found, every = find(model), blocks(model)
    layers = {block: layer for layer, block, _ in every}
    return [(site, layers[site.block] if len(every) > len(found) else site.layer) for site in found]


def unread(model: nn.Module) -> list[str]:
    """The paths of what stands between the blocks and is no block, as far as anybody can tell."""
    return others_between(model, {block for _, block, _ in blocks(model)})


@contextmanager
def checking_blocks(model: nn.Module, possible: Container[int], most: int) -> Iterator[None]:
    """For the time of a with block, in which a batch of so many rows runs: refuse what is not its samples' tokens."""
    try:
        library = _locate(model)
    except NoSitesError:
        library = None
    if library is None or library.is_watched(model):
        from acutance.sites.chain import Chain

        with Chain(repeated_blocks(model), possible):
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


@once
def special_tokens(model: nn.Module, part: str | None = None) -> SpecialTokens:
    """How many tokens stand in front of the content (class, distillation, registers) and behind it (detection).

    Of a part, those of the models around it that have no other stack: embeddings are outside of an encoder.
    """
    path = part or ""
    while True:
        around = model.get_submodule(path)
        try:
            library = _locate(around)
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


@once
def sides(model: nn.Module, part: str | None) -> dict[str, Any]:
    """Which of the masks in a batch are about the part's tokens, as `TokenLayout.of` takes it."""
    return {"decoder": in_decoder(model, part), "images": reads_images(model, part)}


def final_norm(model: nn.Module) -> nn.Module:
    """The norm after the last block."""
    return _locate(model).final_norm(model)


def reading(model: nn.Module) -> AbstractContextManager[None]:
    """The state the library's models should be read in, for the time of a with block."""
    try:
        return _locate(model).reading(model)
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
    if all(type(module) is Mitigation or not isinstance(module, Mitigation) for module in model.modules()):
        return None
    try:
        sites = find(model)
    except NoSitesError:
        return None
    specs = {site.layer: site.mitigation.spec for site in sites if site.mitigation is not None}
    if len(specs) == len(sites) and len(set(specs.values())) == 1:
        return specs[1]
    where = {spec: [str(n) for n in specs if specs[n] == spec] for spec in specs.values()}
    return "; ".join(f"{spec} in layers {', '.join(layers)}" for spec, layers in where.items()) or None


@once
def _locate(model: nn.Module) -> Library:
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
        f"{supported}"
    )


@once
def _layers_by(library: Library, model: nn.Module) -> Any:
    """The layers as the library tells them by modules alone, or else its sites: both have the same fields."""
    return library.sites(model) if library.layers is None else library.layers(model)


def _refuse_layers_elsewhere(model: nn.Module, found: Sequence[Layer | AttentionSite]) -> None:
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
        if library.by_structure:  # whose rule is asked below
            continue
        try:
            if len(_layers_by(library, module)) > 1:  # one alone is a pooling head's
                return True
        except SeveralStacksError:
            return True
        except AcutanceError:
            continue
    return holds_attention_blocks(module)


def tokens_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """The tokens among a module's arguments: the first tensor."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value
    raise AcutanceError(f"no tensor among the arguments {list(kwargs)} of a block")


def tokens_out(output: Any) -> Tensor:
    """The tokens in what a block returns: itself, or the first of a tuple."""
    tokens = output if isinstance(output, Tensor) else output[0]
    assert isinstance(tokens, Tensor)
    return tokens


def refuse_other_rows(where: str, tokens: Tensor, rows: Container[int]) -> None:
    """Structure does not say which axis is the batch: it must be as long as what was fed, and the only such one."""
    shape = tuple(tokens.shape)
    if len(tokens) not in rows:
        raise ShapeError(
            f"{where} is given {shape}, whose first axis is not the batch that was fed: what would be read are not the "
            f"tokens of its samples. {ADVICE}"
        )
    if tokens.ndim == 3 and shape[0] == shape[1] > 1:
        raise ShapeError(
            f"{where} is given {shape}, so which axis is the batch is not clear: begin with a batch of another number "
            "of samples"
        )


@dataclass(frozen=True)
class Place:
    """Where a module stands among the repeated blocks."""

    block: str  # path of the block it is in
    stage: str  # path of the container that holds the block
    stack: str  # path of the outermost such container: stages of one model share it, encoder and decoder do not


def place_of(model: nn.Module, path: str) -> Place:
    """The block that holds the module: the innermost member of a container of equals around it.

    Containers of unlike modules count only where there is none of equals: T5's blocks list their own parts.
    """
    return _place_of(modules_of(model), path)


def _place_of(modules: Mapping[str, nn.Module], path: str) -> Place:
    inside = _containers_around(modules, path)
    if not inside:
        raise AcutanceError(f"{path} is not inside a list of blocks, so its depth in the model cannot be told")
    equals = [where for where in inside if _of_equals(modules[where])]
    stage, stack = (equals[-1], equals[0]) if equals else (inside[0], inside[0])
    member = path[len(stage) + 1 :] if stage else path
    return Place(block=_join(stage, member.split(".")[0]), stage=stage, stack=stack)


def path_of(model: nn.Module, module: nn.Module) -> str:
    """Where the module is in the model; a site's own name starts from wherever it was found."""
    return next(path for path, inside in modules_of(model).items() if inside is module)


def unwrapped(module: nn.Module) -> nn.Module:
    """What is inside of the modules that checkpointing, compiling or sharding wraps around a block."""
    while (inner := next((name for name in WRAPPERS if name in module._modules), None)) is not None:
        module = module.get_submodule(inner)
    return module


def places_of(model: nn.Module, paths: Iterable[str]) -> dict[str, Place]:
    """Where the modules of one stack stand; of more than one stack the user says which is meant."""
    every, modules = list(paths), modules_of(model)
    outside = [path for path in every if not _containers_around(modules, path)]
    places = {path: _place_of(modules, path) for path in every if path not in outside or len(outside) == len(every)}
    refuse_several_stacks(model, places.values(), outside)
    return places


def refuse_several_stacks(model: nn.Module, places: Iterable[Place], outside: Sequence[str] = ()) -> None:
    """Layers are numbered within one stack: of several, or of one and modules `outside` of it, the user says which."""
    stacks = list(dict.fromkeys(place.stack for place in places))
    if len(stacks) > 1 or outside:
        around = [stack.rpartition(".")[0] for stack in stacks]
        parts = [up if up and around.count(up) == 1 else stack for up, stack in zip(around, stacks, strict=True)]
        held = f"{'several stacks' if len(stacks) > 1 else 'a stack'} of layers ({', '.join(stacks)})"
        beside = f" and, beside them, {', '.join(outside)}" if outside else ""
        raise SeveralStacksError(f"{type(model).__name__} holds {held}{beside}: {name_one(parts[0])}", parts)


def name_one(part: str) -> str:
    """How to choose one of several parts, e.g. this."""
    return f"name one with part={part!r} (on the command line --part {part}), or pass that part of the model"


def repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The blocks of a model about which nothing else is known: the members of its largest container of equals."""
    best, size = None, 0
    for name, module in model.named_modules():
        if isinstance(module, CONTAINERS) and len(module) > 1 and _of_equals(module):
            weight = sum(parameter.numel() for parameter in module.parameters())
            if weight > size:  # containers inside it come later and are smaller
                best, size = name, weight
    if best is None:
        return []
    blocks = [(_join(best, name), block) for name, block in model.get_submodule(best).named_children()]
    inner = [(name, found) for name, block in blocks if (found := _blocks_of_stage(block))]
    if len(inner) < len(blocks):
        return blocks
    return [(_join(name, path), block) for name, found in inner for path, block in found]


def _blocks_of_stage(block: nn.Module) -> list[tuple[str, nn.Module]]:
    """The blocks inside, where the module is a stage of blocks rather than a block itself."""
    found = repeated_blocks(block)
    if isinstance(block, nn.ModuleList):  # which nobody runs as a whole
        return found or list(block.named_children())
    return found if found and _mostly(found, block) else []


def with_others_like_them(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The blocks, and between them those of their lists that are of their kind, such as Jamba's Mamba layers.

    Of their kind is what shares a class with one of them, be it transformers' base class of all layers.
    """
    known, kinds = set(blocks), {kind for block in blocks for kind in type(block).__mro__} - NO_KIND
    every: list[nn.Module] = []
    for members in _lists_of(model, known):
        bare = [unwrapped(member) for _, member in members]
        every += [member for member in bare if member in known or not kinds.isdisjoint(type(member).__mro__)]
    return every if known.issubset(every) and len(every) == len(set(every)) else list(blocks)


def others_between(model: nn.Module, blocks: Collection[nn.Module]) -> list[str]:
    """The paths of what stands between the blocks in their lists and is none of them, but for what learns nothing."""
    found = []
    for members in _lists_of(model, blocks):
        places = [place for place, (_, member) in enumerate(members) if unwrapped(member) in blocks]
        for path, member in members[places[0] : places[-1]]:
            if unwrapped(member) not in blocks and any(p.ndim > 1 for p in member.parameters()):  # no norm either
                found.append(path)
    return found


def _lists_of(model: nn.Module, blocks: Collection[nn.Module]) -> Iterator[list[tuple[str, nn.Module]]]:
    """The lists that hold some of the blocks, their members by path."""
    for path, module in modules_of(model).items():
        if isinstance(module, CONTAINERS):
            members = [(_join(path, name), child) for name, child in module.named_children()]
            if any(unwrapped(member) in blocks for _, member in members):
                yield members


def holds_attention_blocks(module: nn.Module) -> bool:
    """Whether there are several equal blocks in a row with something in each that calls itself attention."""
    return any(
        isinstance(inside, CONTAINERS) and len(inside) > 1 and _of_equals(inside) and all(map(_attends, inside))
        for inside in module.modules()
    )


def grid_as_tokens(block: nn.Module, x: Tensor) -> Tensor:
    """What goes through a block as (batch, tokens, channels); of a grid, the block's norms tell which axis is which."""
    if x.ndim != 4:
        return x
    widths = {module.normalized_shape[-1] for module in block.modules() if isinstance(module, nn.LayerNorm)}
    last, first = x.shape[-1] in widths, x.shape[1] in widths or not widths  # convolutions have the channels first
    if last == first:
        raise ShapeError(f"{type(block).__name__} gives {tuple(x.shape)}: which axis has the channels is not clear")
    return x.flatten(1, 2) if last else x.flatten(2).transpose(1, 2)


def _containers_around(modules: Mapping[str, nn.Module], path: str) -> list[str]:
    parts = path.split(".")
    paths = [".".join(parts[:depth]) for depth in range(len(parts))]
    return [where for where in paths if isinstance(modules[where], CONTAINERS)]


def _of_equals(container: nn.Module) -> bool:
    return len({type(unwrapped(child)) for child in container.children()}) == 1


def _attends(block: nn.Module) -> bool:
    return any("Attention" in type(module).__name__ for module in block.modules())


def _mostly(found: list[tuple[str, nn.Module]], block: nn.Module) -> bool:
    """Whether the blocks found make up most of the module, as in a stage, not a list of its small parts."""
    inside = sum(p.numel() for _, module in found for p in module.parameters())
    return 2 * inside > sum(p.numel() for p in block.parameters()) and any(
        isinstance(child, CONTAINERS) for child in block.children()
    )


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def tokens_by_name(parameters: Iterable[tuple[str, Tensor]]) -> SpecialTokens:
    """Told by the names of the parameters they are kept in."""
    counts = [(path.rpartition(".")[2], p.shape[-2] if p.ndim > 1 else 1) for path, p in parameters]
    front, back = (sum(count for name, count in counts if name in names) for names in (IN_FRONT, BEHIND))
    return SpecialTokens(front, back)


def norm_by_name(holder: nn.Module, _blocks: str) -> nn.Module | None:
    """The child that is called a final norm; an identity counts, where the norm follows the pooling instead."""
    found = (getattr(holder, name, None) for name in FINAL_NORMS)
    return next((norm for norm in found if isinstance(norm, nn.Module) and not isinstance(norm, CONTAINERS)), None)


def norm_after(
    model: nn.Module, last: nn.Module, choose: Callable[[nn.Module, str], nn.Module | None] = norm_by_name
) -> nn.Module:
    """The norm nearest after the blocks, in the module that holds them or around it.

    Args:
        model: where to look.
        last: the attention of the last block.
        choose: the norm among the children of a module, given the name of the child that holds the blocks.
    """
    path = place_of(model, path_of(model, last)).stage
    while path:
        path, _, blocks = path.rpartition(".")
        norm = choose(model.get_submodule(path), blocks)
        if norm is not None:
            return norm
    raise AcutanceError(
        f"{type(model).__name__} has no norm after its last block, as in Post-LN models, or which one it is is not "
        "clear: read tap='block' instead"
    )
