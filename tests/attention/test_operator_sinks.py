"""Sinks (one logit per head without a value, as in gpt-oss) and softcaps (c·tanh(s/c), as in Gemma 2), written out."""

import pytest
import torch
from operator_cases import assert_close, assert_is_matrix, assert_same_gradients, formula, make_case

from acutance import metrics
from acutance.attention import AttentionCall
from acutance.attention.operator import AttentionOperator
from acutance.errors import AcutanceError

CAP = 1.5


@pytest.mark.parametrize("masking", ["none", "keys", "full", "causal+keys"])
@pytest.mark.parametrize(("grouped", "cap", "has_sink"), [(False, None, True), (True, None, True), (True, CAP, False)])
@pytest.mark.usefixtures("tiles")
def test_values_and_gradients_are_those_of_the_softmax_written_out(masking, grouped, cap, has_sink):
    c = make_case("softmax", masking, grouped, sharpness=4)
    inputs = [q, k, x, y] = [t.clone().requires_grad_() for t in (c.q, c.k, c.x, c.y)]
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True) if has_sink else None
    inputs += [sink] if has_sink else []
    A = AttentionOperator(q, k, **c.options, sink=sink, softcap=cap)
    expected, sums = formula(q, k, **c.options, sink=sink, softcap=cap)
    sees, known = sums > -torch.inf, expected.detach()
    entropy = torch.special.entr(torch.cat([known, (1 - known.sum(-1, keepdim=True)).clamp(min=0)], -1)).sum(-1)
    assert_close(metrics.attention_entropy(A), (entropy * sees).sum(-1) / sees.sum(-1))
    assert_close(A.logsumexp(), AttentionOperator(q, k, **c.options, softcap=cap).logsumexp())
    assert_is_matrix(A, (expected, sums), x, y, inputs)
    with torch.no_grad():
        assert_is_matrix(A, (expected, sums), x, y)
    if has_sink:
        assert_same_gradients(A.row_scale, expected.sum(-1, keepdim=True), inputs)


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


def test_an_operator_and_its_copies_keep_sink_and_cap():
    c = make_case("softmax", dtype=torch.float32)
    sink = torch.randn(4)
    call = AttentionCall(v=c.x, q=c.q, k=c.k, sink=sink)
    logits = 6**-0.5 * c.q @ c.k.mT
    for A in (call.A, call.A.to(torch.float64), AttentionCall(v=c.x, logits=logits, sink=sink).A):
        assert "sink" in repr(A)
        assert_close(A.dense().double(), formula(c.q, c.k, sink=sink)[0], 1e-5)
    assert (call.A @ c.x).dtype == torch.float32
    assert (call.A @ c.x.double()).dtype == torch.float64
    none = AttentionOperator(c.q, c.k, sink=torch.full((4,), -torch.inf))
    assert_close(none.dense(), c.operator.dense(), 1e-6)
    capped = AttentionOperator(c.q, c.k, softcap=CAP)
    assert f"softcap={CAP}" in repr(capped)
    assert_close(capped.to(torch.float64).dense(), formula(c.q, c.k, softcap=CAP)[0], 1e-6)
