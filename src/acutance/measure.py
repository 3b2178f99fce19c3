"""measure: how smooth is a model, layer by layer?"""

from __future__ import annotations

import platform
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from importlib import metadata
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from torch import Tensor, nn

from acutance import metrics as metric_room
from acutance import processes, sites
from acutance.attention import AttentionCall
from acutance.errors import AcutanceError, AcutanceWarning
from acutance.profile import MAP, Profile, Reading
from acutance.reader import SUCCESSIVE, Reader, Running, Statistics, by_key, take_in
from acutance.readout import Key, Readout, values_of
from acutance.samples import SPECIAL, Rows, Samples, refuse_single
from acutance.sites.patched import WINDOWS_MOVE, PatchedSite
from acutance.version import __version__
from acutance.wrappers import bare_module, evaluating, is_sharded

TAPS = ("block", "attention", "values", "final")
TOGETHER = 8  # at most, batches whose values are worked out at a time
Found = tuple[Readout, NDArray[np.bool_] | None]  # of one batch, and which of its samples have a token that counts
DEFAULT_METRICS = ("token_cosine", "hfc_lfc_spectral", "rank_residual", "effective_rank", "norm_spread")


def available_metrics() -> list[str]:
    """Every name that `measure(metrics=…)` knows."""
    return [*metric_room.TOKEN_METRICS, *metric_room.ATTENTION_METRICS, SUCCESSIVE]


def measure(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    metrics: str | Sequence[str] = DEFAULT_METRICS,
    tap: str | Sequence[str] = "block",
    prefix: Literal["in", "out"] = "in",
    part: str | None = None,
    progress: bool = True,
    across_processes: bool = False,
) -> Profile:
    """Stream batches through a model and read smoothing metrics at every layer.

    Memory is that of one forward pass: only running means are kept. The model is read in evaluation mode without
    gradients and left as it was found.

    Args:
        model: any model `acutance.sites.find` knows; of others, token metrics at the `block` tap.
        batches: tensors, (tensor, …) tuples of which the first entry is fed, or mappings of keyword arguments.
            Padding that a mapping's attention mask tells of does not count, and documents packed one after
            another, told by `position_ids` that start anew, are samples of their own; they are refused where the
            model lets them see each other.
        metrics: names from `available_metrics()`, or "all".
        tap: where token metrics are read, one or several of
            `block` (the residual stream after each block; layer 0 is what enters the first),
            `attention` (the branch's output before the residual, after the output projection),
            `values` (v with heads side by side), `final` (after the final norm). Attention metrics read the operator.
        prefix: class, distillation, register and detection tokens `in` or `out` of the metrics; of text, those
            that a tokeniser's `special_tokens_mask` in the batch marks.
        part: path of the submodule to read, where a model has several stacks of layers, e.g. `model.encoder`.
        progress: show a progress bar.
        across_processes: inside a `torch.distributed` process group, each process reads its share of the batches, all
            of which every process is given; all return the profile of the whole. The model may be in DDP or FSDP.

    Returns:
        Profile: mean and standard deviation over samples per tap, layer and metric.
    """
    names, taps = check_choices(metrics, tap, prefix)
    refuse_single(batches)
    bare = bare_module(model)  # a compiled model would not see hooks added now
    target = sites.part_of(bare, part)
    reader = Reader(names, taps)
    skip = sites.special_tokens(bare, part) if prefix == "out" else (0, 0)
    waiting: list[Found] = []
    statistics: Statistics = {}
    rank, size = processes.place() if across_processes else (0, 1)
    if across_processes:
        processes.refuse_shares(batches)
    sides = cache(partial(sites.sides, bare, part))  # only batches with masks need to know

    with evaluating(bare), sites.standing(), sites.reading(target), ExitStack() as stack:
        _attach(target, reader, taps, stack)
        own = track(processes.share(batches, rank, size), progress and rank == 0, stack, "measuring")
        for batch, counts in processes.in_step(own, wait=across_processes and is_sharded(bare)):
            about = sides() if isinstance(batch, Mapping) else {}
            reader.samples = Samples.of(batch, skip=skip, special=prefix == "in", **about)
            filled = reader.samples.filled  # while the device has nothing of this batch to do
            with _first_batch_checked(target, batch, reader), _documents_watched(target, reader):
                feed(bare, batch)
            found = reader.flush()
            waiting += [(found, filled)] if counts else []
            # Those before this one: at once where the device has them still to do, as the host has time then; else the
            # device waits for the host, which takes less for several together.
            if len(waiting) > TOGETHER or (len(waiting) > 1 and not waiting[-2][0].is_there()):
                _settle(statistics, waiting[:-1])
                waiting = waiting[-1:]
        context = _context(bare, target, part, taps, _counted(bare, part, prefix, reader.samples))  # meanwhile
    _settle(statistics, waiting)
    if across_processes:
        statistics = _over_processes(statistics)
    if not statistics:
        raise AcutanceError(
            "no sample has a token that counts: masks and prefix='out' leave none"
            if reader.is_checked
            else "measure got no batches: pass an iterable with at least one"
        )
    readings = tuple(
        Reading(*key, mean=float(s.mean[0]), std=float(s.std[0]), count=s.count)
        for key, s in sorted_by_tap(by_key(statistics), taps)
    )
    return Profile(readings, context | {"samples": readings[0].count})


