"""The cost of measuring: `measure` against a forward pass and whole matrices, by tokens, and during training."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from math import ceil
from operator import methodcaller
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from acutance import metrics, sites
from acutance.attention import AttentionCall
from acutance.attention.operator import AttentionOperator
from acutance.lab.bench.results import Row
from acutance.lab.bench.steps import Shape, classified, shape_for, timm_model
from acutance.lab.bench.timing import Candidate, Pace, Settings, Step, Table, compare, free, repeat, training_step
from acutance.measure import DEFAULT_METRICS, measure
from acutance.measure.monitor import CHEAP_METRICS, INTERVAL, Monitor
from acutance.measure.walk import feed
from acutance.sites.structure import evaluating

WITH_ATTENTION = (*CHEAP_METRICS, "nonlocal_energy", "attention_entropy")
SPECTRAL_BATCH = 32  # small, since eigenvalues of each image's tokens in every layer take long
# Measured by one call of `measure`, whose start and end are part of the cost.
IMAGES, TEXT_BATCHES = 4096, 4
IMAGE_BATCH = 256
OURS: Callable[[Shape], nn.Module] = methodcaller("ours")
DEIT, SMALL = "steps-224", "steps-32"  # the small one is CPU-bound
LARGE_BATCH = 1024  # meant to keep the GPU busy for longer than the host needs to launch the work
# The sizes of the smallest Llama 3.2: 1.2 billion parameters.
LLAMA = {"vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
LLAMA |= {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131_072}
TOY_LLAMA = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
TOY_LLAMA |= {"num_attention_heads": 2, "num_key_value_heads": 1}
WIDTH = 64  # of a head
FEW = 16  # tokens in a call that only warms a model up
PATIENCE = 30.0  # seconds: what would take longer at twice the tokens is not tried

OPERATIONS: dict[str, Callable[[AttentionOperator, Tensor], object]] = {
    "A v": lambda A, v: A @ v,
    "Aᵀ v": lambda A, v: A.T @ v,
    "logsumexp": lambda A, _v: A.logsumexp(),
    "eigenvalues(k=4)": lambda A, _v: A.eigenvalues(4),
    "stationary": lambda A, _v: A.stationary(),
    "nonlocal_energy": metrics.nonlocal_energy,
    "gradient_alignment": metrics.gradient_alignment,
    "attention_entropy": lambda A, _v: metrics.attention_entropy(A),
    "head_cosine": lambda A, _v: metrics.head_cosine(A),
    "attention_cosine": lambda A, _v: metrics.attention_cosine(A, AttentionOperator(A.k, A.q)),
    "log_nonlocal_energy_raw": metrics.log_nonlocal_energy_raw,
    "extreme_eigenvalues": lambda A, _v: A.extreme_eigenvalues(),
}
# For a monitor: the number of images it reads, and its options.
READINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "default": (64, {}),
    "bfloat16": (64, {"autocast": torch.bfloat16}),
    "whole batch": (IMAGE_BATCH, {}),
    "attention": (64, {"metrics": WITH_ATTENTION, "tap": ("block", "attention")}),
    "spectral": (64, {"metrics": DEFAULT_METRICS}),  # the defaults of `measure`, which need eigenvalues
}
Work = Callable[[int, Settings], tuple[list[Candidate], Pace]]  # for a number of tokens


@dataclass(frozen=True)
class Subject:
    """A model in one dtype, a batch for it, and the same measurement by whole matrices."""

    model: nn.Module
    batch: Any
    obvious: Step


def tables(settings: Settings) -> Iterator[Table]:
    """Our DeiT-Ti; with timm also timm's and a smaller, CPU-bound ViT; with transformers also a Llama."""
    shapes = [(DEIT, IMAGE_BATCH), (DEIT, LARGE_BATCH), (SMALL, IMAGE_BATCH)][: None if settings.on_gpu else 1]
    subjects = [("timm's ", timm_model, *each) for each in shapes] if find_spec("timm") is not None else []
    for whose, build, shape, batch in [*subjects, ("", OURS, DEIT, IMAGE_BATCH)]:
        title = f"measuring {whose}{shape_for(shape, settings).title}, batch {batch}"
        yield title, _rows(partial(_vit, batch, settings, shape, build), IMAGES // batch, settings)
    if find_spec("transformers") is not None:
        llama = "Llama of 1.2 billion parameters, 4 texts of 2048 tokens" if settings.on_gpu else "Llama at toy size"
        make = partial(llama_subject, *((4, 2048) if settings.on_gpu else (2, 16)), settings)
        yield f"measuring {llama}", _rows(make, TEXT_BATCHES, settings)
    title = f"measuring {shape_for(DEIT, settings).title}, batch {SPECTRAL_BATCH}, spectral metrics"
    yield title, _rows(partial(_vit, SPECTRAL_BATCH, settings), 1, settings, spectral=True)


def _rows(make: Callable[[], Subject], batches: int, settings: Settings, spectral: bool = False) -> Iterator[list[Row]]:
    readings = {"token metrics": CHEAP_METRICS, "and attention energy and entropy": WITH_ATTENTION}
    matrices: str | None = "the same by whole matrices"
    if spectral:  # the default of `measure`: eigenvalues of every sample's tokens, which take seconds
        readings, matrices = {"default token metrics": DEFAULT_METRICS}, None
    pace = settings.pace(steps=1, refresh=0, calls=batches, repetitions=3 if spectral else 7)
    yield from compare(candidates(make(), batches, readings, matrices), pace, settings.device)


def candidates(
    subject: Subject, batches: int, readings: Mapping[str, Sequence[str]], matrices: str | None = None
) -> list[Candidate]:
    """A forward pass, `measure` with each variant's metrics, and if it has a name, the same by whole matrices."""
    read = partial(measure, subject.model, [subject.batch] * batches, progress=False)
    made: dict[str, Any] = {"plain forward pass": partial(forward, subject, batches)}
    made |= {variant: partial(read, metrics=names) for variant, names in readings.items()}
    made |= {} if matrices is None else {matrices: partial(repeat, subject.obvious, batches)}
    return [Candidate(name, partial(made.__getitem__, name), baseline=name.startswith("plain")) for name in made]


def forward(subject: Subject, batches: int) -> None:
    """Forward passes in evaluation mode."""
    with evaluating(subject.model):
        for _ in range(batches):
            feed(subject.model, subject.batch)


def _vit(batch: int, settings: Settings, shape: str = DEIT, build: Callable[[Shape], nn.Module] = OURS) -> Subject:
    chosen = shape_for(shape, settings)
    model = build(chosen).to(settings.device, settings.dtype)
    size, batch = chosen.image_size, batch if settings.on_gpu else chosen.batch
    images = torch.randn(batch, 3, size, size, device=settings.device, dtype=settings.dtype)
    return Subject(model, images, partial(_vit_obvious, model, images))


def _vit_obvious(model: nn.Module, images: Tensor) -> list[list[float]]:
    """Keep every layer's tokens, matrix and outputs by hooks, then apply the formulas."""
    tokens: list[Tensor] = []
    records: list[AttentionCall] = []
    with ExitStack() as stack, evaluating(model):
        for _, block, _ in sites.blocks(model):
            hook = block.register_forward_hook(lambda _m, _i, out: tokens.append(sites.tokens_out(out)))
            stack.callback(hook.remove)
        for site in sites.find(model):
            stack.enter_context(site.observe(records.append))
        feed(model, images)
        matrices = [(r.A.q @ r.A.k.mT * r.A.scale).softmax(-1) for r in records]
        return read_obvious(tokens, [(A, r.output) for A, r in zip(matrices, records, strict=True)])


def llama_subject(texts: int, tokens: int, settings: Settings) -> Subject:
    """A Llama with random weights. The obvious way reads the same weights with eager attention."""
    transformers: Any = import_module("transformers")
    shape: Mapping[str, Any] = LLAMA if settings.on_gpu else TOY_LLAMA
    with torch.device(settings.device):
        config = transformers.LlamaConfig(**shape, attn_implementation="sdpa")
        model = transformers.LlamaModel(config).to(settings.dtype)
    words = torch.randint(shape["vocab_size"], (texts, tokens), device=settings.device)
    batch = {"input_ids": words, "use_cache": False}
    return Subject(model, batch, partial(_llama_obvious, model, batch))


def _llama_obvious(model: Any, batch: Mapping[str, Any]) -> list[list[float]]:
    """Read it with `output_attentions=True`. That returns no outputs of heads, so the energy is that of the tokens."""
    model.set_attn_implementation("eager")
    try:
        with evaluating(model):
            out = model(**batch, output_attentions=True, output_hidden_states=True)
            tokens = list(out.hidden_states[1:])
            return read_obvious(tokens, [(A, x[:, None]) for A, x in zip(out.attentions, tokens, strict=True)])
    finally:
        model.set_attn_implementation("sdpa")


def read_obvious(tokens: Sequence[Tensor], layers: Sequence[tuple[Tensor, Tensor]]) -> list[list[float]]:
    """The means of `WITH_ATTENTION` per layer by their plain formulas, with matrices of all pairs of tokens."""
    found = []
    for x, (A, u) in zip(tokens, layers, strict=True):
        x, A, u = x.float(), A.float(), u.float()
        unit = normalize(x, dim=-1)
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


def operator_tables(settings: Settings) -> list[Table]:
    """Every attention metric of one layer, by itself."""
    lengths = (2048, 4096, 8192, 16_384, 32_768) if settings.on_gpu else (16, 32)
    title = f"cost against tokens, {8 if settings.on_gpu else 2} heads of width {WIDTH}"
    return [(title, in_turn(lengths, _operations, settings))]


def model_tables(settings: Settings) -> list[Table]:
    """How many tokens of a whole Llama can be measured; no table without transformers."""
    if find_spec("transformers") is None:
        return []
    lengths = (2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072) if settings.on_gpu else (16,)
    title = "one text in a Llama, cheap token metrics, energy and entropy in every layer"
    return [(title, in_turn(lengths, _readings, settings))]


def monitor_tables(settings: Settings) -> list[Table]:
    """The cost of monitoring: a `Monitor`'s readings in units of a training step of its model."""
    shape = shape_for(DEIT, settings, batch=IMAGE_BATCH)
    title = f"readings of a monitor, {shape.title}, training at batch {shape.batch}"
    return [(title, _monitor_rows(shape, settings))]


def _monitor_rows(shape: Shape, settings: Settings) -> Iterator[list[Row]]:
    model = shape.ours().to(settings.device)
    images, labels = classified(shape, settings)
    loss = partial(cross_entropy, target=labels)
    train = training_step(model, [images], loss, mode=settings.modes[0], dtype=settings.dtype)
    with TemporaryDirectory() as folder:
        monitors = {
            name: Monitor(model, images[:samples], jsonl=f"{folder}/{name}.jsonl", **options)
            for name, (samples, options) in READINGS.items()
        }
        found = [Candidate("a training step", lambda: train, settings.modes[0], baseline=True)]
        found += [Candidate(name, partial(getattr, monitor, "record")) for name, monitor in monitors.items()]
        for rows in compare(found, settings.pace(steps=3, refresh=0, repetitions=5), settings.device):
            for row in (row for row in rows if row.get("ratios")):
                row["share_percent"] = f"{100 * float(row['ratio']) / INTERVAL:.3f}"
                row["every_for_2_percent"] = ceil(float(row["ratio_max"]) / 0.02)
            yield rows


def in_turn(lengths: tuple[int, ...], work: Work, settings: Settings) -> Iterator[list[Row]]:
    """One length after another, freeing memory in between. What fails or takes long is not tried at longer lengths."""
    done: list[Row] = []
    given_up: dict[str, str] = {}
    for tokens in lengths:
        found, pace = work(tokens, settings)
        tried = [candidate for candidate in found if candidate.variant not in given_up]
        rows: list[Row] = [{"tokens": tokens, "variant": name, "note": why} for name, why in given_up.items()]
        for timed in compare(tried, pace, settings.device):
            rows = [*rows[: len(given_up)], *({"tokens": tokens, **row} for row in timed)]
            yield [*done, *rows]
        done += rows
        given_up |= {row["variant"]: why for row in rows if (why := _reason_to_stop(row))}
        del found, tried
        free()


def _reason_to_stop(row: Row) -> str:
    if "ms" not in row:
        return f"not tried: it failed at {row['tokens']} tokens" if "left out" in row.get("note", "") else ""
    seconds = float(row["ms"]) / 1e3
    # The work grows with the square of the tokens.
    return f"not tried: it took {seconds:.0f} s at {row['tokens']} tokens" if 4 * seconds > PATIENCE else ""


def _operations(tokens: int, settings: Settings) -> tuple[list[Candidate], Pace]:
    generator = torch.Generator(settings.device).manual_seed(0)
    shape = (3, 1, 8 if settings.on_gpu else 2, tokens, WIDTH)
    q, k, v = torch.randn(shape, generator=generator, device=settings.device).to(settings.dtype)

    def step(operation: Callable[[AttentionOperator, Tensor], object]) -> Step:
        # A new operator each time, since an operator remembers the sums of its rows.
        return torch.no_grad()(lambda: operation(AttentionOperator(q, k), v))

    found = [Candidate(name, partial(step, made), baseline=name == "A v") for name, made in OPERATIONS.items()]
    return found, settings.pace(steps=1, refresh=0, repetitions=3)


def _readings(tokens: int, settings: Settings) -> tuple[list[Candidate], Pace]:
    subject = llama_subject(1, tokens, settings)
    # A few tokens first: the first product takes memory for good, which must not count in a reading.
    words: Tensor = subject.batch["input_ids"]
    forward(replace(subject, batch={**subject.batch, "input_ids": words[:, :FEW]}), 1)
    # Long calls take seconds; reading the memory of one is warm-up enough.
    pace = settings.pace(steps=1, refresh=0, repetitions=3 if tokens <= 8192 else 1)
    return candidates(subject, 1, {"measure": WITH_ATTENTION}, "by whole matrices"), replace(pace, warm_up=0)
