"""walk: the one pass of batches through a model, with the hooks that its visitors need and no others."""

import platform
import sys
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from itertools import repeat
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn

from acutance import distributed as processes
from acutance import sites
from acutance.attention import AttentionCall
from acutance.errors import AcutanceError, first_line
from acutance.measure.samples import SPECIAL, Fed, TokenLayout, fed_of, possible_rows, refuse_misfit, refuse_single
from acutance.sites.structure import bare_module, evaluating, is_sharded, refuse_meta
from acutance.version import __version__

EVERY = range(sys.maxsize)  # layer


@dataclass
class Batch:
    """What is fed in one forward pass, and how its tokens fall into samples."""

    model: nn.Module  # the whole model
    part: str | None  # that is read
    fed: Fed
    counts: bool = True  # False if this process reruns another's batch, which FSDP may need
    asked: dict[str, TokenLayout] = field(default_factory=dict, init=False)  # what `samples` gave

    def samples(self, prefix: str) -> TokenLayout:
        """How the tokens fall into samples, with the special tokens `in` or `out`."""
        if prefix not in self.asked:
            about = sites.token_kind(self.model, self.part)
            skip = sites.special_tokens(self.model, self.part) if prefix == "out" else (0, 0)
            self.asked[prefix] = TokenLayout.of(self.fed, special_token_counts=skip, special=prefix == "in", **about)
        return self.asked[prefix]


class Visitor:
    """Sees what happens in a model: every method does nothing unless it is overridden.

    `begin` and `end` are called before and after a batch; `enter` and `leave` with the tokens (batch, tokens, channels)
    of a block; `attend` when its attention branch is done; `norm` with the tokens before and after a norm that acts on
    the stream itself, as in Post-LN; `final` with the tokens after the final norm, as the last layer's. `needs` names
    those of `enter`, `attend`, `norm`, `leave` and `final` that are to be called, and at which layers.
    Layers are numbered from 1 over all blocks, also those without attention.
    """

    needs: Mapping[str, Container[int]] = {}

    def begin(self, batch: Batch) -> None: ...
    def enter(self, layer: int, tokens: Tensor) -> None: ...
    def attend(self, layer: int, call: AttentionCall) -> None: ...
    def norm(self, layer: int, tokens: tuple[Tensor, Tensor]) -> None: ...
    def leave(self, layer: int, tokens: Tensor) -> None: ...
    def final(self, layer: int, tokens: Tensor) -> None: ...
    def end(self) -> None: ...


def walk(
    model: nn.Module,
    batches: Iterable[Any],
    *visitors: Visitor,
    part: str | None = None,
    progress: str | None = None,
    across_processes: bool = False,
) -> None:
    """Stream batches through a model, once for all visitors; in evaluation mode, without gradients and wrappers.

    Model, batches, part and across_processes are as in `measure`; progress is the title of a progress bar.
    """
    refuse_single(batches)
    batches = () if batches is None else batches
    bare = bare_module(model)  # a compiled model would not see hooks added now
    refuse_meta(bare)
    target = sites.part_of(bare, part)
    with evaluating(bare), sites.cached_lookup(), sites.reading(target), ExitStack() as stack:
        set_hooks(target, visitors, stack)
        rank, size = processes.rank_and_world_size() if across_processes else (0, 1)
        if across_processes:
            batches = processes.share(batches, rank, size)
        own, waits = track(batches, progress if rank == 0 else None, stack), across_processes and is_sharded(bare)
        shares = processes.pad_uneven_batches(own) if waits else zip(own, repeat(True), strict=False)
        for number, (given, counts) in enumerate(shares):
            batch = Batch(bare, part, fed_of(given), counts)
            for visitor in visitors:
                visitor.begin(batch)
            with ExitStack() as around:
                if number == 0:  # once only: the check waits for the device
                    around.enter_context(sites.checking_blocks(target, *possible_rows(batch.fed)))
                for packed in [samples.documents for samples in batch.asked.values() if samples.documents is not None]:
                    with suppress(AcutanceError):  # another reads this attention and checks it, or nobody can
                        for site in {type(site): site for site, _ in sites.readable_layers(target)[::-1]}.values():
                            around.enter_context(site.observe(packed.refuse_mixing))
                refuse_misfit(bare, batch.fed)
                try:
                    feed(bare, batch.fed)
                except (AcutanceError, torch.OutOfMemoryError):
                    raise
                except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
                    raise AcutanceError(_failure(bare, batch.fed, error)) from error
            for visitor in visitors:
                visitor.end()


