"""Experiments behind the statements: layers repeated, kernels inspected, networks made very deep."""

from acutance.laboratory.assumptions import KernelAssumptions, kernel_assumptions
from acutance.laboratory.depth import DepthConfig, DepthStudy, depth_study
from acutance.laboratory.repeat import (
    Trajectory,
    attention_from,
    branch_with_spectrum,
    drawn_attention,
    random_attention,
    repeat,
)
from acutance.laboratory.settings import norm_grid

__all__ = [
    "DepthConfig",
    "DepthStudy",
    "KernelAssumptions",
    "Trajectory",
    "attention_from",
    "branch_with_spectrum",
    "depth_study",
    "drawn_attention",
    "kernel_assumptions",
    "norm_grid",
    "random_attention",
    "repeat",
]
