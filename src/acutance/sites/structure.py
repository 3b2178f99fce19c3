"""What modules alone tell of a model: paths, wrappers, lists of blocks, special tokens and norms by their names."""

import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from itertools import chain
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from acutance.errors import TOKENS_REMAIN, AcutanceError, NoSitesError, SeveralStacksError, ShapeError

CONTAINERS = (nn.ModuleList, nn.Sequential)
PARAMETRIZATIONS = "parametrizations"  # what torch.nn.utils.parametrize adds to a module
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
# The names of the parameters that special tokens are kept in.
IN_FRONT = (
    *("cls_token", "class_token", "class_embedding", "cls_register_token"),
    *("dist_token", "distillation_token", "reg_token", "register_tokens"),
)
BEHIND = ("detection_tokens",)  # YOLOS
FINAL_NORMS = ("norm", "layernorm", "layer_norm", "final_layernorm", "final_layer_norm", "final_norm", "ln_f")
CROSS = re.compile("cross|multihead_attn|enc.*attn|encdec|memory", re.IGNORECASE)  # beside a self-attention
ADVICE = "Describe the model in a Library of its own"

Modules = dict[str, nn.Module]  # by their paths
Look = TypeVar("Look", bound=Callable[..., Any])
_cache: ContextVar[dict[tuple[Any, ...], Any] | None] = ContextVar("cache", default=None)


@contextmanager
def cached_lookup() -> Iterator[None]:
    """Look each model up once inside the with block, in which nobody changes it."""
    token = _cache.set({} if _cache.get() is None else _cache.get())
    try:
        yield
    finally:
        _cache.reset(token)


def cached(look: Look) -> Look:
    """Keep what the function finds for the time of `cached_lookup`, or else of one call."""

    @wraps(look)
    def looked(*args: Any, **options: Any) -> Any:
        with cached_lookup():
            cache: Any = _cache.get()
            key = (look, *args, *options.items())
            if key not in cache:
                cache[key] = look(*args, **options)
            return cache[key]

    return cast(Look, looked)


class Layer(NamedTuple):
    """A block with attention, found by modules alone; sites have the same fields."""

    layer: int  # depth; 1 is the first
    name: str  # path of the attention
    block: nn.Module
    attention: nn.Module
    stage: str = ""  # path of the container that holds the block


class SpecialTokens(NamedTuple):
    """How many tokens that are no content stand before and after it."""

    front: int = 0  # class, distillation, registers
    back: int = 0  # detection

    def __str__(self) -> str:
        return f"{self.front} prefix {f'and {self.back} trailing ' if self.back else ''}tokens"


@cached
def modules_of(model: nn.Module) -> Modules:
    """The model and its modules by their paths, without parametrizations."""
    return {path: module for path, module in model.named_modules() if PARAMETRIZATIONS not in path.split(".")}


def path_of(model: nn.Module, module: nn.Module) -> str:
    """The module's path in the model; a site's name may start from a part."""
    return next(path for path, inside in modules_of(model).items() if inside is module)


def outwards(path: str | None) -> list[str]:
    """The path, then those of the modules around it, up to the model's own."""
    parts = path.split(".") if path else []
    return [".".join(parts[:depth]) for depth in range(len(parts), -1, -1)]


def parent_of(path: str) -> str:
    """The path of the module around."""
    return path.rpartition(".")[0]


def unwrapped(module: nn.Module) -> nn.Module:
    """The block inside of what checkpointing, compiling or sharding wraps around it."""
    while inner := next((name for name in WRAPPERS if name in module._modules), None):
        module = module.get_submodule(inner)
    return module


