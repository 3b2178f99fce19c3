"""measure: how smooth is a model, layer by layer?"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager
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
from acutance import sites
from acutance.errors import AcutanceError
from acutance.operator import AttentionOperator, AttentionRecord
from acutance.profile import MAP, Profile, Reading
from acutance.version import __version__

TAPS = ("block", "attention", "values", "final")
DEFAULT_METRICS = ("token_cosine", "hfc_lfc_spectral", "rank_residual", "effective_rank", "norm_spread")
SUCCESSIVE = "attention_cosine"  # compares a layer's attention with the layer before (Fig. 5 of arXiv 2312.00751)

Key = tuple[str, int, str]


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
    progress: bool = True,
) -> Profile:
    """Stream batches through a model and read smoothing metrics at every layer.

    Memory is that of one forward pass: only running means are kept. The model is read in evaluation mode without
    gradients and left as it was found.

    Args:
        model: any model `acutance.sites.find` knows.
        batches: tensors, (tensor, …) tuples of which the first entry is fed, or mappings of keyword arguments.
        metrics: names from `available_metrics()`, or "all".
        tap: where token metrics are read, one or several of
            `block` (the residual stream after each block; layer 0 is what enters the first),
            `attention` (the branch's output before the residual, after the output projection),
            `values` (v with heads side by side), `final` (after the final norm). Attention metrics read the operator.
        prefix: class, distillation and register tokens `in` or `out` of the metrics.
        progress: show a progress bar.

    Returns:
        Profile: mean and standard deviation over samples per tap, layer and metric.
    """
    names, taps = _metric_names(metrics), _tap_names(tap)
    if prefix not in ("in", "out"):
        raise AcutanceError(f"prefix says whether class and register tokens count: 'in' or 'out', not {prefix!r}")
    bare = getattr(model, "_orig_mod", model)  # a compiled model would not see hooks added now
    reader = _Reader(names, taps, sites.prefix_tokens(bare) if prefix == "out" else 0)
    statistics: dict[Key, _Running] = {}
    with evaluating(bare), ExitStack() as stack:
        _attach(bare, reader, taps, stack)
        for batch in track(batches, progress, stack, "measuring"):
            feed(bare, batch)
            for key, values in reader.flush().items():
                statistics.setdefault(key, _Running()).add(values)
    if not statistics:
        raise AcutanceError("measure got no batches: pass an iterable with at least one")
    readings = tuple(Reading(*key, mean=s.mean, std=s.std, count=s.count) for key, s in sorted_by_tap(statistics, taps))
    return Profile(readings, _context(bare, readings, taps, prefix))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients, then every module's own mode again (some may have been frozen)."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # compiled code would not see the hooks
            yield
    finally:
        for module, training in modes:
            module.training = training


def feed(model: nn.Module, batch: Any) -> Any:
    """Run one batch of any accepted form through the model, on the model's device."""
    device = next(model.parameters()).device
    if isinstance(batch, Mapping):
        return model(**{k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()})
    inputs = batch[0] if isinstance(batch, (tuple, list)) else batch
    if not isinstance(inputs, Tensor):
        raise AcutanceError(
            f"a batch must be a tensor, a (tensor, …) tuple or a mapping of arguments, not {type(inputs).__name__}"
        )
    return model(inputs.to(device))


class _Reader:
    """Turns what the hooks see in one batch into metric values; holds at most one earlier layer's q and k."""

    def __init__(self, names: Sequence[str], taps: Sequence[str], skip: int) -> None:
        self.token_metrics = [n for n in names if n in metric_room.TOKEN_METRICS]
        self.attention_metrics = [n for n in names if n in metric_room.ATTENTION_METRICS]
        self.successive = SUCCESSIVE in names
        self.taps = taps
        self.skip = skip
        self.values: dict[Key, Tensor] = {}
        self.previous: AttentionOperator | None = None

    @property
    def wants_records(self) -> bool:
        return bool({"attention", "values"} & set(self.taps) or self.attention_metrics or self.successive)

    def tokens(self, tap: str, layer: int, tokens: Tensor) -> None:
        mask = self._mask(tokens)
        if self.token_metrics:
            metric_room.check_finite(tokens, metric=f"{self.token_metrics[0]} at {tap}", layer=layer, mask=mask)
        for name in self.token_metrics:
            self.values[tap, layer, name] = metric_room.TOKEN_METRICS[name](tokens, mask)

    def record(self, layer: int, record: AttentionRecord) -> None:
        if "attention" in self.taps:
            self.tokens("attention", layer, record.branch)
        if "values" in self.taps:
            self.tokens("values", layer, record.values.transpose(1, 2).flatten(2))
        mask = self._mask(record.branch)
        if self.attention_metrics or self.successive:
            first = [*self.attention_metrics, SUCCESSIVE][0]
            metric_room.check_finite(record.branch, metric=first, layer=layer, mask=mask)
        for name in self.attention_metrics:
            self._keep(layer, name, metric_room.ATTENTION_METRICS[name](record, mask))
        if self.successive:
            if self.previous is not None:
                self._keep(layer, SUCCESSIVE, metric_room.attention_cosine(self.previous, record.operator, mask))
            self.previous = record.operator

    def flush(self) -> dict[Key, NDArray[np.float64]]:
        """Hand over the batch's values in one transfer from the device."""
        if not self.values:
            raise AcutanceError(f"nothing was read: {SUCCESSIVE} compares successive layers and needs two of them")
        keys = list(self.values)
        stacked = torch.stack([v.double() for v in self.values.values()]).cpu().numpy()
        self.values, self.previous = {}, None
        return dict(zip(keys, stacked, strict=True))

    def _keep(self, layer: int, name: str, value: Tensor) -> None:
        self.values[MAP, layer, name] = value.flatten(1).mean(1) if value.ndim > 1 else value  # mean over heads

    def _mask(self, tokens: Tensor) -> Tensor | None:
        if self.skip == 0:
            return None
        mask = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        mask[:, : self.skip] = False
        return mask


class _Running:
    """Mean and standard deviation of a stream, merged batch by batch (Chan's update)."""

    def __init__(self) -> None:
        self.count, self.mean, self._squares = 0, 0.0, 0.0

    def add(self, values: NDArray[np.float64]) -> None:
        if not np.isfinite(values).all():  # a documented infinity, such as HFC/LFC of tokens whose mean is zero
            self.mean += float(values[~np.isfinite(values)].sum())
            self.count += len(values)
            return
        count, mean = len(values), float(values.mean())
        delta, total = mean - self.mean, self.count + len(values)
        self.mean += delta * count / total
        self._squares += float(((values - mean) ** 2).sum()) + delta**2 * self.count * count / total
        self.count = total

    @property
    def std(self) -> float:
        if not np.isfinite(self.mean):
            return float("inf")
        return float(np.sqrt(self._squares / (self.count - 1))) if self.count > 1 else 0.0


def _attach(model: nn.Module, reader: _Reader, taps: Sequence[str], stack: ExitStack) -> None:
    found = sites.find(model)
    if "block" in taps:
        first = found[0].block
        stack.callback(first.register_forward_pre_hook(lambda _, args: reader.tokens("block", 0, args[0])).remove)
        for site in found:
            stack.callback(site.block.register_forward_hook(_block_hook(reader, site.layer)).remove)
    if reader.wants_records:
        for site in found:
            stack.callback(site.observe(_record_hook(reader, site.layer)).remove)
    if "final" in taps:
        norm, depth = sites.final_norm(model), len(found)
        stack.callback(norm.register_forward_hook(lambda *args: reader.tokens("final", depth, args[-1])).remove)


def _block_hook(reader: _Reader, layer: int) -> Callable[..., None]:
    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        reader.tokens("block", layer, output[0] if isinstance(output, tuple) else output)

    return hook


def _record_hook(reader: _Reader, layer: int) -> Callable[[AttentionRecord], None]:
    return lambda record: reader.record(layer, record)


def track(batches: Iterable[Any], show: bool, stack: ExitStack, description: str) -> Iterable[Any]:
    """The batches, with a progress bar that closes with the stack."""
    if not show:
        return batches
    total = len(batches) if isinstance(batches, Sized) else None
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    bar = stack.enter_context(Progress(*columns, transient=True))
    return bar.track(batches, total=total, description=description)


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


def sorted_by_tap(statistics: Mapping[Key, _Running], taps: Sequence[str]) -> list[tuple[Key, _Running]]:
    """Readings in the order a reader expects: tap as asked for, then depth."""
    order = {name: position for position, name in enumerate([*taps, MAP])}
    return sorted(statistics.items(), key=lambda item: (order[item[0][0]], item[0][1]))


def _context(
    model: nn.Module, readings: Sequence[Reading], taps: Sequence[str], prefix: Literal["in", "out"]
) -> dict[str, Any]:
    return describe(model) | {
        "samples": readings[0].count,
        "taps": list(taps),
        "prefix": f"{sites.prefix_tokens(model)} prefix tokens {prefix}",
    }


def describe(model: nn.Module) -> dict[str, Any]:
    """What was read and with what, so that somebody else can read it again."""
    parameter = next(model.parameters())
    return {
        "model": type(model).__name__,
        "mitigation": sites.mitigation_spec(model),
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(parameter.device) if parameter.is_cuda else str(parameter.device),
        "seed": torch.initial_seed(),
        "versions": {
            "acutance": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
    }
