"""Random operators against the matrix written out in float64: every product, sum and spectrum describes one matrix."""

import math
import os
from contextlib import suppress

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from acutance import AttentionOperator
from acutance.errors import AcutanceError
from acutance.metrics import attention_entropy

DTYPES = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 4e-2, torch.float16: 5e-3}
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "100"))
LOW = (-math.inf, torch.finfo(torch.float32).min, -1e9, -1e4)


@st.composite
def problems(draw):
    """Arguments of an operator; tensors are drawn by one seed, so that an example shrinks to a short one."""
    dtype = draw(st.sampled_from(list(DTYPES)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    key_heads, width, keys = draw(st.integers(1, 3)), draw(st.integers(1, 9)), draw(st.integers(1, 9))
    heads = key_heads * draw(st.integers(1, 2))
    queries = keys if draw(st.booleans()) else draw(st.integers(1, 9))
    sharpness = draw(st.sampled_from([0.0, 1.0, 5.0, 40.0]))

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k = (sharpness * normal(2, heads, queries, width)).to(dtype), normal(2, key_heads, keys, width).to(dtype)
    options = {"causal": draw(st.booleans()), "mask": draw(masks(normal, heads, queries, keys))}
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([0.5, 30.0]))
    if draw(st.booleans()):
        options["sink"] = normal(heads).to(dtype)
    return q, k, options


@st.composite
def masks(draw, normal, heads, queries, keys):
    """None, of keys or of pairs, bool or additive; additive ones hide by −∞ or by a low number, whole rows too."""
    kind = draw(st.sampled_from(["none", "keys", "bool", "hides", "bias"]))
    if kind == "none":
        return None
    if kind == "keys":
        return normal(2, keys) > -0.5
    shape = (2, draw(st.sampled_from([1, heads])), draw(st.sampled_from([1, queries])), keys)
    mask = normal(*shape) > -0.5
    if draw(st.booleans()):
        mask[:, :, 0] = False
    if kind == "bool":
        return mask
    bias = normal(*shape) if kind == "bias" else torch.zeros(shape, dtype=torch.float64)
    return bias.masked_fill(~mask, draw(st.sampled_from(LOW))).float()


def written_out(q, k, causal, mask, softcap=None, sink=None):
    """The matrix in float64, and which of its rows see anything."""
    heads, queries, keys = q.shape[1], q.shape[2], k.shape[2]
    logits = q.double() @ k.double().repeat_interleave(heads // k.shape[1], 1).mT / q.shape[-1] ** 0.5
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    bias = torch.zeros_like(logits)
    if mask is not None:
        mask = mask[:, None, None] if mask.ndim == 2 else mask
        bias = bias.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else bias + mask
    if causal:
        bias = bias.masked_fill(~torch.ones(queries, keys).bool().tril(keys - queries), -math.inf)
    top = bias.amax(-1, keepdim=True)
    dead = top == -math.inf
    logits = logits + (bias - top.masked_fill(dead, 0))  # a constant of a row is none of the softmax's business
    logits = logits.masked_fill(dead, 0)
    sums = logits.logsumexp(-1, keepdim=True)
    weights = (logits - sums).exp().masked_fill(dead, 0)
    if sink is not None:
        total = sums + top.masked_fill(dead, 0)
        weights = weights * torch.sigmoid(total - sink.double()[:, None, None])
    return weights, ~dead.squeeze(-1)


def assert_near(found, wanted, dtype):
    scale = 1 + wanted.abs().amax()
    assert found.isfinite().all()
    assert (found.double() - wanted).abs().max() <= DTYPES[dtype] * scale


@settings(deadline=None, max_examples=EXAMPLES)
@given(problems())
def test_products_entropies_and_a_stationary_distribution_are_of_one_matrix(problem):
    q, k, options = problem
    A, (weights, sees) = AttentionOperator(q, k, **options), written_out(q, k, **options)
    units = torch.eye(weights.shape[-1], dtype=q.dtype).expand(2, q.shape[1], -1, -1)
    rows = torch.eye(weights.shape[-2], dtype=q.dtype).expand(2, q.shape[1], -1, -1)
    assert_near(A.dense(), weights, q.dtype)
    assert_near(A @ units, weights, q.dtype)
    assert_near((A.T @ rows).mT, weights, q.dtype)
    if weights.shape[-1] == weights.shape[-2]:
        assert_near(A.diagonal(), weights.diagonal(dim1=-2, dim2=-1), q.dtype)
        traces = A.eigenvalues().sum(-1).real
        assert_near(traces, weights.diagonal(dim1=-2, dim2=-1).sum(-1), q.dtype)
    missing = (1 - weights.sum(-1, keepdim=True)).clamp_min(0) if "sink" in options else weights[..., :0]
    rows = torch.cat([weights, missing], -1)
    wanted = torch.special.entr(rows).sum(-1)
    wanted = (wanted * sees).sum(-1) / sees.sum(-1)
    errors = (attention_entropy(A).double() - wanted)[sees.any(-1)].abs()
    assert (errors <= max(1e-3, DTYPES[q.dtype])).all()
    if q.shape[2] == k.shape[2] and "sink" not in options:
        with suppress(AcutanceError):  # it may be refused
            pi = A.stationary().double()
            assert (pi.sum(-1) - 1).abs().max() <= 1e-5
            moved = torch.einsum("bhi,bhij->bhj", pi, weights)
            assert (moved - pi).abs().sum(-1).max() <= 10 * DTYPES[q.dtype]