def tokens_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """The tokens among a module's arguments: the first tensor."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            if value.is_nested:
                raise AcutanceError("a block was given a nested tensor: pass a padded one and a mask")
            return value
    raise AcutanceError(f"no tensor among the arguments {list(kwargs)} of a block")


def tokens_out(output: Any) -> Tensor:
    """The tokens in what a block returns: itself, or the first of a tuple."""
    tokens = output if isinstance(output, Tensor) else None if type(output) in (dict, type(None)) else output[0]
    if not isinstance(tokens, Tensor):
        raise AcutanceError(f"a {type(output).__name__} comes out in place of tokens. {ADVICE}")
    return tokens


def place_of(model: nn.Module, path: str) -> tuple[str, str, str]:
    """The paths of the block that holds the module, of its stage, which lists it, and of the stack around all stages.

    The block is the innermost member of a container of equals around the module. Containers of unlike modules count
    only where there is none of equals: T5's blocks list their own parts. Outside of lists the parent is the block.
    """
    lists, around = lists_in(model), outwards(path)[::-1]  # from the model to the module
    inside = [up for up in around[:-1] if up in lists]
    if not inside:
        return parent_of(path), "", ""
    equals = [up for up in inside if are_equal(lists[up])] or inside[:1]
    return around[around.index(equals[-1]) + 1], equals[-1], equals[0]


def innermost(found: Modules) -> Modules:
    """Those that hold none of the others."""
    return {path: module for path, module in found.items() if not any(other.startswith(f"{path}.") for other in found)}


def layers_in(model: nn.Module, found: Mapping[str, nn.Module]) -> list[Layer]:
    """The layers of these attentions, by path: one in every block of one stack.

    An attention beside the stack, such as a pooling head's, is no layer.
    """
    modules, places = modules_of(model), {path: place_of(model, path) for path in found}
    stacks = {stack for _, _, stack in places.values()}
    inner = [a for _, _, a in places.values() if not any(a != b and a in outwards(b) for b in stacks)]
    if len(set(inner)) > 1:
        raise several_stacks(model, inner)
    blocks: dict[tuple[str, str], Modules] = {}
    kinds = {type(modules[block]) for block, _, stack in places.values() if stack == inner[0]}
    for path, (block, stage, stack) in places.items():
        if stack == inner[0]:
            blocks.setdefault((block, stage), {})[path] = found[path]
        elif type(modules[block]) in kinds:
            where = f"{path} is in a block like those of {inner[0]}, but outside of it"
            raise AcutanceError(f"{where}, so its depth is not known: put all blocks into one nn.ModuleList. {ADVICE}")
    layers: list[Layer] = []
    for (block, stage), attentions in blocks.items():
        path, module = self_attention_in(block, attentions), modules[block]
        if isinstance(module, nn.ModuleList) or (block == path and stage):
            what = f"{block} is a list of modules without a forward, or the attention itself"
            raise NoSitesError(f"{what}, so the residual stream is not known: make it a block. {TOKENS_REMAIN}")
        layers.append(Layer(len(layers) + 1, path, unwrapped(module), found[path], stage))
    return layers


def self_attention_in(block: str, found: Mapping[str, nn.Module]) -> str:
    """The path of the self-attention among a block's attentions: names tell the cross-attention of a decoder."""
    labels = {path: f"{path.removeprefix(block)} {type(found[path]).__name__}" for path in found}
    own = [path for path in found if len(found) == 1 or not CROSS.search(labels[path])]
    if len(own) != 1:
        # Tokens can be measured without any site, where they are given batch by batch.
        is_readable = all(getattr(attention, "batch_first", True) for attention in found.values())
        what = f"the block {block!r} holds several attentions ({', '.join(found)})"
        error = NoSitesError if is_readable else AcutanceError
        raise error(f"{what}, and which is its self-attention is not clear. {ADVICE}")
    return own[0]


def several_stacks(model: nn.Module, found: Iterable[str]) -> SeveralStacksError:
    """Layers were found in several places: choose what is around one of them, and around none of the others."""
    stacks = list(dict.fromkeys(found))
    inside = [up for stack in stacks for up in outwards(stack)[:-1]]
    parts = [up if (up := parent_of(stack)) and inside.count(up) == 1 else stack for stack in stacks]
    return SeveralStacksError(
        f"{type(model).__name__} holds several stacks of layers ({', '.join(stacks)}): name one with part={parts[0]!r} "
        f"(on the command line --part {parts[0]}), or pass that part of the model",
        parts,
    )


@cached
def lists_in(model: nn.Module) -> dict[str, Modules]:
    """What each list of the model holds, inside wrappers; no identities, which keep places in DINOv2's chunks."""
    lists = {path: module for path, module in modules_of(model).items() if isinstance(module, CONTAINERS)}
    return {
        path: {join(path, name): unwrapped(m) for name, m in one.named_children() if not isinstance(m, nn.Identity)}
        for path, one in lists.items()
    }


def lists_of_equals(model: nn.Module) -> dict[str, Modules]:
    """The lists of several modules of one class."""
    return {path: listed for path, listed in lists_in(model).items() if len(listed) > 1 and are_equal(listed)}


def are_equal(listed: Modules) -> bool:
    """Whether all are of one class."""
    return len(set(map(type, listed.values()))) == 1


