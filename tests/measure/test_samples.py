"""Padding, packed documents and prefix tokens: what counts in a batch."""

import pytest
import torch

from acutance import metrics
from acutance.attention import AttentionCall
from acutance.attention.operator import AttentionOperator
from acutance.errors import AcutanceError, ShapeError
from acutance.measure.samples import BatchRows, Documents, TokenLayout

LENGTHS = [[4, 3], [2, 1, 4]]  # documents in the two rows of a batch


def positions():
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])


def record(tokens=7, heads=2, width=4, causal=False, mask=None):
    g = torch.Generator().manual_seed(0)
    q, k, v, u = (torch.randn(2, heads, tokens, width, generator=g, dtype=torch.float64) for _ in range(4))
    A = AttentionOperator(q, k, mask=mask, causal=causal, scale=0.7)
    return AttentionCall(
        operator=A, v=v, values=v, output=u, branch=torch.randn(2, tokens, 8, generator=g, dtype=torch.float64)
    )


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


def test_documents_may_start_at_any_position():
    found = Documents.of(torch.tensor([[4, 5, 6, 2, 3, 4, 5]]))
    assert found.rows.tolist() == [0, 0]
    assert found.inside.sum(1).tolist() == [3, 4]


def test_positions_that_never_start_anew_leave_the_rows_alone():
    assert TokenLayout.of({"position_ids": torch.arange(7).expand(2, 7)}).documents is None
    assert TokenLayout.of({"position_ids": positions()}).documents is not None
    assert TokenLayout.of({"position_ids": positions(), "attention_mask": torch.ones(2, 7)}).documents is None


def test_one_row_of_positions_is_every_rows():
    ids, one = torch.zeros(3, 7, dtype=torch.long), positions()[1:]
    told, broadcast = (
        TokenLayout.of({"input_ids": ids, "position_ids": given}).documents for given in (one.expand(3, -1), one)
    )
    assert broadcast.rows.tolist() == told.rows.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert torch.equal(broadcast.positions, told.positions)
    assert torch.equal(broadcast.inside, told.inside)


@pytest.mark.parametrize("causal", [False, True])
def test_documents_that_see_each_other_are_refused(causal):
    samples, apart = TokenLayout.of({"position_ids": positions()}), same_document()
    open_once = apart.clone()
    open_once[1, 0, 6, 0] = True  # the last document of the second row sees the first one
    future = apart.clone()
    future[1, 0, 0, 6] = True
    for mask, mixes in ((None, True), (open_once, True), (future, not causal), (apart, False)):
        additive = [] if mask is None else [torch.zeros(2, 1, 7, 7).masked_fill(~mask, low) for low in (-1e4, -3e38)]
        for form in (mask, *additive):
            A = record(causal=causal, mask=form).A
            if mixes:
                with pytest.raises(AcutanceError, match=r"does not keep such documents apart.*rows of their own"):
                    samples.refuse_mixing(A)
            else:
                samples.refuse_mixing(A)
    TokenLayout().refuse_mixing(record(causal=causal).A)


@pytest.mark.parametrize("kind", ["bool mask", "float mask", "causal"])
def test_every_document_has_the_readings_it_has_alone(kind):
    mask = same_document()
    if kind == "float mask":
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf) + 0.1 * torch.randn(
            2, 1, 7, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64
        )
    whole = record(causal=kind == "causal", mask=mask)
    samples = TokenLayout.of({"position_ids": positions()})
    apart, (tokens, inside) = samples.record(whole), samples.tokens(whole.branch)
    for document, (row, span) in enumerate(spans()):
        own = None if mask.dtype == torch.bool else mask[row : row + 1, :, span, span]
        A = whole.A
        alone = AttentionOperator(
            A.q[row : row + 1, :, span], A.k[row : row + 1, :, span], mask=own, causal=A.causal, scale=0.7
        )
        assert torch.allclose(metrics.attention_entropy(apart.A, inside)[document], metrics.attention_entropy(alone)[0])
        energy = metrics.nonlocal_energy(apart.A, apart.values, inside)[document]
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
    mask = TokenLayout.of(batch).mask
    assert (None if mask is None else mask.tolist()) == expected


@pytest.mark.parametrize("name", ["pixel_attention_mask", "patch_valid"])
def test_padding_of_images_does_not_count(name):
    padding = torch.tensor([[1, 1, 0]])
    beside = {"attention_mask": torch.tensor([[1, 0]]), "special_tokens_mask": torch.tensor([[1, 0]])}  # a text's
    assert TokenLayout.of(beside | {name: padding}, images=True, special=False).mask.tolist() == [[True, True, False]]
    assert TokenLayout.of(beside | {name: torch.ones(1, 3)}, images=True, special=False).mask is None
    assert TokenLayout.of(beside | {name: torch.ones(1, 3, 3)}, images=True).mask is None


def test_padding_of_pixels_is_refused():
    pixels = torch.ones(2, 8, 8)
    pixels[1, 4:] = 0
    with pytest.raises(ShapeError, match=r"pixel_mask is \(2, 8, 8\).*images without padding"):
        TokenLayout.of({"pixel_mask": pixels}, images=True)


def test_a_decoder_has_a_mask_of_its_own():
    batch = {"attention_mask": torch.tensor([[1, 0]]), "decoder_attention_mask": torch.tensor([[1, 1, 0]])}
    assert TokenLayout.of(batch, decoder=True).mask.tolist() == [[True, True, False]]
    assert TokenLayout.of(batch | {"decoder_attention_mask": None}, decoder=True).mask is None