def _failure(model: nn.Module, fed: Fed, error: Exception) -> str:
    """Why a batch did not go through, with what most often is the reason: shapes, dtypes and devices."""
    given = {"": fed} if isinstance(fed, Tensor) else fed
    tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
    shown = [f"{name} {tuple(x.shape)} {x.dtype}".strip() for name, x in tensors.items()]
    weights = dict.fromkeys(f"{p.dtype} on {p.device}" for p in model.parameters())
    text = f"{type(model).__name__}, whose weights are {', '.join(weights)}, does not run on {', '.join(shown)}"
    call = "model(batch)" if isinstance(fed, Tensor) else "model(**batch)"
    return f"{text.replace('torch.', '')}: {first_line(error)}. Pass batches that {call} takes"


def set_hooks(model: nn.Module, visitors: Iterable[Visitor], stack: ExitStack) -> None:
    """Set the hooks that the visitors need, until the stack closes."""

    def listen(method: str, layer: int, register: Callable[..., Any], read: Callable[..., Any]) -> None:
        """Have visitors that need this method at this layer told what `read` makes of the hook's arguments."""
        told = [getattr(visitor, method) for visitor in visitors if layer in visitor.needs.get(method, ())]

        def hook(*args: Any) -> None:
            seen = read(*args)
            for tell in told:
                tell(layer, seen)

        if told:
            stack.callback(register(hook).remove)

    blocks = sites.blocks(model)
    for layer, block, tokens in blocks:
        before, after = partial(block.register_forward_pre_hook, with_kwargs=True), block.register_forward_hook
        listen("enter", layer, before, lambda _, *given, tokens=tokens: tokens(sites.tokens_in(*given)))
        listen("leave", layer, after, lambda *args, tokens=tokens: tokens(sites.tokens_out(args[-1])))
    for site, layer in sites.readable_layers(model) if any("attend" in v.needs for v in visitors) else ():
        listen("attend", layer, site.observe, lambda call: call)
    for site, layer in sites.layers_of(model) if any("norm" in v.needs for v in visitors) else ():
        stages = site.stages() if any(layer in v.needs.get("norm", ()) for v in visitors) else None
        for norm in stages.norms if stages is not None else ():
            listen("norm", layer, norm.register_forward_hook, partial(_both_sides, site.tokens))
    if any("final" in v.needs for v in visitors):
        norm, tokens = sites.final_norm(model), sites.find(model)[-1].tokens
        listen("final", blocks[-1][0], norm.register_forward_hook, lambda *args: tokens(sites.tokens_out(args[-1])))


def _both_sides(tokens: Callable[[Tensor], Tensor], _: nn.Module, args: Any, out: Any) -> tuple[Tensor, Tensor]:
    return tokens(sites.tokens_in(args, {})), tokens(sites.tokens_out(out))


def track(batches: Iterable[Any], progress: str | None, stack: ExitStack) -> Iterable[Any]:
    """The batches, with a progress bar of this title that closes with the stack; None shows none."""
    console = Console(stderr=True)  # what is printed may be piped
    if progress is None or not console.is_terminal:
        return batches
    columns = "{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    bar = stack.enter_context(Progress(*columns, console=console, transient=True))
    return bar.track(batches, description=progress)


def feed(model: nn.Module, batch: Any) -> Any:
    """Run one batch of any accepted form through the model, on the model's device."""
    device = next(model.parameters()).device
    fed = map_tensors(fed_of(batch), lambda tensor: tensor.to(device))
    return model(fed) if isinstance(fed, Tensor) else model(**{name: x for name, x in fed.items() if name != SPECIAL})


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same with every tensor changed, also inside mappings."""
    if isinstance(value, Mapping):
        return {name: map_tensors(inside, change) for name, inside in value.items()}
    return change(value) if isinstance(value, Tensor) else value


def describe(model: nn.Module, part: str | None = None) -> dict[str, Any]:
    """What was read and with what, so that somebody else can read it again."""
    parameter = next(model.parameters())
    used = {n: sys.modules[n] for n in ("torch", "numpy", "transformers", "timm", "gguf") if n in sys.modules}
    versions = {n: getattr(used[n], "__version__", None) or metadata.version(n) for n in used}  # gguf has none
    return {
        "model": type(model).__name__,
        "mitigation": sites.mitigation_spec(sites.part_of(model, part)),
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(parameter.device) if parameter.is_cuda else str(parameter.device),
        "seed": torch.initial_seed(),
        "versions": {"acutance": __version__, "python": platform.python_version(), **versions},
        **({} if part is None else {"part": part}),
    }
