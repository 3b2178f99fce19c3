"""NeuTRENO's efficiency ratios (https://arxiv.org/abs/2312.00751, appendix G.4): FLOPs, memory and time at inference.

The paper has DeiT-tiny with and without the term, as PyTorch runs it, without compiling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from acutance.lab.bench.results import Row
from acutance.lab.bench.settings import Settings, Table, inference_step, unfused, without_fused_kernel
from acutance.lab.bench.steps import NEUTRENO, TOY
from acutance.lab.bench.timing import Candidate, Step, compare
from acutance.models import ViT, deit_tiny


class PointwiseCounter(TorchDispatchMode):
    """Counts one operation per number that a pointwise operation gives: the term is nothing else."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it, and count."""
        out = func(*args, **(kwargs or {}))
        if torch.Tag.pointwise in func.tags and isinstance(out, Tensor):
            self.operations += out.numel()
        return out


def count_flops(model: nn.Module, images: Tensor) -> tuple[int, int]:
    """Of one forward pass: those of matrix products and attention, and those of pointwise operations."""
    # On the path that is made of products: counters do not see into our kernel, nor into all of PyTorch's.
    with without_fused_kernel(), sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        with FlopCounterMode(display=False) as products:
            model(images)
        with PointwiseCounter() as pointwise:
            model(images)
    return products.get_total_flops(), pointwise.operations


def tables(settings: Settings) -> list[Table]:
    """DeiT-tiny at 224×224; a toy on the CPU."""
    batch = 1024 if settings.on_gpu else 4  # so large that launching the kernels takes less time than they take
    body = "DeiT-Ti/16, 224×224" if settings.on_gpu else "DeiT-Ti at toy size"
    return [Table(f"efficiency of {body}, batch {batch}, inference, not compiled", partial(_rows, batch, settings))]


def _rows(batch: int, settings: Settings) -> Iterator[list[Row]]:
    build: Callable[..., ViT] = deit_tiny if settings.on_gpu else partial(ViT, **TOY)
    plain, neutreno = build(), build(mitigation=NEUTRENO)
    size = plain.config.image_size
    images = torch.randn(batch, 3, size, size, device=settings.device)

    def step(model: ViT, fused: bool) -> Step:
        run = inference_step(model, [images], dtype=settings.dtype)
        return run if fused else unfused(run)

    candidates = [
        Candidate("plain", partial(step, plain, False), "SDPA", baseline=True),
        Candidate("NeuTRENO", partial(step, neutreno, False), "SDPA"),
        *(
            Candidate(name, partial(step, model, True), "fused kernel")
            for name, model in (("plain", plain), ("NeuTRENO", neutreno))
            if settings.on_gpu
        ),
    ]
    counted = [_flops(model.to(settings.device), images[:1]) for model in (plain, neutreno)]
    for row in counted:
        row["flops_ratio"] = f"{row['flops'] / counted[0]['flops']:.7f}"
    for rows in compare(candidates, settings.pace(), settings.device):
        yield [{**row, **counted[row["variant"] == "NeuTRENO"]} for row in rows]


def _flops(model: ViT, images: Tensor) -> Row:
    products, pointwise = count_flops(model.eval(), images)
    return {"flops": products + pointwise, "flops_products": products, "flops_pointwise": pointwise}
