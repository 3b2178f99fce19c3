import math
from functools import partial

import pytest
import torch
from kernel_cases import CUDA, DEVICE, each, random, require_kernels

from acutance.attention import AttentionCall, products
from acutance.attention.kernels import attention_sums
from acutance.attention.operator import AttentionOperator
from acutance.metrics import attention_entropy, nonlocal_energy
from acutance.metrics.sums import FROM_ROWS, from_rows
from attention.operator_cases import formula

require_kernels()
from acutance.attention.kernels import attention_sums_tiles  # noqa: E402
from acutance.attention.kernels.long_tiles import Tile  # noqa: E402

DTYPES = list(attention_sums.DTYPES) if CUDA else [torch.float16]  # NumPy, the interpreter's base, has no bfloat16
SMALL = Tile(32, 16)  # so that few tokens are many tiles
MASKS = ("none", "causal", "keys", "causal keys", "entries")
dtype, causal, kind = each(DTYPES), each([False, True]), each(MASKS)
# batch, tokens, heads, key heads, heads of u, width, channels: one tile, whole tiles, several and a tail.
SHAPES = [(2, 7, 2, 2, 2, 16, 16), (1, 64, 2, 1, 2, 16, 16), (1, 43, 4, 2, 2, 16, 24), (1, 33, 3, 3, 3, 40, 8)]
FLOAT32 = 5e-6 if CUDA else 2e-6  # a GPU's exponentials and logarithms are not the closest
# Of the energy relative to Σ ‖u_i − ū‖²: what two numbers leave of a third, squared, or else float32.
ROUNDING = {torch.float16: 1e-6, torch.bfloat16: 2.0**-16}


def inputs(shape, dtype=torch.float16, size=1.0):
    batch, tokens, heads, key_heads, token_heads, width, channels = shape
    q = random(batch, heads, tokens, width, dtype=dtype, size=size)
    k = random(batch, key_heads, tokens, width, dtype=dtype, seed=1, size=size)
    return q, k, random(batch, token_heads, tokens, channels, dtype=dtype, seed=2)


