"""A sink, one logit per head without a value, against a softmax over [logits, sink] whose last column is dropped."""

import pytest
import torch
from operator_cases import assert_close, make_case

from acutance import metrics
from acutance.attention import AttentionCall
from acutance.attention.operator import AttentionOperator
from acutance.errors import AcutanceError, ShapeError

MASKINGS = ("none", "keys", "full", "causal+keys")


def written_out(c, q, k, sink):
    """The matrix as gpt-oss computes it, and the whole distribution with the sink's column."""
    logits = 6**-0.5 * q @ c.with_heads(k).mT
    if c.mask is not None:
        logits = logits.masked_fill(~(c.mask if c.mask.ndim == 4 else c.mask[:, None, None, :]), -torch.inf)
    if c.causal:
        logits = logits.masked_fill(torch.ones(11, 11).triu(1).bool(), -torch.inf)
    whole = torch.cat([logits, sink[:, None, None].expand(2, 4, 11, 1)], -1).softmax(-1)
    return whole[..., :-1], whole


@pytest.mark.parametrize("masking", MASKINGS)
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("tiles", ["one", "several"])
def test_values_and_gradients_are_those_of_the_softmax_written_out(masking, grouped, tiles, request):
    if tiles == "several":
        request.getfixturevalue("small_tiles")
    c = make_case("softmax", masking, grouped)
    q, k, x, y = (t.clone().requires_grad_() for t in (c.q, c.k, c.x, c.y))
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True)
    A = AttentionOperator(q, k, **c.options, sink=sink)
    expected, whole = written_out(c, q, k, sink)
    entropy, sees = torch.special.entr(whole.detach()).sum(-1), (expected > 0).any(-1)
    assert_close(metrics.attention_entropy(A), (entropy * sees).sum(-1) / sees.sum(-1))
    assert_close(A.logsumexp(), AttentionOperator(q, k, **c.options).logsumexp())
    for ours, theirs in (
        (A.apply(x), expected @ c.with_heads(x)),
        (A.T @ y, expected.mT @ y),
        (A.dense(), expected),
        (A.diagonal(), expected.diagonal(dim1=-2, dim2=-1)),
        (A.row_scale, expected.sum(-1, keepdim=True)),
    ):
        assert_close(ours, theirs.detach())
        weight = torch.randn_like(theirs)
        inputs = (q, k, x, y, sink)
        found = torch.autograd.grad(ours, inputs, weight, retain_graph=True, allow_unused=True)
        wanted = torch.autograd.grad(theirs, inputs, weight, retain_graph=True, allow_unused=True)
        for own, other in zip(found, wanted, strict=True):
            assert (own is None) == (other is None)
            if own is not None:
                assert_close(own, other, 1e-10)


@pytest.mark.parametrize("largest", [None, 3])
@pytest.mark.parametrize("masking", ["none", "causal"])
def test_eigenvalues_are_those_of_the_matrix(masking, largest, monkeypatch):
    if largest is not None:
        monkeypatch.setattr("acutance.attention.spectra.DENSE_TOKENS", 1)
    c = make_case("softmax", masking, tokens=40)
    A = AttentionOperator(c.q, c.k, **c.options, sink=torch.linspace(-1, 2, 4).double())
    expected = torch.linalg.eigvals(A.dense()).abs().sort(descending=True).values[..., :largest]
    assert_close(A.eigenvalues(largest).abs(), expected, 1e-8)


def test_metrics_follow_their_sums():
    c = make_case("softmax", "keys")
    A = AttentionOperator(c.q, c.k, **c.options, sink=torch.linspace(-1, 2, 4).double())
    distances = torch.cdist(c.x, c.x).square()
    assert_close(metrics.nonlocal_energy(A, c.x), (A.dense() * distances).sum((-2, -1)) / 2)
    plain = A.without_sink()
    assert_close(metrics.gradient_alignment(A, c.x), metrics.gradient_alignment(plain, c.x))
    assert_close(metrics.log_nonlocal_energy_raw(A, c.x), metrics.log_nonlocal_energy_raw(plain, c.x))
    flat = A.dense()[:, :2].flatten(2)
    two = AttentionOperator(c.q[:, :2], c.k[:, :2], mask=c.mask, sink=A.sink[:2])
    assert_close(metrics.head_cosine(two), torch.cosine_similarity(flat[:, 0], flat[:, 1], dim=-1))


def test_what_needs_rows_that_sum_to_one_is_refused():
    c = make_case("softmax")
    A = AttentionOperator(c.q, c.k, sink=torch.zeros(4).double())
    with pytest.raises(AcutanceError, match="sink"):
        A.stationary()
    assert_close(A.without_sink().stationary(), c.operator.stationary())
    with pytest.raises(ShapeError, match="per head"):
        AttentionOperator(c.q, c.k, sink=torch.zeros(3).double())


def test_an_operator_and_its_copies_keep_the_sink():
    c = make_case("softmax", dtype=torch.float32)
    sink = torch.randn(4)
    call = AttentionCall(v=c.x, q=c.q, k=c.k, sink=sink)
    logits = 6**-0.5 * c.q @ c.k.mT
    for A in (call.A, call.A.to(torch.float64), AttentionCall(v=c.x, logits=logits, sink=sink).A):
        assert "sink" in repr(A)
        assert_close(A.dense().double(), written_out(c, c.q, c.k, sink)[0].double(), 1e-5)
    assert (call.A @ c.x).dtype == torch.float32
    assert (call.A @ c.x.double()).dtype == torch.float64
    none = AttentionOperator(c.q, c.k, sink=torch.full((4,), -torch.inf))
    assert_close(none.dense(), c.operator.dense(), 1e-6)
