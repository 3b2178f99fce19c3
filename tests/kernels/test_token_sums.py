import math

import pytest
import torch
from kernel_cases import DEVICE, each, needs_gpu, needs_kernels, random

import acutance as ac
from acutance.metrics import TOKEN_METRICS
from acutance.metrics.kernels import token_sums
from acutance.metrics.sums import FROM_SUMS
from acutance.models import ViT
from metrics.test_token_metrics import CASES as EDGES
from token_fields import fields

pytestmark = needs_kernels
SHAPES = [(1, 1, 1), (3, 9, 5), (2, 21, 192), (1, 9, 300)]
dtype, masked = each([torch.float32, torch.float16, torch.bfloat16]), each([False, True])


def tokens_of(*shape, dtype=torch.float32):
    return (random(*shape) + 0.3).to(DEVICE, dtype)


def mask_of(*shape):
    """Some samples begin with tokens that do not count; one has none that does."""
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[0, : shape[1] // 2] = False
    mask[-1] = False
    return mask.to(DEVICE)


@pytest.fixture(params=[1, 3, 10**6], ids=["whole", "three parts", "as many as there are"])
def programs(request, monkeypatch):
    """In how many parts a sample is taken."""
    from acutance.metrics.kernels import token_sums_rows

    monkeypatch.setattr(token_sums_rows, "parts_of", lambda _, tokens, rows: min(request.param, -(-tokens // rows)))
    monkeypatch.setattr(token_sums_rows, "TILE", 256)
    token_sums_rows._plan.cache_clear()
    yield
    token_sums_rows._plan.cache_clear()


def assert_fields(found, expected):
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-10)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_sums_are_those_of_float64(shape, dtype, masked, programs):
    tokens, mask = tokens_of(*shape, dtype=dtype), mask_of(*shape[:2]) if masked else None
    assert token_sums.is_available(tokens, mask)
    assert_fields(token_sums.token_sums(tokens, mask), fields(tokens, mask))


def test_tokens_that_begin_anywhere_are_read_in_turn_with_others():
    """Code is kept by shape: what was compiled for aligned tokens must not be given others."""
    longer = tokens_of(2 * 9 * 16 + 1)
    for start in (0, 1, 0):
        tokens = longer[start : start + 2 * 9 * 16].view(2, 9, 16)
        assert_fields(token_sums.token_sums(tokens), fields(tokens))


@pytest.mark.parametrize("kind", ["slice", "transposed", "channels first", "mask of one row", "long mask"])
def test_tokens_and_masks_may_be_views(kind, programs):
    late = torch.arange(2100, device=DEVICE) >= torch.tensor([[2050], [2100]], device=DEVICE)
    late[1, 3] = True
    tokens, mask = {
        "slice": (tokens_of(3, 12, 40)[:, 2:11, 8:29], None),
        "transposed": (tokens_of(9, 3, 20).transpose(0, 1), None),
        "channels first": (tokens_of(3, 20, 9).mT, None),
        "long mask": (tokens_of(2, 2100, 4), late),  # looked through to its end
        "mask of one row": (tokens_of(3, 9, 20), mask_of(2, 9)[:1].expand(3, 9)),
    }[kind]
    assert_fields(token_sums.token_sums(tokens, mask), fields(tokens, mask))


@pytest.mark.parametrize("rubbish", [math.nan, math.inf, 6e4])
def test_tokens_that_do_not_count_may_hold_anything(rubbish, programs):
    tokens, mask = tokens_of(3, 21, 5), mask_of(3, 21)
    spoilt = tokens.masked_fill(~mask[..., None], rubbish)
    assert torch.equal(token_sums.token_sums(spoilt, mask), token_sums.token_sums(tokens, mask))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_counted_in_its_own_sample(value, dtype, programs):
    tokens = tokens_of(3, 21, 5, dtype=dtype)
    expected = token_sums.token_sums(tokens)
    tokens[1, 20, 0] = tokens[1, 7, 3] = tokens[1, 7, 4] = value
    found = token_sums.token_sums(tokens)
    assert found[:, :3].tolist() == [[21, 0, 21], [21, 2, 7], [21, 0, 21]]
    assert torch.equal(found[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("case", ["nearly equal", "a large channel", "a large token", "a large last token"])
def test_small_differences_are_kept(case, dtype, programs):
    tokens = tokens_of(2, 131, 16, dtype=dtype)
    if case == "nearly equal":
        tokens = tokens[:, :1].expand(2, 131, 16)
        assert token_sums.token_sums(tokens)[:, token_sums.FIELDS.index("high")].tolist() == [0, 0]
        assert_close_metrics(tokens, rtol=1e-9)
        bits = torch.int16 if dtype.itemsize == 2 else torch.int32
        steps = torch.randint(-1, 2, tokens.shape, generator=torch.Generator().manual_seed(2)).to(DEVICE, bits)
        tokens = (tokens.view(bits) + steps).view(dtype)  # by the last bit
    elif case == "a large channel":
        tokens = tokens / 64
        tokens[..., 3] = 2000
    else:
        tokens[:, 5 if "last" in case else 0] *= 1e4
    assert_close_metrics(tokens, rtol=1e-6 if case == "a large channel" else 1e-9)


@pytest.mark.parametrize("factor", [2.0**-100, 2.0**120])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_squares_do_not_leave_the_range(dtype, factor):
    tokens = tokens_of(2, 9, 5, dtype=dtype)
    assert_close_metrics(tokens * factor, rtol=1e-6, like=tokens)


def assert_close_metrics(tokens, rtol, like=None, mask=None):
    """All metrics that follow from the sums, against the formulas in float64."""
    sums = token_sums.token_sums(tokens, mask).cpu().numpy()
    for name, metric in FROM_SUMS.items():
        expected = TOKEN_METRICS[name]((tokens if like is None else like).double(), mask)
        torch.testing.assert_close(torch.from_numpy(metric(sums)), expected.cpu(), rtol=rtol, atol=1e-14)


@pytest.mark.parametrize("case", EDGES)
def test_edge_cases_are_those_of_the_formulas(case):
    tokens, mask = (x if x is None else x[None].to(DEVICE) for x in EDGES[case])
    assert_close_metrics(tokens, rtol=1e-12, mask=mask)
    if mask is not None:
        assert_close_metrics(tokens.masked_fill(~mask[..., None], math.nan), rtol=1e-12, mask=mask)


def test_what_the_kernels_do_not_take():
    tokens = tokens_of(2, 5, 4)
    assert token_sums.is_available(tokens, None)
    for other in (tokens.double(), tokens[:, :0], tokens[0], tokens_of(1, 1, token_sums.WIDEST + 1)):
        assert not token_sums.is_available(other, None)
    for mask in (torch.ones(2, 5, device=DEVICE), torch.ones(5, dtype=torch.bool, device=DEVICE)):
        assert not token_sums.is_available(tokens, mask)


def test_plain_sums_are_those_of_float64():
    tokens, mask = tokens_of(3, 9, 5), mask_of(3, 9)
    tokens[1, 2] = 0
    assert_fields(token_sums.plain_sums(tokens, mask), fields(tokens, mask))
    assert_fields(token_sums.plain_sums(tokens), fields(tokens))


def test_the_kernels_agree_with_pytorch_when_they_are_tried(monkeypatch):
    monkeypatch.setattr(token_sums, "PROGRAMS", 4)
    assert token_sums._agrees(torch.device(DEVICE), samples=5)


@pytest.mark.parametrize(("samples", "parts"), [(256, 1), (4, 66), (1, 264), (1000, 1)])
def test_few_samples_are_cut_into_parts(samples, parts):
    assert token_sums.parts_of(samples, 2048, 1) == parts
    assert token_sums.parts_of(samples, 20, 8) <= 3


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("shape", [(256, 197, 192), (4, 2048, 2048), (2, 300, 4096), (2, 100, 8192)], ids=str)
def test_at_the_sizes_of_models(shape, dtype, masked):
    tokens, mask = tokens_of(*shape, dtype=dtype), mask_of(*shape[:2]) if masked else None
    assert_close_metrics(tokens, rtol=1e-9, mask=mask)
    assert torch.equal(token_sums.token_sums(tokens, mask), token_sums.token_sums(tokens, mask))


@pytest.mark.cuda
@needs_gpu
def test_nothing_waits_for_the_gpu_until_the_end():
    vit = ViT(image_size=8, patch_size=2, in_chans=1, dim=24, depth=3, heads=2, num_classes=4).to(DEVICE)
    images, names = random(4, 1, 8, 8), list(FROM_SUMS)
    before = ac.measure(vit, [images], metrics=names, progress=False)
    torch.cuda.set_sync_debug_mode("error")
    try:
        after = ac.measure(vit, [images], metrics=names, progress=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert after.readings == before.readings
