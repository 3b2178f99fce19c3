"""Models made of nn.MultiheadAttention: their sites are found, read and measured; what is passed by or refused."""

from functools import partial

import pytest
import tiny_models as models
import torch
from tiny_models import BIAS, DEPTH, DIM, HEADS, HIDDEN, blocks, encoder, left_alone, padding, shaken, tokens
from torch import nn

import acutance as ac
from acutance import sites
from acutance.errors import AcutanceError


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (models.vit(heads=HEADS), [f"blocks.{i}.attn" for i in range(DEPTH)]),
        (encoder(), [f"layers.{i}.self_attn" for i in range(DEPTH)]),
        (models.decoder(), [f"layers.{i}.self_attn" for i in range(DEPTH)]),
        (models.Model(), [f"blocks.{i}.attention.mha" for i in range(DEPTH)]),
        (encoder().layers[0], ["self_attn"]),
        (nn.MultiheadAttention(DIM, HEADS), [""]),
        (nn.Sequential(nn.Identity(), encoder(2), nn.Identity()), ["1.layers.0.self_attn", "1.layers.1.self_attn"]),
        (nn.Sequential(nn.Identity(), encoder().layers[0]), ["1.self_attn"]),
        (nn.Sequential(encoder(1), models.cross_attention()), ["0.layers.0.self_attn"]),
        (nn.ModuleDict({"body": encoder(1), "pool": models.cross_attention()}), ["body.layers.0.self_attn"]),
        (nn.ModuleList([encoder(1), encoder(1)]), ["0.layers.0.self_attn", "1.layers.0.self_attn"]),
        (nn.ModuleDict({"one": encoder().layers[0], "two": encoder().layers[0]}), ["one.self_attn", "two.self_attn"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_sites_stand_in_depth_order(model, expected):
    found = sites.find(model)
    assert [site.name for site in found] == expected
    for layer, site in enumerate(found, 1):
        shape = (site.layer, site.dim, site.heads, site.kv_heads, site.head_dim)
        assert shape == (layer, DIM, HEADS, HEADS, DIM // HEADS)
        assert f"of layer {layer}: {site.name}, {HEADS} heads of {DIM // HEADS}>" in repr(site)
        assert model.get_submodule(site.name) is site.attention
        assert site.attention in site.block.modules()


def test_encoder_and_decoder_are_two_stacks():
    model = nn.Transformer(DIM, HEADS, 2, 2, 16, batch_first=True)
    src, tgt = tokens(dtype=torch.float32), tokens(2, dtype=torch.float32)
    before = model.eval()(src, tgt)
    with ac.mitigate(model.encoder, "neutreno:0.6"), ac.mitigate(model.decoder, "neutreno:0.6"):
        assert not torch.equal(model(src, tgt), before)
        with pytest.raises(AcutanceError, match=r"several stacks .*\(encoder\.layers, decoder\.layers\).*part="):
            sites.find(model)
    assert torch.equal(model(src, tgt), before)
    sides = nn.ModuleDict({name: nn.ModuleList(encoder().layers) for name in "ab"})
    with pytest.raises(AcutanceError, match=r"\(a, b\).*part='a'"):
        sites.find(sides)
    assert len(sites.find(sides["b"])) == DEPTH


def test_weights_of_their_own():
    mha = nn.MultiheadAttention(DIM, HEADS, vdim=7)
    (site,) = sites.find(mha)
    assert (site.query_weight(), site.key_weight()) == (mha.q_proj_weight, mha.k_proj_weight)
    with pytest.raises(AcutanceError, match=r"v_proj_weight \(12, 7\) does not read the 12 channels"):
        site.value_weight()


MASKS = [{}, {"attn_mask": HIDDEN}, {"attn_mask": HIDDEN, "is_causal": True}, {"attn_mask": BIAS}]
MASKS += [{"key_padding_mask": padding()}, {"key_padding_mask": padding(), "attn_mask": HIDDEN}]
masked = pytest.mark.parametrize("masks", MASKS, ids=",".join)
with_weights = pytest.mark.parametrize("need_weights", [True, False])


@pytest.mark.parametrize("batch_first", [True, False])
@masked
@with_weights
def test_records_hold_the_attention_that_torch_reports(batch_first, masks, need_weights):
    mha = nn.MultiheadAttention(DIM, HEADS, batch_first=batch_first).double()
    x = tokens() if batch_first else tokens().transpose(0, 1)
    plain, weights = mha(x, x, x, **masks, average_attn_weights=False)
    (output, _), (record,) = models.recorded(lambda: mha(x, x, x, **masks, need_weights=need_weights), sites.find(mha))
    torch.testing.assert_close(record.A.dense(), weights, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(record.output, weights @ record.values, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(record.branch, plain if batch_first else plain.transpose(0, 1))
    assert not need_weights or torch.equal(output, plain)
    assert record.A.scale == (DIM // HEADS) ** -0.5  # torch scales the queries before the product
    torch.testing.assert_close(record.A.symmetrised().q, record.k)
    if [*masks] == ["attn_mask", "is_causal"] and not need_weights:  # a hint that makes the mask superfluous
        assert (record.A.causal, record.A.mask) == (True, None)


ATTENTIONS = [{}, {"batch_first": True}, {"bias": False}, {"vdim": 7, "batch_first": True}, {"one sample": True}]


@pytest.mark.parametrize("options", ATTENTIONS, ids=str)
@masked
@pytest.mark.parametrize("weights", [{"need_weights": False}, {}, {"average_attn_weights": False}], ids=str)
def test_without_effect_we_change_no_bit(options, masks, weights):
    """Outputs, weights, gradients and the random numbers that dropout takes are torch's own."""
    x = tokens(dtype=torch.float32)
    if "one sample" in options:
        options, x, masks = {}, x[1], {"key_padding_mask": padding()[1]}
    x = x if options.get("batch_first") or x.ndim == 2 else x.transpose(0, 1)
    masks = {name: mask.float() if mask is BIAS else mask for name, mask in masks.items()}
    mha = nn.MultiheadAttention(DIM, HEADS, dropout=0.3, **options)

    def run():
        torch.manual_seed(3)
        mha.zero_grad()
        output, weighted = mha(x, x, x[..., : options.get("vdim")], **masks, **weights)
        output.square().sum().backward()
        return [output, torch.rand(()), *(p.grad.clone() for p in mha.parameters()), weighted]

    before = run()
    with ac.mitigate(mha, "neutreno:0.0"):
        during = run()
    if weights == {"need_weights": False}:
        assert before.pop() is during.pop() is None
    assert all(torch.equal(a, b) for a, b in zip(before, during, strict=True))


@masked
@with_weights
def test_scores_are_changed_before_the_softmax(need_weights, masks):
    mha, x = shaken(nn.MultiheadAttention(DIM, HEADS, batch_first=True)).double(), tokens()
    with ac.mitigate(mha, models.Sharper()):
        found, _ = mha(x, x, x, need_weights=need_weights, **masks)
    with torch.no_grad():
        mha.in_proj_weight[:DIM] *= 2
        mha.in_proj_bias[:DIM] *= 2
    torch.testing.assert_close(found, mha(x, x, x, **masks)[0], rtol=1e-10, atol=1e-12)


@torch.no_grad()
def test_an_observed_encoder_computes_as_torch_does_without_its_fast_path():
    model = encoder(nested=True, dtype=torch.float32).eval()
    run = partial(model, tokens(dtype=torch.float32), src_key_padding_mask=padding())
    with left_alone(model, run):
        torch.backends.mha.set_fastpath_enabled(False)
        slow = run()
        torch.backends.mha.set_fastpath_enabled(True)
        watched, records = models.recorded(run, sites.find(model))
        assert torch.equal(watched, slow)
        assert len(records) == DEPTH


TAPS = ["block", "attention", "values"]


def profile_of(model, batch, **options):
    return models.readings(ac.measure(model, [batch], progress=False, **{"metrics": "all", "tap": TAPS, **options}))


def assert_same_profile(one, other):
    assert one == pytest.approx(other, rel=1e-9, abs=1e-12)


def test_measured_alike_whichever_axis_comes_first():
    usual, turned, final = encoder(norm=True), encoder(norm=True, batch_first=False), {"tap": [*TAPS, "final"]}
    assert_same_profile(profile_of(usual, tokens(), **final), profile_of(turned, tokens().transpose(0, 1), **final))
    one = tokens(batch=1)  # one sample may come without a batch axis
    assert_same_profile(profile_of(usual, one), profile_of(usual, one[0]))
    somebodys = profile_of(blocks(depth=2), tokens())
    assert_same_profile(somebodys, profile_of(blocks(True, False, depth=2), tokens()))
    assert_same_profile(somebodys, profile_of(blocks(False, False, depth=2), tokens().transpose(0, 1)))


@pytest.mark.parametrize("tap", ["block", TAPS])
def test_padding_does_not_count(tap):
    model, padded = encoder(nested=True), {"src": tokens()[1:2], "src_key_padding_mask": padding()[1:2]}
    names = ["token_cosine", "effective_rank"]
    one, other = (profile_of(model, x, metrics=names, tap=tap) for x in (padded, {"src": tokens()[1:2, :3]}))
    assert_same_profile(one, other)
    assert torch.backends.mha.get_fastpath_enabled()


def test_class_tokens_and_final_norms():
    model = shaken(models.Model()).double()
    assert sites.special_tokens(model).front == 1
    assert ("final", DEPTH, "token_cosine") in profile_of(model, tokens(), tap=["final", *TAPS], prefix="out")
    for one in (model, encoder(norm=True)):
        assert sites.final_norm(one) is one.norm
    for missing in (encoder(), nn.Sequential(nn.Sequential(models.Block(batch_first=False)), nn.LayerNorm(DIM))):
        match = rf"{type(missing).__name__} has no norm after its last block.*read tap='block'"
        with pytest.raises(AcutanceError, match=match):
            sites.final_norm(missing)


@pytest.mark.parametrize("shape", [(DIM,), (), (1,), (1, 1, DIM)])
def test_explained_from_the_weights_with_a_gain_of_any_shape(shape):
    model = shaken(models.Model()).double()
    for block in model.blocks:
        block.gain = nn.Parameter(torch.randn(shape, dtype=torch.float64))
    spectrum = ac.explain(model)
    for site, block, layer in zip(sites.find(model), model.blocks, spectrum.layers, strict=True):
        gain, mha = block.gain.flatten().expand(DIM), block.attention.mha
        assert site.pre_norm() is block.norm1
        assert torch.equal(site.branch_gain(), gain)
        h = gain[:, None] * mha.out_proj.weight @ mha.in_proj_weight[2 * DIM :] * block.norm1.weight
        expected = torch.linalg.eigvals(h.detach())
        assert sorted(layer.eigenvalues.real) == pytest.approx(sorted(expected.real.tolist()), abs=1e-9)


def test_what_stands_around_the_attention_is_found_by_a_run():
    block = models.with_positions()
    assert [sites.find(nn.Sequential(one))[0].pre_norm() for one in (models.PostNorm(), block)] == [None, block.norm]
    assert sites.find(nn.Sequential(block))[0].branch_gain() is None
    idle = models.PostNorm(lambda self, x: self.norm(x + self.attention(x)) if x.isnan().any() else x)
    with pytest.raises(AcutanceError, match="PostNorm does not run"):
        sites.find(nn.Sequential(idle))[0].pre_norm()


def refreshed():
    """Makes the normed tokens three times over, as many a tutorial does."""
    run = lambda self, x: x + self.attn(self.norm(x), self.norm(x), self.norm(x))[0]  # noqa: E731
    return models.Made(run, attn=models.cross_attention(), norm=nn.LayerNorm(DIM))


@pytest.mark.parametrize("block", [models.with_positions, refreshed])
def test_equal_tensors_and_queries_with_positions_are_self_attention(block):
    model = nn.Sequential(block(), block()).double()
    before = model(tokens())
    with ac.mitigate(model, "neutreno:0.0"):
        assert torch.equal(model(tokens()), before)
    with ac.mitigate(model, "neutreno:0.6"):
        assert not torch.equal(model(tokens()), before)


def twice():
    return models.Made(
        lambda self, x: x + self.columns(self.rows(x)), rows=models.SelfAttention(), columns=models.SelfAttention()
    )


def in_halves(self, x):
    """Attends within each half of the tokens."""
    return x[:, :4] + torch.cat(self.attention(torch.cat(x[:, :4].chunk(2, dim=1))).chunk(2), dim=1)


def skips(*layers, depth=3):
    """Runs some of its blocks, as LayerDrop does, or one more than once."""

    def run(self, x):
        for layer in layers:
            x = self.blocks[layer](x)
        return x

    return models.Made(run, blocks=nn.ModuleList(models.PostNorm() for _ in range(depth)))


def several(block, **options):
    return nn.Sequential(block(**options), block(**options))


def lists():
    return nn.ModuleList(nn.ModuleList([models.SelfAttention(), nn.Linear(DIM, DIM)]) for _ in range(2))


REFUSED = {  # by `mitigate`: the model, the mitigation, and what is said
    "bias_kv": (lambda: several(models.PostNorm, add_bias_kv=True), "neutreno:0.6", "a key that is no token"),
    "zero_attn": (lambda: several(models.PostNorm, add_zero_attn=True), "neutreno:0.6", "a key that is no token"),
    "two attentions": (lambda: several(twice), "featscale", r"several attentions \(0\.rows\.mha, 0\.columns\.mha\)"),
    "outside of the list": (
        *(lambda: nn.ModuleDict({"start": encoder().layers[0], "layers": encoder().layers}), "featscale"),
        r"start\.self_attn is in a block like those of layers, but outside",
    ),
    "lists for blocks": (
        *(lambda: nn.ModuleDict({"layers": lists()}), "featscale"),
        r"layers\.0 is a list of modules without a forward",
    ),
    "stages": (
        *(lambda: nn.ModuleList([encoder(2), encoder(2)]), "neutreno:0.6"),
        r"stages \(0\.layers, 1\.layers\).*part='0\.layers'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_stays_as_it_was_and_its_tokens_are_measured(case):
    make, spec, match = REFUSED[case]
    model = make().double()
    run = (lambda: model(tokens())) if isinstance(model, nn.Sequential) else None
    with left_alone(model, run), pytest.raises(AcutanceError, match=match):
        ac.mitigate(model, spec)
    if run is not None:
        assert {r.layer for r in ac.measure(model, [tokens()], progress=False).readings} == {0, 1, 2}


WINDOWS = "its attention a batch of 8"
REFUSED_RUNNING = [
    *(
        (lambda: several(models.PostNorm, run=in_halves), spec, WINDOWS)
        for spec in ("neutreno:0.6", "featscale", "attnscale+featscale")
    ),
    (
        lambda: several(models.PostNorm, run=lambda self, x: self.norm(x + self.attention(x))[:, 1:]),
        "neutreno:0.6",
        "not of the same tokens",
    ),
    (lambda: skips(1, 2), "neutreno:0.6", "first layer has"),
    (lambda: skips(0, 0, 0, depth=1), "neutreno:0.6", "ran more than once"),
]


@pytest.mark.parametrize(("make", "spec", "match"), REFUSED_RUNNING)
def test_tokens_that_are_not_those_of_the_first_layer_are_refused(make, spec, match):
    model = make().double()
    with ac.mitigate(model, spec), pytest.raises(AcutanceError, match=match):
        model(tokens())
    with ac.mitigate(model, "attnscale"):  # which needs no others
        model(tokens())


def test_a_block_that_is_skipped_is_none_of_the_pass():
    torch.manual_seed(0)
    model = skips(0, 2).double()
    without = nn.Sequential(model.blocks[0], model.blocks[2])
    with ac.mitigate(model, "neutreno:0.6"):
        found = model(tokens())
    with ac.mitigate(without, "neutreno:0.6"):
        assert torch.equal(found, without(tokens()))


class Undone(ac.NeuTRENO):
    def stream(self, x_in, x_out, call):
        return x_in


def test_a_block_by_itself_is_mitigated_and_then_left_alone():
    block, x = encoder(1).layers[0], tokens()
    with ac.mitigate(block, Undone(0.6)):
        assert torch.equal(block(x), x)
    assert torch._C._len_torch_function_stack() == 0


def test_cross_attention_passes_through_and_is_not_mitigated():
    memory = models.Made(lambda self, x: x + self.attn(x, x.flip(1), x.flip(1))[0], attn=models.SelfAttention().mha)
    model = nn.Sequential(shaken(models.with_positions()), shaken(memory)).double()
    before = model(tokens())
    watched, records = models.recorded(lambda: model(tokens()), sites.find(model))
    assert torch.equal(watched, before)
    assert len(records) == 1
    match = r"1\.attn is called as cross-attention.*leave layer 2 out"
    with ac.mitigate(model, "featscale"), pytest.raises(AcutanceError, match=match):
        model(tokens())
    with ac.mitigate(model, "featscale", layers=[1]):
        assert torch.equal(model(tokens()), before)


def test_nested_tensors_are_refused():
    model = encoder().eval()
    nested = torch.nested.nested_tensor([tokens()[0], tokens()[1, :3]])
    match = "nested tensor: pass a padded one"
    with ac.mitigate(model.layers[0], "featscale"), torch.no_grad(), pytest.raises(AcutanceError, match=match):
        model.layers[0](nested)


@pytest.mark.parametrize("low", [-1e4, -1e9, torch.finfo(torch.float32).min, -torch.inf])
@torch.no_grad()
def test_what_a_low_number_hides_is_hidden_from_every_mitigation(low):
    layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval(), torch.randn(2, 6, 16)
    hidden = torch.zeros(6, 6, dtype=torch.bool)
    hidden[:4, 4:] = True
    mask = torch.zeros(6, 6).masked_fill(hidden, low)
    plain = model(x)
    with ac.mitigate(model, "attnscale"):
        for parameter in [p for name, p in model.named_parameters() if "mitigation" in name]:
            parameter.fill_(0.7)
        assert not torch.allclose(model(x), plain)
        torch.testing.assert_close(model(x, mask=mask), model(x, mask=hidden))
    with ac.mitigate(model, "featscale"), pytest.raises(AcutanceError, match="a mask hides some"):
        model(x, mask=mask)
