"""An MLP in one kernel forwards, with its GELU inside the products backwards: ours against PyTorch's, in one run.

    python benchmarks/mlp.py
    python benchmarks/mlp.py --only backward --repetitions 9

On CUDA: 65,536 and 100,352 tokens, 192 to 768 channels and back (ViT-Ti/4 at batch 1024, DeiT-Ti/16 at batch 512, both
without their class tokens), bfloat16. "training" is the whole MLP, forward and backward, as a compiled model runs it,
in autocast with float32 weights: PyTorch's layers and `kernels.mlp`; "inference" the same without gradients. "forward"
and "backward" are the kernels by themselves in several cuts (tokens and channels of a tile, warps, stages, programs,
registers), at the first size, beside PyTorch's operations, which are not compiled there. Ten calls are one CUDA graph;
the variants take turns beside PyTorch's, and ratios are taken within the pairs. `floor_ms` is what reading and writing
every tensor of every product once takes at the speed of a copy, or its products at that of a large one where that is
longer, both measured in the same run; `gb_per_second` counts those bytes. On the CPU a toy size runs uncompiled, ours
in Triton's interpreter (TRITON_INTERPRET=1), which shows that the script runs, not what anything costs. Results go to
benchmarks/results, one CSV per device, dtype and versions.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from acutance.attention.kernels import packed
from acutance.lab.bench import results
from acutance.lab.bench.floor import Ceilings, graphed, measured_ceilings
from acutance.lab.bench.results import Row
from acutance.lab.bench.timing import Candidate, Pace, Settings, Step, compare
from acutance.models.block import Mlp
from acutance.models.kernels import mlp
from acutance.models.kernels.mlp import Tile

CALLS = 10
PARTS = ("training", "inference", "forward", "backward")
FORWARD = [(128, 64, 8, 2), (128, 64, 8, 1), (128, 32, 8, 3), (64, 64, 4, 2)]
BACKWARD = [(64, 128, 4, 1, 10**6, 168), (64, 64, 4, 2, 264, 128), (128, 64, 4, 1, 396, 168)]
BACKWARD += [(128, 128, 8, 1, 264, 128), (64, 64, 4, 1, 528, 128)]
TILES = {
    "forward": [mlp.FORWARD, *(Tile(*sizes) for sizes in FORWARD), Tile(64, 64, 4, 1, registers=168)],
    "backward": [mlp.BACKWARD, *(Tile(*sizes) for sizes in BACKWARD)],
}


class Shape(NamedTuple):
    """What is timed."""

    tokens: int
    inside: int
    hidden: int

    def passes(self, part: str, size: int) -> list[tuple[int, int]]:
        """Bytes and FLOPs of each product: what it reads and writes once, what is done to it on the way included."""
        narrow, wide, weight = (
            a * b * size for a, b in ((self.tokens, self.inside), (self.tokens, self.hidden), self[1:])
        )
        flops = 2 * self.tokens * self.inside * self.hidden
        both = (2 * (narrow + weight), 2 * flops)
        both_kept = (both[0] + wide, both[1])
        made_again = (narrow + 3 * wide + weight, flops)
        plain = (narrow + wide + weight, flops)
        return {
            "training": [both_kept, made_again, plain, plain, plain],  # the last: dx and two gradients of weights
            "inference": [both],
            "forward": [both_kept],
            "backward": [made_again],
        }[part]


SHAPES = [Shape(1024 * 64, 192, 768), Shape(512 * 196, 192, 768)]
TOY = [Shape(70, 64, 128)]


class Inputs:
    """Tensors for one shape, shared by all candidates."""

    def __init__(self, shape: Shape, device: str, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.device, self.dtype = device, dtype
        draw = partial(torch.randn, device=device, dtype=dtype)
        self.layers = Mlp(shape.inside, shape.hidden, 0.0).to(device)
        self.x = draw(shape.tokens, shape.inside).requires_grad_()
        self.grad = draw(shape.tokens, shape.inside)
        self.pre = draw(shape.tokens, shape.hidden)
        self.up, self.down = (layer.weight.detach().to(dtype) for layer in (self.layers.fc1, self.layers.fc2))
        self.bias, self.last_bias = (layer.bias.detach().to(dtype) for layer in (self.layers.fc1, self.layers.fc2))


def training(inputs: Inputs, run: Callable[[Tensor], Tensor]) -> object:
    with torch.autocast(inputs.device, inputs.dtype):
        out = run(inputs.x)
    return torch.autograd.grad(out, [inputs.x, *inputs.layers.parameters()], inputs.grad)


def inference(inputs: Inputs, run: Callable[[Tensor], Tensor]) -> object:
    with torch.no_grad(), torch.autocast(inputs.device, inputs.dtype):
        return run(inputs.x)


def plain_forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    pre = F.linear(inputs.x.detach(), inputs.up, inputs.bias)
    return F.linear(F.gelu(pre), inputs.down, inputs.last_bias), pre


def plain_backward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """PyTorch has GELU(h) from the forward pass."""
    of_pre = torch.ops.aten.gelu_backward(inputs.grad @ inputs.down, inputs.pre)
    return of_pre, of_pre.sum(0)


def our_forward(inputs: Inputs, tile: Tile) -> object:
    from acutance.models.kernels import mlp_tiles

    out, pre = torch.empty_like(inputs.x.detach()), torch.empty_like(inputs.pre)
    layers = (inputs.up, inputs.bias, inputs.down, inputs.last_bias)
    mlp_tiles.forward(inputs.x.detach(), *layers, out, pre, tile)
    return out, pre


def our_backward(inputs: Inputs, tile: Tile) -> object:
    from acutance.models.kernels import mlp_tiles

    tokens, hidden = inputs.pre.shape
    of_pre, again = torch.empty_like(inputs.pre), torch.empty_like(inputs.pre)
    sums = torch.empty(-(-tokens // tile.rows), hidden, device=inputs.device)
    mlp_tiles.backward(inputs.grad, inputs.down, inputs.pre, of_pre, sums, again, tile)
    return of_pre, sums.sum(0), again


def calls_of(part: str, inputs: Inputs) -> Iterator[tuple[str, Step]]:
    """PyTorch's first."""
    on_gpu = inputs.device == "cuda"
    if part in ("training", "inference"):
        layers, call = inputs.layers, training if part == "training" else inference
        plain_layers = nn.Sequential(layers.fc1, layers.act, layers.fc2)  # in which no kernel of ours is asked for
        for name, module in {"PyTorch": plain_layers, "ours": layers}.items():
            run: Any = torch.compile(module, dynamic=False) if on_gpu else module
            yield name, partial(call, inputs, run)
        return
    plain, ours = {"forward": (plain_forward, our_forward), "backward": (plain_backward, our_backward)}[part]
    yield "PyTorch", partial(plain, inputs)
    for tile in TILES[part][: None if on_gpu else 2]:  # the interpreter is slow
        yield f"ours, {tuple(tile)}", partial(ours, inputs, tile if on_gpu else tile._replace(programs=2))


