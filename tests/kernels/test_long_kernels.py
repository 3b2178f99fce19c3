import kernel_cases
import pytest
import torch
from kernel_cases import CUDA, DEVICE, DTYPES, TOLERANCE, each, needs_gpu, random

kernel_cases.require_kernels()
from acutance.attention.kernels import long_backward, long_forward, long_means, long_tiles  # noqa: E402
from acutance.attention.kernels.long_tiles import Tile  # noqa: E402

# Small ones, so that few tokens are many tiles; None asks for the tables' own.
SMALL = {"query_tile": Tile(64, 32), "key_tile": Tile(32, 64)}
OWN = {"query_tile": None, "key_tile": None}
# One tile, a tile and a token, whole tiles, whole tiles of keys only, several and a tail; grouped queries among them.
SHAPES = [(1, 64, 1, 1, 16), (1, 65, 2, 1, 16), (2, 128, 2, 2, 32), (1, 160, 4, 2, 16), (1, 300, 2, 1, 16)]
STRENGTH, ALL_PARTS = ("strength",), ("strength", "contrast", "residual")
causal, dtype = each([False, True]), each(DTYPES)


def inputs(shape, dtype=torch.float32, size=1.0):
    """q, k and v, v⁰, λ and c per head, ρ per head of the keys, and a gradient."""
    batch, tokens, heads, kv_heads, width = shape
    return kernel_cases.inputs(batch, tokens, heads, width, dtype, size, kv_heads=kv_heads)


def by_kernels(given, grad, shape, causal, constant=0.0, later=None, query_tile=None, key_tile=None):
    """u, and all that the backward pass returns."""
    numbers = (constant, *shape[2:4], 0.3, causal)
    out, log_sums = long_forward.forward(*given, *numbers, tile=query_tile)
    return out, long_backward.backward(
        grad, later, *given, out, log_sums, *numbers, query_tile=query_tile, key_tile=key_tile
    )


def found(qkv, first, strength, grad, shape, causal):
    """u and its gradients, with nothing but a strength."""
    out, grads = by_kernels((qkv, first, strength, None, None), grad, shape, causal, **SMALL)
    return out, *grads[:3]


def check(shape, parts, causal, dtype=torch.float32, size=0.5, tolerance=None, change=None, **tiles):
    """u and the gradients of all that is given; those of v⁰ without λ du, which autograd's formula adds."""
    qkv, first, *numbers, grad = inputs(shape, dtype, size)
    if change is not None:
        change(qkv, numbers)
    heads, kv_heads, width = shape[2:]
    identity = (torch.zeros_like(numbers[0]), torch.ones_like(numbers[1]), torch.zeros_like(numbers[2]))
    named = list(zip(ALL_PARTS, numbers, identity, strict=True))
    kept = [number if name in parts else one for name, number, one in named]
    given = [number if name in parts else None for name, number, _ in named]
    theirs, (of_qkv, of_first, *of_numbers) = kernel_cases.expected(
        (qkv, first, *kept), grad, heads, kv_heads, 0.3, causal
    )
    later = torch.randn_like(first).contiguous()
    of_qkv[..., -kv_heads * width :] += later.double()
    pulled = (grad.double().unflatten(-1, (heads, width)) * kept[0].double()[:, None]).unflatten(2, (kv_heads, -1))
    u, (grad_qkv, grad_first, *by_sample) = by_kernels(
        (qkv, first, *given), grad, shape, causal, later=later, **(tiles or SMALL)
    )
    pairs = [(u, theirs), (grad_qkv, of_qkv)]
    pairs += [(g.sum(0), o) for g, o, number in zip(by_sample, of_numbers, given, strict=True) if number is not None]
    if "residual" in parts:
        pairs.append((grad_first, of_first - pulled.sum(3).flatten(2)))
    for mine, other in pairs:
        assert kernel_cases.error(mine, other) < (tolerance or TOLERANCE[dtype])


# Code and tiles for float16 are bfloat16's but for the type, so that one shape and one width of it are enough.
CHECKS = [
    *((s, STRENGTH, d) for s in SHAPES for d in DTYPES if d != torch.float16 or s == SHAPES[1]),
    *((shape, ALL_PARTS, torch.float32) for shape in SHAPES[1:]),
    *((SHAPES[1], parts, torch.float32) for parts in ((), ("contrast",), ("residual",))),
    *((SHAPES[1], ALL_PARTS, dtype) for dtype in DTYPES[1:]),
]


@pytest.mark.parametrize(("shape", "parts", "dtype"), CHECKS, ids=lambda value: str(value) or "plain")
def test_outputs_and_gradients_follow_the_formula(shape, parts, dtype, causal):
    check(shape, parts, causal, dtype)


