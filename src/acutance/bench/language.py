"""What NeuTRENO costs a causal language model, whose attention is SDPA's with and without the term."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from acutance.bench.results import Row
from acutance.bench.settings import Settings, Table
from acutance.bench.timing import Candidate, Step, compare
from acutance.bench.work import training_step
from acutance.models import LanguageModel

NEUTRENO = "neutreno:0.4"


@dataclass(frozen=True)
class Size:
    """Of model and batch; heads have width 64."""

    tokens: int
    batch: int
    heads: int = 12
    depth: int = 6
    vocabulary: int = 8192

    @property
    def dim(self) -> int:
        """Channels."""
        return 64 * self.heads


SIZES = (Size(tokens=2048, batch=16), Size(tokens=8192, batch=4))
TOY = (Size(tokens=16, batch=2, heads=1, depth=2, vocabulary=50),)


def tables(settings: Settings) -> list[Table]:
    """One per length."""
    sizes = SIZES if settings.on_gpu else TOY
    title = "causal LM, {0.tokens} tokens, batch {0.batch}, {0.depth} layers of {0.dim} channels, training"
    return [Table(title.format(size), partial(_rows, size, settings)) for size in sizes]


def _rows(size: Size, settings: Settings) -> Iterator[list[Row]]:
    mode = settings.modes[0]  # these steps are long: the host's launches do not count
    variants: dict[str, str | None] = {"plain": None, "NeuTRENO": NEUTRENO}
    candidates = [
        Candidate(name, partial(_step, size, spec, mode, settings), mode, baseline=spec is None)
        for name, spec in variants.items()
    ]
    return compare(candidates, settings.pace(), settings.device)


def _step(size: Size, spec: str | None, mode: str, settings: Settings) -> Step:
    model = LanguageModel(
        mitigation=spec,
        vocabulary=size.vocabulary,
        dim=size.dim,
        depth=size.depth,
        heads=size.heads,
        hidden=4 * size.dim,
        cutoffs=(),
        dropout=0.0,
    )
    words = torch.randint(size.vocabulary, (size.batch, size.tokens + 1), device=settings.device)
    return training_step(model, [words[:, :-1], words[:, 1:]], _mean, mode=mode, dtype=settings.dtype)


def _mean(losses: Tensor) -> Tensor:
    return losses.mean()
