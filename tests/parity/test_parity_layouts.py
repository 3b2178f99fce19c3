"""Other layouts and masks of torch.nn than the matrix has, and the zoo of transformers: the formula's gradients."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from parity_formula import Plain
from parity_matrix import TOLERANCE, distance
from torch import nn

from acutance import sites
from sites import tiny_models as tiny
from sites.hf_zoo import ZOO, batch, build, in_float64, output, part_of
from sites.tiny_models import DEPTH, HEADS, blocks, decoder, encoder, leaves_of, mitigated, tokens, with_gradients

SPEC = "attnscale+neutreno:0.6"  # takes masks
MASKS = {
    "none": {},
    "padding": {"src_key_padding_mask": tiny.padding()},
    "float padding": {"src_key_padding_mask": tiny.padding().double().masked_fill(tiny.padding(), -torch.inf)},
    "hidden": {"mask": tiny.HIDDEN},
    "causal": {"mask": tiny.CAUSAL, "is_causal": True},
    "bias": {"mask": tiny.BIAS},
    "bias of all": {"mask": tiny.BIAS[0]},
    "causal and padding": {"mask": tiny.HIDDEN, "src_key_padding_mask": tiny.padding(), "is_causal": True},
}


def tokens_first(model, x):
    return model(x.transpose(0, 1)).transpose(0, 1)


def with_memory(model, x):
    return model(x, tokens(seed=2), tgt_mask=tiny.CAUSAL, tgt_is_causal=True)


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    run: Callable[..., torch.Tensor] = lambda model, x, **arguments: model(x, **arguments)
    spec: str = f"{SPEC}+featscale"
    mask: str = "none"


PRE = {"norm_first": True}
CASES = {
    "post-norm": Case(partial(encoder, norm=True)),
    "tokens first, pre-norm, no bias": Case(partial(encoder, **PRE, bias=False, batch_first=False), tokens_first),
    "one sample": Case(encoder, lambda model, x: model(x[0])),
    "decoder": Case(decoder, with_memory, SPEC),
    "decoder, pre-norm": Case(partial(decoder, **PRE), with_memory, SPEC),
    "somebody's": Case(blocks),
    "turned inside": Case(partial(blocks, True, False)),
    "turned inside to no avail": Case(partial(blocks, True, True), tokens_first),
    "turned outside": Case(partial(blocks, False, False), tokens_first),
    **{f"mask: {name}": Case(encoder, spec=SPEC, mask=name) for name in MASKS},
}


def assert_parity(case, run=None):
    """The model mitigated in place, and another one with the plain formulas."""
    model, plain, x = case.make(), case.make(), tokens()
    mitigated(model, case.spec)
    leaves = leaves_of(model)
    attentions = {name: module for name, module in plain.named_modules() if isinstance(module, nn.MultiheadAttention)}
    layers = [(each, each.out_proj) for name, each in attentions.items() if not name.endswith("multihead_attn")]
    formula = Plain(plain, layers, heads=HEADS, strength=0.6)
    expected = case.run(partial(formula, leaves), x, **MASKS[case.mask])
    output = case.run(model if run is None else run(model), x, **MASKS[case.mask])
    found, wanted = with_gradients(output, model.named_parameters()), with_gradients(expected.view_as(output), leaves)
    assert distance(found, wanted) < TOLERANCE["float64"]


@pytest.mark.parametrize("name", CASES)
def test_a_layout_or_a_mask_equals_the_formulas(name):
    assert_parity(CASES[name])


@pytest.mark.slow
def test_compiled_with_masks():
    torch._dynamo.reset()
    case = Case(partial(encoder, norm=True), spec=SPEC, mask="causal and padding")
    assert_parity(case, lambda model: torch.compile(model, backend="aot_eager", fullgraph=True))


@pytest.mark.parametrize("mask", ["none", "padding", "causal and padding"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_the_fast_path_does_not_bypass_us(mask, norm_first, monkeypatch):
    calls = []

    def counted(own, *args, **kwargs):
        calls.append(own)
        return own(*args, **kwargs)

    for name in ("_transformer_encoder_layer_fwd", "_nested_tensor_from_mask"):
        monkeypatch.setattr(torch, name, partial(counted, getattr(torch, name)))
    model, arguments = encoder(norm=True, nested=not norm_first, norm_first=norm_first).eval(), MASKS[mask]
    with torch.no_grad():
        before = model(tokens(), **arguments)
        assert len(calls) == DEPTH + int(mask == "padding" and not norm_first)  # torch does take its fast paths
        usual, handle = calls.copy(), mitigated(model, SPEC)
        output = model(tokens(), **arguments)
        assert calls == usual
        handle.remove()
        assert torch.equal(model(tokens(), **arguments), before)
        assert calls == 2 * usual
    mitigated(model, SPEC)
    torch.testing.assert_close(output, model(tokens(), **arguments), rtol=1e-10, atol=1e-10)  # which traces gradients


EITHER = ("vit", "beit", "bert", "t5_encoder", "bart_decoder", "gpt2", "llama")  # tried by both implementations
WITHOUT_MEAN = ("swin", "modernbert")  # and causal ones: where a mean over tokens is refused


def output_that_counts(model, inputs):
    """Padding does not."""
    y, mask = output(model, inputs), inputs.get("attention_mask")
    return y * mask[..., None] if mask is not None and y.shape[:2] == mask.shape else y


@pytest.mark.parametrize(
    ("name", "implementation"), [*((name, None) for name in ZOO), *((n, i) for n in EITHER for i in ("sdpa", "eager"))]
)
def test_a_chain_of_learnt_mitigations(name, implementation):
    learn = {None: ",learn=head", "eager": ",learn=layer", "sdpa": ""}[implementation]
    parts = ["attnscale"]  # first: it scales A, whatever is added afterwards
    parts += [f"neutreno:0.6{learn}"] if ZOO[name].first_values else []
    parts += ["featscale"] if not ZOO[name].causal and name not in WITHOUT_MEAN else []
    inputs, model, plain = batch(name, padded="featscale" not in parts), build(name), build(name)
    if implementation is not None:
        model.set_attn_implementation(implementation)
    mitigated(part_of(name, model), "+".join(parts))
    leaves = leaves_of(model)
    layers = [(site.attention, site.output_projection()) for site in sites.find(part_of(name, plain))]
    formula = Plain(plain, layers, strength=0.6 * ZOO[name].first_values)
    with in_float64():
        found = with_gradients(output_that_counts(model, inputs), model.named_parameters())
        expected = with_gradients(output_that_counts(partial(formula, leaves), inputs), leaves)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert all(gradient.any() for path, gradient in found.items() if ".mitigation." in path)
