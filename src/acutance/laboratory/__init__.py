"""Experiments behind the statements: layers repeated, kernels inspected, networks made very deep."""

from acutance.laboratory.assumptions import KernelAssumptions, kernel_assumptions
from acutance.laboratory.depth import DepthConfig, DepthStudy, depth_study
from acutance.laboratory.kernel_study import KernelStudy, kernel_study
from acutance.laboratory.norms import PostNorm, centred_spectrum, groups_rate, post_norm, ratio_at_equal_size
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
    "KernelStudy",
    "PostNorm",
    "Trajectory",
    "attention_from",
    "branch_with_spectrum",
    "centred_spectrum",
    "depth_study",
    "drawn_attention",
    "groups_rate",
    "kernel_assumptions",
    "kernel_study",
    "norm_grid",
    "post_norm",
    "random_attention",
    "ratio_at_equal_size",
    "repeat",
]