def feed(model: nn.Module, batch: Any) -> Any:
    """Run one batch of any accepted form through the model, on the model's device."""
    device = next(model.parameters()).device
    if isinstance(batch, Mapping):
        return model(**_moved({name: value for name, value in batch.items() if name != SPECIAL}, device))
    inputs = batch[0] if isinstance(batch, (tuple, list)) else batch
    if not isinstance(inputs, Tensor):
        raise AcutanceError(
            f"a batch must be a tensor, a (tensor, …) tuple or a mapping of arguments, not {type(inputs).__name__}"
        )
    return model(inputs.to(device))


def _moved(value: Any, device: torch.device) -> Any:
    """Tensors, also those inside a mapping, on the device."""
    if isinstance(value, Mapping):
        return {name: _moved(inside, device) for name, inside in value.items()}
    return value.to(device) if isinstance(value, Tensor) else value


def _settle(statistics: Statistics, batches: Sequence[Found]) -> None:
    """Take in what was read of some batches; samples without a token that counts have no values."""
    read, filled = [found for found, _ in batches], None
    if any(own is not None for _, own in batches):
        every = [np.ones(found.sent_form().size, bool) if own is None else own for found, own in batches]
        filled = np.concatenate(every)
    start = 0
    for keys, values in values_of(read):
        own = values if filled is None else values[:, filled[start : start + values.shape[1]]]
        start += values.shape[1]
        if own.shape[1]:
            take_in(statistics, keys, Running.of(own))


def _over_processes(own: Statistics) -> Statistics:
    """The statistics of all processes as one, merged in the order of their ranks."""
    merged: Statistics = {}
    for part in processes.gather(own):
        for keys, found in part.items():
            take_in(merged, keys, found)
    return merged


def _attach(model: nn.Module, reader: Reader, taps: Sequence[str], stack: ExitStack) -> None:
    blocks = sites.blocks(model)
    if "block" in taps:
        _warn_of_unread(sites.unread(model))
    for layer, block, as_tokens in blocks:
        if layer == 1:
            entering = block.register_forward_pre_hook(_entry_hook(reader, as_tokens), with_kwargs=True)
            stack.callback(entering.remove)
        if "block" in taps:
            stack.callback(block.register_forward_hook(_block_hook(reader, layer, as_tokens)).remove)
    if reader.wants_records:
        found, layers = sites.find(model), {block: layer for layer, block, _ in blocks}
        for site in found:
            layer = layers[site.block] if len(blocks) > len(found) else site.layer  # attention is not in all blocks
            stack.callback(site.observe(_record_hook(reader, layer, site)).remove)
    if "final" in taps:
        norm, last = sites.final_norm(model), sites.find(model)[-1]
        stack.callback(norm.register_forward_hook(_final_hook(reader, blocks[-1][0], last)).remove)


def _warn_of_unread(paths: Sequence[str]) -> None:
    if paths:
        warnings.warn(
            f"not read, and not among the layers by number: {', '.join(paths)}, between the blocks with attention but "
            "unlike them",
            AcutanceWarning,
            stacklevel=4,
        )


@contextmanager
def _first_batch_checked(model: nn.Module, batch: Any, reader: Reader) -> Iterator[None]:
    """What the blocks are given and give is looked at once: it takes a while."""
    if reader.is_checked:
        yield
        return
    with sites.checking_blocks(model, Rows.of(batch)):
        yield
    reader.is_checked = True


@contextmanager
def _documents_watched(model: nn.Module, reader: Reader) -> Iterator[None]:
    """Where nothing else reads attention, the first layer's tells whether the model keeps packed documents apart."""
    with ExitStack() as stack:
        if reader.samples.documents is not None and not reader.wants_records:
            with suppress(AcutanceError):  # attention that cannot be read cannot be asked
                watcher = sites.find(model)[0].observe(lambda record: reader.samples.refuse_mixing(record.A))
                stack.callback(watcher.remove)
        yield


def _entry_hook(reader: Reader, as_tokens: Callable[[Tensor], Tensor]) -> Callable[..., None]:
    def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
        if reader.out.size == 0:  # layers that share a module enter it again
            tokens = as_tokens(sites.tokens_in(args, kwargs))
            reader.begin(tokens)
            if "block" in reader.taps:
                reader.tokens("block", 0, tokens)

    return hook


