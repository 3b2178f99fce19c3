"""A linear layer and its GELU: PyTorch's, compiled, against the fused GELU, as ratios in one run.

    python benchmarks/gelu.py
    python benchmarks/gelu.py --only "GELU backward" --repetitions 9

On CUDA: 65,536 and 100,864 tokens, 192 to 768 channels (ViT-Ti/4 at batch 1024, DeiT-Ti/16 at batch 512; of this last
"training" alone), bfloat16. "GELU forward" and "GELU backward" are the passes over memory alone, the second with the
gradient of the bias, in several cuts: rows of a tile, warps, stages, registers, and rows that are summed up by one
program. "forward" and "training" are the linear layer and its GELU as a compiled model runs them, in autocast with
float32 weights. Ten calls are one CUDA graph; the variants take turns beside what inductor makes of PyTorch's GELU, and
ratios are taken within the pairs. GB/s count what has to be read and written: the GELU's tensors once each. On the CPU
a toy size runs uncompiled, ours in Triton's interpreter (TRITON_INTERPRET=1), which shows that the script runs, not
what anything costs. Results go to benchmarks/results, one CSV per device, dtype and versions.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from acutance.bench import results
from acutance.bench.floor import graphed
from acutance.bench.results import Row
from acutance.bench.timing import Candidate, Pace, Step, compare
from acutance.kernels import gelu, packed

RESULTS = Path(__file__).parent / "results"
CALLS = 10
PARTS = ("GELU forward", "GELU backward", "forward", "training")
# Elements of a program and warps; rows of a tile, warps, stages and registers; rows that a program sums up.
BLOCKS = [(2048, 4), (1024, 4), (4096, 8), (4096, 4)]
TILES = [(4, 4, 1, 48), (4, 4, 1, None), (8, 4, 1, 80), (8, 8, 1, 48), (4, 4, 3, None), (8, 4, 3, None)]
CHUNKS = [64, 128, 256]


class Shape(NamedTuple):
    """What is timed."""

    tokens: int
    inside: int
    hidden: int


SHAPES = [Shape(65536, 192, 768), Shape(100864, 192, 768)]
TOY = [Shape(70, 8, 24)]


class Inputs:
    """Tensors for one shape, shared by all candidates."""

    def __init__(self, shape: Shape, device: str, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.device, self.dtype = device, dtype
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.x = torch.randn(shape.tokens, shape.inside, **options).requires_grad_()
        self.weight = (torch.randn(shape.hidden, shape.inside, device=device) / shape.inside**0.5).requires_grad_()
        self.bias = torch.randn(shape.hidden, device=device).requires_grad_()
        self.pre, self.grad = (torch.randn(shape.tokens, shape.hidden, **options) for _ in range(2))


def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.linear(x, weight, bias))


def plain_gelu(pre: Tensor) -> Tensor:
    return F.gelu(pre)


def plain_backward(grad: Tensor, pre: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of what goes into the GELU, and that of the bias, as autograd makes them."""
    of_pre = torch.ops.aten.gelu_backward(grad, pre)
    return of_pre, of_pre.sum(0)


def our_backward(inputs: Inputs, tile: Any, chunk: int) -> tuple[Tensor, Tensor]:
    from acutance.kernels import gelu_tiles

    of_pre, sums = gelu_tiles.backward(inputs.grad, inputs.pre, True, gelu_tiles.Tile(*tile), chunk)
    return of_pre, sums.sum(0)


def our_forward(inputs: Inputs, block: tuple[int, int]) -> Tensor:
    from acutance.kernels import gelu_tiles

    return gelu_tiles.forward(inputs.pre, gelu_tiles.Block(*block))


def linear(inputs: Inputs, run: Callable[..., Tensor], training: bool) -> object:
    leaves = [inputs.x, inputs.weight, inputs.bias]
    with torch.set_grad_enabled(training), torch.autocast(inputs.device, inputs.dtype):
        out = run(*leaves)
    return torch.autograd.grad(out, leaves, inputs.grad) if training else out


def compiled(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False) if device == "cuda" else function


def ready(call: Step, inputs: Inputs, ours: bool) -> Step:
    """Several calls as one step; on the CPU one."""
    if ours and not packed.runs_on(inputs.x):
        raise RuntimeError("needs a Hopper GPU with Triton, or Triton's interpreter")
    return graphed(call, CALLS) if inputs.device == "cuda" else call


def calls_of(part: str, inputs: Inputs) -> Iterator[tuple[str, Step]]:
    """PyTorch's first."""
    by_compiler = partial(compiled, device=inputs.device)
    most = None if inputs.device == "cuda" else 1  # the interpreter is slow
    if part == "GELU forward":
        yield "PyTorch", partial(by_compiler(plain_gelu), inputs.pre)
        for block in BLOCKS[:most]:
            yield f"ours, {block}", partial(our_forward, inputs, block)
    elif part == "GELU backward":
        yield "PyTorch", partial(by_compiler(plain_backward), inputs.grad, inputs.pre)
        for tile, chunk in product(TILES[:most], CHUNKS[:most]):
            yield f"ours, {tile}, {chunk}", partial(our_backward, inputs, tile, chunk)
    else:
        yield "PyTorch", partial(linear, inputs, by_compiler(plain), part == "training")
        yield "ours", partial(linear, inputs, by_compiler(gelu.linear_gelu), part == "training")


def moved(part: str, shape: Shape, size: int) -> int | None:
    """Bytes that a pass has to read and write; None where products take most of the time."""
    tensors = {"GELU forward": 2, "GELU backward": 3}.get(part)
    return None if tensors is None else tensors * shape.tokens * shape.hidden * size


def timed(part: str, shape: Shape, inputs: Inputs, pace: Pace) -> list[Row]:
    candidates = [
        Candidate(name, partial(ready, call, inputs, name != "PyTorch"), baseline=name == "PyTorch", static=True)
        for name, call in calls_of(part, inputs)
    ]
    *_, rows = compare(candidates, pace, inputs.device)
    total = moved(part, shape, inputs.dtype.itemsize)
    for row in rows:
        if total is not None and "ms" in row:
            row["gb_per_second"] = f"{total / float(row['ms']) / 1e6:.0f}"
    return [{"part": part, **shape._asdict(), **row} for row in rows]


def show(rows: list[Row]) -> None:
    print(f"\n{rows[0]['part']}, {rows[0]['tokens']} tokens\n{'variant':<32}{'ms':>10}{'ratio':>9}{'GB/s':>9}")
    for row in (row for row in rows if "ms" in row):
        print(f"{row['variant']:<32}{row['ms']:>10}{row['ratio']:>9}{row.get('gb_per_second', ''):>9}", flush=True)


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--repetitions", type=int, default=5, help="on CUDA")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the CSV goes")
    arguments = parser.parse_args()
    device, dtype = ("cuda", "bfloat16") if on_gpu else ("cpu", "float16")
    shared = results.script_provenance("gelu.py")
    pace = Pace(arguments.repetitions, steps=5, warm_up=3, refresh=1, calls=CALLS) if on_gpu else Pace(1, 1, 1, 0)
    rows: list[Row] = []
    for shape in SHAPES if on_gpu else TOY:
        inputs = Inputs(shape, device, getattr(torch, dtype))
        parts = PARTS if shape is not SHAPES[-1] else PARTS[-1:]
        for part in (part for part in parts if arguments.only in (None, part)):
            found = timed(part, shape, inputs, pace)
            show(found)
            rows += found
            path = results.write_rows(arguments.results / results.file_name("gelu", device, dtype), rows, shared)
    print(f"written to {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
