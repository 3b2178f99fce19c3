"""What a spectrum costs: the training step of ViT-Ti⁻ against plain ViT-Ti (https://arxiv.org/abs/2401.04301).

What cannot be captured in a CUDA graph is compiled without; `benchmarks/eigen_step.py` times all five bases.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from acutance.bench.results import Row
from acutance.bench.settings import Settings, Table
from acutance.bench.steps import SHAPES, Shape, in_modes, toy, training
from acutance.bench.timing import Candidate, Step, compare

BASES = {"householder": 2, "polar": 1, "qr": 1}  # and how many of the modes each is timed in


def tables(settings: Settings) -> list[Table]:
    """ViT-Ti/4 at 32×32; a toy on the CPU."""
    shape = SHAPES["steps-32"] if settings.on_gpu else toy(SHAPES["steps-32"])
    title = f"ViT-Ti⁻ against ViT-Ti: {shape.title}, batch {shape.batch}, training"
    return [Table(title, partial(_rows, shape, settings))]


def _rows(shape: Shape, settings: Settings) -> Iterator[list[Row]]:
    def made(spec: str | None, mode: str) -> Step:
        return training(shape.ours(mitigation=spec), shape, settings, mode)

    candidates: list[Candidate] = in_modes("plain ViT", partial(made, None), settings.modes, baseline=True)
    for basis, modes in BASES.items():
        spec = f"eigen:negative,basis={basis}"
        candidates += in_modes(spec, partial(made, spec), settings.modes[:modes])
    return compare(candidates, settings.pace(), settings.device)
