"""Where the repeated blocks of a model are, told by its structure alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor, nn

from acutance.errors import AcutanceError, SeveralStacksError, ShapeError

CONTAINERS = (nn.ModuleList, nn.Sequential)
NO_KIND = {cls for container in CONTAINERS for cls in container.__mro__}  # two such need not be alike
PARAMETRIZATIONS = "parametrizations"  # what torch.nn.utils.parametrize adds to a module
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


_walks: ContextVar[dict[nn.Module, dict[str, nn.Module]] | None] = ContextVar("walks", default=None)


@contextmanager
def walking_once() -> Iterator[None]:
    """For the time of a with block, in which nobody changes a model, its modules are gone through once."""
    if _walks.get() is not None:
        yield
        return
    token = _walks.set({})
    try:
        yield
    finally:
        _walks.reset(token)


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Its modules by their paths, itself first; not those that make a weight of one of them."""
    before = _walks.get()
    if before is None:
        return _modules_of(model)
    if model not in before:
        before[model] = _modules_of(model)
    return before[model]


def _modules_of(model: nn.Module) -> dict[str, nn.Module]:
    return {path: module for path, module in model.named_modules() if PARAMETRIZATIONS not in path.split(".")}


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
