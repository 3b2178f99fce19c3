"""The kernels for long sequences against the formula in float64: on a GPU, and on the CPU in Triton's interpreter."""

import packed_cases
import pytest
import torch

from acutance.attention.kernels import packed

CUDA = torch.cuda.is_available() and packed.TRITON
if not (CUDA or (packed.INTERPRETED and packed.TRITON)):
    pytest.skip("needs a GPU or Triton's interpreter", allow_module_level=True)

from acutance.attention.kernels import long_backward, long_forward, long_means, long_tiles  # noqa: E402
from acutance.attention.kernels.long_tiles import Tile  # noqa: E402

DEVICE = "cuda" if CUDA else "cpu"
# Small ones, so that few tokens are many tiles; the tables' own are for `test_the_tables_own_tiles`.
QUERY_TILE, KEY_TILE = Tile(64, 32), Tile(32, 64)
# One tile, a tile and a token, whole tiles, whole tiles of keys only, several and a tail; grouped queries among them.
SHAPES = [(1, 64, 1, 1, 16), (1, 65, 2, 1, 16), (2, 128, 2, 2, 32), (1, 160, 4, 2, 16), (1, 300, 2, 1, 16)]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = list(TOLERANCE) if CUDA else [torch.float32, torch.float16]  # NumPy, the interpreter's base, has no bfloat16
# Code and tiles for float16 are bfloat16's but for the type, so that one shape and one width of it are enough.
CASES = [(shape, dtype) for shape in SHAPES for dtype in DTYPES if dtype != torch.float16 or shape == SHAPES[1]]


def inputs(shape, dtype=torch.float32, size=1.0):
    """q, k and v, v⁰, λ per head, and a gradient."""
    qkv, first, strength, *_, grad = every_input(shape, dtype, size)
    return qkv, first, strength, grad


def every_input(shape, dtype=torch.float32, size=1.0):
    """q, k and v, v⁰, λ and c per head, ρ per head of the keys, and a gradient."""
    batch, tokens, heads, kv_heads, width = shape
    return packed_cases.inputs(batch, tokens, heads, width, dtype, DEVICE, size, kv_heads=kv_heads)


def expected(qkv, first, strength, grad, shape, causal):
    """u, and the gradients of qkv and λ."""
    heads, kv_heads = shape[2:4]
    leaves = (qkv, first, strength, strength.new_ones(heads), strength.new_zeros(kv_heads))
    out, (grad_qkv, _, grad_strength, *_) = packed_cases.expected(leaves, grad, heads, kv_heads, 0.3, causal)
    return out, grad_qkv, grad_strength


def found(qkv, first, strength, grad, shape, causal, constant=0.0, **tiles):
    """The same by the kernels."""
    out, (grad_qkv, _, by_sample, *_) = by_kernels(
        (qkv, first, strength, None, None), grad, shape, causal, constant, **tiles
    )
    assert by_sample.shape == ((shape[0], shape[2]) if strength is not None else (0,))
    return out, grad_qkv, by_sample.sum(0)


def by_kernels(given, grad, shape, causal, constant=0.0, later=None, query_tile=QUERY_TILE, key_tile=KEY_TILE):
    """u, and all that the backward pass returns."""
    numbers = (constant, *shape[2:4], 0.3, causal)
    out, log_sums = long_forward.forward(*given, *numbers, tile=query_tile)
    return out, long_backward.backward(
        grad, later, *given, out, log_sums, *numbers, query_tile=query_tile, key_tile=key_tile
    )


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_outputs_and_gradients_follow_the_formula(shape, causal, dtype):
    qkv, first, strength, grad = inputs(shape, dtype)
    theirs = expected(qkv, first, strength, grad, shape, causal)
    ours = found(qkv, first, strength, grad, shape, causal)
    for mine, other in zip(ours, theirs, strict=True):
        assert packed_cases.error(mine, other) < TOLERANCE[dtype]


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("constant", [0.6, None], ids=["constant", "uncorrected"])
def test_a_strength_may_be_constant_or_left_out(constant, causal):
    shape = (1, 100, 2, 1, 16)
    qkv, first, strength, grad = inputs(shape)
    theirs = expected(qkv, first, torch.full_like(strength, constant or 0.0), grad, shape, causal)
    ours = found(qkv, None if constant is None else first, None, grad, shape, causal, constant or 0.0)
    for mine, other in zip(ours[:2], theirs[:2], strict=True):
        assert packed_cases.error(mine, other) < 2e-5


