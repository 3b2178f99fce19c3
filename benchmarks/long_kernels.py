"""Attention with the correction at 2048 and 8192 tokens: tiles of our kernels against SDPA, in TFLOP/s.

    python benchmarks/long_kernels.py
    python benchmarks/long_kernels.py --only forward --repetitions 9

On CUDA: 16,384 tokens in all, 16 heads 64 wide, bfloat16, causal, at 2048 and 8192 tokens, and once with 4 heads of
keys and values; then heads of other widths with the tables' tiles alone. Every candidate is timed in pairs beside
SDPA's flash attention, forward and backward on their own. SDPA gets q, k and v as the projection leaves them (views),
its back-ends one by one, plain and with λ (v⁰ − v) added as PyTorch would; its backward pass ends in the gradients of
q, k and v, not yet side by side. Counted are the FLOPs of attention alone, half of them as it is causal, and 2.5 times
as many backward. On the CPU a toy size runs in Triton's interpreter (TRITON_INTERPRET=1), which shows that the script
runs, not what anything costs. Results go to benchmarks/results, one CSV per device, dtype and versions.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from acutance.attention.kernels import long_backward, long_forward
from acutance.attention.kernels.long_tiles import Tile
from acutance.lab.bench import results
from acutance.lab.bench.results import Row
from acutance.lab.bench.timing import Candidate, Pace, Step, compare

STRENGTH = 0.6
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


class Tiles(NamedTuple):
    """Those to try, of each kernel; the first is what stands while another kernel's are tried."""

    forward: list[Tile]
    over_queries: list[Tile]
    over_keys: list[Tile]

    def first(self, count: int) -> "Tiles":
        return Tiles(*(tiles[:count] for tiles in self))


def tiles(first: Tile, others: str) -> list[Tile]:
    """Each once: that of the tables comes first, and may be among the others too."""
    return list(dict.fromkeys([first, *(Tile(*map(int, sizes.split())) for sizes in others.split(","))]))


# Queries, keys, warps, stages, registers.
TILES = Tiles(
    tiles(
        long_forward.TILES[2, 64],
        "128 64 8 3 128, 128 64 4 3, 128 64 8 4 128, 128 128 8 2, 256 64 8 3, 64 64 4 3 128",
    ),
    tiles(long_backward.QUERY_TILES[2, 64], "128 64 8 3 128, 128 64 8 2 128, 128 32 8 4 128, 128 64 8 3, 128 128 8 2"),
    tiles(long_backward.KEY_TILES[2, 64], "64 128 8 3, 32 128 8 3 128, 64 128 8 2, 32 128 8 4 128, 64 64 4 3"),
)
SMALL = Tiles([Tile(64, 32)], [Tile(64, 32)], [Tile(32, 64)])


class Shape(NamedTuple):
    """What is timed."""

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    width: int
    causal: bool = True

    def flops(self) -> float:
        """Of the two products forward."""
        return 4 * self.batch * self.heads * self.tokens**2 * self.width / (2 if self.causal else 1)


def of_tables(width: int) -> Tiles:
    """The tiles in use for 16 bits."""
    tables = (long_forward.TILES, long_backward.QUERY_TILES, long_backward.KEY_TILES)
    return Tiles(*([table[2, width]] for table in tables))


