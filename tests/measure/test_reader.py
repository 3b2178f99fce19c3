"""What a batch's readings cost on their way to the host, and that they are the same by sums and by formulas."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import acutance as ac
from acutance import metrics
from acutance.errors import NonFiniteError
from acutance.measure import reader as reading
from acutance.measure.reader import MetricReader, PendingValues
from acutance.measure.samples import TokenLayout
from acutance.measure.walk import feed
from acutance.metrics.sums import FROM_SUMS
from acutance.sites.structure import evaluating
from attention.operator_cases import LargestTensor
from token_fields import stand_in

WAITS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique")
ATTENTION = ["nonlocal_energy", "attention_entropy"]


def operations(run):
    """How many operations it takes, and how often a number is needed on the host."""
    with LargestTensor() as seen:
        run()
    return len(seen.operations), sum(function.__name__.split(".")[0] in WAITS for function in seen.operations)


@pytest.fixture(params=[False, True], ids=["formulas", "sums"])
def by_sums(request, monkeypatch):
    if request.param:
        stand_in(monkeypatch)


def values(out):
    """What was read, by its key."""
    out.send()
    return dict(zip(*out.received(), strict=True))


def test_a_reading_by_sums_costs_a_launch_and_little_else(model, images, monkeypatch):
    def plain():
        with evaluating(model):
            feed(model, images)

    asked = stand_in(monkeypatch)
    total, waits = operations(lambda: ac.measure(model, [images], metrics=list(FROM_SUMS), progress=False))
    # Of a reading the launch and a view of what it gives; of a batch what joins and sends these.
    assert total - operations(plain)[0] <= 2 * len(asked) + 3
    assert (len(asked), waits) == (4, 0)


def test_tokens_are_not_summed_up_again_for_attention(model, images, monkeypatch):
    asked = stand_in(monkeypatch)
    ac.measure(model, [images], metrics=["token_cosine", *ATTENTION], progress=False)
    assert len(asked) == 4
    asked.clear()
    ac.measure(model, [images], metrics=ATTENTION, progress=False)
    assert len(asked) == 3, "with nothing else read, the branches are watched"


@pytest.mark.usefixtures("by_sums")
@pytest.mark.parametrize(("there", "received"), [(True, [1, 2, 3, 4, 5, 6]), (False, [3, 4, 5, 6, 6, 6])])
def test_the_host_waits_for_a_batch_only_if_too_many_are_under_way(model, images, monkeypatch, there, received):
    sent, seen = [], []
    send, receive = PendingValues.send, PendingValues.received
    monkeypatch.setattr(reading, "MAX_PENDING_BATCHES", 2)
    monkeypatch.setattr(PendingValues, "is_there", lambda _: there)
    monkeypatch.setattr(PendingValues, "send", lambda self: sent.append(1) or send(self))
    monkeypatch.setattr(PendingValues, "received", lambda self: seen.append(len(sent)) or receive(self))
    options = {"metrics": [*FROM_SUMS, *ATTENTION], "tap": ["block", "attention", "values", "final"], "prefix": "out"}
    assert operations(lambda: ac.measure(model, images[:6].split(1), progress=False, **options))[1] == 0
    assert seen == received


FAR = np.random.default_rng(0).normal(1000.0, 0.1, 9)  # a mean far above the spread shows a careless formula


@pytest.mark.parametrize(
    ("parts", "mean", "std"),
    [(np.split(FAR, [1, 2, 6]), FAR.mean(), FAR.std(ddof=1))]
    + [(parts, math.inf, math.inf) for parts in itertools.permutations([[1.0, 2.0], [math.inf], [3.0]])],
)
def test_merged_statistics_are_those_of_the_whole_and_keep_infinities(parts, mean, std) -> None:
    reader = MetricReader(["token_cosine"], ["block"])
    for part in parts:
        reader.take_in((("block", 1, "token_cosine"),), np.array([part]))
    reader.take_in((("block", 0, "token_cosine"), ("block", 2, "token_cosine")), np.zeros((2, 1)))  # not in all batches
    found = reader.readings()[1]
    assert found.mean == pytest.approx(mean, rel=1e-15)
    assert found.std == pytest.approx(std, rel=1e-9)
    assert [r.count for r in reader.readings()] == [1, sum(map(len, parts)), 1]


PADDING = {"attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0]])}
DOCUMENTS = {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6]])}  # three in two rows


@pytest.mark.parametrize("batch", [{}, PADDING, DOCUMENTS], ids=["all", "padding", "documents"])
def test_sums_give_what_the_formulas_give(batch, monkeypatch):
    tokens = torch.randn(2, 2, 7, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.3

    def read():
        reader = MetricReader(list(metrics.TOKEN_METRICS), ["block"])
        layout = TokenLayout.of(batch, special_token_counts=(1, 1))
        reader.begin(SimpleNamespace(samples=lambda prefix: layout, counts=True, fed=batch))
        for layer, x in enumerate(tokens):
            reader.tokens("block", layer, x)
        return values(reader.out)

    expected = read()
    asked = stand_in(monkeypatch)
    found = read()
    assert len(asked) == 2
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_heads_and_windows_are_averaged():
    out = PendingValues(samples=2)
    value = torch.arange(12.0).reshape(4, 3)  # two windows of each sample, three heads
    out.add("block", 1, ["effective_rank"], value)
    out.add("block", 2, ["effective_rank"], value[:2, 0].double())
    out.add("block", 2, ["token_cosine"], value / 2)
    found = [value.tolist() for value in values(out).values()]
    assert found == [[2.5, 8.5], [0.0, 3.0], [1.25, 4.25]]


@pytest.mark.usefixtures("by_sums")
def test_the_first_layer_that_is_spoilt_is_named(model, images):
    model.blocks[1].register_forward_hook(
        lambda _m, _i, out: (out[0].index_fill(1, torch.tensor([4]), torch.nan), out[1])
    )
    with pytest.raises(NonFiniteError) as error:
        ac.measure(model, images.split(2), metrics=["norm_spread", "effective_rank"], progress=False)
    message = "layer 2: norm_spread at block: 2 of 36 tokens hold NaN or infinity (first: sample 0, token 4). "
    assert str(error.value).startswith(message)


def test_no_batch_is_let_off(model, images):
    batches = list(images[:6].clone().split(2))
    batches[-1][1, 0, 0, 0] = torch.inf
    with pytest.raises(NonFiniteError, match=r"layer 0: token_cosine at block: .*sample 1"):
        ac.measure(model, batches, metrics="token_cosine", progress=False)
