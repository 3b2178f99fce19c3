"""The packed kernels against the formula in float64."""

import kernel_cases
import pytest
import torch
from kernel_cases import CUDA, DEVICE, DTYPES, TOLERANCE, each

from acutance.attention.kernels import packed, packed_operation

kernel_cases.require_kernels()
from acutance.attention.kernels import packed_backward  # noqa: E402

dtype, causal = each(DTYPES), each([False, True])
# Smaller than a block, a block, a block and a tail, several blocks, several and a tail; the papers' sizes among them.
SMALL = [(3, 17, 2, 16), (1, 64, 1, 16), (2, 65, 2, 32), (1, 128, 1, 128), (1, 197, 1, 16)]
LARGE = [(4, 65, 3, 64), (2, 50, 3, 128), (2, 197, 3, 64), (1, 256, 2, 32), (1, 1, 2, 16)]
SHAPES = SMALL + (LARGE if CUDA else [])
PARTS = ("qkv", "first", "strength", "contrast", "residual")


def check(shape, parts, dtype=torch.float32, causal=False, kv_heads=None, scale=0.3):
    """Output and all gradients, with the named parts in play and the others left out."""
    batch, tokens, heads, width = shape
    kv_heads = kv_heads or heads
    *given, grad = kernel_cases.inputs(batch, tokens, heads, width, dtype, kv_heads=kv_heads)
    given = dict(zip(PARTS, given, strict=True))
    identity = {"strength": torch.zeros(heads), "contrast": torch.ones(heads), "residual": torch.zeros(kv_heads)}
    leaves = {name: given[name] if name in ("qkv", "first", *parts) else identity[name].to(DEVICE) for name in PARTS}
    out, grads = kernel_cases.expected(leaves.values(), grad, heads, kv_heads, scale, causal)
    used = {name: leaves[name].detach().requires_grad_() for name in ("qkv", *parts)}
    ours = packed.attention(**used, heads=heads, scale=scale, causal=causal, kv_heads=kv_heads)
    assert kernel_cases.error(ours, out) < TOLERANCE[dtype]
    expected = dict(zip(PARTS, grads, strict=True))
    for name, mine in zip(used, torch.autograd.grad(ours, list(used.values()), grad), strict=True):
        assert kernel_cases.error(mine, expected[name]) < TOLERANCE[dtype], name


CORRECTED, ALL_PARTS = ("first", "strength"), ("first", "strength", "contrast", "residual")
WIDE = LARGE if CUDA else [(1, 65, 1, 32), (1, 80, 1, 128)]
CHECKS = [
    *((shape, CORRECTED, {"dtype": dtype}) for shape in SHAPES for dtype in DTYPES),
    *(((2, tokens, 2, 16), (), {}) for tokens in (33, 65, 150)),
    *(((1, tokens, 2, 16), CORRECTED, {"causal": True}) for tokens in (17, 65, 128, 150)),
    *(((1, tokens, 2, 16), ALL_PARTS, {"causal": c}) for tokens in (17, 65, 128, 150) for c in (False, True)),
    *(((1, tokens, 2, 16), parts, {}) for tokens in (65, 150) for parts in (("contrast",), ("first", "residual"))),
    *((shape, ALL_PARTS, {"dtype": dtype}) for shape in WIDE for dtype in DTYPES),
    # Heads that share their keys, and sequences that go to the kernels for long ones.
    *((shape, CORRECTED, {"kv_heads": kv}) for shape, kv in (((2, 17, 4, 16), 2), ((1, 65, 4, 16), 2))),
    *(((1, 130, 3, 16), CORRECTED, {"kv_heads": 1, "causal": causal}) for causal in (False, True)),
    *(((1, 80, 4, 32), parts, {"kv_heads": 2, "dtype": d}) for parts in ((), ALL_PARTS) for d in DTYPES),
    *(((1, packed.MOST_TOKENS + 4, 2, 16), parts, {"kv_heads": 1, "causal": True}) for parts in ((), CORRECTED)),
]


@pytest.mark.parametrize(("shape", "parts", "options"), CHECKS, ids=lambda value: str(value) or "plain")
def test_outputs_and_gradients_follow_the_formula(shape, parts, options):
    check(shape, parts, **options)


