"""Logits kept within ±c by c·tanh(s/c), as in Gemma 2."""

import pytest
import torch

from acutance import metrics
from acutance.attention.operator import AttentionOperator
from acutance.errors import AcutanceError

CAP = 1.5


def inputs(tokens=6):
    g = torch.Generator().manual_seed(0)
    q = 3 * torch.randn(2, 4, tokens, 5, generator=g, dtype=torch.float64)
    k = 3 * torch.randn(2, 2, tokens, 5, generator=g, dtype=torch.float64)
    return q, k, torch.randn(2, 2, tokens, 3, generator=g, dtype=torch.float64)


def plain(q, k, bias, causal):
    logits = CAP * torch.tanh(0.4 * q @ k.repeat_interleave(2, 1).mT / CAP)
    if bias is not None:
        logits = logits + bias
    if causal:
        logits = logits.masked_fill(torch.ones(logits.shape[-2:]).triu(1).bool(), -torch.inf)
    return logits.softmax(-1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_every_product_follows_the_formula_with_its_gradients(causal, biased):
    q, k, x = (t.requires_grad_() for t in inputs())
    bias = torch.randn(1, 1, 6, 6, dtype=torch.float64) if biased else None
    A = AttentionOperator(q, k, mask=bias, causal=causal, scale=0.4, softcap=CAP)
    expected = plain(q, k, bias, causal)
    torch.testing.assert_close(A.dense(), expected)
    ours, theirs = A @ x, expected @ x.repeat_interleave(2, 1)
    torch.testing.assert_close(ours, theirs)
    weight = torch.randn_like(theirs)
    for a, b in zip(
        torch.autograd.grad((ours * weight).sum(), (q, k, x)),
        torch.autograd.grad((theirs * weight).sum(), (q, k, x)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(A.T @ ours.detach(), expected.mT @ ours)
    entropy = -(expected * expected.clamp_min(1e-300).log()).sum(-1).mean(-1)
    torch.testing.assert_close(metrics.attention_entropy(A), entropy)


def test_copies_keep_the_cap():
    q, k, _ = inputs()
    A = AttentionOperator(q, k, scale=0.4, softcap=CAP)
    for other in (A.to(torch.float64), A.map(torch.clone)):
        torch.testing.assert_close(other.dense(), A.dense())
    assert f"softcap={CAP}" in repr(A)


def test_a_large_cap_changes_nothing():
    q, k, _ = inputs()
    torch.testing.assert_close(AttentionOperator(q, k, softcap=1e9).dense(), AttentionOperator(q, k).dense())


def test_only_exponential_kernels_have_logits_to_cap():
    q, k, _ = inputs()
    with pytest.raises(AcutanceError, match="linear"):
        AttentionOperator(q, k, kernel="linear", softcap=2.0)
    with pytest.raises(AcutanceError, match="positive"):
        AttentionOperator(q, k, softcap=0.0)
