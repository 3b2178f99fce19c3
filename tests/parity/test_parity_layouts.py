"""Other layouts and masks of torch.nn than the matrix has, and the zoo of transformers: the formula's gradients."""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch
from parity_formula import Names, encode, use_formula
from parity_matrix import TOLERANCE, distance, loss_of
from torch import nn

import acutance as ac
from acutance import sites
from acutance.errors import AcutanceError
from sites.hf_zoo import ZOO, batch, build, in_float64, output, part_of
from sites.tiny_models import BIAS, CAUSAL, DEPTH, HEADS, HIDDEN, blocks, decoder, encoder, mitigated, padding, tokens

NAMES = Names("layers.", "self_attn", "in_proj_", "out_proj", "linear1", "linear2")
SOMEBODYS = Names("", "attention.mha", "in_proj_", "out_proj", "mlp.0", "mlp.2")
STRENGTH = 0.4
SPEC = f"attnscale+neutreno:{STRENGTH}"  # takes masks
FLOAT_PADDING = padding().double().masked_fill(padding(), -torch.inf)
PADDED = FLOAT_PADDING[:, None, None, :]
MASKS = {  # what the encoder is given, and what that adds to the logits
    "none": ({}, None),
    "padding": ({"src_key_padding_mask": padding()}, PADDED),
    "float padding": ({"src_key_padding_mask": FLOAT_PADDING}, PADDED),
    "hidden": ({"mask": HIDDEN}, CAUSAL),
    "causal": ({"mask": CAUSAL, "is_causal": True}, CAUSAL),
    "bias": ({"mask": BIAS}, BIAS.unflatten(0, (-1, HEADS))),
    "bias of all": ({"mask": BIAS[0]}, BIAS[0]),
    "causal and padding": ({"mask": HIDDEN, "src_key_padding_mask": padding(), "is_causal": True}, CAUSAL + PADDED),
}


def tokens_first(model, x):
    return model(x.transpose(0, 1)).transpose(0, 1)


def with_memory(model, x, mask, is_causal):
    return model(x, tokens(seed=2), tgt_mask=mask, tgt_is_causal=is_causal)


class Case(NamedTuple):
    """A model, how it is run, and what the formula is told of it."""

    make: Callable[[], nn.Module]
    run: Callable[..., torch.Tensor] = lambda model, x, **arguments: model(x, **arguments)
    spec: str = f"{SPEC}+featscale"
    formula: Mapping[str, object] = MappingProxyType({})
    mask: str = "none"
    samples: int = 4


PRE, MINE = {"norm_first": True}, {"norm_first": True, "names": SOMEBODYS}
BARE = PRE | {"bias": False, "batch_first": False}
CROSS = {"memory": tokens(seed=2)}
CASES = {
    "post-norm": Case(partial(encoder, norm=True)),
    "pre-norm": Case(partial(encoder, norm=True, **PRE), formula=PRE),
    "tokens first": Case(partial(encoder, norm=True, batch_first=False), tokens_first),
    "tokens first, pre-norm, no bias": Case(partial(encoder, norm=True, **BARE), tokens_first, formula=PRE),
    "one sample": Case(encoder, lambda model, x: model(x[0])[None], samples=1),
    "decoder": Case(decoder, with_memory, SPEC, CROSS, "causal"),
    "decoder, pre-norm": Case(partial(decoder, **PRE), with_memory, SPEC, CROSS | PRE, "causal"),
    "somebody's": Case(blocks, formula=MINE),
    "turned inside": Case(partial(blocks, True, False), formula=MINE),
    "turned inside to no avail": Case(partial(blocks, True, True), tokens_first, formula=MINE),
    "turned outside": Case(partial(blocks, False, False), tokens_first, formula=MINE),
    **{f"mask: {name}": Case(encoder, spec=SPEC, mask=name) for name in MASKS},
}


def with_gradients(output, parameters):
    loss_of(output).backward()
    return {"output": output.detach(), **{name: parameter.grad for name, parameter in parameters}}


def plain(model, x=None, mask="none", **formula):
    leaves = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    known = {"heads": HEADS, "depth": DEPTH, "names": NAMES, "activation": torch.relu, "strength": STRENGTH}
    known |= {"norm_first": False, "mask": MASKS[mask][1]} | formula
    return with_gradients(encode(leaves, tokens() if x is None else x, **known), leaves.items())


def assert_exact(model, output, expected):
    assert distance(with_gradients(output, model.named_parameters()), expected) < TOLERANCE["float64"]