@pytest.mark.parametrize("parts", [(), CORRECTED], ids=["plain", "corrected"])
def test_one_token_more_than_a_block_has_a_kernel_of_its_own(parts, causal, dtype, monkeypatch):
    monkeypatch.setattr(packed_backward, "backward_head", None)  # which would be called otherwise
    check((2, 65, 3, 64 if CUDA and dtype != torch.float32 else 16), parts, dtype, causal)


@pytest.mark.parametrize("tokens", [17, 65, 150])
def test_a_constant_is_one_for_all_heads(tokens):
    qkv, first, *_, grad = kernel_cases.inputs(1, tokens, 4, 16, kv_heads=2)
    leaves = [x.detach().requires_grad_() for x in (qkv, first)]
    results = []
    for strength, residual in ((0.6, 0.5), [torch.full((n,), x, device=DEVICE) for n, x in ((4, 0.6), (2, 0.5))]):
        u = packed.attention(leaves[0], 4, 0.3, leaves[1], strength, residual=residual, kv_heads=2)
        results.append((u, *torch.autograd.grad(u, leaves, grad)))
    for mine, theirs in zip(*results, strict=True):
        assert kernel_cases.error(mine, theirs.double()) < 1e-6


def test_a_contrast_of_zero_is_the_mean_and_has_a_gradient():
    """Where dividing by the contrast, to have A w from u, would fail."""
    qkv, *_, grad = kernel_cases.inputs(1, 65, 2, 16)
    leaves = [qkv.requires_grad_(), torch.zeros(2, device=DEVICE, requires_grad=True)]
    u = packed.attention(leaves[0], 2, 0.3, contrast=leaves[1])
    mean = qkv.detach()[..., 64:].unflatten(-1, (2, 16)).mean(1, keepdim=True)
    torch.testing.assert_close(u.unflatten(-1, (2, 16)), mean.expand(1, 65, 2, 16), atol=1e-6, rtol=1e-5)
    grad_qkv, grad_contrast = torch.autograd.grad(u, leaves, grad)
    attended = packed.attention(qkv.detach(), 2, 0.3)
    expected = (grad * (attended - u.detach())).unflatten(-1, (2, 16)).sum((0, 1, 3))
    torch.testing.assert_close(grad_contrast, expected, atol=1e-4, rtol=1e-4)
    assert grad_qkv[..., :64].abs().max() < 1e-5  # nothing depends on queries and keys


@pytest.mark.parametrize("tokens", [65, 150])
def test_extreme_logits_give_no_nan(tokens, dtype):
    qkv, first, strength, contrast, _, grad = kernel_cases.inputs(1, tokens, 2, 16, dtype, size=60.0)
    leaf = qkv.detach().requires_grad_()
    for sharper in (None, contrast):
        ours = packed.attention(leaf, 2, 1.0, first, strength, contrast=sharper)
        assert ours.isfinite().all()
        assert torch.autograd.grad(ours, leaf, grad)[0].isfinite().all()


TRACED = [(0, 17), (3, 17), (5, 17), (5, 82)]  # how many tensors are given, and tokens


@pytest.mark.parametrize(("count", "tokens"), TRACED, ids=["plain", "corrected", "together", "long"])
def test_the_operations_are_sound_to_trace(count, tokens, monkeypatch):
    monkeypatch.setattr(packed_operation, "MOST_TOKENS", 64)  # of more the interpreter is slow
    *given, grad = kernel_cases.inputs(1, tokens, 2, 16, kv_heads=1)
    leaves = [x.detach().requires_grad_() if place < max(count, 1) else None for place, x in enumerate(given)]
    numbers, utils = (0.0, 2, 1, 0.3, False), ("test_schema", "test_faketensor")
    both = (*utils, "test_autograd_registration")
    torch.library.opcheck(packed_operation.packed_attention, (*leaves, *numbers), test_utils=both)
    given = [None if x is None else x.detach() for x in leaves]
    *made, stand_in = packed_operation.packed_attention(*given, *numbers)
    for owed in (None, torch.randn(stand_in.shape, device=DEVICE)):
        arguments = (grad, owed, *given, *made, *numbers)
        torch.library.opcheck(packed_operation.packed_attention_backward, arguments, test_utils=utils)