PARTS = {"contrast": ("contrast",), "residual": ("residual",), "all": ("strength", "contrast", "residual")}


def check_parts(shape, dtype, causal, parts, **tiles):
    """u and the gradients of all that is given; those of v⁰ without λ du, which autograd's formula adds."""
    qkv, first, strength, contrast, residual, grad = every_input(shape, dtype, size=0.5)
    heads, kv_heads, width = shape[2:]
    kept = (
        strength if "strength" in parts else torch.zeros_like(strength),
        contrast if "contrast" in parts else torch.ones_like(contrast),
        residual if "residual" in parts else torch.zeros_like(residual),
    )
    theirs, (of_qkv, of_first, *of_numbers) = packed_cases.expected(
        (qkv, first, *kept), grad, heads, kv_heads, 0.3, causal
    )
    later = torch.randn_like(first)
    of_qkv[..., -kv_heads * width :] += later.double()
    pulled = (grad.double().unflatten(-1, (heads, width)) * kept[0].double()[:, None]).unflatten(2, (kv_heads, -1))
    given = [
        number if name in parts else None
        for name, number in zip(("strength", "contrast", "residual"), kept, strict=True)
    ]
    u, (grad_qkv, grad_first, *by_sample) = by_kernels(
        (qkv, first, *given), grad, shape, causal, later=later.contiguous(), **tiles
    )
    pairs = [(u, theirs), (grad_qkv, of_qkv)]
    pairs += [(g.sum(0), o) for g, o, number in zip(by_sample, of_numbers, given, strict=True) if number is not None]
    if "residual" in parts:
        pairs.append((grad_first, of_first - pulled.sum(3).flatten(2)))
    for mine, other in pairs:
        assert packed_cases.error(mine, other) < TOLERANCE[dtype]


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_contrast_and_residual_follow_the_formula(shape, causal):
    check_parts(shape, torch.float32, causal, PARTS["all"])


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("part", ["contrast", "residual"])
def test_one_without_the_other(part, causal):
    check_parts(SHAPES[3], torch.float32, causal, PARTS[part])


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_contrast_and_residual_in_sixteen_bits(dtype, causal):
    check_parts((1, 160, 4, 2, 16), dtype, causal, PARTS["all"])


