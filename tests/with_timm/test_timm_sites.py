"""The sites found in timm's models: what they say about the weights, and what an observer is shown."""

import json
from collections import defaultdict
from functools import partial

import pytest
import timm
import torch
from timm.models import vision_transformer
from timm_zoo import FUSED, MEASURED, MERGED, MIXED_HEADS, SHIFTED, SMALL, create, images
from torch import nn

import acutance as ac
from acutance.attention.products import repeat_heads
from acutance.errors import AcutanceError, NoSitesError
from acutance.measure.profile import MATRIX
from sites.tiny_models import Made, recorded, with_gradients

PREFIX = {"vit_tiny_patch16_224": 1, "vit_base_patch14_reg4_dinov2": 5, "deit_tiny_distilled_patch16_224": 2}
PREFIX |= {"vit_wee_patch16_reg1_gap_256": 1, "vit_small_patch16_dinov3": 5, "beit_base_patch16_224": 1}
PREFIX |= {"cait_xxs24_224": 0, "swin_tiny_patch4_window7_224": 0, "pvt_v2_b0": 0}


@pytest.mark.parametrize("fused", FUSED.values(), ids=FUSED)
@pytest.mark.parametrize("name", [name for name in MEASURED if name not in MIXED_HEADS])
def test_records_are_what_timm_computes(name, fused):
    model = create(name, fused=fused)
    expected = model(images())
    output, records = recorded(lambda: model(images()), ac.sites.find(model))
    assert torch.equal(output, expected)
    assert torch.equal(model(images()), expected)
    twin, weights, branches = create(name, fused=False), [], []  # what timm's dropout sees, and its W_proj returns
    for site in ac.sites.find(twin):
        site.attention.attn_drop.register_forward_hook(lambda _, args, _out: weights.append(args[0]))
        site.attention.proj.register_forward_hook(lambda _, _args, out: branches.append(out))
    twin(images())
    for record, A, branch in zip(records, weights, branches, strict=True):
        torch.testing.assert_close(record.A.dense(), A, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(record.branch, branch, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(record.output, record.A @ record.values, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", MEASURED)
def test_weights_make_the_values_and_norms_and_gains_are_those_of_the_residual_branch(name):
    """x + gain · attention(pre_norm(x)), or with a norm after the attention instead."""
    model, seen = create(name), defaultdict(dict)
    for site in ac.sites.find(model):
        projected = getattr(site.attention, "kv", site.attention)  # PVT projects tokens that were merged before
        for what, module in {"x": site.block, "inside": site.attention, "projected": projected}.items():
            into = partial(seen[site.layer].__setitem__, what)
            module.register_forward_pre_hook(lambda _, args, into=into: into(args[0]))
    _, records = recorded(lambda: model(images()), ac.sites.find(model))
    for site, record in zip(ac.sites.find(model), records, strict=True):
        values = nn.functional.linear(
            seen[site.layer]["projected"], site.value_weight(), site.projections().value.offset()
        )
        values = repeat_heads(values.unflatten(-1, (site.kv_heads, -1)).transpose(1, 2), record.values.shape[1])
        torch.testing.assert_close(values, record.values, rtol=1e-10, atol=1e-10)
        assert site.value_weight().shape == site.key_weight().shape == (site.kv_heads * site.head_dim, site.dim)
        assert site.query_weight().shape == (site.heads * site.head_dim, site.dim)
        assert site.projection_weight().shape == (site.dim, site.heads * site.head_dim)
        assert site.projections().output.offset() is site.attention.proj.bias
        norm, x = site.pre_norm(), seen[site.layer]["x"]
        assert (norm is None) == ("norms after" in name)
        if name not in SHIFTED:
            torch.testing.assert_close(x if norm is None else norm(x), seen[site.layer]["inside"])
        gains = [p for n, p in site.block.named_parameters(recurse=True) if n in ("ls1.gamma", "gamma_1")]
        assert [site.branch_gain()] == (gains or [None])


@pytest.mark.parametrize("name", MEASURED)
def test_measured_at_every_tap(name):
    model = create(name)
    some = ["token_cosine", "rank_residual"]  # the rest needs A, or an A that is square
    metrics = some if name in MIXED_HEADS else [*some, "attention_entropy", "head_cosine"] if name in MERGED else "all"
    taps = ["block", "attention", "values", "final"]
    profile = ac.measure(model, [images(), images(seed=3)], metrics=metrics, tap=taps, progress=False)
    depth = len(ac.sites.find(model))
    assert name not in PREFIX or ac.sites.special_tokens(model).front == PREFIX[name]
    assert sorted({r.layer for r in profile.readings if r.tap == "block"}) == list(range(depth + 1))
    for tap in ("attention", "values", *(() if name in MIXED_HEADS else [MATRIX])):
        assert sorted({r.layer for r in profile.readings if r.tap == tap}) == list(range(1, depth + 1))


BETWEEN = {
    "vit_tiny_patch16_224 scale norms": "a norm or a gate of Attention before W_proj",
    "eva02_tiny_patch14_224 joint": "a norm or a gate of EvaAttention before W_proj",
    "naflexvit_base_patch16_gap": "a norm or a gate of EvaAttention before W_proj",
    "cait_xxs24_224": "the mixing of heads",
}


@pytest.mark.parametrize("name", MEASURED)
def test_explained_from_the_weights_and_what_no_h_has_is_said(name):
    spectrum = ac.explain(create(name), progress=False)
    assert len(spectrum.layers) == len(ac.sites.find(create(name)))
    assert spectrum.context["outside H"] == BETWEEN.get(name)
    assert ("acts beside H⊗A and is not in the spectra" in " ".join(str(spectrum).split())) == (name in BETWEEN)


def test_attentions_side_by_side_and_two_stacks_are_refused():
    with pytest.raises(NoSitesError, match="CrossVit run in branches"):
        ac.sites.find(timm.create_model("crossvit_tiny_240", num_classes=5))
    model = vision_transformer.VisionTransformer(**SMALL, block_fn=vision_transformer.ParallelThingsBlock)
    with pytest.raises(NoSitesError, match=r"blocks\.0\.attns\.0\.attn stands beside others"):
        ac.sites.find(model)
    model = nn.ModuleDict({"one": create("vit_tiny_patch16_224"), "other": create("eva02_tiny_patch14_224")})
    with pytest.raises(AcutanceError, match=r"several stacks of layers \(one\.blocks, other\.blocks\)"):
        ac.sites.find(model)


def test_a_forward_of_ones_own_is_not_taken_for_timms():
    class DoubledAttention(timm.layers.Attention):
        def forward(self, x, attn_mask=None, is_causal=False):
            return 2 * super().forward(x, attn_mask, is_causal)

    model = vision_transformer.VisionTransformer(**SMALL, attn_layer=DoubledAttention).double().eval()
    with pytest.raises(NoSitesError, match=r"DoubledAttention.*does more than multiply"):
        ac.explain(model, progress=False)
    before = model(images())
    with ac.mitigate(model, "neutreno:0"):
        assert torch.equal(model(images()), before)

    model, batch = timm.create_model("convit_tiny", num_classes=5).eval(), torch.randn(2, 3, 224, 224)
    with torch.no_grad():  # attention that nobody described is intercepted
        before = model(batch)
        with ac.mitigate(model, "neutreno:0"):
            assert torch.equal(model(batch), before)


@pytest.mark.parametrize(
    ("name", "size", "match"),
    [
        ("crossvit_tiny_240", 240, r"blocks\.0\.blocks\.1 .*which does not come from the block"),
        ("mobilevit_xxs", 64, r"transformer\.0\.attn \(Block\) .*whose first axis is not the batch"),
    ],
)
def test_tokens_that_are_not_the_samples_are_refused(name, size, match):
    model = timm.create_model(name).eval()
    with pytest.raises(AcutanceError, match=match):
        ac.measure(model, [torch.randn(2, 3, size, size)], metrics="token_cosine", progress=False)


@pytest.mark.parametrize("name", ["beit_base_patch16_224", "eva02_tiny_patch14_224"])
def test_an_adapter_that_timm_passes_by_is_refused(name):
    model = create(name)
    before, qkv = model(images()), model.blocks[0].attn.qkv
    # It shows the weight of the layer inside, as peft's layers do.
    model.blocks[0].attn.qkv = Made(lambda self, x: 2 * self.base(x), base=qkv, weight=qkv.weight, bias=qkv.bias)
    assert torch.equal(model(images()), before), "timm does not use it"
    with pytest.raises(NoSitesError, match=r"blocks\.0\.attn multiplies by the weight of its qkv itself.*Made"):
        ac.explain(model)


def wrapped():
    """Inside transformers' wrapper, which goes past their forward, they are timm's all the same."""
    transformers = pytest.importorskip("transformers", reason="make test installs it beside timm")
    torch.manual_seed(0)
    sizes = {name: value for name, value in SMALL.items() if name != "num_classes"}
    config = transformers.TimmWrapperConfig(architecture="deit_tiny_distilled_patch16_224", model_args=sizes)
    return transformers.TimmWrapperModel(config).double().eval()


def test_it_is_read_as_timms_own():
    model, taps = wrapped(), ["block", "attention", "values", "final"]
    assert ac.sites.special_tokens(model) == (2, 0)
    assert ac.sites.final_norm(model) is model.timm_model.norm
    ours = ac.measure(model, [{"pixel_values": images()}], metrics="all", tap=taps, prefix="out", progress=False)
    theirs = ac.measure(model.timm_model, [images()], metrics="all", tap=taps, prefix="out", progress=False)
    assert ours.readings == theirs.readings
    assert ours.context["versions"].keys() >= {"timm", "transformers"}


def test_it_is_mitigated_as_timms_own():
    model = wrapped()
    plain = model(images()).last_hidden_state
    with ac.mitigate(model, "neutreno:0.6+attnscale"):
        found = with_gradients(model(images()).last_hidden_state, model.timm_model.named_parameters())
    assert torch.equal(model(images()).last_hidden_state, plain)
    assert not torch.equal(found["output"], plain)
    with ac.mitigate(model.timm_model, "neutreno:0.6+attnscale"):
        wanted = with_gradients(model.timm_model.forward_features(images()), model.timm_model.named_parameters())
    assert torch.equal(found["output"], wanted["output"])
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("part", ["", "timm_model"])
def test_it_is_saved_with_its_mitigation(tmp_path, part):
    model = wrapped()
    ac.mitigate(model.get_submodule(part), "neutreno:0.6")
    ac.save(model, tmp_path)
    noted = json.loads((tmp_path / "config.json").read_text())["acutance"]
    assert noted == {"TimmWrapperModel": {f"timm_model.blocks.{i}.attn": "neutreno:0.6" for i in range(3)}}
    loaded = ac.load(tmp_path).double().eval()
    assert torch.equal(loaded(images()).last_hidden_state, model(images()).last_hidden_state)
