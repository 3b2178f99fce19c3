"""The cost of NeuTRENO in a causal language model, against the plain model with each of SDPA's fast back-ends."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from acutance.attention.kernels import packed
from acutance.lab.bench.floor import ADAMW_BYTES, Kernel, Problem, linear, of_blocks, with_floor
from acutance.lab.bench.results import Row
from acutance.lab.bench.timing import Candidate, Settings, Step, Table, compare, training_step, unfused
from acutance.models import LanguageModel

NEUTRENO = "neutreno:0.4"
BACKENDS = {"SDPA flash": SDPBackend.FLASH_ATTENTION, "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION}


@dataclass(frozen=True)
class Size:
    """The size of model and batch; heads have width 64."""

    tokens: int
    batch: int
    heads: int = 12
    depth: int = 6
    vocabulary: int = 8192

    @property
    def dim(self) -> int:
        return 64 * self.heads

    @property
    def parameters(self) -> int:
        """The number of parameters without norms and biases."""
        return self.dim * (self.vocabulary + self.depth * 12 * self.dim)

    def kernels(self, itemsize: int, *, training: bool) -> list[Kernel]:
        """The kernels of the blocks, and of a softmax that shares the embedding's weights."""
        attention = Problem(self.batch, self.tokens, self.heads, causal=True)
        blocks = of_blocks(attention, 4 * self.dim, self.depth, itemsize, training=training)
        words = linear(self.batch * self.tokens, self.dim, self.vocabulary, itemsize, 3 if training else 1)
        return [*blocks, *words, *([(ADAMW_BYTES * self.parameters, 0)] if training else [])]


SIZES = (Size(tokens=2048, batch=16), Size(tokens=8192, batch=4))
TOY = (Size(tokens=16, batch=2, heads=1, depth=2, vocabulary=50),)


def tables(settings: Settings) -> list[Table]:
    """One table per length."""
    sizes = SIZES if settings.on_gpu else TOY
    title = "causal LM, {0.tokens} tokens, batch {0.batch}, {0.depth} layers of {0.dim} channels, training"
    return [(title.format(size), _rows(size, settings)) for size in sizes]


def _rows(size: Size, settings: Settings) -> Iterator[list[Row]]:
    found = compare(candidates(size, settings), settings.pace(), settings.device)
    yield from with_floor(size.kernels(settings.dtype.itemsize, training=True), found, settings)


def candidates(size: Size, settings: Settings) -> list[Candidate]:
    """The plain model with each back-end (flash is the baseline), then plain and NeuTRENO with our kernel, or SDPA."""
    mode = settings.modes[0]  # these steps are long, so the host's launches do not matter
    probe = torch.empty(1, size.tokens, 3 * size.dim, device=settings.device, dtype=settings.dtype)
    fused = packed.is_available(probe, size.heads)
    plain, neutreno = (partial(_step, size, settings, mode, spec) for spec in (None, NEUTRENO))
    found = {f"plain, {name}": partial(plain, backend) for name, backend in BACKENDS.items()}
    found |= {"plain, fused kernel": plain} if fused else {}
    found["NeuTRENO, fused kernel" if fused else "NeuTRENO, SDPA"] = neutreno
    return [Candidate(name, make, mode, baseline=name == "plain, SDPA flash") for name, make in found.items()]


def _step(size: Size, settings: Settings, mode: str, spec: str | None, backend: SDPBackend | None = None) -> Step:
    sizes = {"vocabulary": size.vocabulary, "dim": size.dim, "depth": size.depth, "hidden": 4 * size.dim}
    model = LanguageModel(**sizes, mitigation=spec, heads=size.heads, cutoffs=(), dropout=0.0)
    words = torch.randint(size.vocabulary, (size.batch, size.tokens + 1), device=settings.device)
    run = model if backend is None else WithBackend(model, backend)
    step = training_step(run, [words[:, :-1], words[:, 1:]], torch.mean, mode=mode, dtype=settings.dtype)
    return step if backend is None else unfused(step)


class WithBackend(nn.Module):
    """A model with one attention back-end, chosen inside the compiled code, which all models of a class share."""

    def __init__(self, model: nn.Module, backend: SDPBackend) -> None:
        super().__init__()
        self.model, self.backend = model, backend

    def forward(self, *inputs: Tensor) -> Tensor:
        with sdpa_kernel(self.backend):
            out: Tensor = self.model(*inputs)
        return out