def masked(q, k, kind, **options):
    (batch, heads, tokens), mask = q.shape[:3], None
    if kind.endswith("keys"):  # padding on the left: with causality the first rows see nothing
        mask = (torch.arange(tokens) >= torch.arange(1, batch + 1)[:, None]).to(DEVICE)
    if kind == "entries":
        mask = random(batch, heads, tokens, tokens, seed=3) > -0.25
        mask[:, 0, tokens // 2] = False
    return AttentionOperator(q, k, mask=mask, causal=kind.startswith("causal"), **options)


def expected(A, u=None):
    """The same from the matrix in float64; distances by differences."""
    weights, log_sums = formula(A.q, A.k, A.mask4, A.causal, scale=A.scale)
    entropies = torch.special.entr(weights).sum(-1)
    if u is None:
        return log_sums, entropies
    u = u.double().repeat_interleave(A.heads // u.shape[1], 1)
    distances = (u[..., :, None, :] - u[..., None, :, :]).square().sum(-1)
    return log_sums, entropies, (weights * distances).sum(-1)


def found(A, u=None, counted=None, tile=SMALL):
    return attention_sums_tiles.forward(A.q, A.k, A.mask4, u, counted, A.scale, A.causal, tile=tile)


def spread(u):
    """Σ_i ‖u_i − ū‖² of every head, in float64."""
    u = u.double()
    return (u - u.mean(-2, keepdim=True)).square().sum((-2, -1))


def check(A, u, tile=SMALL, size=1.0):
    """All that is found of every row; the room for log-sums grows with the logits."""
    theirs, ours = expected(A, u), found(A, u, tile=tile).double()
    torch.testing.assert_close(ours[:2], torch.stack(theirs[:2]), rtol=1e-6, atol=FLOAT32 * max(1, size**2))
    largest = theirs[2].max() + (0 if tile is None else u.double().square().sum(-1).max())
    assert ((ours[2] - theirs[2]).abs() <= ROUNDING[u.dtype] * largest).all()
    return ours


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_follow_the_formula(shape, kind, dtype):
    q, k, u = inputs(shape, dtype)
    A = masked(q, k, kind)
    torch.testing.assert_close(found(A).double(), check(A, u)[:2], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [SHAPES[0], (1, 9, 1, 1, 1, 16, 16)], ids=str)
def test_kernels_launched_again_read_what_is_there_then(shape, kind):
    """From the second launch on Triton is not asked which code to run."""
    q, k, u = inputs(shape)
    for size in (1.0, 0.5, 2.0):
        check(masked(size * q, k, kind, scale=size / 3), size * u, size=size)


@pytest.mark.parametrize("width", [16, *(pytest.param(width, marks=pytest.mark.cuda) for width in (64, 80, 128))])
@pytest.mark.parametrize("kind", ["none", "causal", "causal keys"])
@pytest.mark.parametrize("tokens", [40, 300])
def test_the_tables_own_tiles(tokens, kind, width, dtype):
    if not CUDA and (width > 16 or (tokens > 40 and kind != "causal")):
        pytest.skip("the interpreter is too slow")
    q, k, u = inputs((1, tokens, 2, 1, 2, width, width), dtype)
    check(masked(q, k, kind), u, tile=None)


def test_tokens_that_are_nearly_equal_keep_their_energy(dtype):
    """A few units in the last place apart, so that squares of tokens are 10⁴ or 10⁶ times those of differences."""
    q, k, steps = inputs((1, 60, 2, 2, 2, 16, 16), dtype)
    ulp = torch.finfo(dtype).eps
    u = (8 + 8 * ulp * (4 * steps.float()).round() / 4 * (1 + torch.arange(16, device=DEVICE) % 3)).to(dtype)
    A = AttentionOperator(q, k)
    ours, theirs = found(A, u)[2].double(), expected(A, u)[2]
    torch.testing.assert_close(ours.sum(-1), theirs.sum(-1), rtol=3e-6, atol=0)
    assert ((ours - theirs).abs().sum(-1) <= ROUNDING[dtype] * spread(u)).all()
    same = u[..., :1, :].expand_as(u)
    assert (found(A, same)[2] == 0).all()


def test_one_token_far_from_the_others_does_not_hide_them(dtype):
    """As in language models, whose first token holds nothing: its difference from the mean is no 16-bit number."""
    q, k, steps = inputs((1, 60, 2, 2, 2, 16, 16), dtype)
    u = (3 + 0.05 * steps.float()).to(dtype)
    u[..., 0, :] = 0.01 * steps[..., 0, :]
    mask = torch.ones(60, 60, dtype=torch.bool, device=DEVICE)
    mask[1:, 0] = False  # nobody looks at it
    A = AttentionOperator(q, k, mask=mask[None, None])
    ours, theirs = found(A, u)[2].double(), expected(A, u)[2]
    torch.testing.assert_close(ours[..., 1:], theirs[..., 1:], rtol=1e-4, atol=0)
    assert ((ours - theirs).abs().sum(-1) <= ROUNDING[dtype] * spread(u)).all()


def test_extreme_logits_and_tokens(causal, dtype):
    q, k, u = inputs((1, 50, 2, 1, 2, 16, 16), dtype, size=100.0)
    A = AttentionOperator(q, k, causal=causal)
    ours, theirs = found(A, u).double(), expected(A, u)
    assert theirs[0].abs().max() > 1e4
    torch.testing.assert_close(ours, torch.stack(theirs), rtol=1e-6, atol=5e-7 * theirs[0].abs().max().item())
    assert (ours[1:] >= 0).all()
    u = torch.full_like(u, 60000.0)  # too large to take their mean out
    u[..., 0, :] = -65504.0
    ours, theirs = found(A, u)[2].double(), expected(A, u)[2]
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6 * theirs.max().item())


def test_keys_far_from_the_origin_and_other_numbers_of_queries():
    q, k, _ = inputs((1, 30, 2, 2, 2, 16, 16))
    A = AttentionOperator(q, k + 64)
    torch.testing.assert_close(found(A)[1].double(), expected(A)[1], rtol=0, atol=1e-7 * 64 * 16)
    A = AttentionOperator(q[:, :, :5], k)
    torch.testing.assert_close(found(A).double(), torch.stack(expected(A)), rtol=1e-6, atol=FLOAT32)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's
def test_a_nan_stays_where_it_is_seen():
    q, k, u = inputs((2, 40, 2, 2, 2, 16, 16))
    u[0, 1, 39, 3], q[1, 0, 20, 0] = math.nan, math.nan
    padding = torch.ones(2, 40, dtype=torch.bool, device=DEVICE)
    A = AttentionOperator(q, k)
    assert nonlocal_energy(A, u).isnan().tolist() == [[False, True], [True, False]]
    assert attention_entropy(A).isnan().tolist() == [[False, False], [True, False]]
    padding[0, 39] = False
    padded = AttentionOperator(q, k, mask=padding)
    assert nonlocal_energy(padded, u, padding).isnan().tolist() == [[False, False], [True, False]]


def test_rows_may_lie_apart():
    """q, k and u as the model has them: heads beside each other in a wider tensor."""
    q, k, u = inputs((2, 40, 2, 2, 2, 16, 16))
    apart = [x.transpose(1, 2) for x in torch.stack([q, k, u], 2).transpose(1, 3).contiguous().unbind(2)]
    assert all(not x.is_contiguous() and torch.equal(x, y) for x, y in zip(apart, (q, k, u), strict=True))
    assert torch.equal(found(masked(*apart[:2], "keys"), apart[2]), found(masked(q, k, "keys"), u))


@pytest.mark.parametrize(("kernel", "kind"), [*(("softmax", kind) for kind in MASKS), ("symmetric", "keys")])
def test_metrics_are_the_same_with_and_without(kernel, kind, monkeypatch):
    q, k, u = inputs((2, 43, 2, 1, 2, 16, 16))
    A = masked(q, k, kind, kernel=kernel)
    rows = torch.arange(43, device=DEVICE) < torch.tensor([[30], [43]], device=DEVICE)
    reads = [partial(nonlocal_energy, A, u, counted) for counted in (None, rows)]
    reads += [partial(attention_entropy, A, counted) for counted in (None, rows)]
    for read in (*reads, A.logsumexp, A.diagonal):
        with monkeypatch.context() as patch:
            patch.setattr(attention_sums, "ENABLED", False)
            expected = read()
        ours = read()
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, expected, rtol=FLOAT32, atol=FLOAT32)


