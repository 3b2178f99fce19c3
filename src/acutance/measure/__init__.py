"""How alike a model's tokens are, layer by layer: `measure` says so once, `Monitor` while the model trains.

`walk` is the one pass through a model, visitors read it on the way, and a `Profile` holds what they found. Formulas
belong to `metrics`, knowledge of libraries to `sites`, and reasons to `explain`: none of them may stand here.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import nn

    from acutance.measure.profile import Profile

PREFIXES = ("in", "out")  # whether class, register and other special tokens count
TAPS = ("block", "attention", "values", "final")
DEFAULT_METRICS = ("token_cosine", "hfc_lfc_spectral", "rank_residual", "effective_rank", "norm_spread")


def measure(
    model: "nn.Module",
    batches: Iterable[Any],
    *,
    metrics: str | Sequence[str] = DEFAULT_METRICS,
    tap: str | Sequence[str] = "block",
    prefix: Literal["in", "out"] = "in",
    part: str | None = None,
    progress: bool = True,
    across_processes: bool = False,
) -> "Profile":
    """Stream batches through a model and read smoothing metrics at every layer: mean and spread over samples.

    Memory is that of one forward pass. The model is read in evaluation mode and left as it was found.

    Args:
        model: any model `acutance.sites.find` knows; of others, token metrics at the `block` tap.
        batches: tensors, (tensor, …) tuples of which the first entry is fed, or mappings of keyword arguments.
            Padding, told by an attention mask, is left out. Documents packed into a row, with `position_ids` that
            restart, are separate samples; they are refused if the model lets them see each other.
        metrics: names from `acutance.measure.reader.available_metrics()`, or "all".
        tap: where token metrics are read, one or several of `block` (the residual stream after each block; layer 0
            is what enters the first), `attention` (the branch's output before the residual), `values` (v with heads
            side by side) and `final` (after the final norm). Attention metrics read the operator.
        prefix: class, register and detection tokens, and those that a `special_tokens_mask` marks, `in` or `out`.
        part: path of the submodule to read, if a model has several stacks of layers, e.g. `model.encoder`.
        across_processes: inside a `torch.distributed` process group, every process is given all batches and reads its
            share of them. All return the profile of the whole. The model may be in DDP or FSDP.
    """
    from acutance import sites
    from acutance.measure.profile import Profile
    from acutance.measure.reader import MetricReader
    from acutance.measure.walk import describe, walk
    from acutance.sites.structure import bare_module

    bare = bare_module(model)
    with sites.cached_lookup():
        reader = MetricReader(metrics, tap, prefix, sites.part_of(bare, part))
        title = "measuring" if progress else None
        walk(bare, batches, reader, part=part, progress=title, across_processes=across_processes)
        # The device is still at work on the last batch.
        about = {"autocast": reader.autocast, "taps": reader.taps, "prefix": reader.describe_prefix(bare, part)}
        context = describe(bare, part) | about
    readings = reader.readings(across_processes=across_processes)
    return Profile(readings, context | {"samples": readings[0].count, "digest": reader.digest})
