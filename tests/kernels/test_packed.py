"""The packed kernels against the formula in float64: on a GPU, and on the CPU in Triton's interpreter.

The interpreter needs triton and TRITON_INTERPRET=1: `make test` runs this folder a second time so.
"""

import packed_cases
import pytest
import torch

from acutance import mitigations
from acutance.kernels import packed
from acutance.models import ViT

CUDA = torch.cuda.is_available() and packed.TRITON
INTERPRETED = packed.INTERPRETED and packed.TRITON
DEVICE = "cuda" if CUDA else "cpu"
needs_kernels = pytest.mark.skipif(not (CUDA or INTERPRETED), reason="needs a GPU or Triton's interpreter")
# Smaller than a block, a block, a block and a tail, several blocks, several and a tail; the papers' sizes among them.
SMALL = [(3, 17, 2, 16), (1, 64, 1, 16), (2, 65, 2, 32), (1, 128, 1, 128), (1, 197, 1, 16)]
LARGE = [(4, 65, 3, 64), (2, 50, 3, 128), (2, 197, 3, 64), (1, 256, 2, 32), (1, 1, 2, 16)]
SHAPES = SMALL + (LARGE if CUDA else [])
# Half precision rounds A, u and the gradients once each; float32 is computed in float32.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = list(TOLERANCE) if CUDA else [torch.float32, torch.float16]  # NumPy, the interpreter's base, has no bfloat16


def error(ours, theirs):
    return ((ours.double() - theirs).norm() / theirs.norm()).item()


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("learnt", [False, True], ids=["constant", "learnt"])
def test_outputs_and_gradients_follow_the_formula(shape, dtype, learnt):
    batch, tokens, heads, width = shape
    qkv, first, strength, grad = packed_cases.inputs(batch, tokens, heads, width, dtype, DEVICE)
    if not learnt:
        strength = torch.full_like(strength, 0.6)
    out, grads = packed_cases.expected(qkv, first, strength, grad, heads, 0.3)
    leaves = [x.detach().requires_grad_() for x in (qkv, first, strength)]
    assert packed.is_available(leaves[0], heads)
    ours = packed.attention(leaves[0], heads, 0.3, leaves[1], leaves[2] if learnt else 0.6)
    found = torch.autograd.grad(ours, leaves if learnt else leaves[:2], grad)
    assert error(ours, out) < TOLERANCE[dtype]
    for mine, theirs in zip(found, grads, strict=False):
        assert error(mine, theirs) < TOLERANCE[dtype]


@needs_kernels
@pytest.mark.parametrize("tokens", [17, 65, 128, 150])
def test_a_causal_token_sees_only_earlier_ones(tokens):
    qkv, first, strength, grad = packed_cases.inputs(1, tokens, 2, 16, device=DEVICE)
    out, grads = packed_cases.expected(qkv, first, strength, grad, 2, 0.3, causal=True)
    leaves = [x.detach().requires_grad_() for x in (qkv, first, strength)]
    ours = packed.attention(leaves[0], 2, 0.3, leaves[1], leaves[2], causal=True)
    assert error(ours, out) < 2e-5
    for mine, theirs in zip(torch.autograd.grad(ours, leaves, grad), grads, strict=True):
        assert error(mine, theirs) < 2e-5


@needs_kernels
@pytest.mark.parametrize("tokens", [33, 65, 150])
def test_without_a_correction_it_is_attention(tokens):
    qkv, first, strength, grad = packed_cases.inputs(2, tokens, 2, 16, device=DEVICE)
    out, (expected, _, _) = packed_cases.expected(qkv, first, torch.zeros_like(strength), grad, 2, 0.125)
    leaf = qkv.detach().requires_grad_()
    ours = packed.attention(leaf, 2, 0.125)
    assert error(ours, out) < 2e-5
    assert error(torch.autograd.grad(ours, leaf, grad)[0], expected) < 2e-5


@needs_kernels
@pytest.mark.parametrize("tokens", [65, 150])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_logits_give_no_nan(tokens, dtype):
    qkv, first, strength, grad = packed_cases.inputs(1, tokens, 2, 16, dtype, DEVICE, size=60.0)
    leaf = qkv.detach().requires_grad_()
    ours = packed.attention(leaf, 2, 1.0, first, strength)
    assert ours.isfinite().all()
    assert torch.autograd.grad(ours, leaf, grad)[0].isfinite().all()


@needs_kernels
def test_the_operation_is_sound_to_trace():
    qkv, first, strength, _ = packed_cases.inputs(1, 17, 2, 16, device=DEVICE)
    arguments = [x.detach().requires_grad_() for x in (qkv, first, strength)]
    utils = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(packed.packed_attention, (*arguments, 0.0, 2, 0.3, False), test_utils=utils)


@needs_kernels
@pytest.mark.parametrize("mitigation", [None, "neutreno:0.6", "neutreno:0.6,learn=head+featscale"])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.cuda)], ids=["eager", "compiled"])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
def test_a_vit_by_the_kernel_learns_as_by_the_operator(mitigation, compiled, checkpointed, monkeypatch):
    if compiled and not CUDA:
        pytest.skip("the interpreter cannot be compiled")
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    model = vit(mitigation)
    with monkeypatch.context() as patch:
        patch.setattr(packed, "is_available", lambda *_: False)
        by_operator = gradients(model.double(), model, images.double())
    model.float().set_grad_checkpointing(checkpointed)
    calls = []
    if compiled:
        torch._dynamo.reset()
    else:
        original = packed.attention
        monkeypatch.setattr(packed, "attention", lambda *a: calls.append(1) or original(*a))
    by_kernel = gradients(torch.compile(model, fullgraph=True) if compiled else model, model, images)
    assert compiled or len(calls) >= 3
    assert by_kernel.keys() == by_operator.keys()
    for name, grad in by_operator.items():
        scale = grad.norm().clamp_min(1e-6)
        assert (by_kernel[name] - grad).norm() / scale < 2e-3, name  # float32 with TF32 off, against float64


def vit(mitigation):
    torch.manual_seed(0)
    model = ViT(
        image_size=32, patch_size=4, dim=32, depth=3, heads=2, num_classes=10, mlp_ratio=1, mitigation=mitigation
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.15)
    return model.to(DEVICE)


def gradients(run, model, images):
    model.zero_grad()
    run(images).square().mean().backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("none", 0.0),
        ("neutreno:0.6", 0.6),
        ("neutreno:0.6+featscale", 0.6),
        ("neutreno:0.6+neutreno:0.2", None),
        ("neutreno:0.6+attnscale", None),
        ("neutreno:0.6,detach=true", None),
    ],
)
def test_only_what_the_kernel_can_add_is_given_to_it(spec, expected):
    assert mitigations.parse(spec).correction() == expected


def test_a_subclass_that_does_something_else_is_not_given_to_the_kernel():
    class Louder(mitigations.NeuTRENO):
        def output(self, u, v, v0, A):
            return 2 * super().output(u, v, v0, A)

    assert Louder(0.6).correction() is None


@pytest.mark.skipif(packed.INTERPRETED, reason="the interpreter takes CPU tensors")
@pytest.mark.parametrize(("shape", "dtype"), [((1, 65, 96), torch.float32), ((1, 65, 96), torch.float64)])
def test_elsewhere_the_operator_is_used(shape, dtype):
    assert not packed.is_available(torch.zeros(shape, dtype=dtype), 2)