def blocks_in_order(model: nn.Module) -> Modules:
    """The blocks of a model about which nothing else is known: `repeated_blocks`, and lists beside them of their class.

    Lists that stand elsewhere, such as a decoder's, must not be left out without a word.
    """
    found = repeated_blocks(model)
    kinds = set(map(type, found.values()))
    if not found or any(kind.__module__.startswith("torch.nn.") for kind in kinds):
        return found
    modules, first = modules_of(model), parent_of(next(iter(found)))
    if not isinstance(modules[parent_of(first)], CONTAINERS):  # a list of stages has been read already
        lists = [listed for path, listed in lists_in(model).items() if parent_of(path) == parent_of(first)]
        beside = ((path, block) for listed in lists for path, block in listed.items())
        alike = {path: block for path, block in beside if type(block) in kinds}
        found = alike if found.keys() <= alike.keys() else found
    known = set(chain.from_iterable(map(outwards, found)))
    others = [path for path, module in modules.items() if type(module) in kinds and path not in known]
    if others := [path for path in others if found.keys().isdisjoint(outwards(path))]:
        raise several_stacks(model, [first, *(parent_of(path) or path for path in others)])
    return found


def repeated_blocks(model: nn.Module, part: str = "") -> Modules:
    """The members of the part's largest list of equals, the outermost of several; of stages, the blocks inside."""
    lists = [listed for path, listed in lists_of_equals(model).items() if part in outwards(path)]
    blocks = max(lists, key=lambda listed: _size(listed.values()), default={})
    if not _size(blocks.values()):
        return {}
    stages = [_blocks_of_stage(model, *listed) for listed in blocks.items()]
    return dict(chain.from_iterable(stage.items() for stage in stages)) if all(stages) else blocks


def _blocks_of_stage(model: nn.Module, path: str, block: nn.Module) -> Modules:
    """The blocks inside, if they make up most of the module, as in a stage; a block has lists of small parts."""
    found = repeated_blocks(model, path)
    if isinstance(block, nn.ModuleList):  # which nobody runs as a whole
        return found or lists_in(model)[path]
    is_stage = any(isinstance(child, CONTAINERS) for child in block.children())
    return found if is_stage and 2 * _size(found.values()) > _size([block]) else {}


def other_blocks(model: nn.Module, blocks: Collection[nn.Module]) -> list[str]:
    """The paths of lists of equals beside the blocks whose members, of any size, have several modules with weights."""
    inside = {module for block in blocks for module in block.modules()}
    found = [
        path
        for path, listed in lists_of_equals(model).items()
        if any(sum(bool(m._parameters) for m in block.modules()) > 1 for block in listed.values())
        and inside.isdisjoint(modules_of(model)[path].modules())
    ]
    return [path for path in found if not any(up in found for up in outwards(path)[1:])]


def _size(modules: Iterable[nn.Module]) -> int:
    return sum(p.numel() for p in {p for module in modules for p in module.parameters()})


def join(prefix: str, name: str) -> str:
    """A path from that of a module and the name of a child."""
    return f"{prefix}.{name}" if prefix else name


def grid_as_tokens(block: nn.Module, x: Tensor) -> Tensor:
    """What goes through a block as (batch, tokens, channels); of a grid, the block's norms tell which axis is which."""
    if x.ndim != 4:
        return x
    norms = [module for module in block.modules() if "norm" in type(module).__name__.lower()]
    widths = {p.shape[0] for norm in norms for p in norm.parameters(recurse=False)}
    last, first = x.shape[-1] in widths, x.shape[1] in widths or not widths  # convolutions have the channels first
    if last == first:
        raise ShapeError(f"{type(block).__name__} gives {tuple(x.shape)}: which axis has the channels is not clear")
    return x.flatten(1, 2) if last else x.flatten(2).transpose(1, 2)


def tokens_by_name(parameters: Iterable[tuple[str, Tensor]]) -> SpecialTokens:
    """Count special tokens by the names of their parameters."""
    counts = [(path.rpartition(".")[2], p.shape[-2] if p.ndim > 1 else 1) for path, p in parameters]
    return SpecialTokens(*(sum(count for name, count in counts if name in names) for names in (IN_FRONT, BEHIND)))


def norm_by_name(holder: nn.Module, _blocks: str) -> nn.Module | None:
    """The child that is called a final norm; an identity counts, where the norm follows the pooling instead."""
    found = (getattr(holder, name, None) for name in FINAL_NORMS)
    return next((norm for norm in found if isinstance(norm, nn.Module) and not isinstance(norm, CONTAINERS)), None)