def test_special_tokens_and_prefix_are_left_out_on_request():
    batch = {"attention_mask": torch.tensor([[1, 1, 1, 0]]), "special_tokens_mask": torch.tensor([[1, 0, 0, 1]])}
    assert TokenLayout.of(batch).mask.tolist() == [[True, True, True, False]]
    assert TokenLayout.of(batch, special=False).mask.tolist() == [[False, True, True, False]]
    _, mask = TokenLayout.of(batch, special_token_counts=(2, 0)).tokens(torch.zeros(1, 4, 5))
    assert mask.tolist() == [[False, False, True, False]]
    for back in range(4):
        _, mask = TokenLayout(special_token_counts=(1, back)).tokens(torch.zeros(2, 4, 5))
        assert mask.tolist() == [[False] + [True] * (3 - back) + [False] * back] * 2


def test_a_mask_of_another_shape_is_an_error():
    with pytest.raises(ShapeError, match=r"\(1, 3\).*\(1, 4, 5\).*without padding"):
        TokenLayout.of({"attention_mask": torch.tensor([[1, 1, 0]])}).tokens(torch.zeros(1, 4, 5))


PADDING = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]).bool()


def pairs(kind):
    """The same padding as a mask of queries and keys."""
    visible = PADDING[:, None, None, :].expand(2, 1, 4, 4)
    return {
        "bool": visible,
        "one row of queries": visible[:, :, :1],
        "heads": visible.expand(2, 3, 4, 4),
        "without heads": visible[:, 0].float(),
        "integers": visible.long(),
        "padding sees nothing": visible & PADDING[:, None, :, None],
        "added": torch.zeros(2, 1, 4, 4).masked_fill(~visible, torch.finfo(torch.float32).min),
        "added infinities": torch.zeros(2, 1, 4, 4).masked_fill(~visible, -torch.inf),
        "added 1e4": torch.zeros(2, 1, 4, 4).masked_fill(~visible, -1e4),
    }[kind]


@pytest.mark.parametrize(
    "kind",
    [
        *("bool", "one row of queries", "heads", "without heads", "integers", "padding sees nothing"),
        *("added", "added infinities", "added 1e4"),
    ],
)
@pytest.mark.parametrize("name", ["attention_mask", "decoder_attention_mask"])
def test_padding_is_read_from_masks_of_queries_and_keys(kind, name):
    found = TokenLayout.of({name: pairs(kind)}, decoder=name != "attention_mask").mask
    assert found.tolist() == PADDING.tolist()


def test_one_mask_of_queries_and_keys_is_every_samples():
    batch = {"input_ids": torch.zeros(5, 4, dtype=torch.long), "attention_mask": pairs("bool")[:1]}
    assert TokenLayout.of(batch).mask.tolist() == PADDING[:1].tolist() * 5
    assert TokenLayout.of({"attention_mask": torch.zeros(2, 1, 4, 4)}).mask is None  # nothing is added: all count


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(2, 1, 4, 4, dtype=torch.bool).tril(),
        torch.zeros(2, 1, 4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf),
        torch.ones(2, 1, 4, 4).tril(),  # added to the logits, or zeros and ones?
        pairs("heads") & torch.tensor([1, 1, 0]).bool()[:, None, None],
    ],
    ids=["causal", "causal and added", "either", "heads differ"],
)
def test_other_masks_of_queries_and_keys_are_refused(mask):
    with pytest.raises(ShapeError, match=r"attention_mask is \(2, .*\).*give attention_mask as \(batch, tokens\)"):
        TokenLayout.of({"attention_mask": mask})


def test_a_mask_that_keeps_documents_apart_is_theirs():
    apart = same_document()
    found = TokenLayout.of({"position_ids": positions(), "attention_mask": apart})
    assert found.mask is None
    assert found.documents.rows.tolist() == [0, 0, 1, 1, 1]
    found.refuse_mixing(record(mask=apart).A)


def test_padding_of_a_sample_by_itself():
    assert TokenLayout.of({"src_key_padding_mask": torch.tensor([False, True])}).mask.tolist() == [[True, False]]


def test_samples_without_a_token_that_counts_are_told():
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]])
    assert TokenLayout().filled is None
    assert TokenLayout.of({"attention_mask": torch.ones(3, 4)}).filled is None
    assert TokenLayout.of({"attention_mask": mask[:1]}).filled is None
    assert TokenLayout.of({"attention_mask": mask}).filled.tolist() == [True, False, True]
    assert TokenLayout.of({"attention_mask": mask}, special_token_counts=(1, 0)).filled.tolist() == [True, False, False]
    special = torch.zeros(2, 7, dtype=torch.long)
    special[1, 2] = 1  # all of a document of one token
    packed = TokenLayout.of({"position_ids": positions(), "special_tokens_mask": special}, special=False)
    assert packed.filled.tolist() == [True, True, True, False, True]


def test_rows_are_told_by_any_tensor_that_is_fed():
    ids, image = torch.zeros(3, 12, dtype=torch.long), torch.zeros(2, 3, 8, 8)
    assert BatchRows.of(image) == BatchRows.of((image, torch.zeros(2))) == ({2}, 2)
    assert BatchRows.of({"input_ids": ids, "inside": {"pixel_values": image}}) == ({2, 3}, 12)
    assert BatchRows.of({"input_ids": torch.zeros(2, 3, 5, dtype=torch.long)}).possible == {2, 3, 4, 5, 6}  # choices
    assert BatchRows.of(torch.zeros(2, 4, 3, 8, 8)).possible == set(range(2, 9))  # frames, or some of them
    for unknown in ({"images": [image[0], image[1]], "scale": torch.ones(1)}, {"words": "a b"}):
        assert 1000 in BatchRows.of(unknown).possible
