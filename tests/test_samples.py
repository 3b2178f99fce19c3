"""Padding, packed documents and prefix tokens: what counts in a batch."""

import pytest
import torch

from acutance import metrics
from acutance.errors import AcutanceError, ShapeError
from acutance.operator import AttentionOperator, AttentionRecord
from acutance.samples import Documents, Samples

LENGTHS = [[4, 3], [2, 1, 4]]  # documents in the two rows of a batch


def positions():
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])


def record(tokens=7, heads=2, width=4, causal=False, mask=None):
    g = torch.Generator().manual_seed(0)
    q, k, v, u = (torch.randn(2, heads, tokens, width, generator=g, dtype=torch.float64) for _ in range(4))
    A = AttentionOperator(q, k, mask=mask, causal=causal, scale=0.7)
    return AttentionRecord(A, v, None, u, torch.randn(2, tokens, 8, generator=g, dtype=torch.float64))


def spans():
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            yield row, slice(start, start + length)
            start += length


def same_document():
    ids = torch.stack([torch.cat([torch.full((n,), i) for i, n in enumerate(row)]) for row in LENGTHS])
    return ids[:, None, :, None] == ids[:, None, None, :]


def test_documents_are_found_where_positions_start_anew():
    found = Documents.of(positions())
    assert found.rows.tolist() == [0, 0, 1, 1, 1]
    assert found.inside.sum(1).tolist() == [4, 3, 2, 1, 4]
    tokens = torch.arange(14.0).reshape(2, 7, 1)
    split = found.split(tokens)
    for document, (row, span) in enumerate(spans()):
        assert torch.equal(split[document][found.inside[document]], tokens[row, span])


def test_positions_that_never_start_anew_leave_the_rows_alone():
    assert Samples.of({"position_ids": torch.arange(7).expand(2, 7)}).documents is None
    assert Samples.of({"position_ids": positions()}).documents is not None
    assert Samples.of({"position_ids": positions(), "attention_mask": torch.ones(2, 7)}).documents is None


def test_one_row_of_positions_is_every_rows():
    ids, one = torch.zeros(3, 7, dtype=torch.long), positions()[1:]
    told, broadcast = (
        Samples.of({"input_ids": ids, "position_ids": given}).documents for given in (one.expand(3, -1), one)
    )
    assert broadcast.rows.tolist() == told.rows.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert torch.equal(broadcast.positions, told.positions)
    assert torch.equal(broadcast.inside, told.inside)


@pytest.mark.parametrize("causal", [False, True])
def test_documents_that_see_each_other_are_refused(causal):
    samples, apart = Samples.of({"position_ids": positions()}), same_document()
    open_once = apart.clone()
    open_once[1, 0, 6, 0] = True  # the last document of the second row sees the first one
    future = apart.clone()
    future[1, 0, 0, 6] = True
    for mask, mixes in ((None, True), (open_once, True), (future, not causal), (apart, False)):
        additive = [] if mask is None else [torch.zeros(2, 1, 7, 7).masked_fill(~mask, low) for low in (-1e4, -3e38)]
        for form in (mask, *additive):
            A = record(causal=causal, mask=form).operator
            if mixes:
                with pytest.raises(AcutanceError, match=r"does not keep such documents apart.*rows of their own"):
                    samples.refuse_mixing(A)
                with pytest.raises(AcutanceError, match="does not keep such documents apart"):
                    samples.record(record(causal=causal, mask=form))
            else:
                samples.refuse_mixing(A)
    Samples().refuse_mixing(record(causal=causal).operator)


