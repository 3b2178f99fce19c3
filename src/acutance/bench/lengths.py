"""Cost against the number of tokens: attention metrics and extreme eigenvalues, and how far a model can be measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

from acutance import metrics
from acutance.bench.measuring import WITH_ATTENTION, forward, llama_subject, read_metrics
from acutance.bench.results import Row
from acutance.bench.settings import Settings, Table, free
from acutance.bench.timing import Candidate, Step, compare
from acutance.operator import AttentionOperator

WIDTH = 64

OPERATIONS: dict[str, Callable[[AttentionOperator, Tensor], object]] = {
    "A v": lambda A, v: A @ v,
    "nonlocal_energy": metrics.nonlocal_energy,
    "log_nonlocal_energy_raw": metrics.log_nonlocal_energy_raw,
    "gradient_alignment": metrics.gradient_alignment,
    "attention_entropy": lambda A, _v: metrics.attention_entropy(A),
    "head_cosine": lambda A, _v: metrics.head_cosine(A),
    "extreme_eigenvalues": lambda A, _v: A.extreme_eigenvalues(),
}


def operator_tables(settings: Settings) -> list[Table]:
    """Every attention metric by itself, of one layer."""
    lengths: tuple[int, ...] = (2048, 4096, 8192, 16_384, 32_768) if settings.on_gpu else (16, 32)
    title = f"cost against tokens, {_heads(settings)} heads of width {WIDTH}"
    return [Table(title, partial(in_turn, lengths, _operator_rows, settings))]


def model_tables(settings: Settings) -> list[Table]:
    """How far a whole Llama can be measured; nothing where transformers is not installed."""
    if find_spec("transformers") is None:
        return []
    lengths: tuple[int, ...] = (2048, 4096, 8192, 16_384, 32_768) if settings.on_gpu else (16,)
    title = "one text in a Llama, cheap token metrics, energy and entropy in every layer"
    return [Table(title, partial(in_turn, lengths, _model_rows, settings))]


def _heads(settings: Settings) -> int:
    return 8 if settings.on_gpu else 2


def in_turn(
    lengths: tuple[int, ...], rows_at: Callable[[int, Settings], Iterator[list[Row]]], settings: Settings
) -> Iterator[list[Row]]:
    """Each length by itself, its memory freed before the next."""
    done: list[Row] = []
    for tokens in lengths:
        rows: list[Row] = []
        for found in rows_at(tokens, settings):
            rows = [{"tokens": tokens, **row} for row in found]
            yield [*done, *rows]
        done += rows
        free()


def _operator_rows(tokens: int, settings: Settings) -> Iterator[list[Row]]:
    draw = torch.Generator(settings.device).manual_seed(0)
    q, k, v = (
        torch.randn(1, _heads(settings), tokens, WIDTH, generator=draw, device=settings.device).to(settings.dtype)
        for _ in range(3)
    )
    A = AttentionOperator(q, k)

    def step(operation: Callable[[AttentionOperator, Tensor], object]) -> Step:
        def run() -> None:
            with torch.no_grad():
                operation(A, v)

        return run

    candidates = [
        Candidate(name, partial(step, operation), baseline=name == "A v") for name, operation in OPERATIONS.items()
    ]
    return compare(candidates, settings.pace(steps=1, refresh=0, repetitions=3), settings.device)


def _model_rows(tokens: int, settings: Settings) -> Iterator[list[Row]]:
    subject = llama_subject(1, tokens, settings)
    candidates = [
        Candidate("plain forward pass", lambda: partial(forward, subject, 1), baseline=True),
        Candidate("measure", lambda: partial(read_metrics, subject, WITH_ATTENTION, 1)),
        Candidate("by whole matrices", lambda: subject.obvious),
    ]
    return compare(candidates, settings.pace(steps=1, refresh=0, repetitions=1), settings.device)
