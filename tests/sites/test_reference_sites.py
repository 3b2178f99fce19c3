"""Attention sites of the reference models."""

import pytest
import torch
from torch import nn

from acutance import sites
from acutance.errors import AcutanceError
from acutance.measure import measure
from acutance.mitigations.projection import Projection, Projections
from acutance.models import ViT
from acutance.sites import Library, lookup
from acutance.sites.site import AttentionSite

TINY = {"image_size": 8, "patch_size": 4, "dim": 12, "depth": 3, "heads": 3, "num_classes": 5}


def images():
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def test_sites_stand_in_depth_order_with_their_shapes():
    model = ViT(**TINY)
    found = sites.find(model)
    assert [site.layer for site in found] == [1, 2, 3]
    for site, block in zip(found, model.blocks, strict=True):
        assert (site.dim, site.heads, site.kv_heads, site.head_dim) == (12, 3, 3, 4)
        assert site.block is block
        assert model.get_submodule(site.name) is site.attention is block.attn
    assert repr(found[1]) == "<BlockSite of layer 2: blocks.1.attn, 3 heads of 4>"


def test_standing_models_are_looked_through_once_and_others_anew():
    model = ViT(**TINY)
    with sites.cached_lookup():
        first = sites.find(model)
        first.pop()  # is the caller's own
        assert [site.layer for site in sites.find(model)] == [1, 2, 3]
        del model.blocks[2]
        assert len(sites.find(model)) == 3
        assert len(sites.find(ViT(**TINY | {"depth": 1}))) == 1
    assert len(sites.find(model)) == 2


def test_measuring_looks_for_the_layers_once(monkeypatch):
    looked, look = [], lookup._refuse_layers_elsewhere
    monkeypatch.setattr(lookup, "_refuse_layers_elsewhere", lambda *found: looked.append(found) or look(*found))
    metrics = ("token_cosine", "attention_entropy")
    measure(ViT(**TINY), [images()], metrics=metrics, tap=("block", "final"), progress=False)
    assert len(looked) == 1


@pytest.mark.parametrize("attention", ["softmax", "symmetric"])
def test_the_weights_are_those_the_values_go_through(attention):
    model = ViT(**TINY, attention=attention)
    for site in sites.find(model):
        records, inputs = [], []
        with site.observe(records.append):
            hook = site.attention.register_forward_pre_hook(lambda _, args, kept=inputs: kept.append(args[0]))
            model(images())
            hook.remove()
        assert site.value_weight().shape == (12, 12)
        bias = site.attention.value_projection.bias[-12:]
        values = records[0].values.transpose(1, 2).flatten(2)
        torch.testing.assert_close(inputs[0] @ site.value_weight().T + bias, values)
        merged = records[0].output.transpose(1, 2).flatten(2)
        torch.testing.assert_close(merged @ site.projection_weight().T + site.attention.proj.bias, records[0].branch)


@pytest.mark.parametrize("mitigation", [None, "eigen:negative"])
@pytest.mark.parametrize("attention", ["softmax", "symmetric"])
def test_queries_and_keys_come_from_their_weights(attention, mitigation):
    model = ViT(**TINY, attention=attention, mitigation=mitigation)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    for site in sites.find(model):
        records, inputs = [], []
        hook = site.attention.register_forward_pre_hook(lambda _, args, kept=inputs: kept.append(args[0]))
        with site.observe(records.append):
            model(images())
        hook.remove()
        A, bias = records[0].A, site.attention.value_projection.bias
        shift = 0 if attention == "symmetric" else 12
        for weight, found, rows in ((site.query_weight(), A.q, bias[:12]), (site.key_weight(), A.k, bias[shift:][:12])):
            assert weight.shape == (12, 12)
            torch.testing.assert_close(inputs[0] @ weight.T + rows, found.transpose(1, 2).flatten(2))


