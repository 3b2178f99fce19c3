"""The packed kernels against the formula in float64; v⁰ and its gradient, gathered from the layers that share it."""

from unittest.mock import Mock

import kernel_cases
import pytest
import torch
from kernel_cases import CUDA, DEVICE, DTYPES, TOLERANCE, each, random

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


@pytest.mark.parametrize(("count", "tokens"), [(0, 17), (3, 17), (5, 17), (5, 82)])  # of tensors given
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


LAYERS = 4  # that share v⁰
# One program per head, with and without a tail; two passes, with and without; heads that share keys; a long sequence.
SHARED = [(2, 17, 2, 2), (1, 64, 2, 2), (1, 65, 2, 2), (1, 150, 2, 2), (1, 128, 1, 1), (1, 65, 4, 2), (1, 260, 1, 1)]

GATHERED = [*((shape, {}) for shape in SHARED), *(((1, 65, 2, 2), {"dtype": dtype}) for dtype in DTYPES[1:])]
GATHERED += [((1, 80, 2, 1), {"causal": True})]


def layers(shape, dtype=torch.float32):
    """Each layer's q, k and v, λ per head of all but the first, and each output's gradient."""
    batch, tokens, heads, kv_heads = shape
    qkvs = random(LAYERS, batch, tokens, (heads + 2 * kv_heads) * 16, dtype=dtype)
    grads = random(LAYERS, batch, tokens, heads * 16, dtype=dtype, seed=1)
    return [*qkvs], [*random(LAYERS - 1, heads, seed=2).abs()], [*grads]


def leaves(tensors, dtype=None):
    return [x.detach().to(dtype or x.dtype).requires_grad_() for x in tensors]


def by_kernels(qkvs, strengths, shape, causal):
    heads, kv_heads = shape[2:]
    u, first = packed.first_attention(qkvs[0], heads, 0.3, causal, kv_heads=kv_heads)
    others = [
        packed.attention(qkv, heads, 0.3, first, strength, causal, kv_heads=kv_heads)
        for qkv, strength in zip(qkvs[1:], strengths, strict=True)
    ]
    return [u, *others]


@pytest.mark.parametrize(("shape", "options"), GATHERED, ids=str)
def test_the_first_layer_gathers_from_all_later_ones(shape, options):
    dtype, causal = options.get("dtype", torch.float32), "causal" in options
    qkvs, strengths, grads = layers(shape, dtype)
    exact, (heads, kv_heads) = (leaves(qkvs, torch.float64), leaves(strengths, torch.float64)), shape[2:]
    one, first = torch.ones(heads, device=DEVICE).double(), exact[0][0][..., -16 * kv_heads :]
    outputs = [
        kernel_cases.plain(qkv, first, strength, one, 0 * one[:kv_heads], heads, kv_heads, 0.3, causal)
        for qkv, strength in zip(exact[0], [0 * one, *exact[1]], strict=True)
    ]
    expected = torch.autograd.grad(outputs, [*exact[0], *exact[1]], [g.double() for g in grads])
    ours = leaves(qkvs), leaves(strengths)
    found = torch.autograd.grad(by_kernels(*ours, shape, causal), [*ours[0], *ours[1]], grads)
    for mine, theirs in zip(found, expected, strict=True):
        assert kernel_cases.error(mine, theirs) < TOLERANCE[dtype]


def gradient(use, shape=(1, 65, 2, 2)):
    """That of the first layer's projection, where `use` makes a number of u, v⁰ and the second layer's projection."""
    qkvs, *_ = layers(shape)
    qkv = qkvs[0].requires_grad_()
    return torch.autograd.grad(use(*packed.first_attention(qkv, 2, 0.3), qkvs[1]), qkv)[0]


def test_v0_may_be_used_for_anything_else():
    own = gradient(lambda u, first, _: u.square().sum())
    corrected = gradient(lambda u, first, qkv: packed.attention(qkv, 2, 0.3, first, 0.6).sum())
    every = gradient(
        lambda u, first, qkv: u.square().sum() + packed.attention(qkv, 2, 0.3, first, 0.6).sum() + 3 * first.sum()
    )
    added = torch.zeros_like(own)
    added[..., -32:] = 3
    torch.testing.assert_close(every, own + corrected + added)
    assert torch.equal(gradient(lambda u, first, _: 3 * first.sum()), added)  # u not used at all
    torch.testing.assert_close(gradient(lambda u, first, _: u.square().sum() + first.detach().sum()), own)


def test_the_values_are_not_copied():
    qkv = layers((1, 17, 2, 2))[0][0].requires_grad_()
    _, first = packed.first_attention(qkv, 2, 0.3)
    assert first.data_ptr() == qkv[..., -32:].data_ptr()
    assert first.stride() == qkv[..., -32:].stride()
    stand_in = packed_operation.packed_attention(qkv, None, None, None, None, 0.0, 2, 2, 0.3, False)[2]
    assert stand_in.untyped_storage().nbytes() == qkv.element_size()


def test_one_backward_pass_of_all_adds_what_later_layers_owe(monkeypatch):
    """Of all layers only the first is given something to add; and it is one tensor, the sum."""
    backward = Mock(wraps=packed_operation.packed_attention_backward)
    monkeypatch.setattr(packed_operation, "packed_attention_backward", backward)
    qkvs, _, grads = layers((1, 17, 2, 2))
    qkvs = leaves(qkvs)
    torch.autograd.backward(by_kernels(qkvs, [0.5, 0.25, 2.0], (1, 17, 2, 2), False), grads)
    *later, first = (call.args[1] for call in backward.call_args_list)
    assert later == [None] * (LAYERS - 1)
    torch.testing.assert_close(first, 0.5 * grads[1] + 0.25 * grads[2] + 2.0 * grads[3])