@pytest.mark.cuda
@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("width", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_contrast_and_residual_with_the_tables_own_tiles(dtype, width, causal):
    check_parts((1, 1000, 2, 1, width), dtype, causal, PARTS["all"], query_tile=None, key_tile=None)


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_a_contrast_may_be_zero(causal):
    shape = (1, 100, 2, 2, 16)
    qkv, first, strength, contrast, residual, grad = every_input(shape)
    nothing = torch.zeros_like(contrast)
    leaves = (qkv, first, strength, nothing, torch.zeros_like(residual))
    theirs, (of_qkv, _, _, of_contrast, _) = packed_cases.expected(leaves, grad, 2, 2, 0.3, causal)
    u, (grad_qkv, _, _, by_sample, _) = by_kernels((qkv, first, strength, nothing, None), grad, shape, causal)
    for mine, other in ((u, theirs), (grad_qkv, of_qkv), (by_sample.sum(0), of_contrast)):
        assert packed_cases.error(mine, other) < 2e-5


@pytest.mark.parametrize("width", [16, *(pytest.param(width, marks=pytest.mark.cuda) for width in (32, 64, 128))])
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_the_tables_own_tiles(causal, width):
    if width > 16 and not CUDA:
        pytest.skip("the interpreter is too slow")
    shape = (1, 300, 2, 1, width)
    for dtype in DTYPES if width == 16 else (torch.float32, torch.bfloat16):
        qkv, first, strength, grad = inputs(shape, dtype, size=0.5)
        theirs = expected(qkv, first, strength, grad, shape, causal)
        for mine, other in zip(
            found(qkv, first, strength, grad, shape, causal, query_tile=None, key_tile=None), theirs, strict=True
        ):
            assert packed_cases.error(mine, other) < TOLERANCE[dtype]


def test_a_tile_for_every_width_and_precision():
    for table, owner in (
        (long_forward.TILES, "queries"),
        (long_backward.QUERY_TILES, "queries"),
        (long_backward.KEY_TILES, "keys"),
    ):
        assert set(table) == {(size, width) for size in (2, 4) for width in packed.WIDTHS[2]}
        for tile in table.values():
            owned, other = (tile.queries, tile.keys) if owner == "queries" else (tile.keys, tile.queries)
            assert owned % other == 0
    for kind, tile in long_backward.KEY_TILES.items():
        assert long_backward.QUERY_TILES[kind].queries % tile.queries == 0  # what the first pass keeps has its rows


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's: weights that are hidden afterwards
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_extreme_logits_give_no_nan(causal, dtype):
    shape = (1, 100, 2, 1, 16)
    qkv, first, strength, grad = inputs(shape, dtype, size=100.0)
    for result in found(qkv, first, strength, grad, shape, causal):
        assert result.isfinite().all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's: what is computed beyond the last token and not written
def test_very_low_logits_leave_nothing_behind_the_last_token():
    """Where every logit is far below 0 a weight of 2^(0 − log-sum) beyond the last token would be infinite."""
    shape = (1, 70, 1, 1, 16)
    qkv, first, strength, grad = inputs(shape)
    qkv[..., :16], qkv[..., 16:32] = 10.0, -10.0
    for mine, other in zip(
        found(qkv, first, strength, grad, shape, False),
        expected(qkv, first, strength, grad, shape, False),
        strict=True,
    ):
        assert packed_cases.error(mine, other) < 2e-4  # logits of 700 have that precision in float32


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_rows_may_lie_apart(causal):
    """q, k and v as a part of a wider tensor, every second sample of it."""
    shape = (2, 70, 2, 1, 16)
    qkv, first, strength, grad = inputs(shape)
    wide = torch.full((4, 70, 2 * qkv.shape[-1]), float("nan"), device=DEVICE)
    apart = wide[::2, :, 16 : 16 + qkv.shape[-1]]
    apart.copy_(qkv)
    together = found(qkv, first, strength, grad, shape, causal)
    for mine, other in zip(found(apart, first, strength, grad, shape, causal), together, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("at_a_time", [1, 2, 4])
def test_the_order_of_programs_changes_nothing(at_a_time, monkeypatch):
    shape = (1, 100, 3, 3, 16)
    qkv, first, strength, grad = inputs(shape)
    together = found(qkv, first, strength, grad, shape, True)
    monkeypatch.setattr(long_tiles, "CACHE_BYTES", at_a_time * 2 * 100 * 16 * 4)
    assert long_tiles.heads_at_a_time(3, 2 * 100 * 16 * 4) == min(at_a_time, 3)
    for mine, other in zip(found(qkv, first, strength, grad, shape, True), together, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.cuda
@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("tokens", [2048, 8192])
def test_long_ones_follow_the_formula(tokens, causal):
    shape = (1, tokens, 2, 1, 64)
    for dtype in (torch.bfloat16, torch.float16):
        qkv, first, strength, grad = inputs(shape, dtype, size=0.5)
        theirs = expected(qkv, first, strength, grad, shape, causal)
        ours = found(qkv, first, strength, grad, shape, causal, query_tile=None, key_tile=None)
        for mine, other in zip(ours, theirs, strict=True):
            assert packed_cases.error(mine, other) < TOLERANCE[dtype]


@pytest.mark.cuda
@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_the_same_inputs_give_the_same_gradients():
    shape = (2, 1000, 8, 2, 64)
    *given, grad = every_input(shape, torch.bfloat16)
    runs = [by_kernels(given, grad, shape, True, query_tile=None, key_tile=None) for _ in range(3)]
    for u, grads in runs[1:]:
        assert torch.equal(u, runs[0][0])
        assert all(torch.equal(mine, other) for mine, other in zip(grads, runs[0][1], strict=True))


@pytest.mark.parametrize("tiles", [1, 64, 150])
def test_sums_before_and_behind_a_tile(tiles):
    sums = torch.randn(1, 2, tiles, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    exact = sums.double()
    before, behind = (long_means._running(sums.clone(), backwards=backwards) for backwards in (False, True))
    assert (before - (exact.cumsum(2) - exact)).abs().max() < 1e-5
    assert (behind - (exact.flip(2).cumsum(2).flip(2) - exact)).abs().max() < 1e-5
    assert before[:, :, 0].abs().max() == behind[:, :, -1].abs().max() == 0
