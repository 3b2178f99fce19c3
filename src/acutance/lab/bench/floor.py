"""The fused attention by itself, beside its floor: the bytes and FLOPs it needs at what this machine can do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from acutance.attention.kernels import packed
from acutance.lab.bench.results import Row
from acutance.lab.bench.settings import Settings, Table
from acutance.lab.bench.timing import Candidate, Pace, Step, compare, repeat, seconds_per_step

STRENGTH = 0.6
CALLS = 10  # in one CUDA graph: the host's launches take longer than a kernel


@dataclass(frozen=True)
class Ceilings:
    """Measured in the same run."""

    bytes_per_second: float
    flops_per_second: float

    def floor(self, bytes_moved: float, flops: float) -> float:
        """Seconds: the slower of the two, as if the other were hidden behind it."""
        return max(bytes_moved / self.bytes_per_second, flops / self.flops_per_second)

    def columns(self) -> Row:
        """For a row of results."""
        return {
            "copy_tb_per_s": f"{self.bytes_per_second / 1e12:.3f}",
            "matmul_tflop_per_s": f"{self.flops_per_second / 1e12:.1f}",
        }


@dataclass(frozen=True)
class Problem:
    """Attention of one layer."""

    batch: int
    tokens: int
    heads: int = 3
    width: int = 64
    causal: bool = False

    def bytes_moved(self, itemsize: int, *, term: bool, backward: bool) -> float:
        """Every input read once and every output written once, with one log-sum a row in float32.

        Forward: q, k, v and v⁰ to u. Backward: the same, u and its gradient to those of q, k, v and v⁰.
        """
        activation = self.batch * self.tokens * self.heads * self.width * itemsize
        sums = self.batch * self.heads * self.tokens * 4
        forward = (3 + term + 1) * activation + sums
        # v⁰'s gradient is λ times the output's; v⁰ itself is not needed where λ is a constant.
        return forward + ((3 + 1 + 1 + 3 + term) * activation + sums) * backward

    def flops(self, *, backward: bool) -> float:
        """Two products forward; backward five, one of which is the first again."""
        pairs = self.tokens * (self.tokens + 1) // 2 if self.causal else self.tokens**2
        product = 2 * self.batch * self.heads * pairs * self.width
        return product * (2 + 5 * backward)


PROBLEMS = (Problem(1024, 64), Problem(1024, 65), Problem(512, 197))  # without and with a class token
TOY = (Problem(2, 5, 2, 16),)


def measured_ceilings(settings: Settings) -> Ceilings:
    """A copy of a large tensor, and a large product of matrices in the dtype of the attention."""
    size, side = (2**29, 8192) if settings.on_gpu else (2**20, 128)
    source = torch.empty(size, dtype=torch.uint8, device=settings.device)
    target = torch.empty_like(source)
    a, b = (torch.randn(side, side, device=settings.device, dtype=settings.dtype) for _ in range(2))
    copy = _fastest(lambda: target.copy_(source), settings.pace(), settings.device)
    product = _fastest(lambda: a @ b, settings.pace(), settings.device)
    return Ceilings(2 * size / copy, 2 * side**3 / product)


def _fastest(step: Step, pace: Pace, device: str) -> float:
    seconds_per_step(step, pace.warm_up, device)
    return min(seconds_per_step(step, pace.steps, device) for _ in range(3))


def tables(settings: Settings) -> list[Table]:
    """Per problem: forward alone, and with the backward pass."""
    return [
        Table(
            f"attention, batch {p.batch}, {p.tokens} tokens, {p.heads} heads of width {p.width}, {what}",
            partial(_rows, p, backward, settings),
        )
        for p in (PROBLEMS if settings.on_gpu else TOY)
        for what, backward in (("forward", False), ("forward and backward", True))
    ]


def _rows(problem: Problem, backward: bool, settings: Settings) -> Iterator[list[Row]]:
    ceilings = measured_ceilings(settings)
    inputs = _Inputs(problem, settings)
    attentions: dict[str, Any] = {"SDPA": sdpa}
    if packed.is_available(inputs.qkv, problem.heads):
        attentions["fused kernel"] = packed.attention
    candidates = [
        Candidate(
            f"{name}, {'with the term' if term else 'plain'}",
            partial(inputs.step, attention, term, backward),
            baseline=name == "SDPA" and not term,
            static=settings.on_gpu,
        )
        for name, attention in attentions.items()
        for term in (False, True)
    ]
    for rows in compare(candidates, settings.pace(steps=10, calls=CALLS), settings.device):
        yield [{**row, **_beside(row, problem, backward, ceilings, settings)} for row in rows]


def sdpa(qkv: Tensor, heads: int, scale: float, first: Tensor | None = None, strength: float = 0.0) -> Tensor:
    """The same as `packed.attention`, as one writes it in PyTorch."""
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    u = F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(2)
    return u if first is None else u + strength * (first - v.transpose(1, 2).flatten(2))


class _Inputs:
    def __init__(self, problem: Problem, settings: Settings) -> None:
        self.problem, self.on_gpu = problem, settings.on_gpu
        shape = (problem.batch, problem.tokens, problem.heads * problem.width)
        draw = partial(torch.randn, device=settings.device, dtype=settings.dtype)
        self.qkv = draw(*shape[:2], 3 * shape[2], requires_grad=True)
        self.first = draw(*shape, requires_grad=True)
        self.grad = draw(*shape)

    def step(self, attention: Any, term: bool, backward: bool) -> Step:
        """The attention `CALLS` times over, with gradients of all inputs or without."""
        run = torch.compile(attention, dynamic=False) if self.on_gpu else attention
        first, wanted = (self.first, [self.qkv, self.first]) if term else (None, [self.qkv])
        call = partial(run, self.qkv, self.problem.heads, self.problem.width**-0.5, first, STRENGTH)

        def forward() -> None:
            with torch.no_grad():
                call()

        def both() -> None:
            torch.autograd.grad(call(), wanted, self.grad)

        once = both if backward else forward
        return graphed(once, CALLS) if self.on_gpu else partial(repeat, once, CALLS)


def graphed(step: Step, calls: int) -> Step:
    """So many calls as one CUDA graph, warmed up on a stream of its own as capturing wants it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        repeat(step, 3)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        repeat(step, calls)
    return graph.replay


def _beside(row: Row, problem: Problem, backward: bool, ceilings: Ceilings, settings: Settings) -> Row:
    """How far a variant is from the floor of what it computes."""
    term = not row["variant"].endswith("plain")
    moved = problem.bytes_moved(settings.dtype.itemsize, term=term, backward=backward)
    flops = problem.flops(backward=backward)
    floor = 1e3 * ceilings.floor(moved, flops)
    return {
        "floor_ms": f"{floor:.4f}",
        "times_floor": f"{float(row['ms']) / floor:.2f}" if "ms" in row else "",
        "mbytes": f"{moved / 1e6:.1f}",
        "gflop": f"{flops / 1e9:.2f}",
        **ceilings.columns(),
    }
