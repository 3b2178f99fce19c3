"""v⁰ that many layers share: its gradient, gathered from all of them, against the formula in float64."""

import kernel_cases
import pytest
import torch
from kernel_cases import DEVICE, DTYPES, TOLERANCE, assert_equal_gradients, by_operator, gradients, images, random

from acutance.attention.kernels import packed, packed_operation

pytestmark = kernel_cases.needs_kernels
LAYERS = 4
# One program per head, with and without a tail; two passes, with and without; heads that share keys; a long sequence.
SHAPES = [(2, 17, 2, 2), (1, 64, 2, 2), (1, 65, 2, 2), (1, 150, 2, 2), (1, 128, 1, 1), (1, 65, 4, 2), (1, 260, 1, 1)]

CHECKS = [*((shape, {}) for shape in SHAPES), *(((1, 65, 2, 2), {"dtype": dtype}) for dtype in DTYPES[1:])]
CHECKS += [((1, 80, 2, 1), {"causal": True})]


def layers(shape, dtype=torch.float32):
    """Each layer's q, k and v, λ per head of all but the first, and each output's gradient."""
    batch, tokens, heads, kv_heads = shape
    qkvs = random(LAYERS, batch, tokens, (heads + 2 * kv_heads) * 16, dtype=dtype)
    grads = random(LAYERS, batch, tokens, heads * 16, dtype=dtype, seed=1)
    return [*qkvs], [*random(LAYERS - 1, heads, seed=2).abs()], [*grads]


def leaves(tensors, dtype=None):
    return [x.detach().to(dtype or x.dtype).requires_grad_() for x in tensors]


def plainly(qkvs, strengths, shape, causal):
    heads, kv_heads = shape[2:]
    one, first = torch.ones(heads, device=DEVICE).double(), qkvs[0][..., -16 * kv_heads :]
    return [
        kernel_cases.plain(qkv, first, strength, one, 0 * one[:kv_heads], heads, kv_heads, 0.3, causal)
        for qkv, strength in zip(qkvs, [0 * one, *strengths], strict=True)
    ]


def by_kernels(qkvs, strengths, shape, causal):
    heads, kv_heads = shape[2:]
    u, first = packed.first_attention(qkvs[0], heads, 0.3, causal, kv_heads=kv_heads)
    others = [
        packed.attention(qkv, heads, 0.3, first, strength, causal, kv_heads=kv_heads)
        for qkv, strength in zip(qkvs[1:], strengths, strict=True)
    ]
    return [u, *others]


@pytest.mark.parametrize(("shape", "options"), CHECKS, ids=str)
def test_the_first_layer_gathers_from_all_later_ones(shape, options):
    dtype, causal = options.get("dtype", torch.float32), "causal" in options
    qkvs, strengths, grads = layers(shape, dtype)
    exact = leaves(qkvs, torch.float64), leaves(strengths, torch.float64)
    outputs = plainly(*exact, shape, causal)
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
    owed = []
    original = packed_operation.packed_attention_backward
    monkeypatch.setattr(
        packed_operation,
        "packed_attention_backward",
        lambda grad, later, *a: owed.append(later) or original(grad, later, *a),
    )
    qkvs, _, grads = layers((1, 17, 2, 2))
    qkvs = leaves(qkvs)
    torch.autograd.backward(by_kernels(qkvs, [0.5, 0.25, 2.0], (1, 17, 2, 2), False), grads)
    *later, first = owed
    assert later == [None] * (LAYERS - 1)
    torch.testing.assert_close(first, 0.5 * grads[1] + 0.25 * grads[2] + 2.0 * grads[3])


MODELS = {"some layers": {"layers": (2, 4)}, "drop path": {"drop_path": 0.5}, "first layer frozen": {}, "exported": {}}


@pytest.mark.parametrize("case", MODELS)
def test_a_vit_gathers_as_by_the_operator(case, monkeypatch):
    model, dtype = kernel_cases.vit("by head", depth=4, **MODELS[case]), torch.float64
    if case == "drop path":
        dtype = torch.float32
    if case == "first layer frozen":  # is owed nothing
        for part in (model.patch_embed, model.blocks[0], model.pos_embed, model.cls_token):
            part.requires_grad_(False)
    run = torch.export.export(model, (images(),)).module() if case == "exported" else model
    assert_equal_gradients(gradients(run, run, images()), by_operator(model, monkeypatch, images(), dtype))