CASES = [
    (Shape(8, 2048, 16, 16, 64), TILES),
    (Shape(2, 8192, 16, 16, 64), TILES),
    (Shape(2, 8192, 16, 4, 64), TILES.first(2)),
    *((Shape(8, 2048, 1024 // width, 1024 // width, width), of_tables(width)) for width in (16, 32, 128)),
]
TOY = [(Shape(1, 70, 2, 1, 16), SMALL)]


@dataclass
class Inputs:
    """Tensors for one shape, shared by all candidates."""

    shape: Shape
    qkv: Tensor
    first: Tensor
    grad: Tensor

    @classmethod
    def random(cls, shape: Shape, device: str, dtype: torch.dtype) -> "Inputs":
        """Normal numbers."""
        torch.manual_seed(0)
        batch, tokens, heads, kv_heads, width, _ = shape
        draw = partial(torch.randn, batch, tokens, device=device, dtype=dtype)
        qkv, before = (draw((heads + 2 * kv_heads) * width) for _ in range(2))
        return cls(shape, qkv, before[..., -kv_heads * width :], draw(heads * width))

    def options(self) -> dict[str, Any]:
        """As the kernels take them: a correction of constant strength, and nothing else."""
        shape = self.shape
        return {
            **dict.fromkeys(("strength", "contrast", "residual")),
            "constant": STRENGTH,
            "heads": shape.heads,
            "kv_heads": shape.kv_heads,
            "scale": shape.width**-0.5,
            "causal": shape.causal,
        }

    def ours(self, tile: Tile | None = None) -> tuple[Tensor, Tensor]:
        """u and log-sums."""
        return long_forward.forward(self.qkv, self.first, **self.options(), tile=tile)

    def theirs(self, leaves: list[Tensor], backend: SDPBackend, corrected: bool) -> Tensor:
        """u by SDPA."""
        q, k, v = leaves
        group = self.shape.heads // self.shape.kv_heads
        with sdpa_kernel(backend):
            u = scaled_dot_product_attention(q, k, v, is_causal=self.shape.causal, enable_gqa=group > 1)
        if corrected:
            first = self.first.unflatten(-1, (-1, self.shape.width)).transpose(1, 2)
            pull = STRENGTH * (first - v)
            u = u + (pull.repeat_interleave(group, 1) if group > 1 else pull)
        return u.transpose(1, 2).flatten(2)

    def leaves(self) -> list[Tensor]:
        """q, k and v (batch, heads, tokens, width), views of what the projection leaves."""
        heads, kv_heads, width = self.shape.heads, self.shape.kv_heads, self.shape.width
        split = self.qkv.unflatten(-1, (-1, width)).transpose(1, 2).split([heads, kv_heads, kv_heads], 1)
        return [part.detach().requires_grad_() for part in split]


def made(step: Step) -> Callable[[], Step]:
    return lambda: step


def name_of(kernel: str, tile: Tile) -> str:
    return f"{kernel} " + " ".join(str(size) for size in tile if size is not None)


def forward_steps(inputs: Inputs, tiles: Tiles) -> Iterator[tuple[str, Callable[[], Step]]]:
    leaves = [leaf.detach() for leaf in inputs.leaves()]
    for backend, corrected in product(BACKENDS, (False, True)):
        step = partial(inputs.theirs, leaves, BACKENDS[backend], corrected)
        yield f"SDPA {backend}{' + correction' * corrected}", made(step)
    for tile in tiles.forward:
        yield name_of("ours", tile), made(partial(inputs.ours, tile))


def backward_steps(inputs: Inputs, tiles: Tiles) -> Iterator[tuple[str, Callable[[], Step]]]:
    """SDPA's whole backward pass; ours; ours with one of its two kernels cut in another way."""
    for backend, corrected in product(BACKENDS, (False, True)):
        make = partial(their_backward, inputs, BACKENDS[backend], corrected)
        yield f"SDPA {backend}{' + correction' * corrected}", make
    out, log_sums = inputs.ours(tiles.forward[0])
    given = {"grad": inputs.grad, "later": None, "qkv": inputs.qkv, "first": inputs.first}
    ours = partial(long_backward.backward, **given, out=out, log_sums=log_sums, **inputs.options())
    queries, keys = tiles.over_queries[0], tiles.over_keys[0]
    both = f"{name_of('ours, over queries', queries)}, {name_of('over keys', keys)}"
    yield both, made(partial(ours, query_tile=queries, key_tile=keys))
    for tile in tiles.over_queries[1:]:
        yield name_of("ours, over queries", tile), made(partial(ours, query_tile=tile, key_tile=keys))
    for tile in tiles.over_keys[1:]:
        yield name_of("ours, over keys", tile), made(partial(ours, query_tile=queries, key_tile=tile))


def their_backward(inputs: Inputs, backend: SDPBackend, corrected: bool) -> Step:
    leaves = inputs.leaves()
    u = inputs.theirs(leaves, backend, corrected)
    return lambda: torch.autograd.grad(u, leaves, inputs.grad, retain_graph=True)


def rows_of(steps: Iterator[tuple[str, Callable[[], Step]]], flops: float, pace: Pace, device: str) -> list[Row]:
    """Each beside SDPA's flash attention; one that cannot run says why."""
    candidates = [Candidate(name, make, baseline=name == "SDPA flash", static=True) for name, make in steps]
    *_, rows = compare(candidates, pace, device)
    for row in (row for row in rows if "ms" in row):
        row["tflops"] = f"{flops / float(row['ms']) / 1e9:.1f}"
    return rows


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = results.script_parser(__doc__, device=False)
    parser.add_argument("--only", choices=["forward", "backward"])
    parser.add_argument("--repetitions", type=int, default=5 if on_gpu else 1)
    arguments = parser.parse_args()
    device, dtype = ("cuda", "bfloat16") if on_gpu else ("cpu", "float32")
    pace = Pace(arguments.repetitions, steps=5 if on_gpu else 1, warm_up=2, refresh=1 if on_gpu else 0)
    rows: list[Row] = []
    for shape, tiles in CASES if on_gpu else TOY:
        inputs = Inputs.random(shape, device, getattr(torch, dtype))
        parts = {"forward": (forward_steps, shape.flops()), "backward": (backward_steps, 2.5 * shape.flops())}
        for part, (candidates, flops) in parts.items():
            if arguments.only in (None, part):
                found = rows_of(candidates(inputs, tiles), flops, pace, device)
                print(f"\n{part}, {shape}")
                results.show(found, "variant", "ms", "tflops", "ratio", "note")
                rows += [{"part": part, **shape._asdict(), **row} for row in found]
                print(results.script_rows("long_kernels", rows, arguments.results, device, dtype))


if __name__ == "__main__":
    main()