def test_energy_and_entropy_take_one_pass(monkeypatch):
    passes, forward = [], attention_sums_tiles.forward
    monkeypatch.setattr(attention_sums_tiles, "forward", lambda *args: passes.append(1) or forward(*args))
    q, k, u = inputs((1, 20, 2, 2, 2, 16, 16))
    A = AttentionOperator(q, k)
    nonlocal_energy(A, u)
    before = attention_entropy(A)
    A.logsumexp()
    assert len(passes) == 1
    q.mul_(3)  # what was remembered is of other queries
    assert (attention_entropy(A) < before).all()
    assert len(passes) == 2
    with torch.inference_mode():  # nobody counts how often those are written to
        A = AttentionOperator(q.clone(), k.clone())
        before = attention_entropy(A)
        A.q.mul_(3)
        assert (attention_entropy(A) < before).all()


def test_what_the_kernel_does_not_know_is_left_to_others():
    q, k, u = inputs((1, 20, 2, 2, 2, 16, 16))
    bias, wide = torch.zeros(1, 1, 20, 20, device=DEVICE, dtype=q.dtype), random(1, 2, 20, 144, dtype=q.dtype)
    assert attention_sums.is_available(AttentionOperator(q, k), u)
    options = {"mask": bias}, {"softcap": 30.0}, {"kernel": "rbf"}, {"kernel": "linear"}
    others = [
        *(AttentionOperator(q, k, **each) for each in options),
        AttentionOperator(q.float(), k.float()),
        AttentionOperator(wide, wide),
        AttentionOperator(q[..., :5, :], k, causal=True),
        AttentionOperator(q.mT.contiguous().mT, k),
    ]
    assert not any(attention_sums.is_available(A) for A in others)
    assert not attention_sums.is_available(AttentionOperator(q, k), u.float())
    leaf = q.clone().requires_grad_()
    assert not attention_sums.is_available(AttentionOperator(leaf, k))
    attention_entropy(AttentionOperator(leaf, k)).sum().backward()
    assert leaf.grad.isfinite().all()


def test_nothing_as_large_as_the_matrix_is_made(monkeypatch):
    monkeypatch.setattr(products, "Tiles", None)
    q, k, u = inputs((1, 300, 1, 1, 1, 16, 16))
    made = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **o: made.append(empty(*a, **o)) or made[-1])
    A = AttentionOperator(q, k)
    nonlocal_energy(A, u)
    attention_entropy(A)
    assert max(x.numel() for x in made) <= 3 * 300


def test_it_traces_into_one_graph():
    q, k, u = inputs((1, 20, 2, 1, 2, 16, 16))

    def read(q, k, u):
        A = AttentionOperator(q, k, causal=True)
        return nonlocal_energy(A, u), attention_entropy(A), A.logsumexp()

    torch._dynamo.reset()
    graph = torch.compile(read, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(graph(q, k, u), read(q, k, u))


@pytest.mark.skipif(not CUDA, reason="compiles, which the interpreter cannot")
def test_the_operation_keeps_its_promises():
    q, k, u = inputs((1, 40, 2, 1, 2, 16, 16))
    for tokens in (None, u):
        torch.library.opcheck(attention_sums.attention_sums, (q, k, None, tokens, None, 0.25, True))


def test_one_reduction_gives_energy_and_entropy_where_all_rows_count(causal):
    q, k, u = inputs(SHAPES[1])
    A, seen = AttentionOperator(q, k, causal=causal), torch.ones(1, 64, dtype=torch.bool, device=DEVICE)

    def rows(A, u, counted=None):
        record = AttentionCall(operator=A, v=u, values=u, output=u, branch=u.transpose(1, 2).flatten(2))
        return from_rows(record, counted)

    found = rows(A, u)
    assert tuple(found) == FROM_ROWS
    for name, alone in (("nonlocal_energy", nonlocal_energy(A, u)), ("attention_entropy", attention_entropy(A))):
        torch.testing.assert_close(found[name], alone, rtol=1e-6, atol=1e-6)
    assert rows(A, u, seen) == rows(AttentionOperator(q, k, mask=seen), u) == rows(A, u[:, :, 1:]) == {}
