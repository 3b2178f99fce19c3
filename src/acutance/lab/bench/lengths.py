"""Cost against the number of tokens: attention metrics and extreme eigenvalues, and how far a model can be measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

from acutance import metrics
from acutance.attention.operator import AttentionOperator
from acutance.lab.bench.measuring import WITH_ATTENTION, forward, llama_subject, read_metrics
from acutance.lab.bench.results import Row
from acutance.lab.bench.settings import Settings, Table, free
from acutance.lab.bench.timing import Candidate, Pace, Step, compare

WIDTH = 64
FEW = 16  # tokens of a call that only makes a model ready
PATIENCE = 30.0  # seconds: what would take longer at twice the tokens is not tried there

OPERATIONS: dict[str, Callable[[AttentionOperator, Tensor], object]] = {
    "A v": lambda A, v: A @ v,
    "nonlocal_energy": metrics.nonlocal_energy,
    "gradient_alignment": metrics.gradient_alignment,
    "attention_entropy": lambda A, _v: metrics.attention_entropy(A),
    "head_cosine": lambda A, _v: metrics.head_cosine(A),
    "attention_cosine": lambda A, _v: metrics.attention_cosine(A, AttentionOperator(A.k, A.q)),
    "log_nonlocal_energy_raw": metrics.log_nonlocal_energy_raw,
    "extreme_eigenvalues": lambda A, _v: A.extreme_eigenvalues(),
}
Work = Callable[[int, Settings], tuple[list[Candidate], Pace]]  # at so many tokens


def operator_tables(settings: Settings) -> list[Table]:
    """Every attention metric by itself, of one layer."""
    lengths = (2048, 4096, 8192, 16_384, 32_768) if settings.on_gpu else (16, 32)
    title = f"cost against tokens, {8 if settings.on_gpu else 2} heads of width {WIDTH}"
    return [Table(title, partial(in_turn, lengths, _operations, settings))]


def model_tables(settings: Settings) -> list[Table]:
    """How far a whole Llama can be measured; nothing where transformers is not installed."""
    if find_spec("transformers") is None:
        return []
    lengths = (2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072) if settings.on_gpu else (16,)
    title = "one text in a Llama, cheap token metrics, energy and entropy in every layer"
    return [Table(title, partial(in_turn, lengths, _readings, settings))]


def in_turn(lengths: tuple[int, ...], work: Work, settings: Settings) -> Iterator[list[Row]]:
    """Each length by itself, its memory freed before the next; what fails, or takes long, is not tried at more."""
    done: list[Row] = []
    given_up: dict[str, str] = {}
    for tokens in lengths:
        candidates, pace = work(tokens, settings)
        tried = [candidate for candidate in candidates if candidate.variant not in given_up]
        rows: list[Row] = [{"tokens": tokens, "variant": name, "note": why} for name, why in given_up.items()]
        for found in compare(tried, pace, settings.device):
            rows = [*rows[: len(given_up)], *({"tokens": tokens, **row} for row in found)]
            yield [*done, *rows]
        done += rows
        given_up |= {row["variant"]: why for row in rows if (why := _reason_to_stop(row))}
        del candidates, tried
        free()


def _reason_to_stop(row: Row) -> str:
    if "ms" not in row:
        return f"not tried: it failed at {row['tokens']} tokens" if "left out" in row.get("note", "") else ""
    seconds = float(row["ms"]) / 1e3
    # The work grows with the square of the tokens.
    return f"not tried: it took {seconds:.0f} s at {row['tokens']} tokens" if 4 * seconds > PATIENCE else ""


def _operations(tokens: int, settings: Settings) -> tuple[list[Candidate], Pace]:
    draw = torch.Generator(settings.device).manual_seed(0)
    q, k, v = (
        torch.randn(1, (8 if settings.on_gpu else 2), tokens, WIDTH, generator=draw, device=settings.device).to(
            settings.dtype
        )
        for _ in range(3)
    )

    def step(operation: Callable[[AttentionOperator, Tensor], object]) -> Step:
        def run() -> None:
            with torch.no_grad():
                operation(AttentionOperator(q, k), v)  # anew: an operator remembers the sums of its rows

        return run

    candidates = [
        Candidate(name, partial(step, operation), baseline=name == "A v") for name, operation in OPERATIONS.items()
    ]
    return candidates, settings.pace(steps=1, refresh=0, repetitions=3)


def _readings(tokens: int, settings: Settings) -> tuple[list[Candidate], Pace]:
    subject = llama_subject(1, tokens, settings)
    # A few of the tokens first: the memory that the first product takes for good is no part of any reading.
    words: Tensor = subject.batch["input_ids"]
    forward(replace(subject, batch={**subject.batch, "input_ids": words[:, :FEW]}), 1)
    candidates = [
        Candidate("plain forward pass", lambda: partial(forward, subject, 1), baseline=True),
        Candidate("measure", lambda: partial(read_metrics, subject, WITH_ATTENTION, 1)),
        Candidate("by whole matrices", lambda: subject.obvious),
    ]
    # A call takes seconds in the end; reading its memory is warm-up enough.
    pace = settings.pace(steps=1, refresh=0, repetitions=3 if tokens <= 8192 else 1)
    return candidates, replace(pace, warm_up=0)
