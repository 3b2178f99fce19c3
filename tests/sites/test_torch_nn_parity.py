"""Mitigations in torch.nn models against plain formulas: outputs and the gradients of all parameters."""

import copy
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from torch_nn_models import (
    BATCH,
    DEPTH,
    DIM,
    HEADS,
    TOKENS,
    Block,
    Checkpointed,
    decoder,
    encoder,
    inventory,
    padding,
    shaken,
    tokens,
)

from acutance.errors import AcutanceError
from acutance.mitigations import Mitigation
from acutance.sites.mitigate import mitigate
from parity.parity_formula import Names, encode

SPECS = ["neutreno:0.6", "neutreno:0.6,learn=head", "featscale", "attnscale", "attnscale+neutreno:0.4+featscale"]
LAYERS = [{}, {"norm_first": True}, {"batch_first": False}, {"batch_first": False, "norm_first": True, "bias": False}]
HIDDEN = torch.triu(torch.ones(TOKENS, TOKENS, dtype=torch.bool), 1)
CAUSAL = torch.zeros(TOKENS, TOKENS, dtype=torch.float64).masked_fill(HIDDEN, -torch.inf)
NAMES = Names("layers.", "self_attn", "in_proj_", "out_proj", "linear1", "linear2")
SOMEBODYS = Names("", "attention.mha", "in_proj_", "out_proj", "mlp.0", "mlp.2")
GENERATOR = torch.Generator().manual_seed(5)
BIAS = torch.randn(BATCH * HEADS, TOKENS, TOKENS, generator=GENERATOR, dtype=torch.float64)


def as_bias(hidden):
    return torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, -torch.inf)


PADDED = as_bias(padding())[:, None, None, :].expand(-1, HEADS, TOKENS, -1)
MASKS = {  # what the encoder is given, and what that adds to the logits
    "none": ({}, None),
    "padding": ({"src_key_padding_mask": padding()}, PADDED),
    "float padding": ({"src_key_padding_mask": as_bias(padding())}, PADDED),
    "hidden": ({"mask": HIDDEN}, CAUSAL.expand(BATCH, HEADS, -1, -1)),
    "causal": ({"mask": CAUSAL, "is_causal": True}, CAUSAL.expand(BATCH, HEADS, -1, -1)),
    "bias": ({"mask": BIAS}, BIAS.view(BATCH, HEADS, TOKENS, TOKENS)),
    "bias of all": ({"mask": BIAS[0]}, BIAS[0].expand(BATCH, HEADS, -1, -1)),
    "causal and padding": ({"mask": HIDDEN, "src_key_padding_mask": padding(), "is_causal": True}, CAUSAL + PADDED),
}


def strength_of(spec):
    return next((float(part[9:12]) for part in spec.split("+") if part.startswith("neutreno")), 0.0)


def mitigated(model, spec):
    handle = mitigate(model, spec)
    for name, parameter in model.named_parameters():
        if ".mitigation." in name:
            parameter.data += 0.1 + 0.1 * torch.arange(parameter.numel(), dtype=parameter.dtype).view_as(parameter)
    return handle


def loss_of(output):
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(7), dtype=output.dtype)
    return (output * weights).sum()


def plain(model, x, *, bias=None, norm_first=False, names=NAMES, **options):
    """The output by the plain formulas and its loss's gradients, by parameter name."""
    leaves = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    depth = len({n.removeprefix(names.blocks).split(".")[0] for n in leaves if n.startswith(names.blocks)})
    options |= {"heads": HEADS, "depth": depth, "names": names, "norm_first": norm_first, "activation": torch.relu}
    output = encode(leaves, x, mask=bias, **options)
    loss_of(output).backward()
    return output.detach(), {n: t.grad for n, t in leaves.items()}


def assert_equals_plain(model, output, expected):
    loss_of(output).backward()
    wanted, gradients = expected
    torch.testing.assert_close(output.detach(), wanted, rtol=1e-10, atol=1e-10)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, gradients[name], rtol=1e-10, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(("options", "spec"), [*product(LAYERS[:1], SPECS), *product(LAYERS[1:], SPECS[-1:])], ids=str)
def test_an_encoder_equals_the_formulas(options, spec):
    model = encoder(norm=True, **options)
    mitigated(model, spec)
    x = tokens()
    expected = plain(model, x, norm_first=options.get("norm_first", False), strength=strength_of(spec))
    turned = x if options.get("batch_first", True) else x.transpose(0, 1)
    output = model(turned)
    assert_equals_plain(model, output if turned is x else output.transpose(0, 1), expected)


