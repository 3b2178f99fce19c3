"""Padding, packed documents and special tokens: what counts in a batch."""

from contextlib import nullcontext

import pytest
import torch

from acutance import metrics
from acutance.attention import AttentionCall
from acutance.attention.operator import AttentionOperator
from acutance.errors import AcutanceError, ShapeError
from acutance.measure.samples import Documents, TokenLayout, possible_rows

LENGTHS = [[4, 3], [2, 1, 4]]  # documents in the two rows of a batch
SPANS = [(0, slice(0, 4)), (0, slice(4, 7)), (1, slice(0, 2)), (1, slice(2, 3)), (1, slice(3, 7))]
POSITIONS = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])
PACKED = {"position_ids": POSITIONS}
IDS = torch.stack([torch.cat([torch.full((n,), i) for i, n in enumerate(row)]) for row in LENGTHS])
APART = IDS[:, None, :, None] == IDS[:, None, None, :]


def record(causal=False, mask=None):
    g = torch.Generator().manual_seed(0)
    q, k, v, u = (torch.randn(2, 2, 7, 4, generator=g, dtype=torch.float64) for _ in range(4))
    branch = torch.randn(2, 7, 8, generator=g, dtype=torch.float64)
    A = AttentionOperator(q, k, mask=mask, causal=causal, scale=0.7)
    return AttentionCall(operator=A, v=v, values=v, output=u, branch=branch)


def test_documents_are_found_where_positions_start_anew():
    found = Documents.of(POSITIONS)
    assert found.rows.tolist() == [0, 0, 1, 1, 1]
    tokens = torch.arange(14.0).reshape(2, 7, 1)
    for own, inside, (row, span) in zip(found.split(tokens), found.inside, SPANS, strict=True):
        assert torch.equal(own[inside], tokens[row, span])
    anywhere = Documents.of(torch.tensor([[4, 5, 6, 2, 3, 4, 5]]))
    assert (anywhere.rows.tolist(), anywhere.inside.sum(1).tolist()) == ([0, 0], [3, 4])


def test_when_rows_are_documents():
    for plain in ({"position_ids": torch.arange(7).expand(2, 7)}, PACKED | {"attention_mask": torch.ones(2, 7)}):
        assert TokenLayout.of(plain).documents is None
    found = TokenLayout.of(PACKED | {"attention_mask": APART})  # the mask keeps documents apart
    assert (found.mask, found.documents.rows.tolist()) == (None, [0, 0, 1, 1, 1])
    one = TokenLayout.of({"input_ids": torch.zeros(3, 7, dtype=torch.long), "position_ids": POSITIONS[1:]}).documents
    assert one.rows.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]  # one row of positions is every row's


@pytest.mark.parametrize("causal", [False, True])
def test_documents_that_see_each_other_are_refused(causal):
    samples, open_once, future = TokenLayout.of(PACKED), APART.clone(), APART.clone()
    open_once[1, 0, 6, 0] = future[1, 0, 0, 6] = True
    for mask, mixes in ((None, True), (open_once, True), (future, not causal), (APART, False)):
        additive = [] if mask is None else [torch.zeros(2, 1, 7, 7).masked_fill(~mask, low) for low in (-1e4, -3e38)]
        refused = pytest.raises(AcutanceError, match=r"documents see each other.*rows of their own")
        for form in (mask, *additive):
            with refused if mixes else nullcontext():
                samples.documents.refuse_mixing(record(causal=causal, mask=form))