@pytest.mark.parametrize("kind", ["bool mask", "float mask", "causal"])
def test_every_document_has_the_readings_it_has_alone(kind):
    mask = same_document()
    if kind == "float mask":
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf) + 0.1 * torch.randn(
            2, 1, 7, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64
        )
    whole = record(causal=kind == "causal", mask=mask)
    samples = Samples.of({"position_ids": positions()})
    apart, (tokens, inside) = samples.record(whole), samples.tokens(whole.branch)
    for document, (row, span) in enumerate(spans()):
        own = None if mask.dtype == torch.bool else mask[row : row + 1, :, span, span]
        A = whole.operator
        alone = AttentionOperator(
            A.q[row : row + 1, :, span], A.k[row : row + 1, :, span], mask=own, causal=A.causal, scale=0.7
        )
        assert torch.allclose(
            metrics.attention_entropy(apart.operator, inside)[document], metrics.attention_entropy(alone)[0]
        )
        energy = metrics.nonlocal_energy(apart.operator, apart.values, inside)[document]
        assert torch.allclose(energy, metrics.nonlocal_energy(alone, whole.values[row : row + 1, :, span])[0])
        if span.stop - span.start > 1:
            ours = metrics.token_cosine(tokens, inside)[document]
            assert torch.allclose(ours, metrics.token_cosine(whole.branch[row, span]))


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"attention_mask": torch.tensor([[1, 1, 0]])}, [[True, True, False]]),
        ({"src_key_padding_mask": torch.tensor([[False, False, True]])}, [[True, True, False]]),
        ({"patch_valid": torch.tensor([[True, True, False]])}, [[True, True, False]]),
        ({"attention_mask": torch.ones(1, 3)}, None),
        ({"attention_mask": torch.ones(1, 1, 3, 3)}, None),
        (torch.zeros(1, 3), None),
    ],
)
def test_padding_does_not_count(batch, expected):
    mask = Samples.of(batch).mask
    assert (None if mask is None else mask.tolist()) == expected


@pytest.mark.parametrize("name", ["pixel_attention_mask", "patch_valid"])
def test_padding_of_images_does_not_count(name):
    padding = torch.tensor([[1, 1, 0]])
    beside = {"attention_mask": torch.tensor([[1, 0]]), "special_tokens_mask": torch.tensor([[1, 0]])}  # a text's
    assert Samples.of(beside | {name: padding}, images=True, special=False).mask.tolist() == [[True, True, False]]
    assert Samples.of(beside | {name: torch.ones(1, 3)}, images=True, special=False).mask is None
    assert Samples.of(beside | {name: torch.ones(1, 3, 3)}, images=True).mask is None


def test_padding_of_pixels_is_refused():
    pixels = torch.ones(2, 8, 8)
    pixels[1, 4:] = 0
    with pytest.raises(ShapeError, match=r"pixel_mask is \(2, 8, 8\).*images without padding"):
        Samples.of({"pixel_mask": pixels}, images=True)


def test_a_decoder_has_a_mask_of_its_own():
    batch = {"attention_mask": torch.tensor([[1, 0]]), "decoder_attention_mask": torch.tensor([[1, 1, 0]])}
    assert Samples.of(batch, decoder=True).mask.tolist() == [[True, True, False]]
    assert Samples.of(batch | {"decoder_attention_mask": None}, decoder=True).mask is None


def test_special_tokens_and_prefix_are_left_out_on_request():
    batch = {"attention_mask": torch.tensor([[1, 1, 1, 0]]), "special_tokens_mask": torch.tensor([[1, 0, 0, 1]])}
    assert Samples.of(batch).mask.tolist() == [[True, True, True, False]]
    assert Samples.of(batch, special=False).mask.tolist() == [[False, True, True, False]]
    _, mask = Samples.of(batch, skip=(2, 0)).tokens(torch.zeros(1, 4, 5))
    assert mask.tolist() == [[False, False, True, False]]
    for back in range(4):
        _, mask = Samples(skip=(1, back)).tokens(torch.zeros(2, 4, 5))
        assert mask.tolist() == [[False] + [True] * (3 - back) + [False] * back] * 2


def test_a_mask_of_another_shape_is_an_error():
    with pytest.raises(ShapeError, match=r"\(1, 3\).*\(1, 4, 5\).*without padding"):
        Samples.of({"attention_mask": torch.tensor([[1, 1, 0]])}).tokens(torch.zeros(1, 4, 5))
