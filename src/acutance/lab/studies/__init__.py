"""Experiments behind the statements: repeated layers, learnt kernels, very deep networks, real language models."""

from acutance.lab.studies.depth import DepthConfig, DepthStudy, depth_study
from acutance.lab.studies.kernel import KernelAssumptions, KernelStudy, kernel_assumptions, kernel_study
from acutance.lab.studies.layers import LayersStudy, layers_study
from acutance.lab.studies.norms import PostNorm, centred_spectrum, groups_rate, post_norm, ratio_at_equal_size
from acutance.lab.studies.repeat import (
    Trajectory,
    attention_from,
    branch_with_spectrum,
    drawn_attention,
    norm_grid,
    random_attention,
    repeat,
)  # fmt: skip

__all__ = [
    "DepthConfig", "DepthStudy", "KernelAssumptions", "KernelStudy", "LayersStudy", "PostNorm", "Trajectory",
    "attention_from", "branch_with_spectrum", "centred_spectrum", "depth_study", "drawn_attention", "groups_rate",
    "kernel_assumptions", "kernel_study", "layers_study", "norm_grid", "post_norm", "random_attention",
    "ratio_at_equal_size", "repeat",
]  # fmt: skip
