"""Benchmarks of the fused attention and MLP, and floors: the least time for a kernel's bytes and FLOPs on this machine.

A floor counts each matrix product and each attention as one kernel, which reads its operands once and writes its result
once. It takes the time of its bytes or of its FLOPs, whichever is longer. The optimiser reads and writes once.
Everything else counts as free.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from acutance.attention.kernels import packed
from acutance.lab.bench.results import Row
from acutance.lab.bench.timing import Candidate, Settings, Step, Table, compare, repeat, seconds_per_step, unfused
from acutance.models import ViT
from acutance.models.block import Mlp

STRENGTH = 0.6
CALLS = 10  # in one CUDA graph, since the host's launches take longer than a kernel
ADAMW_BYTES = 28  # a parameter: itself, its gradient and two moments are read, all but the gradient written, in float32
Kernel = tuple[float, float]  # its bytes and FLOPs


@dataclass(frozen=True)
class Ceilings:
    """The machine's bandwidth and throughput, measured in the same run."""

    bytes_per_second: float
    flops_per_second: float

    def floor(self, bytes_moved: float, flops: float) -> float:
        """Seconds for the slower of the two, as if it hid the other."""
        return max(bytes_moved / self.bytes_per_second, flops / self.flops_per_second)

    def columns(self, kernels: Sequence[Kernel] = ()) -> Row:
        """The ceilings, and all bytes and FLOPs of the kernels, for a row of results."""
        moved, flops = (sum(column) for column in zip((0, 0), *kernels, strict=True))
        work = {"mbytes": f"{moved / 1e6:.1f}", "gflop": f"{flops / 1e9:.2f}"} if kernels else {}
        copied, multiplied = f"{self.bytes_per_second / 1e12:.3f}", f"{self.flops_per_second / 1e12:.1f}"
        return {**work, "copy_tb_per_s": copied, "matmul_tflop_per_s": multiplied}


def measured_ceilings(settings: Settings) -> Ceilings:
    """Time a copy of a large tensor, and a large matrix product in the dtype of the attention."""
    size, side = (2**29, 8192) if settings.on_gpu else (2**20, 128)
    source = torch.empty(size, dtype=torch.uint8, device=settings.device)
    target = torch.empty_like(source)
    a, b = (torch.randn(side, side, device=settings.device, dtype=settings.dtype) for _ in range(2))
    pace = settings.pace()

    def fastest(step: Step) -> float:
        seconds_per_step(step, pace.warm_up, settings.device)
        return min(seconds_per_step(step, pace.steps, settings.device) for _ in range(3))

    copy, product = fastest(lambda: target.copy_(source)), fastest(lambda: a @ b)
    return Ceilings(2 * size / copy, 2 * side**3 / product)


@dataclass(frozen=True)
class Problem:
    """Attention of one layer."""

    batch: int
    tokens: int
    heads: int = 3
    width: int = 64
    causal: bool = False

    def kernels(self, itemsize: int, *, training: bool, term: bool = False) -> list[Kernel]:
        """Forward, and in training backward. Every input is read once and every output written once.

        Forward reads q, k, v and v⁰ and writes u, with one log-sum per row in float32. Backward reads q, k, v, u and
        its gradient.
        """
        activation = self.batch * self.tokens * self.heads * self.width * itemsize
        sums = self.batch * self.heads * self.tokens * 4
        pairs = self.tokens * (self.tokens + 1) // 2 if self.causal else self.tokens**2
        product = 2 * self.batch * self.heads * pairs * self.width
        forward = (4 + term) * activation + sums, 2 * product
        backward = (8 + term) * activation + sums, 5 * product  # one of them recomputes the first product
        return [forward, backward] if training else [forward]


def linear(rows: int, inputs: int, outputs: int, itemsize: int, passes: int = 1) -> list[Kernel]:
    """(rows, inputs) · (inputs, outputs). Training has three passes: gradients of weights and of inputs too."""
    numbers = rows * inputs + inputs * outputs + rows * outputs
    return [(numbers * itemsize, 2 * rows * inputs * outputs)] * passes


def of_blocks(attention: Problem, hidden: int, depth: int, itemsize: int, *, training: bool) -> list[Kernel]:
    """The linear layers and the attention of all blocks."""
    rows, dim, passes = attention.batch * attention.tokens, attention.heads * attention.width, 3 if training else 1
    shapes = ((dim, 3 * dim), (dim, dim), (dim, hidden), (hidden, dim))
    products = [kernel for shape in shapes for kernel in linear(rows, *shape, itemsize, passes)]
    return (products + attention.kernels(itemsize, training=training)) * depth


