"""measure: how smooth is a model, layer by layer?"""

from __future__ import annotations

import platform
import sys
import warnings
from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from acutance import metrics as metric_room
from acutance import sites
from acutance.errors import AcutanceError, AcutanceWarning
from acutance.measure.profile import Profile
from acutance.measure.reader import SUCCESSIVE, Reader
from acutance.measure.samples import TokenLayout, refuse_single
from acutance.measure.walk import hooked, walk
from acutance.sites.patched import WINDOWS_MOVE, PatchedSite
from acutance.sites.wrappers import bare_module
from acutance.version import __version__

TAPS = ("block", "attention", "values", "final")
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
    bare = bare_module(model)
    target = sites.part_of(bare, part)
    with sites.cached_lookup():
        reader = _reader(target, names, taps, prefix)
        title = "measuring" if progress else None
        walk(bare, batches, reader, part=part, progress=title, across_processes=across_processes)
        # Meanwhile the device goes on.
        where = {} if part is None else {"part": part}
        counted = {"samples": 0, "taps": taps, "prefix": _counted(bare, part, prefix, reader.samples)}
        context = describe(bare, target) | where | counted
    readings = reader.readings(across_processes=across_processes)
    return Profile(readings, context | {"samples": readings[0].count})


def _reader(target: nn.Module, names: Sequence[str], taps: Sequence[str], prefix: str) -> Reader:
    """The visitor that reads these metrics; warns of what it cannot see."""
    unread = sites.unread(target) if "block" in taps else []
    if unread:
        warnings.warn(
            f"not read, and not among the layers by number: {', '.join(unread)}, between the blocks with attention but "
            "unlike them",
            AcutanceWarning,
            stacklevel=3,
        )
    layers = sites.layers_of(target) if SUCCESSIVE in names else []
    moving = [n for site, n in layers if isinstance(site, PatchedSite) and site.refuse_first_values() == WINDOWS_MOVE]
    return Reader(names, taps, prefix, moving)


def check_readable(
    model: nn.Module, *, metrics: str | Sequence[str], tap: str | Sequence[str], prefix: str, part: str | None
) -> None:
    """Raise what `measure` would raise before its first batch."""
    names, taps = check_choices(metrics, tap, prefix)
    target = sites.part_of(model, part)
    with sites.reading(target), hooked(target, _reader(target, names, taps, prefix)):
        pass


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


def _counted(model: nn.Module, part: str | None, prefix: str, samples: TokenLayout) -> str:
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
