"""What a mitigation costs at inference, as ratios within one process: operations, memory, time."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from acutance.lab.bench.efficiency import count_flops
from acutance.lab.bench.timing import MIB, peak_mib, seconds_per_step
from acutance.lab.reproduce.target import Row
from acutance.lab.tasks.classification import build_vit

if TYPE_CHECKING:
    from acutance.lab.reproduce.session import Session

BATCH = 8
REPEATS = 50


def ratios(session: Session, row: Row, seed: int) -> dict[str, float]:
    """The row's model over the same without its mitigation, on random images; memory on a GPU only."""
    chosen = session.planned(row, seed).config.task.model
    torch.manual_seed(seed)
    steered = build_vit(chosen, weights=None).to(session.device).eval()
    plain = build_vit(replace(chosen, mitigation=None), weights=None).to(session.device).eval()
    images = torch.randn(BATCH, chosen.in_chans, chosen.image_size, chosen.image_size, device=session.device)
    (products, pointwise), (more, more_pointwise) = (count_flops(model, images) for model in (plain, steered))
    term = more - products + more_pointwise - pointwise  # against products alone, as FLOPs are usually given
    found = {"operations": (products + term) / products, "time": _time_ratio(steered, plain, images, session)}
    if images.is_cuda:
        plain.cpu()  # only the model that is measured may take memory there
        peak = _peak(steered, images)
        steered.cpu()
        found["memory"] = peak / _peak(plain.to(images.device), images)
    return found


def _time_ratio(steered: nn.Module, plain: nn.Module, images: Tensor, session: Session) -> float:
    """Called in turn, so that a machine that slows down slows both."""
    repeats = 3 if session.scale == "tiny" else REPEATS
    once = partial(seconds_per_step, steps=1, device=str(images.device))
    steps = [partial(_call, model, images) for model in (steered, plain)]
    for step in steps:
        once(step)
    pairs = [[once(step) for step in steps] for _ in range(repeats)]
    return median(mine for mine, _ in pairs) / median(theirs for _, theirs in pairs)


def _peak(model: nn.Module, images: Tensor) -> float:
    """All that is allocated at the worst moment, the model and its images included, in MiB."""
    above = peak_mib(partial(_call, model, images), str(images.device))
    assert above is not None, "on a GPU"
    return above + torch.cuda.memory_allocated() / MIB


@torch.no_grad()
def _call(model: nn.Module, images: Tensor) -> None:
    model(images)
