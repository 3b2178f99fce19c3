"""Attention sites of models made of nn.MultiheadAttention: found, read, measured."""

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
    Model,
    PostNorm,
    WithPositions,
    cross_attention,
    decoder,
    encoder,
    padding,
    shaken,
    tokens,
)

from acutance import sites
from acutance.errors import AcutanceError
from acutance.explain import explain
from acutance.measure import measure
from acutance.sites.mitigate import mitigate


def linear():
    return nn.Linear(DIM, DIM)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (encoder(), [f"layers.{i}.self_attn" for i in range(DEPTH)]),
        (decoder(), [f"layers.{i}.self_attn" for i in range(DEPTH)]),
        (Model(), [f"blocks.{i}.attention.mha" for i in range(DEPTH)]),
        (encoder().layers[0], ["self_attn"]),
        (nn.MultiheadAttention(DIM, HEADS), [""]),
        (nn.Sequential(linear(), encoder(2), linear()), ["1.layers.0.self_attn", "1.layers.1.self_attn"]),
        (nn.Sequential(linear(), encoder().layers[0]), ["1.self_attn"]),
        (nn.Sequential(encoder(1), cross_attention()), ["0.layers.0.self_attn"]),
        (nn.ModuleDict({"body": encoder(1), "pool": cross_attention()}), ["body.layers.0.self_attn"]),
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
        assert model.get_submodule(site.name) is site.attention
        assert site.attention in site.block.modules()


def test_a_model_that_is_mitigated_keeps_its_sites():
    model = encoder()
    with mitigate(model, "neutreno:0.6"):
        assert all(a is b for a, b in zip(sites.find(model), sites.find(model), strict=True))
        assert sites.mitigation_spec(model) == "neutreno:0.6"
    assert sites.mitigation_spec(model) is None


def test_encoder_and_decoder_are_two_stacks():
    model = nn.Transformer(DIM, HEADS, 2, 2, 16, batch_first=True)
    src, tgt = tokens(dtype=torch.float32), tokens(2, dtype=torch.float32)
    before = model.eval()(src, tgt)
    with mitigate(model.encoder, "neutreno:0.6"), mitigate(model.decoder, "neutreno:0.6"):
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


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    "masks",
    [
        {},
        {"attn_mask": torch.triu(torch.ones(TOKENS, TOKENS, dtype=torch.bool), 1)},
        {"key_padding_mask": padding()},
        {"attn_mask": torch.randn(BATCH * HEADS, TOKENS, TOKENS, dtype=torch.float64)},
    ],
    ids=lambda masks: ",".join(masks),
)
@pytest.mark.parametrize("need_weights", [True, False])
def test_records_hold_the_attention_that_torch_reports(batch_first, masks, need_weights):
    mha = nn.MultiheadAttention(DIM, HEADS, batch_first=batch_first).double()
    x = tokens() if batch_first else tokens().transpose(0, 1)
    plain, weights = mha(x, x, x, **masks, average_attn_weights=False)
    records = []
    with sites.find(mha)[0].observe(records.append):
        output, _ = mha(x, x, x, **masks, need_weights=need_weights)
    torch.testing.assert_close(records[0].A.dense(), weights, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(records[0].output, weights @ records[0].values, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(records[0].branch, plain if batch_first else plain.transpose(0, 1))
    assert not need_weights or torch.equal(output, plain)
    assert records[0].A.scale == (DIM // HEADS) ** -0.5  # torch scales the queries before the product
    torch.testing.assert_close(records[0].A.symmetrised().q, records[0].k)


def test_a_causal_hint_needs_no_mask_in_the_record():
    mha, x, records = nn.MultiheadAttention(DIM, HEADS, batch_first=True), tokens(dtype=torch.float32), []
    causal = nn.Transformer.generate_square_subsequent_mask(TOKENS)
    with sites.find(mha)[0].observe(records.append):
        mha(x, x, x, attn_mask=causal, is_causal=True, need_weights=False)
    assert records[0].A.causal
    assert records[0].A.mask is None


@torch.no_grad()
def test_an_observed_encoder_computes_as_torch_does_without_its_fast_path():
    model, records = encoder(nested=True, dtype=torch.float32).eval(), []

    def run():
        return model(tokens(dtype=torch.float32), src_key_padding_mask=padding())

    was, fast = torch.backends.mha.get_fastpath_enabled(), run()
    torch.backends.mha.set_fastpath_enabled(False)
    slow = run()
    torch.backends.mha.set_fastpath_enabled(was)
    handles = [site.observe(records.append) for site in sites.find(model)]
    assert torch.equal(run(), slow)
    assert len(records) == DEPTH
    for handle in handles:
        handle.remove()
    assert torch.equal(run(), fast)


TAPS = ["block", "attention", "values"]


def profile_of(model, batch, **options):
    readings = measure(model, [batch], progress=False, **{"metrics": "all", "tap": TAPS, **options}).readings
    return {(r.tap, r.layer, r.metric): r.mean for r in readings}


def assert_same_profile(one, other):
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert other[key] == pytest.approx(value, rel=1e-9, abs=1e-12), key


def test_measured_alike_whichever_axis_comes_first():
    usual, turned = encoder(norm=True), encoder(norm=True, batch_first=False)
    taps = [*TAPS, "final"]
    assert_same_profile(profile_of(usual, tokens(), tap=taps), profile_of(turned, tokens().transpose(0, 1), tap=taps))
    one = tokens(batch=1)  # one sample may come without a batch axis
    assert_same_profile(profile_of(usual, one), profile_of(usual, one[0]))


@pytest.mark.parametrize(("turn", "batch_first"), [(True, False), (False, False)])
def test_somebodys_blocks_are_measured_alike_whichever_axis_comes_first(turn, batch_first):
    kinds = [(False, True), (turn, batch_first)]
    usual, other = (shaken(nn.Sequential(*(Block(*kind) for _ in range(2)))).double() for kind in kinds)
    x = tokens() if turn != batch_first else tokens().transpose(0, 1)
    assert_same_profile(profile_of(usual, tokens()), profile_of(other, x))


@pytest.mark.parametrize("tap", ["block", TAPS])
def test_padding_does_not_count(tap):
    model, padded = encoder(nested=True), {"src": tokens()[1:2], "src_key_padding_mask": padding()[1:2]}
    names = ["token_cosine", "effective_rank"]
    one, other = (profile_of(model, x, metrics=names, tap=tap) for x in (padded, {"src": tokens()[1:2, :3]}))
    assert_same_profile(one, other)
    assert torch.backends.mha.get_fastpath_enabled()


def test_class_tokens_and_final_norms():
    model = shaken(Model()).double()
    assert sites.special_tokens(model).front == 1
    assert sites.final_norm(model) is model.norm
    profile = profile_of(model, tokens(), tap=["final", *TAPS], prefix="out")
    assert ("final", DEPTH, "token_cosine") in profile
    model = encoder(norm=True)
    assert sites.final_norm(model) is model.norm
    for missing in (encoder(), nn.Sequential(nn.Sequential(Block(batch_first=False)), nn.LayerNorm(DIM))):
        with pytest.raises(AcutanceError, match="has no norm after its last block"):
            sites.final_norm(missing)


def test_explained_from_the_weights():
    model = shaken(Model()).double()
    found, block, mha = sites.find(model), model.blocks[0], model.blocks[0].attention.mha
    assert [(site.pre_norm(), site.branch_gain()) for site in found] == [(b.norm1, b.gain) for b in model.blocks]
    h = block.gain[:, None] * mha.out_proj.weight @ mha.in_proj_weight[2 * DIM :] * block.norm1.weight
    expected = torch.linalg.eigvals(h.detach())
    layer = explain(model).layers[0]
    assert sorted(layer.eigenvalues.real) == pytest.approx(sorted(expected.real.tolist()), abs=1e-9)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, DIM)])
