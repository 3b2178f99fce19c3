"""What a spectrum costs: the training step of ViT-Ti⁻ against plain ViT-Ti (https://arxiv.org/abs/2401.04301).

All in the mode with the least overhead; `benchmarks/eigen_step.py` times all five bases, without CUDA graphs too.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from acutance.lab.bench.results import Row
from acutance.lab.bench.settings import Settings, Table
from acutance.lab.bench.steps import SHAPES, Shape, in_modes, toy, training
from acutance.lab.bench.timing import Candidate, Step, compare

# What calls a library comes last: after a capture into a CUDA graph that fails, others may fail too.
BASES = ("polar", "cayley", "householder", "qr")


def tables(settings: Settings) -> list[Table]:
    """ViT-Ti/4 at 32×32; a toy on the CPU."""
    shape = SHAPES["steps-32"] if settings.on_gpu else toy(SHAPES["steps-32"])
    title = f"ViT-Ti⁻ against ViT-Ti: {shape.title}, batch {shape.batch}, training"
    return [Table(title, partial(_rows, shape, settings))]


def _rows(shape: Shape, settings: Settings) -> Iterator[list[Row]]:
    return compare(candidates(shape, settings), settings.pace(), settings.device)


def candidates(shape: Shape, settings: Settings) -> list[Candidate]:
    """The plain model first."""

    def made(spec: str | None, mode: str) -> Step:
        return training(shape.ours(mitigation=spec), shape, settings, mode)

    least = settings.modes[-1:]
    found = in_modes("plain ViT", partial(made, None), least, baseline=True)
    for spec in (f"eigen:negative,basis={basis}" for basis in BASES):
        found += in_modes(spec, partial(made, spec), least)
    return found