def _block_hook(reader: Reader, layer: int, as_tokens: Callable[[Tensor], Tensor]) -> Callable[..., None]:
    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        reader.tokens("block", reader.depth("block", layer), as_tokens(sites.tokens_out(output)))

    return hook


def _final_hook(reader: Reader, layer: int, last: sites.AttentionSite) -> Callable[..., None]:
    return lambda _module, _args, output: reader.tokens("final", layer, last.tokens(output))


def _record_hook(reader: Reader, layer: int, site: sites.AttentionSite) -> Callable[[AttentionCall], None]:
    move = isinstance(site, PatchedSite) and site.refuse_first_values() == WINDOWS_MOVE
    return lambda record: reader.record(reader.depth(MAP, layer), record, windows_move=move)


def track(batches: Iterable[Any], show: bool, stack: ExitStack, description: str) -> Iterable[Any]:
    """The batches, with a progress bar that closes with the stack."""
    if not show:
        return batches
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    bar = stack.enter_context(Progress(*columns, transient=True))
    return bar.track(batches, total=processes.length_of(batches), description=description)


def check_readable(
    model: nn.Module, *, metrics: str | Sequence[str], tap: str | Sequence[str], prefix: str, part: str | None
) -> None:
    """Raise what `measure` would raise before its first batch."""
    names, taps = check_choices(metrics, tap, prefix)
    target = sites.part_of(model, part)
    with sites.reading(target), ExitStack() as stack:
        _attach(target, Reader(names, taps), taps, stack)


def check_choices(metrics: str | Sequence[str], tap: str | Sequence[str], prefix: str) -> tuple[list[str], list[str]]:
    """The metrics and the taps by name; what `measure` does not know is refused."""
    check_prefix(prefix)
    return _metric_names(metrics), _tap_names(tap)


def check_prefix(prefix: str) -> None:
    """Class, register and other special tokens are in or out."""
    if prefix not in ("in", "out"):
        raise AcutanceError(f"prefix says whether class and register tokens count: 'in' or 'out', not {prefix!r}")


def _metric_names(metrics: str | Sequence[str]) -> list[str]:
    known = available_metrics()
    names = known if metrics == "all" else [metrics] if isinstance(metrics, str) else list(metrics)
    unknown = [n for n in names if n not in known]
    if unknown or not names:
        raise AcutanceError(f"unknown metric {', '.join(unknown) or '(none)'}; known: {', '.join(known)}, or all")
    return names


def _tap_names(tap: str | Sequence[str]) -> list[str]:
    taps = [tap] if isinstance(tap, str) else list(tap)
    unknown = [t for t in taps if t not in TAPS]
    if unknown or not taps:
        raise AcutanceError(f"unknown tap {', '.join(unknown) or '(none)'}; known: {', '.join(TAPS)}")
    return taps


def sorted_by_tap(statistics: Mapping[Key, Running], taps: Sequence[str]) -> list[tuple[Key, Running]]:
    """Readings in the order a reader expects: tap as asked for, then depth."""
    order = {name: position for position, name in enumerate([*taps, MAP])}
    return sorted(statistics.items(), key=lambda item: (order[item[0][0]], item[0][1]))


def _context(
    model: nn.Module, target: nn.Module, part: str | None, taps: Sequence[str], counted: str
) -> dict[str, Any]:
    """What stands beside the readings; how many samples there were is not known yet."""
    where = {} if part is None else {"part": part}
    return describe(model, target) | where | {"samples": 0, "taps": list(taps), "prefix": counted}


def _counted(model: nn.Module, part: str | None, prefix: str, samples: Samples) -> str:
    """Which special tokens were in or out of the metrics; what is true of the last batch's samples is of all."""
    try:
        known = sites.special_tokens(model, part)
    except sites.NoSitesError:
        return f"{'special' if samples.leaves_marked_out else 'prefix'} tokens {prefix}"
    if samples.leaves_marked_out:
        return f"{f'{known} and ' if any(known) else ''}the tokeniser's special tokens {prefix}"
    return f"{known} {prefix}"


def describe(model: nn.Module, target: nn.Module | None = None) -> dict[str, Any]:
    """What was read and with what, so that somebody else can read it again; `target` is the part that was read."""
    parameter = next(model.parameters())
    return {
        "model": type(model).__name__,
        "mitigation": sites.mitigation_spec(model if target is None else target),
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(parameter.device) if parameter.is_cuda else str(parameter.device),
        "seed": torch.initial_seed(),
        "versions": {
            "acutance": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        }
        | {name: _version_of(name) for name in ("transformers", "timm", "gguf") if name in sys.modules},
    }


def _version_of(imported: str) -> str:
    """As the library says, or else as it was installed: gguf does not say."""
    return getattr(sys.modules[imported], "__version__", None) or metadata.version(imported)
