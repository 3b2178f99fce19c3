"""The floor of a whole step: every product of matrices at what this machine can do, and all else hidden in them.

A product, or an attention, is one kernel: it reads its operands once and writes its result once, and takes the longer
of what its bytes and its FLOPs take. Norms, activations and residual sums are taken to cost nothing beside them. The
optimiser reads and writes its numbers once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from acutance.lab.bench.floor import Problem, measured_ceilings
from acutance.lab.bench.results import Row
from acutance.lab.bench.settings import Settings
from acutance.models import ViT

ADAMW_BYTES = 28  # a parameter: itself, its gradient and two moments are read, all but the gradient written, in float32


@dataclass(frozen=True)
class Product:
    """(rows, inputs) · (inputs, outputs), a linear layer; `passes` in training: gradients of weights and of inputs."""

    rows: int
    inputs: int
    outputs: int
    passes: int = 3

    def numbers(self) -> int:
        """Of both operands and the result; the same for each of the passes."""
        return self.rows * self.inputs + self.inputs * self.outputs + self.rows * self.outputs

    def flops(self) -> int:
        """Of one pass."""
        return 2 * self.rows * self.inputs * self.outputs


@dataclass(frozen=True)
class Work:
    """What a step of a Transformer is made of."""

    products: Sequence[Product]
    attentions: Sequence[Problem]
    parameters: int

    def kernels(self, itemsize: int, *, training: bool) -> Iterator[tuple[float, float]]:
        """Bytes and FLOPs of each."""
        for product in self.products:
            for _ in range(product.passes if training else 1):
                yield product.numbers() * itemsize, product.flops()
        for attention in self.attentions:
            forward = attention.bytes_moved(itemsize, term=False, backward=False), attention.flops(backward=False)
            yield forward
            if training:
                both = attention.bytes_moved(itemsize, term=False, backward=True), attention.flops(backward=True)
                yield both[0] - forward[0], both[1] - forward[1]
        if training:
            yield ADAMW_BYTES * self.parameters, 0


def of_blocks(attention: Problem, hidden: int, depth: int) -> list[Product]:
    """The linear layers of all blocks."""
    rows, dim = attention.batch * attention.tokens, attention.heads * attention.width
    shapes = ((dim, 3 * dim), (dim, dim), (dim, hidden), (hidden, dim))
    return [Product(rows, *shape) for shape in shapes] * depth


def of_vit(model: ViT, batch: int) -> Work:
    """A ViT with a class token: patches, blocks, and a head that reads one token."""
    config = model.config
    patches = (config.image_size // config.patch_size) ** 2
    attention = Problem(batch, patches + 1, config.heads, config.dim // config.heads)
    pixels = config.in_chans * config.patch_size**2
    products = [
        Product(batch * patches, pixels, config.dim, passes=2),  # images have no gradient
        *of_blocks(attention, round(config.mlp_ratio * config.dim), config.depth),
        Product(batch, config.dim, config.num_classes),
    ]
    return Work(products, [attention] * config.depth, sum(p.numel() for p in model.parameters()))


class StepFloor:
    """Of a step on this machine, whose ceilings are measured now."""

    def __init__(self, work: Work, settings: Settings, *, training: bool) -> None:
        self.kernels = list(work.kernels(settings.dtype.itemsize, training=training))
        self.ceilings = measured_ceilings(settings)
        self.ms = 1e3 * sum(self.ceilings.floor(*kernel) for kernel in self.kernels)

    def beside(self, rows: Sequence[Row]) -> list[Row]:
        """The rows, each with how far it is from the floor, and the floor as the last of them."""
        found = [{**row, "times_floor": f"{float(row['ms']) / self.ms:.2f}"} if "ms" in row else row for row in rows]
        plain = next((row["ms"] for row in rows if row.get("note", "").startswith("the baseline")), None)
        return [*found, self._row(plain)]

    def _row(self, baseline_ms: str | None) -> Row:
        moved, flops = (sum(column) for column in zip(*self.kernels, strict=True))
        return {
            "variant": "floor of the plain model",
            "mode": "",
            "ms": f"{self.ms:.4f}",
            "ratio": f"{self.ms / float(baseline_ms):.4f}" if baseline_ms else "",
            "mbytes": f"{moved / 1e6:.1f}",
            "gflop": f"{flops / 1e9:.2f}",
            **self.ceilings.columns(),
        }