def ready(call: Step, inputs: Inputs, ours: bool) -> Step:
    """Several calls as one step; on the CPU one."""
    if ours and not packed.runs_on(inputs.x):
        raise RuntimeError("needs a Hopper GPU with Triton, or Triton's interpreter")
    return graphed(call, CALLS) if inputs.device == "cuda" else call


def rows_of(part: str, shape: Shape, inputs: Inputs, pace: Pace, ceilings: Ceilings) -> list[Row]:
    candidates = [
        Candidate(name, partial(ready, call, inputs, name != "PyTorch"), baseline=name == "PyTorch", static=True)
        for name, call in calls_of(part, inputs)
    ]
    *_, rows = compare(candidates, pace, inputs.device)
    passes = shape.passes(part, inputs.dtype.itemsize)
    floor = 1e3 * sum(ceilings.floor(*each) for each in passes)
    for row in (row for row in rows if "ms" in row):
        row["floor_ms"] = f"{floor:.4f}"
        row["times_floor"] = f"{float(row['ms']) / floor:.2f}"
        row["gb_per_second"] = f"{sum(moved for moved, _ in passes) / float(row['ms']) / 1e6:.0f}"
    return [{"part": part, **shape._asdict(), **row, **ceilings.columns()} for row in rows]


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = results.script_parser(__doc__, device=False)
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--repetitions", type=int, default=5, help="on CUDA")
    arguments = parser.parse_args()
    device, name = ("cuda", "bfloat16") if on_gpu else ("cpu", "float16")
    pace = Pace(arguments.repetitions, steps=5, warm_up=3, refresh=1, calls=CALLS) if on_gpu else Pace(1, 1, 1, 0)
    ceilings = measured_ceilings(Settings(device))
    rows: list[Row] = []
    for shape in SHAPES if on_gpu else TOY:
        inputs = Inputs(shape, device, getattr(torch, name))
        parts = PARTS if shape is not SHAPES[-1] else PARTS[:2]
        for part in (part for part in parts if arguments.only in (None, part)):
            found = rows_of(part, shape, inputs, pace, ceilings)
            results.show(found, "part", "tokens", "variant", "ms", "ratio", "times_floor", "gb_per_second", "note")
            rows += found
            print(results.script_rows("mlp", rows, arguments.results, device, name))


if __name__ == "__main__":
    main()