def test_a_gain_may_have_any_shape(shape):
    model = shaken(Model()).double()
    for block in model.blocks:
        block.gain = nn.Parameter(torch.randn(shape, dtype=torch.float64))
    for site, block in zip(sites.find(model), model.blocks, strict=True):
        assert torch.equal(site.branch_gain(), block.gain.flatten().expand(DIM))
    assert len(explain(model).layers) == DEPTH


class Untraceable(PostNorm):
    def forward(self, x):
        return super().forward(x) if x.isnan().any() else x


def test_what_stands_around_the_attention_is_found_by_a_run():
    block = WithPositions()
    assert [sites.find(nn.Sequential(one))[0].pre_norm() for one in (PostNorm(), block)] == [None, block.norm]
    assert sites.find(nn.Sequential(block))[0].branch_gain() is None
    with pytest.raises(AcutanceError, match="Untraceable does not run"):
        sites.find(nn.Sequential(Untraceable()))[0].pre_norm()


class Refreshed(nn.Module):
    """Makes the normed tokens three times over, as many a tutorial does."""

    def __init__(self):
        super().__init__()
        self.attn, self.norm = nn.MultiheadAttention(DIM, HEADS, batch_first=True), nn.LayerNorm(DIM)

    def forward(self, x):
        return x + self.attn(self.norm(x), self.norm(x), self.norm(x))[0]


@pytest.mark.parametrize("block", [WithPositions, Refreshed])
def test_equal_tensors_and_queries_with_positions_are_self_attention(block):
    model = nn.Sequential(block(), block()).double()
    before = model(tokens())
    with mitigate(model, "neutreno:0.0"):
        assert torch.equal(model(tokens()), before)
    with mitigate(model, "neutreno:0.6"):
        assert not torch.equal(model(tokens()), before)
