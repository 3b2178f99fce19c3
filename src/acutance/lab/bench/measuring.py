"""What measuring costs: `measure` against a plain forward pass, and against the obvious way with whole matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from acutance import sites
from acutance.attention import AttentionCall
from acutance.lab.bench.results import Row
from acutance.lab.bench.settings import Settings, Table
from acutance.lab.bench.steps import SHAPES, Shape, shape_for, timm_model
from acutance.lab.bench.timing import Candidate, Step, compare, repeat
from acutance.measure import DEFAULT_METRICS, measure
from acutance.measure.monitor import CHEAP_METRICS
from acutance.measure.walk import feed
from acutance.sites.structure import evaluating

WITH_ATTENTION = (*CHEAP_METRICS, "nonlocal_energy", "attention_entropy")
SPECTRAL_BATCH = 32  # the eigenvalues of each image's tokens in every layer take long
# Read by one call of `measure`, whose beginning and end are part of the cost.
IMAGES, TEXT_BATCHES = 4096, 4
IMAGE_BATCH = 256
DEIT, SMALL = "steps-224", "steps-32"  # the small one waits for the host
LARGE_BATCH = 1024  # meant to keep a GPU busy for longer than the host needs to ask for it
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
HEADS = ("num_attention_heads", "num_key_value_heads")
# As the smallest Llama 3.2 has it: 1.2 billion parameters.
LLAMA = {
    **dict(zip((*SIZES, *HEADS), (128_256, 2048, 8192, 16, 32, 8), strict=True)),
    "max_position_embeddings": 131_072,
}
TOY_LLAMA = dict(zip((*SIZES, *HEADS), (100, 32, 64, 2, 2, 1), strict=True))


@dataclass(frozen=True)
class Subject:
    """A model in one dtype, a batch it reads, and the same by whole matrices."""

    model: nn.Module
    batch: Any
    obvious: Step


def tables(settings: Settings) -> list[Table]:
    """Our DeiT-Ti; with timm also timm's, and a smaller ViT that waits for the host; with transformers also a Llama."""
    shapes = [(DEIT, IMAGE_BATCH), (DEIT, LARGE_BATCH), (SMALL, IMAGE_BATCH)][: None if settings.on_gpu else 1]
    subjects = [("timm's ", timm_model, *each) for each in shapes] if find_spec("timm") is not None else []
    found = []
    for whose, build, shape, batch in [*subjects, ("", _ours, DEIT, IMAGE_BATCH)]:
        make = partial(_vit, batch, settings, shape, build)
        title = f"measuring {whose}{_vit_title(shape, batch, settings)}"
        found.append(Table(title, partial(_rows, make, IMAGES // batch, settings)))
    if find_spec("transformers") is not None:
        llama = "Llama of 1.2 billion parameters, 4 texts of 2048 tokens" if settings.on_gpu else "Llama at toy size"
        make = partial(llama_subject, *((4, 2048) if settings.on_gpu else (2, 16)), settings)
        found.append(Table(f"measuring {llama}", partial(_rows, make, TEXT_BATCHES, settings)))
    few = _vit_title(DEIT, SPECTRAL_BATCH, settings)
    return [*found, Table(f"measuring {few}, spectral metrics", partial(_spectral_rows, settings))]


def _vit_title(shape: str, batch: int, settings: Settings) -> str:
    return f"{SHAPES[shape].title}, batch {batch}" if settings.on_gpu else "DeiT-Ti at toy size"


def _rows(make: Callable[[], Subject], batches: int, settings: Settings) -> Iterator[list[Row]]:
    subject = make()
    candidates = [
        Candidate("plain forward pass", lambda: partial(forward, subject, batches), baseline=True),
        Candidate("token metrics", lambda: partial(read_metrics, subject, CHEAP_METRICS, batches)),
        Candidate("and attention energy and entropy", lambda: partial(read_metrics, subject, WITH_ATTENTION, batches)),
        Candidate("the same by whole matrices", lambda: partial(repeat, subject.obvious, batches)),
    ]
    return compare(candidates, settings.pace(steps=1, refresh=0, calls=batches), settings.device)


def _spectral_rows(settings: Settings) -> Iterator[list[Row]]:
    """The default of `measure`: eigenvalues of every sample's tokens, which take seconds."""
    subject = _vit(SPECTRAL_BATCH, settings)
    candidates = [
        Candidate("plain forward pass", lambda: partial(forward, subject, 1), baseline=True),
        Candidate("default token metrics", lambda: partial(read_metrics, subject, DEFAULT_METRICS, 1)),
    ]
    return compare(candidates, settings.pace(steps=1, refresh=0, repetitions=3), settings.device)


def forward(subject: Subject, batches: int) -> None:
    """What any evaluation does."""
    with evaluating(subject.model):
        for _ in range(batches):
            feed(subject.model, subject.batch)


def read_metrics(subject: Subject, names: Sequence[str], batches: int) -> None:
    """By `acutance.measure`."""
    measure(subject.model, [subject.batch] * batches, metrics=names, progress=False)


def _ours(shape: Shape) -> nn.Module:
    return shape.ours()


def _vit(batch: int, settings: Settings, shape: str = DEIT, build: Callable[[Shape], nn.Module] = _ours) -> Subject:
    chosen = shape_for(shape, settings)
    model = build(chosen).to(settings.device, settings.dtype)
    size, batch = chosen.image_size, batch if settings.on_gpu else chosen.batch
    images = torch.randn(batch, 3, size, size, device=settings.device, dtype=settings.dtype)
    return Subject(model, images, partial(_vit_obvious, model, images))


def _vit_obvious(model: nn.Module, images: Tensor) -> list[list[float]]:
    """Hooks that keep every layer's tokens, matrix and outputs, then the formulas."""
    tokens: list[Tensor] = []
    records: list[AttentionCall] = []
    hooks: list[Any] = [
        block.register_forward_hook(lambda _m, _i, out: tokens.append(sites.tokens_out(out)))
        for _, block, _ in sites.blocks(model)
    ]
    hooks += [site.observe(records.append) for site in sites.find(model)]
    try:
        with evaluating(model):
            feed(model, images)
            matrices = [(r.A.q @ r.A.k.mT * r.A.scale).softmax(-1) for r in records]
            return read_obvious(tokens, [(A, r.output) for A, r in zip(matrices, records, strict=True)])
    finally:
        for hook in hooks:
            hook.remove()


def llama_subject(texts: int, tokens: int, settings: Settings) -> Subject:
    """A Llama with random weights; the obvious way is the same weights with eager attention."""
    transformers: Any = import_module("transformers")
    shape: Mapping[str, Any] = LLAMA if settings.on_gpu else TOY_LLAMA
    with torch.device(settings.device):
        config = transformers.LlamaConfig(**shape, attn_implementation="sdpa")
        model = transformers.LlamaModel(config).to(settings.dtype)
    words = torch.randint(shape["vocab_size"], (texts, tokens), device=settings.device)
    batch = {"input_ids": words, "use_cache": False}
    return Subject(model, batch, partial(_llama_obvious, model, batch))


def _llama_obvious(model: Any, batch: Mapping[str, Any]) -> list[list[float]]:
    """`output_attentions=True`; what the heads give is not among the outputs: the energy is that of the tokens."""
    model.set_attn_implementation("eager")
    try:
        with evaluating(model):
            out = model(**batch, output_attentions=True, output_hidden_states=True)
            tokens = list(out.hidden_states[1:])
            return read_obvious(tokens, [(A, x[:, None]) for A, x in zip(out.attentions, tokens, strict=True)])
    finally:
        model.set_attn_implementation("sdpa")


def read_obvious(tokens: Sequence[Tensor], layers: Sequence[tuple[Tensor, Tensor]]) -> list[list[float]]:
    """Per layer the means of `WITH_ATTENTION` as their formulas stand, with matrices of all pairs of tokens."""
    found = []
    for x, (A, u) in zip(tokens, layers, strict=True):
        x, A, u = x.float(), A.float(), u.float()
        unit = torch.nn.functional.normalize(x, dim=-1)
        count = x.shape[1]
        cosine = ((unit @ unit.transpose(-2, -1)).sum((-2, -1)) - count) / (count * (count - 1))
        norms = x.norm(dim=-1)
        residual = (x - x.mean(1, keepdim=True)).norm(dim=(-2, -1)) / x.norm(dim=(-2, -1))
        energy = (A * torch.cdist(u, u).square()).sum((-2, -1)) / 2
        entropy = -(A * A.clamp_min(1e-30).log()).sum(-1).mean(-1)
        spread = norms.std(-1, correction=0) / norms.mean(-1)
        found.append(torch.stack([m.mean() for m in (cosine, residual, spread, energy, entropy)]))
    means: list[list[float]] = torch.stack(found).tolist()
    return means