@pytest.mark.parametrize("name", CASES)
def test_a_layout_or_a_mask_equals_the_formulas(name):
    case = CASES[name]
    model, x = case.make(), tokens(batch=case.samples)
    mitigated(model, case.spec)
    assert_exact(model, case.run(model, x, **MASKS[case.mask][0]), plain(model, x, case.mask, **case.formula))


@pytest.mark.slow
def test_compiled_with_masks():
    torch._dynamo.reset()
    model = encoder(norm=True)
    mitigated(model, SPEC)
    output = torch.compile(model, backend="aot_eager", fullgraph=True)(tokens(), **MASKS["causal and padding"][0])
    assert_exact(model, output, plain(model, mask="causal and padding"))


@pytest.mark.parametrize("mask", ["padding", "hidden", "causal"])
def test_a_mean_over_hidden_tokens_is_refused(mask):
    model = encoder()
    with ac.mitigate(model, "featscale"), pytest.raises(AcutanceError, match="a mask hides some of them"):
        model(tokens(), **MASKS[mask][0])


@pytest.mark.parametrize("mask", ["none", "padding", "causal and padding"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_the_fast_path_does_not_bypass_us(mask, norm_first, monkeypatch):
    calls = []

    def counted(own, *args, **kwargs):
        calls.append(own)
        return own(*args, **kwargs)

    for name in ("_transformer_encoder_layer_fwd", "_nested_tensor_from_mask"):
        monkeypatch.setattr(torch, name, partial(counted, getattr(torch, name)))
    model, arguments = encoder(norm=True, nested=not norm_first, norm_first=norm_first).eval(), MASKS[mask][0]
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
    expected = plain(model, mask=mask, norm_first=norm_first)["output"]
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)


EITHER = ("vit", "beit", "bert", "t5_encoder", "bart_decoder", "gpt2", "llama")  # tried by both implementations
WITHOUT_MEAN = ("swin", "modernbert")  # and causal ones: where a mean over tokens is refused


def gradients_of_all(model, inputs):
    """All tokens that are not padding count, each differently."""
    with in_float64():
        y = output(model, inputs)
        mask = inputs.get("attention_mask")
        if mask is not None and y.shape[:2] == mask.shape:
            y = y * mask[..., None]
        (y * torch.randn(y.shape, generator=torch.Generator().manual_seed(3), dtype=y.dtype)).sum().backward()
    found = {path: torch.zeros_like(p) if p.grad is None else p.grad for path, p in model.named_parameters()}
    return found | {"output": y.detach()}


def assert_parity(name, spec, inputs, implementation=None):
    """The model mitigated in place, and the same model with the plain formulas."""
    model = build(name)
    plain = copy.deepcopy(model)
    if implementation is not None:
        model.set_attn_implementation(implementation)
    found, theirs = sites.find(part_of(name, model)), sites.find(part_of(name, plain))
    layers = [(site.attention, site.output_projection()) for site in theirs]
    mitigated(part_of(name, model), spec)
    for site, (attention, _) in zip(found, layers, strict=True):
        attention.mitigation = copy.deepcopy(site.mitigation)  # parameters of the same names
    own = [{p.rpartition(".")[2]: x for p, x in a.mitigation.named_parameters()} for a, _ in layers]
    use_formula(plain, layers, own, strength=0.6 * ZOO[name].first_values)
    grads = gradients_of_all(model, inputs)
    torch.testing.assert_close(grads, gradients_of_all(plain, inputs), rtol=1e-10, atol=1e-10)
    assert all(gradient.any() for path, gradient in grads.items() if ".mitigation." in path)


@pytest.mark.parametrize("name", [name for name, entry in ZOO.items() if entry.first_values])
def test_neutreno(name):
    assert_parity(name, "neutreno:0.6", batch(name))


@pytest.mark.parametrize(
    ("name", "implementation"), [*((name, None) for name in ZOO), *((n, i) for n in EITHER for i in ("sdpa", "eager"))]
)
def test_a_chain_of_learnt_mitigations(name, implementation):
    learn = "layer" if implementation == "eager" else "head"
    parts = ["attnscale"]  # first: it scales A, whatever is added afterwards
    parts += [f"neutreno:0.6,learn={learn}"] if ZOO[name].first_values else []
    parts += ["featscale"] if not ZOO[name].causal and name not in WITHOUT_MEAN else []
    assert_parity(name, "+".join(parts), batch(name, padded="featscale" not in parts), implementation)
