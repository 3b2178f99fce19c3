"""A residual sum and its LayerNorm: our kernels against what torch.compile makes of them, as ratios in one run.

    python benchmarks/residual_norm.py
    python benchmarks/residual_norm.py --cuts --repetitions 9

On CUDA: tokens of ViT-Ti/4 (1024 × 64) and DeiT-Ti/16 (512 × 197), 192 channels, bfloat16 under autocast; forward
alone, and forward and backward with the gradients of x, the branch, γ and β, with and without DropPath's factor. The
baseline is x + keep·b and LayerNorm, compiled. "backward alone" is the same forward with our kernel for the backward
pass, as a first norm has it. --cuts tries other tiles, warps and numbers of programs, of the kernels alone, uncompiled.
Each variant is one CUDA graph that goes through four sets of inputs, so that none is found in the GPU's cache; variants
take turns beside the baseline. `tb_per_s` counts what must be read and written. On the CPU a toy size runs in Triton's
interpreter (TRITON_INTERPRET=1), which shows that the script runs, not what anything costs. Results go to
benchmarks/results, one CSV per device, dtype and versions.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from acutance.bench import results
from acutance.bench.floor import graphed
from acutance.bench.results import Row
from acutance.bench.timing import Candidate, Pace, Step, compare
from acutance.kernels import residual_norm, residual_norm_rows

RESULTS = Path(__file__).parent / "results"
SETS = 4
SHAPES = [(1024, 64, 192), (512, 197, 192)]
TOY = [(2, 5, 48)]
CASES = [(False, False), (False, True), (True, True)]  # DropPath, backward; inference drops nothing

Both = tuple[Tensor, Tensor]
Function = Callable[[Tensor, nn.LayerNorm, Tensor, Tensor | None], Both]


class Cut(NamedTuple):
    """How tokens are shared out: the constants of the two files."""

    tile: int = residual_norm.TILE
    programs: int = residual_norm.PROGRAMS
    forward_programs: int = residual_norm_rows.FORWARD_PROGRAMS
    warps: int = residual_norm_rows.WARPS
    stages: int = residual_norm_rows.STAGES

    def choose(self) -> None:
        residual_norm.TILE, residual_norm.PROGRAMS = self.tile, self.programs
        residual_norm_rows.FORWARD_PROGRAMS = self.forward_programs
        residual_norm_rows.WARPS, residual_norm_rows.STAGES = self.warps, self.stages


CUTS = [
    Cut(forward_programs=10**6),  # each program once, as many as it takes
    Cut(programs=264, stages=2),
    Cut(stages=2),
    Cut(programs=396, stages=3),
    Cut(tile=1024, programs=1056, forward_programs=1320, warps=4),
    Cut(tile=1024, programs=528, forward_programs=1320, warps=4, stages=2),
    Cut(tile=2048, programs=792, forward_programs=1188, warps=4),
    Cut(tile=4096, programs=264, forward_programs=396),
]


class Inputs(NamedTuple):
    x: Tensor
    branch: Tensor
    keep: Tensor | None
    grads: Both

    @classmethod
    def random(cls, shape: tuple[int, int, int], kept: bool, device: str, dtype: torch.dtype) -> "Inputs":
        x, branch, *grads = (torch.randn(shape, device=device, dtype=dtype) for _ in range(4))
        keep = (torch.rand(shape[0], 1, 1, device=device) < 0.9).to(dtype) / 0.9 if kept else None
        return cls(x.requires_grad_(), branch.requires_grad_(), keep, (grads[0], grads[1]))


def plain(x: Tensor, norm: nn.LayerNorm, branch: Tensor, keep: Tensor | None) -> Both:
    total = x + (branch if keep is None else branch * keep)
    return total, norm(total).to(x.dtype)


def ours(x: Tensor, norm: nn.LayerNorm, branch: Tensor, keep: Tensor | None) -> Both:
    return residual_norm.residual_norm(x, norm, branch, keep)


def backward_alone(x: Tensor, norm: nn.LayerNorm, branch: Tensor, keep: Tensor | None) -> Both:
    return residual_norm.residual_norm(x + (branch if keep is None else branch * keep), norm)


def step_of(function: Function, cut: Cut, sets: list[Inputs], backward: bool) -> Step:
    """All sets of inputs once: a CUDA graph where there is one."""
    cut.choose()
    device = sets[0].x.device.type
    norm = nn.LayerNorm(sets[0].x.shape[-1], eps=1e-6, device=device)
    run = function
    if cut == Cut():
        run = torch.compile(function, dynamic=False, backend="inductor" if device == "cuda" else "aot_eager")

    def step() -> None:
        for x, branch, keep, grads in sets:
            with torch.autocast(device, x.dtype, enabled=device == "cuda"), torch.set_grad_enabled(backward):
                found = run(x, norm, branch, keep)
            if backward:
                torch.autograd.grad(found, [x, branch, norm.weight, norm.bias], grads)

    return graphed(step, 1) if device == "cuda" else step


def candidates(sets: list[Inputs], backward: bool, cuts: list[Cut]) -> Iterator[Candidate]:
    on_gpu = sets[0].x.is_cuda
    make = partial(step_of, sets=sets, backward=backward)
    yield Candidate("compiled", partial(make, plain, Cut()), baseline=True, static=on_gpu)
    yield Candidate("ours", partial(make, ours, Cut()), static=on_gpu)
    if backward:
        yield Candidate("ours, backward alone", partial(make, backward_alone, Cut()), static=on_gpu)
    for cut in cuts:
        yield Candidate(f"ours, {cut}", partial(make, ours, cut), static=on_gpu)


def bytes_moved(inputs: Inputs, backward: bool) -> int:
    """Two tensors read and two written; backward three read, and one written or two."""
    tensors = 4 + (4 + (inputs.keep is not None) if backward else 0)
    return tensors * inputs.x.numel() * inputs.x.element_size()


def show(title: str, rows: list[Row]) -> None:
    print(f"\n{title}\n{'variant':<90}{'µs':>8}{'TB/s':>7}{'ratio':>8}")
    for row in (row for row in rows if "ms" in row):
        print(f"{row['variant']:<90}{1e3 * float(row['ms']):>8.1f}{row['tb_per_s']:>7}{row['ratio']:>8}", flush=True)


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuts", action="store_true", help="other tiles, warps and numbers of programs too")
    parser.add_argument("--repetitions", type=int, default=5 if on_gpu else 1)
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the CSV goes")
    arguments = parser.parse_args()
    device, dtype = ("cuda", "bfloat16") if on_gpu else ("cpu", "float32")
    shared = results.script_provenance("residual_norm.py")
    path = arguments.results / results.file_name("residual_norm", device, dtype)
    pace = Pace(arguments.repetitions, steps=25 if on_gpu else 1, warm_up=4 if on_gpu else 1, calls=SETS)
    done: list[Row] = []
    for shape, (kept, backward) in product(SHAPES if on_gpu else TOY, CASES):
        sets = [Inputs.random(shape, kept, device, getattr(torch, dtype)) for _ in range(SETS)]
        part = "forward and backward" if backward else "forward"
        case = {"part": part, "drop_path": kept, **dict(zip(("batch", "tokens", "channels"), shape, strict=True))}
        moved = bytes_moved(sets[0], backward)
        for rows in compare(list(candidates(sets, backward, CUTS if arguments.cuts else [])), pace, device):
            found = [
                {**case, **row, **({"tb_per_s": f"{moved / float(row['ms']) / 1e9:.2f}"} if "ms" in row else {})}
                for row in rows
            ]
            results.write_rows(path, done + found, shared)
        show(f"{part}, {shape}{', DropPath' * kept}", found)
        done += found
    Cut().choose()
    print(f"written to {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