@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask):
    arguments, bias = MASKS[mask]
    model = encoder()
    mitigated(model, "attnscale+neutreno:0.4")
    expected = plain(model, tokens(), bias=bias, strength=0.4)
    assert_equals_plain(model, model(tokens(), **arguments), expected)


@pytest.mark.parametrize("mask", ["padding", "hidden", "causal"])
def test_a_mean_over_hidden_tokens_is_refused(mask):
    model = encoder()
    with mitigate(model, "featscale"), pytest.raises(AcutanceError, match="a mask hides some of them"):
        model(tokens(), **MASKS[mask][0])


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_decoders_self_attention(norm_first):
    model, memory = decoder(norm_first=norm_first), tokens(seed=2)
    mitigated(model, "neutreno:0.6")
    bias = CAUSAL.expand(BATCH, HEADS, -1, -1)
    expected = plain(model, tokens(), bias=bias, norm_first=norm_first, memory=memory, strength=0.6)
    output = model(tokens(), memory, tgt_mask=CAUSAL, tgt_is_causal=True)
    assert_equals_plain(model, output, expected)


@pytest.mark.parametrize(("turn", "batch_first"), [(False, True), (True, False), (True, True), (False, False)])
def test_somebodys_blocks(turn, batch_first):
    model = shaken(nn.Sequential(*(Block(turn, batch_first) for _ in range(DEPTH)))).double()
    mitigated(model, "neutreno:0.6,learn=head+featscale")
    expected = plain(model, tokens(), names=SOMEBODYS, norm_first=True)
    turned = tokens() if turn != batch_first else tokens().transpose(0, 1)
    output = model(turned)
    assert_equals_plain(model, output if turn != batch_first else output.transpose(0, 1), expected)


def test_one_sample_without_a_batch_axis():
    model = encoder()
    mitigated(model, "neutreno:0.6,learn=head+featscale")
    expected = plain(model, tokens(batch=1))
    assert_equals_plain(model, model(tokens(batch=1)[0])[None], expected)