@pytest.mark.parametrize("width", [16, *(pytest.param(w, marks=[pytest.mark.cuda, needs_gpu]) for w in (32, 64, 128))])
def test_the_tables_own_tiles(causal, width, dtype):
    check((1, 300, 2, 1, width), STRENGTH, causal, dtype, **OWN)
    if CUDA:
        check((1, 1000, 2, 1, width), ALL_PARTS, causal, dtype, **OWN)


@pytest.mark.parametrize("constant", [0.6, None], ids=["constant", "uncorrected"])
def test_a_strength_may_be_constant_or_left_out(constant, causal):
    shape = (1, 100, 2, 1, 16)
    qkv, first, strength, *_, grad = inputs(shape)
    by_head = found(qkv, first, torch.full_like(strength, constant or 0.0), grad, shape, causal)
    given = (qkv, None if constant is None else first, None, None, None)
    u, (grad_qkv, *_) = by_kernels(given, grad, shape, causal, constant or 0.0, **SMALL)
    for mine, other in zip((u, grad_qkv), by_head, strict=False):
        assert kernel_cases.error(mine, other.double()) < 2e-5


def test_a_contrast_may_be_zero(causal):
    check((1, 100, 2, 2, 16), (*STRENGTH, "contrast"), causal, change=lambda _, numbers: numbers[1].zero_())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's: what is computed beyond the last token and not written
def test_very_low_logits_leave_nothing_behind_the_last_token():
    """Where every logit is far below 0 a weight of 2^(0 − log-sum) beyond the last token would be infinite."""

    def change(qkv, _):
        qkv[..., :16], qkv[..., 16:32] = 10.0, -10.0

    # Logits of 700 have that precision in float32.
    check((1, 70, 1, 1, 16), STRENGTH, False, size=1.0, tolerance=2e-4, change=change)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's: weights that are hidden afterwards
def test_extreme_logits_give_no_nan(causal, dtype):
    shape = (1, 100, 2, 1, 16)
    qkv, first, strength, *_, grad = inputs(shape, dtype, size=100.0)
    assert all(result.isfinite().all() for result in found(qkv, first, strength, grad, shape, causal))


def test_rows_may_lie_apart(causal):
    """q, k and v as a part of a wider tensor, every second sample of it."""
    shape = (2, 70, 2, 1, 16)
    qkv, first, strength, *_, grad = inputs(shape)
    wide = torch.full((4, 70, 2 * qkv.shape[-1]), float("nan"), device=DEVICE)
    apart = wide[::2, :, 16 : 16 + qkv.shape[-1]]
    apart.copy_(qkv)
    together = found(qkv, first, strength, grad, shape, causal)
    assert all(map(torch.equal, found(apart, first, strength, grad, shape, causal), together))


@pytest.mark.parametrize("at_a_time", [1, 2, 4])
def test_the_order_of_programs_changes_nothing(at_a_time, monkeypatch):
    shape = (1, 100, 3, 3, 16)
    qkv, first, strength, *_, grad = inputs(shape)
    together = found(qkv, first, strength, grad, shape, True)
    monkeypatch.setattr(long_tiles, "CACHE_BYTES", at_a_time * 2 * 100 * 16 * 4)
    assert long_tiles.heads_at_a_time(3, 2 * 100 * 16 * 4) == min(at_a_time, 3)
    assert all(map(torch.equal, found(qkv, first, strength, grad, shape, True), together))


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("tokens", [2048, 8192])
def test_long_ones_follow_the_formula(tokens, causal):
    for dtype in (torch.bfloat16, torch.float16):
        check((1, tokens, 2, 1, 64), STRENGTH, causal, dtype, **OWN)


@pytest.mark.cuda
@needs_gpu
def test_the_same_inputs_give_the_same_gradients():
    shape = (2, 1000, 8, 2, 64)
    *given, grad = inputs(shape, torch.bfloat16)
    runs = [by_kernels(given, grad, shape, True) for _ in range(3)]
    for u, grads in runs[1:]:
        assert all(map(torch.equal, (u, *grads), (runs[0][0], *runs[0][1])))


@pytest.mark.parametrize("tiles", [1, 64, 150])
def test_sums_before_and_behind_a_tile(tiles):
    sums = random(1, 2, tiles, 16)
    exact = sums.double()
    before, behind = (long_means._running(sums.clone(), backwards=backwards) for backwards in (False, True))
    assert (before - (exact.cumsum(2) - exact)).abs().max() < 1e-5
    assert (behind - (exact.flip(2).cumsum(2).flip(2) - exact)).abs().max() < 1e-5
    assert before[:, :, 0].abs().max() == behind[:, :, -1].abs().max() == 0