@pytest.mark.parametrize("kind", ["bool mask", "float mask", "causal"])
def test_every_document_has_the_readings_it_has_alone(kind):
    mask = APART
    if kind == "float mask":
        bias = torch.randn(2, 1, 7, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        mask = (0.1 * bias).masked_fill(~APART, -torch.inf)
    whole, samples = record(causal=kind == "causal", mask=mask), TokenLayout.of(PACKED)
    apart, (tokens, inside), A = samples.record(whole), samples.tokens(whole.branch), whole.A
    for document, (row, span) in enumerate(SPANS):
        one = slice(row, row + 1)
        own = None if mask.dtype == torch.bool else mask[one, :, span, span]
        alone = AttentionOperator(A.q[one, :, span], A.k[one, :, span], mask=own, causal=A.causal, scale=0.7)
        assert torch.allclose(metrics.attention_entropy(apart.A, inside)[document], metrics.attention_entropy(alone)[0])
        energy = metrics.nonlocal_energy(apart.A, apart.values, inside)[document]
        assert torch.allclose(energy, metrics.nonlocal_energy(alone, whole.values[one, :, span])[0])
        if span.stop - span.start > 1:
            ours = metrics.token_cosine(tokens, inside)[document]
            assert torch.allclose(ours, metrics.token_cosine(whole.branch[row, span]))


BESIDE = {"attention_mask": torch.tensor([[1, 0]]), "special_tokens_mask": torch.tensor([[1, 0]])}  # a text's
SHORT, WHOLE = torch.tensor([[1, 1, 0]]), torch.ones(1, 3)


@pytest.mark.parametrize(
    ("batch", "options", "expected"),
    [
        ({"attention_mask": SHORT}, {}, [[True, True, False]]),
        ({"src_key_padding_mask": ~SHORT.bool()}, {}, [[True, True, False]]),
        ({"src_key_padding_mask": torch.tensor([False, True])}, {}, [[True, False]]),  # a sample by itself
        ({"patch_valid": SHORT.bool()}, {}, [[True, True, False]]),
        ({"attention_mask": WHOLE}, {}, None),
        ({"attention_mask": torch.ones(1, 1, 3, 3)}, {}, None),
        (torch.zeros(1, 3), {}, None),
        (BESIDE | {"pixel_attention_mask": SHORT}, {"images": True, "special": False}, [[True, True, False]]),
        (BESIDE | {"patch_valid": SHORT}, {"images": True}, [[True, True, False]]),
        (BESIDE | {"patch_valid": WHOLE}, {"images": True, "special": False}, None),
        (BESIDE | {"pixel_mask": torch.ones(1, 3, 3)}, {"images": True}, None),
        (BESIDE | {"decoder_attention_mask": SHORT}, {"decoder": True}, [[True, True, False]]),
        (BESIDE | {"tgt_key_padding_mask": ~SHORT.bool()}, {"decoder": True}, [[True, True, False]]),
        (BESIDE | {"decoder_attention_mask": None}, {"decoder": True}, None),
    ],
)
def test_padding_does_not_count(batch, options, expected):
    mask = TokenLayout.of(batch, **options).mask
    assert (mask if mask is None else mask.tolist()) == expected


def test_special_tokens_and_prefix_are_left_out_on_request():
    batch = {"attention_mask": torch.tensor([[1, 1, 1, 0]]), "special_tokens_mask": torch.tensor([[1, 0, 0, 1]])}
    assert TokenLayout.of(batch).mask.tolist() == [[True, True, True, False]]
    assert TokenLayout.of(batch, special=False).mask.tolist() == [[False, True, True, False]]
    layout, tokens = TokenLayout.of(batch, special_token_counts=(2, 0)), torch.zeros(1, 4, 5)
    mask = layout.tokens(tokens)[1]
    assert mask.tolist() == [[False, False, True, False]]
    assert layout.tokens(tokens + 1)[1] is mask, "made once for all layers"
    for back in range(3):
        _, mask = TokenLayout(special_token_counts=(1, back)).tokens(torch.zeros(2, 4, 5))
        assert mask.tolist() == [[False] + [True] * (3 - back) + [False] * back] * 2


PADDING = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]).bool()
VISIBLE = PADDING[:, None, None, :].expand(2, 1, 4, 4)
PAIRS = {  # the same padding as a mask of queries and keys
    "bool": VISIBLE,
    "one row of queries": VISIBLE[:, :, :1],
    "heads": VISIBLE.expand(2, 3, 4, 4),
    "without heads": VISIBLE[:, 0].float(),
    "integers": VISIBLE.long(),
    "padding sees nothing": VISIBLE & PADDING[:, None, :, None],
    "added": torch.zeros(2, 1, 4, 4).masked_fill(~VISIBLE, torch.finfo(torch.float32).min),
    "added infinities": torch.zeros(2, 1, 4, 4).masked_fill(~VISIBLE, -torch.inf),
    "added 1e4": torch.zeros(2, 1, 4, 4).masked_fill(~VISIBLE, -1e4),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_padding_is_read_from_masks_of_queries_and_keys(kind):
    for name in ("attention_mask", "decoder_attention_mask"):
        found = TokenLayout.of({name: PAIRS[kind]}, decoder=name != "attention_mask").mask
        assert found.tolist() == PADDING.tolist()


def test_one_mask_of_queries_and_keys_is_every_samples():
    batch = {"input_ids": torch.zeros(5, 4, dtype=torch.long), "attention_mask": VISIBLE[:1]}
    assert TokenLayout.of(batch).mask.tolist() == PADDING[:1].tolist() * 5
    assert TokenLayout.of({"attention_mask": torch.zeros(2, 1, 4, 4)}).mask is None  # nothing is added: all count


UNCLEAR = {
    "causal": torch.ones(2, 1, 4, 4, dtype=torch.bool).tril(),
    "causal and added": torch.zeros(2, 1, 4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf),
    "added to the logits, or zeros and ones": torch.ones(2, 1, 4, 4).tril(),
    "heads differ": PAIRS["heads"] & torch.tensor([1, 1, 0]).bool()[:, None, None],
}
BY_TOKEN = r"attention_mask is \(2, .*\).*give attention_mask as \(batch, tokens\)"
HALF = torch.ones(2, 8, 8).index_fill(1, torch.arange(4, 8), 0)
REFUSED = {name: ({"attention_mask": mask}, {}, BY_TOKEN) for name, mask in UNCLEAR.items()} | {
    "of pixels": ({"pixel_mask": HALF}, {"images": True}, r"pixel_mask is \(2, 8, 8\).*images without padding"),
    "of another size": ({"attention_mask": SHORT}, {}, r"\(1, 3\).*\(1, 4\).*without padding"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_padding_that_cannot_be_placed_is_refused(kind):
    batch, options, message = REFUSED[kind]
    with pytest.raises(ShapeError, match=message):
        TokenLayout.of(batch, **options).tokens(torch.zeros(1, 4, 5))


def test_samples_without_a_token_that_counts_are_told():
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]])
    for full in (TokenLayout(), TokenLayout.of({"attention_mask": torch.ones(3, 4)})):
        assert full.filled is None
    assert TokenLayout.of({"attention_mask": mask[:1]}).filled is None
    assert TokenLayout.of({"attention_mask": mask}).filled.tolist() == [True, False, True]
    front = TokenLayout.of({"attention_mask": mask}, special_token_counts=(1, 0))
    assert front.filled.tolist() == [True, False, False]
    special = torch.zeros(2, 7, dtype=torch.long)
    special[1, 2] = 1  # all of a document of one token
    packed = TokenLayout.of({"position_ids": POSITIONS, "special_tokens_mask": special}, special=False)
    assert packed.filled.tolist() == [True, True, True, False, True]


def test_rows_are_told_by_any_tensor_that_is_fed():
    ids, image = torch.zeros(3, 12, dtype=torch.long), torch.zeros(2, 3, 8, 8)
    assert possible_rows(image) == ({2}, {2}, 2)
    assert possible_rows({"input_ids": ids, "inside": {"pixel_values": image}}) == ({2, 3}, {2, 3}, 12)
    choices = possible_rows({"input_ids": torch.zeros(2, 3, 5, dtype=torch.long)})
    assert choices == ({2, 3, 4, 5, 6}, {2}, 6)  # a grid of them is an alignment, whose rows are no samples
    frames = set(range(2, 9))
    assert possible_rows(torch.zeros(2, 4, 3, 8, 8))[:2] == (frames, frames)  # or some of them
    for unknown in ({"images": [image[0], image[1]], "scale": torch.ones(1)}, {"words": "a b"}):
        assert 1000 in possible_rows(unknown)[0]
