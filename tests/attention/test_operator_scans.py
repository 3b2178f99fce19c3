"""The operator of a linear recurrence, against its matrix written out as products of transitions, in float64."""

import pytest
import torch
from operator_cases import assert_close, assert_same_gradients, assert_tensors_below, normal

from acutance import AttentionOperator, metrics
from acutance.attention import scan
from acutance.attention.scan import ScanOperator
from acutance.errors import AcutanceError, ShapeError, SignedRowsError

FADING = ("of heads", "of states", "at rates")


def parts(fading="of heads", tokens=11, states=3, seed=0, dtype=torch.float64):
    """The tensors of a scan of two samples and two heads; keys about as long as a delta rule's."""
    q, k = (normal(2, 2, tokens, states, seed=seed + n) / states**0.5 for n in (0, 1))
    write = normal(2, 2, tokens, 1, seed=seed + 2).sigmoid()
    decay = -normal(2, 2, tokens, states if fading == "of states" else 1, seed=seed + 3).exp()
    found = {"q": q, "k": k, "write": write, "decay": decay}
    if fading == "at rates":
        found["rates"] = normal(2, states, seed=seed + 4).exp()
    return {name: x.to(dtype) for name, x in found.items()}


def matrix(q, k, write, decay, rates=None, erases=False):
    """A_ij = q_iᵀ T_i … T_{j+1} w_j k_j, entry by entry, with T_i = (I − w_i k_i k_iᵀ) diag(exp f_i)."""
    fallen = decay if rates is None else decay * rates[:, None]
    fade = torch.diag_embed(fallen.exp().expand(q.shape))
    outer = k[..., :, None] * k[..., None, :] * write[..., None]
    moves = (torch.eye(q.shape[-1]) - outer) @ fade if erases else fade
    rows = []
    for i in range(q.shape[2]):
        row, readout = [], q[:, :, i, None]
        for j in range(i, -1, -1):
            row.insert(0, (readout @ (write * k)[:, :, j, :, None]).flatten(1))
            readout = readout @ moves[:, :, j]
        rows.append(torch.stack(row + [torch.zeros_like(row[0])] * (q.shape[2] - i - 1), -1))
    return torch.stack(rows, -2)


@pytest.mark.parametrize("fading", FADING)
@pytest.mark.parametrize("erases", [False, True])
@pytest.mark.parametrize("longest", [64, 4, 1])
def test_products_entries_and_gradients_are_those_of_the_matrix(fading, erases, longest, monkeypatch):
    monkeypatch.setattr(scan, "LONGEST_CHUNK", longest)
    given = {name: x.requires_grad_() for name, x in parts(fading).items()}
    x, y = (normal(2, 2, 11, 5, seed=seed).requires_grad_() for seed in (7, 8))
    A, expected = ScanOperator(**given, erases=erases), matrix(**given, erases=erases)
    for mine, theirs in [
        (A @ x, expected @ x),
        (A.T @ y, expected.mT @ y),
        (A.dense(), expected),
        (torch.cat([entries for _, entries in A.tiles(3)], -2), expected),
    ]:
        assert_same_gradients(mine, theirs, [*given.values(), x, y])
    assert_same_gradients(A.diagonal(), expected.diagonal(dim1=-2, dim2=-1), [A.q, A.k, A.write])
    found = torch.linalg.eigvals(expected.detach()).abs().sort(descending=True).values
    assert A.is_triangular
    assert (expected < 0).any()
    assert_close(A.eigenvalues().abs(), found)
    assert_close(A.eigenvalues(2).abs(), found[..., :2])


def test_memory_is_linear_in_tokens():
    A = ScanOperator(**parts("at rates", tokens=3000), erases=True)
    x = normal(2, 2, 3000, 4)
    with assert_tensors_below(2 * 2 * 3000 * 64):
        A @ x
        A.T @ x


def test_dtypes():
    given, x = parts("at rates"), normal(2, 2, 11, 4)
    A = ScanOperator(**given)
    low = ScanOperator(**parts("at rates", dtype=torch.bfloat16))
    assert (low @ x.bfloat16()).dtype == (low.T @ x.bfloat16()).dtype == torch.bfloat16
    assert (low @ x).dtype == torch.float64
    assert low.dense().dtype == low.diagonal().dtype == torch.float32
    assert_close((low @ x.bfloat16()).double(), A @ x, 0.05)
    assert_close(low.to(torch.float64) @ x, ScanOperator(**{name: p.double() for name, p in low.parts.items()}) @ x)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(A @ x, matrix(**given) @ x)
    assert "ScanOperator(shape=(2, 2, 11, 11), kernel='scan'" in repr(A)


def test_cosines_are_those_of_the_entries_of_both_signs():
    A, B = (ScanOperator(**parts(seed=seed)) for seed in (0, 20))
    softmax, half = AttentionOperator(A.q, A.k, causal=True), torch.arange(11).expand(2, -1) > 4
    for other in (B, softmax, A.replace(q=-A.q)):
        for mask in (None, half):
            rows = 1.0 if mask is None else mask[:, None, :, None]
            one, two = ((x.dense() * rows).flatten(2) for x in (A, other))
            assert_close(metrics.attention_cosine(A, other, mask), torch.cosine_similarity(one, two, dim=-1))
    twins = {name: part[:, :1].expand_as(part) for name, part in A.parts.items()}
    opposite = ScanOperator(**twins | {"q": twins["q"] * torch.tensor([1.0, -1.0])[:, None, None]})
    for one in (A, opposite):
        flat = one.dense().flatten(2)
        assert_close(metrics.head_cosine(one), torch.cosine_similarity(flat[:, 0], flat[:, 1], dim=-1))


@pytest.mark.parametrize(
    "read",
    [
        *(lambda A, x, name=name: getattr(A, name)() for name in ("logsumexp", "stationary", "symmetrised")),
        lambda A, x: A.row_scale,
        lambda A, x: A.without_sink(),
        lambda A, x: metrics.attention_entropy(A),
        lambda A, x: metrics.nonlocal_energy(A, x),
        lambda A, x: metrics.log_nonlocal_energy_raw(A, x),
        lambda A, x: metrics.gradient_alignment(A, x),
    ],
)
def test_what_needs_weights_is_refused(read):
    A = ScanOperator(**parts())
    with pytest.raises(
        SignedRowsError, match=r"sum to one, and those of a scan have both signs: read attention_cosine"
    ):
        read(A, normal(2, 2, 11, 4))


def test_parts_that_do_not_fit_are_refused():
    given = parts("at rates")
    wrong = {"k": given["k"][:, :1], "write": given["write"][..., 0], "decay": given["q"][..., :2]}
    for name, x in {**wrong, "rates": given["rates"][:, :2], "q": given["q"][0]}.items():
        with pytest.raises(ShapeError, match=rf"a scan takes q and k .*{name} \({', '.join(map(str, x.shape))}\)"):
            ScanOperator(**given | {name: x})
    with pytest.raises(AcutanceError, match=r"x \(2, 1, 11, 4\) does not fit A"):
        ScanOperator(**given) @ normal(2, 1, 11, 4)
