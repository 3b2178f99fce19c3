"""Lengths one after another: what failed or took long is not tried again, and the rows say why."""

import pytest
import torch
from torch import Tensor, nn

from acutance.lab.bench import lengths
from acutance.lab.bench.measuring import Subject
from acutance.lab.bench.settings import Settings
from acutance.lab.bench.timing import Candidate, Pace
from acutance.measure.reader import ATTENTION_COSINE
from acutance.metrics import ATTENTION_METRICS


def test_every_attention_metric_is_timed() -> None:
    assert {*ATTENTION_METRICS, ATTENTION_COSINE} <= lengths.OPERATIONS.keys()


def test_what_fails_or_takes_long_is_left_out_at_more_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    now, tried = [0.0], []
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def work(tokens: int, _settings: Settings) -> tuple[list[Candidate], Pace]:
        def step(name: str, seconds: float) -> None:
            tried.append((name, tokens))
            if name == "dense" and tokens > 2:
                raise MemoryError("out of memory")
            now[0] += seconds

        def candidate(name: str, seconds: float, *, baseline: bool = False) -> Candidate:
            return Candidate(name, lambda: lambda: step(name, seconds), baseline=baseline)

        slow = lengths.PATIENCE / 4 * (1.5 if tokens > 4 else 0.5)
        candidates = [candidate("plain", 1.0, baseline=True), candidate("slow", slow), candidate("dense", 2.0)]
        return candidates, Pace(repetitions=1, steps=1, warm_up=1, refresh=0)

    *_, rows = lengths.in_turn((2, 4, 8, 16), work, Settings("cpu"))
    notes = {(row["variant"], row["tokens"]): row.get("note", "") for row in rows}
    assert notes["dense", 4] == "left out: out of memory"
    assert notes["dense", 8] == notes["dense", 16] == "not tried: it failed at 4 tokens"
    assert notes["slow", 8] == ""
    assert notes["slow", 16] == "not tried: it took 11 s at 8 tokens"
    assert {tokens for name, tokens in tried if name == "slow"} == {2, 4, 8}
    assert {tokens for name, tokens in tried if name == "dense"} == {2, 4}
    assert [row["tokens"] for row in rows if row["variant"] == "plain"] == [2, 4, 8, 16]


class Reader(nn.Module):
    """Notes how many tokens it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.read: list[int] = []

    def forward(self, input_ids: Tensor, use_cache: bool) -> Tensor:
        assert not use_cache
        self.read.append(input_ids.shape[1])
        return input_ids


def test_a_small_call_comes_before_the_first_reading_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or else what the first product of all takes for good would be the first length's."""
    model = Reader()

    def subject(_texts: int, tokens: int, _settings: Settings) -> Subject:
        batch = {"input_ids": torch.zeros(1, tokens, dtype=torch.long), "use_cache": False}
        return Subject(model, batch, lambda: None)

    monkeypatch.setattr(lengths, "llama_subject", subject)
    candidates, pace = lengths._readings(1000, Settings("cpu"))
    assert model.read == [lengths.FEW]
    assert pace.warm_up == 0
    candidates[0].make()()
    assert model.read == [lengths.FEW, 1000]
