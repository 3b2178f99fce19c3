"""What the tests of the MLP's kernels and of the MLP itself share."""

import pytest
import torch
from packed_cases import CUDA, DEVICE

from acutance.models.kernels import mlp

needs_gpu = pytest.mark.skipif(not CUDA, reason="needs a Hopper GPU with Triton")
# What rounding once may change, relatively.
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
ADDING = 2.0**-20  # what adding up products in float32 may lose, as a part of the sum of their magnitudes
STEEPEST = 1.13  # the GELU's slope
DTYPES = list(ROUNDING) if CUDA else [torch.float16]  # NumPy, the interpreter's base, has no bfloat16
LOW = DTYPES[0]
# Tokens, channels, hidden channels: tokens that fill the tiles and that do not, one to four chunks of channels.
SHAPES = [(1, 64, 128), (150, 192, 256), (128, 256, 128), *([(65536, 192, 768), (1000, 128, 512)] if CUDA else [])]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Two a column on a CPU, so that some go through several tiles, and not equally many."""
    if not CUDA:
        monkeypatch.setattr(mlp, "BACKWARD", mlp.BACKWARD._replace(programs=4))


def exact(x):
    """GELU in float64 by the complementary error function, which keeps its digits far to the left."""
    return x * torch.special.erfc(-x / 2**0.5) / 2


def exact_slope(x):
    return torch.special.erfc(-x / 2**0.5) / 2 + x * torch.exp(-x * x / 2) / (2 * torch.pi) ** 0.5


def draw(*shape, dtype, size=1.0, seed=0):
    return (size * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(DEVICE, dtype)


def padded(tensor):
    """The same numbers with no-numbers behind them, which must not be read."""
    return torch.cat([tensor, torch.full_like(tensor[:1], float("nan"))])[:-1]