@pytest.mark.parametrize("mask", ["none", "padding", "causal and padding"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_the_fast_path_does_not_bypass_us(mask, norm_first, monkeypatch):
    calls = []

    def counted(own, *args, **kwargs):
        calls.append(own)
        return own(*args, **kwargs)

    for name in ("_transformer_encoder_layer_fwd", "_nested_tensor_from_mask"):
        monkeypatch.setattr(torch, name, partial(counted, getattr(torch, name)))
    arguments, bias = MASKS[mask]
    model = encoder(norm=True, nested=not norm_first, norm_first=norm_first).eval()
    with torch.no_grad():
        before = model(tokens(), **arguments)
        assert len(calls) == DEPTH + int(mask == "padding" and not norm_first)  # torch does take its fast paths
        handle = mitigated(model, "attnscale+neutreno:0.4")
        with torch.enable_grad():
            expected, _ = plain(model, tokens(), bias=bias, norm_first=norm_first, strength=0.4)
        usual = calls.copy()
        torch.testing.assert_close(model(tokens(), **arguments), expected, rtol=1e-10, atol=1e-10)
        assert calls == usual
        handle.remove()
        assert torch.equal(model(tokens(), **arguments), before)
        assert calls == 2 * usual


ATTENTIONS = [{}, {"batch_first": True}, {"bias": False}, {"vdim": 7, "batch_first": True}]
CALLS = [
    {"need_weights": need, "average_attn_weights": average, **masks}
    for (need, average), masks in product(
        [(False, True), (True, True), (True, False)],
        [
            {},
            {"attn_mask": HIDDEN},
            {"attn_mask": HIDDEN, "is_causal": True},
            {"attn_mask": BIAS.float()},
            {"key_padding_mask": padding(), "attn_mask": HIDDEN},
        ],
    )
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: ",".join(call) + str(call["need_weights"]))
@pytest.mark.parametrize("options", ATTENTIONS, ids=str)
def test_without_effect_we_change_no_bit(options, call):
    """Outputs, weights, gradients and the random numbers that dropout takes are torch's own."""
    x = tokens(dtype=torch.float32)
    assert_no_bit_changes(options, call, x if options.get("batch_first") else x.transpose(0, 1))


@pytest.mark.parametrize("need_weights", [False, True])
def test_one_sample_changes_no_bit_either(need_weights):
    call = {"key_padding_mask": padding()[1], "need_weights": need_weights}
    assert_no_bit_changes({}, call, tokens(dtype=torch.float32)[1])


def assert_no_bit_changes(options, call, x):
    mha = nn.MultiheadAttention(DIM, HEADS, dropout=0.3, **options)
    value = x[..., : options["vdim"]] if "vdim" in options else x

    def run():
        torch.manual_seed(3)
        mha.zero_grad()
        output, weights = mha(x, x, value, **call)
        output.square().sum().backward()
        return output, weights, torch.rand(()), *(p.grad.clone() for p in mha.parameters())

    before = run()
    with mitigate(mha, "neutreno:0.0"):
        during = run()
    assert (before[1] is None) == (during[1] is None) == (not call["need_weights"])
    assert all(torch.equal(a, b) for a, b in zip(before, during, strict=True) if a is not None)


class Sharper(Mitigation):
    """Queries twice as long, and a bias that changes nothing."""

    def scores(self, q, k, call):
        return 2 * q, k, q.new_full((1, 1, 1, 1), 0.5)


@pytest.mark.parametrize("call", [{}, {"attn_mask": HIDDEN}, {"attn_mask": HIDDEN, "is_causal": True}], ids=",".join)
@pytest.mark.parametrize("need_weights", [False, True])
def test_scores_are_changed_before_the_softmax(need_weights, call):
    mha, x = shaken(nn.MultiheadAttention(DIM, HEADS, batch_first=True)).double(), tokens()
    with mitigate(mha, Sharper()):
        found, _ = mha(x, x, x, need_weights=need_weights, **call)
    with torch.no_grad():
        mha.in_proj_weight[:DIM] *= 2
        mha.in_proj_bias[:DIM] *= 2
    torch.testing.assert_close(found, mha(x, x, x, **call)[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("spec", SPECS[:2])
def test_nothing_is_left_behind(spec):
    model = encoder(nested=True)
    before, keys = inventory(model), list(model.state_dict())
    handle = mitigate(model, spec)
    added = set(model.state_dict()) - set(keys)
    assert all(".self_attn.mitigation." in name for name in added)
    assert bool(added) == (spec != "neutreno:0.6")
    handle.remove()
    assert inventory(model) == before
    assert list(model.state_dict()) == keys


def test_a_copy_is_mitigated_too_and_independent():
    model = encoder()
    plain_output = model(tokens())
    handle = mitigated(model, "neutreno:0.6,learn=head")
    output = model(tokens())
    twin = copy.deepcopy(model)
    handle.remove()
    assert torch.equal(model(tokens()), plain_output)
    assert torch.equal(twin(tokens()), output)
    twin.layers[1].self_attn.mitigation.learnt_strength.data.zero_()
    assert not torch.equal(twin(tokens()), output)
    assert_equals_plain(twin, twin(tokens()), plain(twin, tokens()))


def test_non_reentrant_checkpointing_with_two_forward_passes_under_way():
    model = Checkpointed(encoder().layers, reentrant=False)
    mitigated(model, "neutreno:0.6,learn=head+featscale")
    _, one = plain(model, tokens(1))
    _, two = plain(model, tokens(2))
    first, second = loss_of(model(tokens(1))), loss_of(model(tokens(2)))
    first.backward()
    second.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, one[name] + two[name], rtol=1e-10, atol=1e-10)


class MaskFirst(nn.TransformerEncoderLayer):
    def forward(self, mask, x):
        return super().forward(x, src_mask=mask)


def test_blocks_whose_first_tensor_serves_several_forward_passes_are_refused():
    layers = nn.ModuleList(shaken(MaskFirst(DIM, HEADS, 16, dropout=0.0, batch_first=True)) for _ in range(2)).double()

    class CheckpointedMaskFirst(Checkpointed):
        def forward(self, x):
            for layer in self.layers:
                x = torch.utils.checkpoint.checkpoint(layer, CAUSAL, x, use_reentrant=False)
            return x

    model = CheckpointedMaskFirst(layers, reentrant=False)
    mitigated(model, "neutreno:0.6")
    first, _second = model(tokens(1)), model(tokens(2))
    with pytest.raises(AcutanceError, match="whose first argument is the tokens"):
        first.sum().backward()


@pytest.mark.slow
def test_compiled_with_masks():
    arguments, bias = MASKS["causal and padding"]
    model = encoder(depth=2, norm=True)
    mitigated(model, "attnscale+neutreno:0.4")
    expected = plain(model, tokens(), bias=bias, strength=0.4)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_equals_plain(model, compiled(tokens(), **arguments), expected)
