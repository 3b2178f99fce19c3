"""Mitigations against their papers' formulas; NeuTRENO, FeatScale and combinations are in tests/parity."""

import pytest
import torch

from acutance.attention import AttentionCall
from acutance.attention.operator import AttentionOperator
from acutance.errors import ShapeError
from acutance.mitigations import AttnScale, FeatScale, LayerShape, NeuTRENO
from attention.operator_cases import normal

B, H, N, D = 2, 4, 6, 5


def layer_shape(layer=2, heads=H, kv_heads=H, pretrained=False):
    return LayerShape(layer, dim=H * D, heads=heads, head_dim=D, kv_heads=kv_heads, pretrained=pretrained)


def attention(kv_heads=H, **options):
    return AttentionOperator(normal(B, H, N, D), normal(B, kv_heads, N, D, seed=1), **options)


def call_of(A=None, v=None, v0=None):
    options = {"q": A.q, "k": A.k, "mask": A.mask, "causal": A.causal, "operator": A, "kernel": A.kernel}
    return AttentionCall(layer=2, v=normal(B, H, N, D) if v is None else v, first=v0, **options)


@pytest.mark.parametrize(
    ("values", "first", "message"),
    [
        ((B, 3, N, D), (B, 3, N, D), r"values \(2, 3, 6, 5\).*output \(2, 4, 6, 5\)"),
        ((B, H, N, D), (B, H, N + 2, D), "not of the same tokens"),
    ],
)
def test_values_that_cannot_be_matched_are_named(values, first, message):
    built = NeuTRENO(0.6).for_layer(layer_shape())
    v = normal(*values)
    with pytest.raises(ShapeError, match=message):
        built.output(normal(B, H, N, D), v, call_of(attention(), v, normal(*first)))


@pytest.mark.parametrize(
    ("learn", "layer", "pretrained", "start", "expected"),
    [
        (None, 2, False, None, None),
        ("layer", 1, False, None, None),
        ("layer", 2, False, None, [0.6]),
        ("layer", 2, True, None, [0.0]),
        ("head", 2, True, None, [0.0] * H),
        ("head", 2, True, 0.1, [0.1] * H),
    ],
)
def test_where_a_learnt_strength_starts(learn, layer, pretrained, start, expected):
    built = NeuTRENO(0.6, learn=learn, start=start).for_layer(layer_shape(layer, pretrained=pretrained))
    found = {name: parameter.shape for name, parameter in built.named_parameters()}
    assert found == ({} if expected is None else {"learnt_strength": torch.Size([len(expected)])})
    if expected is not None:
        torch.testing.assert_close(built.learnt_strength.detach(), torch.tensor(expected))


KERNELS = ("symmetric", "rbf", "linear", "polynomial")


def masks():
    causal_bias = torch.zeros(N, N, dtype=torch.float64).masked_fill(torch.ones(N, N).triu(1).bool(), -torch.inf)
    keys = torch.ones(B, N, dtype=torch.bool)
    keys[0, 4:] = False
    square = torch.rand(B, 1, N, N, generator=torch.Generator().manual_seed(5)) > 0.4
    square[:, :, 2] = False  # a query that sees nothing
    visible_square = square.expand(B, H, N, N)
    lower = torch.ones(N, N).tril().bool()
    lowest = torch.finfo(torch.float64).min
    return {
        "none": ({}, torch.ones(B, H, N, N).bool()),
        **{kernel: ({"kernel": kernel}, torch.ones(B, H, N, N).bool()) for kernel in KERNELS},
        "causal": ({"causal": True}, lower.expand(B, H, N, N)),
        "keys": ({"mask": keys}, keys[:, None, None].expand(B, H, N, N)),
        "keys and causal": ({"mask": keys, "causal": True}, keys[:, None, None] & lower.expand(B, H, N, N)),
        "square": ({"mask": square}, visible_square),
        "bias of −∞": ({"mask": causal_bias}, lower.expand(B, H, N, N)),
        "bias of the lowest number": ({"mask": causal_bias.clamp_min(lowest)}, lower.expand(B, H, N, N)),
    }


@pytest.mark.parametrize("mask", masks())
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attnscale_equals_the_rescaled_matrix(mask, kv_heads):
    options, visible = masks()[mask]
    A = attention(kv_heads, **options)
    built = AttnScale().for_layer(layer_shape(kv_heads=kv_heads)).double()
    built.gain.data = normal(H, seed=3)
    v = normal(B, kv_heads, N, D, seed=4)
    uniform = visible.double() / visible.sum(-1, keepdim=True).clamp_min(1)
    rescaled = uniform + (1 + built.gain[:, None, None]) * (A.dense() - uniform)
    expected = rescaled @ v.repeat_interleave(H // kv_heads, dim=1)
    torch.testing.assert_close(built.output(A @ v, v, call_of(A, v)), expected, rtol=1e-12, atol=1e-12)


def test_building_for_a_layer_leaves_the_original_alone():
    original = NeuTRENO(learn="head") + FeatScale()
    first, second = (original.for_layer(layer_shape(layer)) for layer in (2, 3))
    assert not list(original.parameters())
    assert original.shape is None
    assert not {id(p) for p in first.parameters()} & {id(p) for p in second.parameters()}
