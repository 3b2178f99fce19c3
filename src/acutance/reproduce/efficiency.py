"""What a mitigation costs at inference, as ratios within one process: operations, memory, time."""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from acutance.models import ViT
from acutance.reproduce.target import Row
from acutance.tasks.classification import build_vit

if TYPE_CHECKING:
    from acutance.reproduce.session import Session

BATCH = 8
REPEATS = 50
PER_VALUE = 3  # λ̃ (v⁰ − v) + u: a difference, a product, a sum


def ratios(session: Session, row: Row, seed: int) -> dict[str, float]:
    """The row's model over the same without its mitigation, on random images; memory on a GPU only."""
    chosen = session.planned(row, seed).config.task.model
    torch.manual_seed(seed)
    steered = build_vit(chosen, weights=None).to(session.device).eval()
    plain = build_vit(replace(chosen, mitigation=None), weights=None).to(session.device).eval()
    images = torch.randn(BATCH, chosen.in_chans, chosen.image_size, chosen.image_size, device=session.device)
    products = _products(plain, images)
    tokens = chosen.prefix_tokens + chosen.grid[0] * chosen.grid[1]
    term = PER_VALUE * BATCH * tokens * chosen.dim * (chosen.depth - 1)
    found = {"operations": (products + term) / products, "time": _time_ratio(steered, plain, images, session)}
    if images.is_cuda:
        plain.cpu()  # only the model that is measured may take memory there
        peak = _peak(steered, images)
        steered.cpu()
        found["memory"] = peak / _peak(plain.to(images.device), images)
    return found


@torch.no_grad()
def _products(model: ViT, images: Tensor) -> int:
    """Floating-point operations in matrix products, attention's included."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(images)
    return int(counter.get_total_flops())


def _time_ratio(steered: nn.Module, plain: nn.Module, images: Tensor, session: Session) -> float:
    """Called in turn, so that a machine that slows down slows both."""
    repeats = 3 if session.scale == "tiny" else REPEATS
    for model in (steered, plain):
        _seconds(model, images)
    pairs = [(_seconds(steered, images), _seconds(plain, images)) for _ in range(repeats)]
    return median(s for s, _ in pairs) / median(p for _, p in pairs)


@torch.no_grad()
def _seconds(model: nn.Module, images: Tensor) -> float:
    start = time.perf_counter()
    model(images)
    if images.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


@torch.no_grad()
def _peak(model: nn.Module, images: Tensor) -> int:
    torch.cuda.reset_peak_memory_stats()
    model(images)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()