def of_mlp(tokens: int, inside: int, hidden: int, itemsize: int, *, training: bool) -> list[Kernel]:
    """Both products in one kernel. Training keeps h, and recomputes GELU(h) where it computes dh."""
    ((moved, flops),) = linear(tokens, inside, hidden, itemsize)
    wide = tokens * hidden * itemsize
    both = 2 * (moved - wide)
    if not training:
        return [(both, 2 * flops)]
    return [(both + wide, 2 * flops), (moved + 2 * wide, flops), *[(moved, flops)] * 3]  # the last: dx, dW₁, dW₂


def of_vit(model: ViT, batch: int, itemsize: int, *, training: bool) -> list[Kernel]:
    """A ViT with a class token: patches, blocks, and a head that reads one token."""
    config = model.config
    patches, pixels = (config.image_size // config.patch_size) ** 2, config.in_chans * config.patch_size**2
    attention = Problem(batch, patches + 1, config.heads, config.dim // config.heads)
    return [
        *linear(batch * patches, pixels, config.dim, itemsize, 2 if training else 1),  # images have no gradient
        *of_blocks(attention, round(config.mlp_ratio * config.dim), config.depth, itemsize, training=training),
        *linear(batch, config.dim, config.num_classes, itemsize, 3 if training else 1),
        *([(ADAMW_BYTES * sum(p.numel() for p in model.parameters()), 0)] if training else []),
    ]


class PointwiseCounter(TorchDispatchMode):
    """Counts one operation per number that a pointwise operation returns. NeuTRENO's term is pointwise."""

    operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and count."""
        out = func(*args, **(kwargs or {}))
        if torch.Tag.pointwise in func.tags and isinstance(out, Tensor):
            self.operations += out.numel()
        return out


def count_flops(model: nn.Module, images: Tensor) -> tuple[int, int]:
    """The FLOPs of one forward pass: of matrix products and attention, and of pointwise operations."""
    # Attention by separate products: the counters cannot look into our kernel, nor into all of PyTorch's.
    with unfused, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        with FlopCounterMode(display=False) as products:
            model(images)
        with PointwiseCounter() as pointwise:  # type: ignore[no-untyped-call]
            model(images)
    return products.get_total_flops(), pointwise.operations


def with_floor(kernels: Sequence[Kernel], tables: Iterator[list[Row]], settings: Settings) -> Iterator[list[Row]]:
    """Rows, each with its time in units of the floor of these kernels, and the floor itself as the last row."""
    ceilings = measured_ceilings(settings)
    floor = 1e3 * sum(ceilings.floor(*kernel) for kernel in kernels)
    for rows in tables:
        plain = next((row["ms"] for row in rows if row.get("note", "").startswith("the baseline")), None)
        ratio = f"{floor / float(plain):.4f}" if plain else ""
        last = {"variant": "floor of the plain model", "mode": "", "ms": f"{floor:.4f}", "ratio": ratio}
        found = [{**row, "times_floor": f"{float(row['ms']) / floor:.2f}"} if "ms" in row else row for row in rows]
        yield [*found, {**last, **ceilings.columns(kernels)}]


PROBLEMS = (Problem(1024, 64), Problem(1024, 65), Problem(512, 197))  # without and with a class token
LONG = (Problem(8, 2048, 16, causal=True), Problem(2, 8192, 16, causal=True))
TOY = (Problem(2, 5, 2, 16), Problem(2, 5, 2, 16, causal=True))
MLPS = ((1024 * 64, 192, 768), (512 * 196, 192, 768))  # tokens and channels: ViT-Ti/4, DeiT-Ti/16
TOY_MLPS = ((10, 64, 128),)


@dataclass(frozen=True)
class Work:
    """A call, the leaves that its backward pass gives gradients for, and the least kernels it takes."""

    call: Callable[[], Tensor]
    leaves: Sequence[Tensor]
    kernels: Sequence[Kernel]


def tables(settings: Settings) -> Iterator[Table]:
    """A table per attention and per MLP: forward alone, and with the backward pass."""
    passes = {"forward": False, "forward and backward": True}
    for p, (what, backward) in product(PROBLEMS + LONG if settings.on_gpu else TOY, passes.items()):
        title = f"attention, batch {p.batch}, {p.tokens} tokens, {p.heads} heads of width {p.width}"
        yield f"{title}{', causal' * p.causal}, {what}", _rows(partial(attentions, p, backward, settings), settings)
    for sizes, (what, backward) in product(MLPS if settings.on_gpu else TOY_MLPS, passes.items()):
        title = "MLP, {} tokens, {} to {} channels".format(*sizes)
        yield f"{title}, {what}", _rows(partial(mlps, *sizes, backward, settings), settings)


def _rows(make: Callable[[], Mapping[str, Work]], settings: Settings) -> Iterator[list[Row]]:
    """Each variant against the first, with its time in units of the floor of its own work."""
    works, ceilings = make(), measured_ceilings(settings)

    def step(work: Work) -> Step:
        gradient = torch.randn_like(work.call()) if work.leaves else None

        def once() -> None:
            with torch.set_grad_enabled(bool(work.leaves)):
                out = work.call()
            if work.leaves:
                torch.autograd.grad(out, work.leaves, gradient)

        return graphed(once, CALLS) if settings.on_gpu else partial(repeat, once, CALLS)

    candidates = [
        Candidate(name, partial(step, work), baseline=name == next(iter(works)), static=settings.on_gpu)
        for name, work in works.items()
    ]
    for rows in compare(candidates, settings.pace(steps=10, calls=CALLS), settings.device):
        for row in rows:
            kernels = works[row["variant"]].kernels
            floor = 1e3 * sum(ceilings.floor(*kernel) for kernel in kernels)
            row["floor_ms"] = f"{floor:.4f}"
            row["times_floor"] = f"{float(row['ms']) / floor:.2f}" if "ms" in row else ""
            row |= ceilings.columns(kernels)
        yield rows


def _compiled(run: Callable[..., Tensor], settings: Settings) -> Callable[..., Tensor]:
    return torch.compile(run, dynamic=False) if settings.on_gpu else run


def attentions(problem: Problem, backward: bool, settings: Settings) -> dict[str, Work]:
    """SDPA and the fused kernel, each plain and with NeuTRENO's term."""
    draw = partial(torch.randn, problem.batch, problem.tokens, device=settings.device, dtype=settings.dtype)
    dim, scale = problem.heads * problem.width, problem.width**-0.5
    qkv, first = draw(3 * dim, requires_grad=backward), draw(dim, requires_grad=backward)
    fused = {"fused kernel": packed.attention} if packed.is_available(qkv, problem.heads) else {}
    works = {}
    for (name, attention), term in product({"SDPA": sdpa, **fused}.items(), (False, True)):
        given = (first, STRENGTH) if term else (None, 0.0)
        call = partial(_compiled(attention, settings), qkv, problem.heads, scale, *given, problem.causal)
        leaves = [qkv, first][: 1 + term] if backward else []
        kernels = problem.kernels(settings.dtype.itemsize, training=backward, term=term)
        works[f"{name}, {'with the term' if term else 'plain'}"] = Work(call, leaves, kernels)
    return works


def mlps(tokens: int, inside: int, hidden: int, backward: bool, settings: Settings) -> dict[str, Work]:
    """PyTorch's layers, and our module made of them, in autocast. Ours is one kernel where that is available."""
    ours = Mlp(inside, hidden, 0.0).to(settings.device)
    plain = nn.Sequential(ours.fc1, ours.act, ours.fc2)  # which never asks for our kernel
    x = torch.randn(tokens, inside, device=settings.device, dtype=settings.dtype, requires_grad=backward)
    autocast = torch.autocast(x.device.type, settings.dtype, enabled=settings.on_gpu)
    leaves = [x, *ours.parameters()] if backward else []
    kernels = of_mlp(tokens, inside, hidden, settings.dtype.itemsize, training=backward)
    return {
        name: Work(autocast(partial(_compiled(module, settings), x)), leaves, kernels)
        for name, module in {"PyTorch": plain, "ours": ours}.items()
    }


def sdpa(
    qkv: Tensor, heads: int, scale: float, first: Tensor | None = None, strength: float = 0.0, causal: bool = False
) -> Tensor:
    """The same as `packed.attention`, in plain PyTorch."""
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    u = F.scaled_dot_product_attention(q, k, v, scale=scale, is_causal=causal).transpose(1, 2).flatten(2)
    return u if first is None else u + strength * (first - v.transpose(1, 2).flatten(2))


def graphed(step: Step, calls: int) -> Step:
    """This many calls as one CUDA graph, after a warm-up on a side stream, which capturing requires."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        repeat(step, 3)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        repeat(step, calls)
    return graph.replay