def norm_after(
    model: nn.Module, last: nn.Module, choose: Callable[[nn.Module, str], nn.Module | None] = norm_by_name
) -> nn.Module:
    """The norm nearest after the block of the `last` attention, in the module that holds the blocks or around it.

    `choose` is given such a module and the name of its child that holds the blocks.
    """
    _, stage, _ = place_of(model, path_of(model, last))
    for path in filter(None, outwards(stage)):
        around, _, inside = path.rpartition(".")
        if (norm := choose(model.get_submodule(around), inside)) is not None:
            return norm
    raise AcutanceError(f"{type(model).__name__} has no norm after its last block that is known: read tap='block'")


def refuse_other_rows(where: str, tokens: Tensor, rows: Container[int], of_grids: Container[int]) -> None:
    """Refuse tokens whose first axis is not the batch that was fed, or is as long as another that may be it."""
    given = f"{where} is given {tuple(tokens.shape)}"
    if len(tokens) not in (of_grids if tokens.ndim == 4 else rows):
        raise ShapeError(f"{given}, whose first axis is not the batch that was fed. {ADVICE}")
    # Tokens first, (tokens, batch, channels), or an alignment's (rows, columns, batch, channels).
    other = tokens.shape[-2]
    is_grid = tokens.ndim == 4 and tokens.shape[0] == tokens.shape[1]  # (batch, rows, columns, channels), all as long
    if tokens.ndim in (3, 4) and len(tokens) == other > 1 and not is_grid:
        raise ShapeError(f"{given}, so which axis is the batch is not clear: begin with a batch of another size")


def check_model(model: object) -> None:
    """Refuse what is not a module, such as the name of a model, its class or its state dict."""
    if isinstance(model, nn.Module):
        return
    found, advice = f"a {type(model).__name__}", "the model comes first, as in measure(model, batches)"
    if isinstance(model, str):
        found = repr(model)
        advice = "load it first, for example by acutance.io.loading.load_model('hf:owner/model').model"
    elif isinstance(model, type):
        found, advice = f"the class {model.__name__}", "pass an instance of it"
    elif isinstance(model, Mapping):
        advice = "if it is a state dict, build the model, give it to model.load_state_dict(…), and pass the model"
    raise AcutanceError(f"a model is a torch.nn.Module, not {found}: {advice}")


def refuse_meta(model: nn.Module) -> None:
    """Refuse a model without values; Accelerate keeps some of those it dispatches elsewhere."""
    empty = next((name for name, x in model.named_parameters() if x.is_meta), None)
    if empty is not None and not hasattr(model, "hf_device_map"):
        raise AcutanceError(f"{empty} of {type(model).__name__} is on the meta device, without values: load it first")


def bare_module(model: nn.Module) -> nn.Module:
    """The module inside torch.compile's and data parallelism's wrappers, whose forward would compile or synchronise."""
    check_model(model)
    parallel = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    while isinstance(model, parallel) or "_orig_mod" in model._modules:
        model = model.get_submodule("module" if isinstance(model, parallel) else "_orig_mod")
    return model


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP gathers the model's weights from all processes, so that none can run it without the others.

    Told by the names of classes: where torch comes without distributed there are none to import.
    """
    kinds = {parent.__name__ for module in model.modules() for parent in type(module).__mro__}
    return not kinds.isdisjoint({"FSDPModule", "FullyShardedDataParallel"})


def refuse_sharded(model: nn.Module, reader: str) -> None:
    """Refuse a model without values, or whose weights FSDP has split: the reader needs them whole."""
    refuse_meta(model)
    if is_sharded(model):
        raise AcutanceError(
            f"{reader} reads the weights, of which FSDP leaves each process a part: give it the model before it is "
            "sharded, or a plain one with the full state dict"
        )


@contextmanager
def shards_put_back(model: nn.Module) -> Iterator[None]:
    """Reshard afterwards: FSDP2 frees gathered weights in the backward pass only, so they would go stale."""
    try:
        yield
    finally:
        for module in model.modules():
            if any(parent.__name__ == "FSDPModule" for parent in type(module).__mro__):
                cast(Any, module).reshard()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients, then every module's own mode again (some may have been frozen)."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False  # not by eval(), which some modules take as the order to merge their weights
        # Compiled code would not see the hooks.
        with shards_put_back(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module in training:
            module.training = True
