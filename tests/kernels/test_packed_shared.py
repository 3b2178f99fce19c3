"""v⁰ that many layers share: its gradient, gathered from all of them, against the formula in float64."""

import packed_cases
import pytest
import torch
from model_cases import assert_equal_gradients, by_operator, gradients, images, vit
from packed_cases import DEVICE, DTYPES, RUNS, TOLERANCE

from acutance.attention.kernels import packed, packed_operation

if not RUNS:
    pytest.skip("needs a GPU or Triton's interpreter", allow_module_level=True)
LAYERS = 4
# One program per head, with and without a tail; two passes, with and without; heads that share keys; a long sequence.
SHAPES = [(2, 17, 2, 2), (1, 64, 2, 2), (1, 65, 2, 2), (1, 150, 2, 2), (1, 128, 1, 1), (1, 65, 4, 2), (1, 260, 1, 1)]


def layers(shape, dtype=torch.float32, count=LAYERS):
    """Each layer's q, k and v, λ per head of all but the first, and each output's gradient."""
    batch, tokens, heads, kv_heads = shape
    g = torch.Generator().manual_seed(0)
    qkvs = [torch.randn(batch, tokens, (heads + 2 * kv_heads) * 16, generator=g) for _ in range(count)]
    strengths = [torch.rand(heads, generator=g) for _ in range(count - 1)]
    grads = [torch.randn(batch, tokens, heads * 16, generator=g) for _ in range(count)]
    qkvs, grads = ([x.to(DEVICE, dtype) for x in tensors] for tensors in (qkvs, grads))
    return qkvs, [x.to(DEVICE) for x in strengths], grads


def leaves(tensors, dtype=None):
    return [x.detach().to(dtype or x.dtype).requires_grad_() for x in tensors]


def plainly(qkvs, strengths, shape, causal):
    heads, kv_heads = shape[2:]
    none, one, no_share = (
        torch.full((n,), x, device=DEVICE).double() for n, x in ((heads, 0), (heads, 1), (kv_heads, 0))
    )
    first = qkvs[0][..., -16 * kv_heads :]
    return [
        packed_cases.plain(qkv, first, strength, one, no_share, heads, kv_heads, 0.3, causal)
        for qkv, strength in zip(qkvs, [none, *strengths], strict=True)
    ]


def by_kernels(qkvs, strengths, shape, causal):
    heads, kv_heads = shape[2:]
    u, first = packed.first_attention(qkvs[0], heads, 0.3, causal, kv_heads=kv_heads)
    others = [
        packed.attention(qkv, heads, 0.3, first, strength, causal, kv_heads=kv_heads)
        for qkv, strength in zip(qkvs[1:], strengths, strict=True)
    ]
    return [u, *others]


def check(shape, dtype=torch.float32, causal=False):
    qkvs, strengths, grads = layers(shape, dtype)
    exact = leaves(qkvs, torch.float64), leaves(strengths, torch.float64)
    outputs = plainly(*exact, shape, causal)
    expected = torch.autograd.grad(outputs, [*exact[0], *exact[1]], [g.double() for g in grads])
    ours = leaves(qkvs), leaves(strengths)
    found = torch.autograd.grad(by_kernels(*ours, shape, causal), [*ours[0], *ours[1]], grads)
    for mine, theirs in zip(found, expected, strict=True):
        assert packed_cases.error(mine, theirs) < TOLERANCE[dtype]


CHECKS = [*((shape, {}) for shape in SHAPES), *(((1, 65, 2, 2), {"dtype": dtype}) for dtype in DTYPES[1:])]


@pytest.mark.parametrize(("shape", "options"), [*CHECKS, ((1, 80, 2, 1), {"causal": True})], ids=str)
def test_the_first_layer_gathers_from_all_later_ones(shape, options):
    check(shape, **options)


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


OPTIONS = {"some-layers": {"layers": (2, 4)}, "drop-path": {"drop_path": 0.5}}


def of_four_layers(**options):
    return vit("by head", depth=4, **options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_vit_gathers_as_by_the_operator(options, monkeypatch):
    model, dtype = of_four_layers(**options), torch.float32 if "drop_path" in options else torch.float64
    assert_equal_gradients(gradients(model, model, images()), by_operator(model, monkeypatch, images(), dtype))


def test_a_frozen_first_layer_is_owed_nothing(monkeypatch):
    model = of_four_layers()
    for part in (model.patch_embed, model.blocks[0]):
        part.requires_grad_(False)
    model.pos_embed.requires_grad_(False)
    model.cls_token.requires_grad_(False)
    assert_equal_gradients(gradients(model, model, images()), by_operator(model, monkeypatch, images()))


def test_an_exported_model_can_still_be_trained(monkeypatch):
    model = of_four_layers()
    exported = torch.export.export(model, (images(),)).module()
    assert_equal_gradients(gradients(exported, exported, images()), by_operator(model, monkeypatch, images()))