def test_sites_that_do_not_know_their_queries_and_keys_say_so():
    class Other(AttentionSite):
        name = "encoder.3.attention"
        attention = nn.Identity()
        mitigation = observe = install = replace = None

        def projections(self):
            return Projections(None, None, Projection(nn.Linear(2, 2)), Projection(nn.Linear(2, 2)))

    for ask, which in ((Other().query_weight, "W_Q"), (Other().key_weight, "W_K")):
        with pytest.raises(
            AcutanceError, match=rf"encoder\.3\.attention: Identity keeps {which} under an unknown name"
        ):
            ask()


def test_value_weight_is_the_parameter_itself():
    site = sites.find(ViT(**TINY))[0]
    with torch.no_grad():
        site.value_weight().zero_()
    assert not site.attention.qkv.weight[-12:].any()
    assert site.attention.qkv.weight[:-12].any()


def test_records_hold_what_attention_did():
    model = ViT(**TINY, mitigation="neutreno:0.6")
    records = []
    handles = [site.observe(records.append) for site in sites.find(model)]
    model(images())
    assert records[0].v0 is None
    for record in records[1:]:
        assert torch.equal(record.v0, records[0].values)
        expected = record.A.dense() @ record.values + 0.6 * (record.v0 - record.values)
        torch.testing.assert_close(record.output, expected)
    for handle in handles:
        handle.remove()
    model(images())
    assert len(records) == 3


def test_a_second_observer_is_refused_until_the_first_leaves():
    site = sites.find(ViT(**TINY))[0]
    with (
        site.observe(print),
        pytest.raises(AcutanceError, match=r"blocks\.0\.attn is being observed already"),
    ):
        site.observe(print)
    site.observe(print).remove()


class Wrapper(nn.Module):
    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def test_models_inside_wrappers_are_found():
    model = ViT(**TINY, registers=2)
    outer = Wrapper(inner=Wrapper(backbone=model))
    assert [site.name for site in sites.find(outer)] == [f"inner.backbone.blocks.{i}.attn" for i in range(3)]
    assert sites.special_tokens(outer).front == 3
    assert sites.final_norm(outer) is model.norm


def test_blocks_inside_wrappers_are_found():
    model = ViT(**TINY)
    model.blocks[1] = Wrapper(wrapped=model.blocks[1])
    assert [site.name for site in sites.find(model)] == [
        "blocks.0.attn",
        "blocks.1.wrapped.attn",
        "blocks.2.attn",
    ]


def test_two_models_at_once_are_ambiguous():
    with pytest.raises(AcutanceError, match=r"several ViTs \(student, teacher\): pass one of them"):
        sites.find(Wrapper(student=ViT(**TINY), teacher=ViT(**TINY)))


def test_a_model_without_sites_is_named_with_what_is_supported():
    with pytest.raises(AcutanceError, match=r"no attention found in torch\.nn\..*Linear; .*today: .*acutance\.models"):
        sites.find(nn.Linear(2, 2))


def test_another_library_is_one_entry(monkeypatch):
    model = nn.Linear(2, 2)
    borrowed = sites.find(ViT(**TINY))
    layers = [sites.Layer(site.layer, site.name, site.block, site.attention) for site in borrowed]
    library = Library(
        name="toys",
        layers=lambda m: layers if m is model else [],
        site=lambda _stack, layer: borrowed[layer.layer - 1],
        final_norm=lambda _: model,
        special_tokens=lambda _: sites.SpecialTokens(7),
    )
    monkeypatch.setattr(lookup, "LIBRARIES", [*sites.LIBRARIES, library])
    assert sites.find(model) == borrowed
    assert sites.special_tokens(model).front == 7
    assert sites.final_norm(model) is model


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, None),
        ({"mitigation": "neutreno:0.6+featscale"}, "neutreno:0.6+featscale"),
        ({"mitigation": "attnscale", "mitigation_layers": (1, 3)}, "attnscale in layers 1, 3"),
    ],
)
def test_mitigation_spec_says_what_the_model_carries(options, expected):
    assert sites.mitigation_spec(ViT(**TINY, **options)) == expected
