"""Segmenter: the public code's names, images of any size, and a second, plain implementation, gradients included."""

import json

import pytest
import torch
from plain_segmenter import bilinear, plain_segmenter

import acutance as ac
from acutance.errors import AcutanceError, SeveralStacksError, ShapeError
from acutance.models import Segmenter, SegmenterConfig, ViT

TINY = {
    "num_classes": 5,
    "image_size": 12,
    "patch_size": 4,
    "dim": 12,
    "depth": 3,
    "heads": 3,
    "decoder_heads": 2,
    "drop_path": 0.0,
}


def images(height=12, width=12, dtype=torch.float64):
    return torch.randn(2, 3, height, width, dtype=dtype, generator=torch.Generator().manual_seed(0))


def seeded(spread=0.3, **options):
    """In evaluation mode, with weights far from initialisation, so that nothing is uniform and nothing vanishes."""
    torch.manual_seed(0)
    model = Segmenter(**{**TINY, **options}).double().eval()
    for parameter in model.parameters():
        parameter.data += spread * torch.randn_like(parameter)
    return model


def public_shapes(depth, dim, patches, classes):
    """State-dict names and shapes of the public code's model with a DeiT encoder, its unused head included."""
    shapes = {"encoder.cls_token": (1, 1, dim), "encoder.pos_embed": (1, 1 + patches, dim)}
    shapes |= {"encoder.patch_embed.proj.weight": (dim, 3, 16, 16), "encoder.patch_embed.proj.bias": (dim,)}
    shapes |= {"encoder.head.weight": (1000, dim), "encoder.head.bias": (1000,)}
    shapes |= {"decoder.cls_emb": (1, classes, dim), "decoder.proj_patch": (dim, dim)}
    shapes |= {
        "decoder.proj_classes": (dim, dim),
        "decoder.proj_dec.weight": (dim, dim),
        "decoder.proj_dec.bias": (dim,),
    }
    norms = {"encoder.norm": dim, "decoder.decoder_norm": dim, "decoder.mask_norm": classes}
    for part, blocks in (("encoder", depth), ("decoder", 2)):
        for i in range(blocks):
            linear = {"attn.qkv": (3 * dim, dim), "attn.proj": (dim, dim)}
            linear |= {"mlp.fc1": (4 * dim, dim), "mlp.fc2": (dim, 4 * dim)}
            for name, shape in linear.items():
                shapes |= {f"{part}.blocks.{i}.{name}.weight": shape, f"{part}.blocks.{i}.{name}.bias": shape[:1]}
            norms |= {f"{part}.blocks.{i}.norm{j}": dim for j in (1, 2)}
    for name, width in norms.items():
        shapes |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
    return shapes


@pytest.mark.parametrize("mitigation", [None, "neutreno:0.6"])
def test_names_and_shapes_are_the_public_codes(mitigation):
    with torch.device("meta"):
        model = Segmenter(num_classes=150, mitigation=mitigation)
    found = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    expected = public_shapes(12, 192, 32 * 32, 150)
    head = {name: expected.pop(name) for name in ("encoder.head.weight", "encoder.head.bias")}
    assert found == expected
    assert head
    assert {type(m).__name__ for m in model.modules() if hasattr(m, "eps") and m.eps != 1e-5} == set()


@pytest.mark.parametrize("size", [(12, 12), (10, 17), (4, 24)])
@pytest.mark.parametrize(
    ("options", "plain"),
    [
        ({}, {}),
        ({"mitigation": "neutreno:0.6"}, {"strength": 0.6}),
        ({"mitigation": "neutreno:0.6,learn=layer"}, {}),
        ({"mitigation": "neutreno:0.6", "attention": "symmetric"}, {"strength": 0.6, "symmetric": True}),
    ],
)
def test_equals_the_plain_model_with_all_gradients(options, plain, size):
    model, batch = seeded(**options), images(*size)
    state = {name: tensor.detach().clone().requires_grad_() for name, tensor in model.state_dict().items()}
    expected = plain_segmenter(state, batch, patch=4, grid=(3, 3), heads=3, decoder_heads=2, **plain)
    found = model(batch)
    assert found.shape == (2, 5, *size)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    direction = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    (found * direction).sum().backward()
    (expected * direction).sum().backward()
    for name, parameter in model.named_parameters():
        assert torch.count_nonzero(state[name].grad), name
        torch.testing.assert_close(
            parameter.grad, state[name].grad, rtol=1e-8, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_the_decoder_has_its_own_first_values():
    model, records = seeded(mitigation="neutreno:0.6"), {"encoder": [], "decoder": []}
    handles = [
        site.observe(records[part].append) for part in records for site in ac.sites.find(model.get_submodule(part))
    ]
    model(images())
    for handle in handles:
        handle.remove()
    for part in records.values():
        assert part[0].v0 is None
        assert all(torch.equal(record.v0, part[0].values) for record in part[1:])
    assert records["decoder"][0].values.shape != records["encoder"][0].values.shape


def test_zero_strength_is_the_plain_model_bit_for_bit():
    assert torch.equal(seeded(mitigation="neutreno:0")(images()), seeded()(images()))


def test_padding_is_cut_off_again_and_whole_patches_need_none():
    model = seeded()
    padded = torch.zeros(2, 3, 12, 20, dtype=torch.float64)
    padded[..., :10, :17] = images(10, 17)
    assert torch.equal(model(images(10, 17)), model(padded)[..., :10, :17])


@pytest.mark.parametrize("mitigation", ["neutreno:0.6", "neutreno:0.6,learn=head"])
def test_gradient_checkpointing_repeats_the_same_dropout(mitigation):
    options = {"dropout": 0.2, "drop_path": 0.3, "decoder_dropout": 0.3, "decoder_drop_path": 0.5}
    model = seeded(mitigation=mitigation, **options).train()

    def gradients():
        model.zero_grad()
        torch.manual_seed(5)
        model(images()).square().mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = gradients()
    model.set_grad_checkpointing()
    torch.testing.assert_close(gradients(), expected, rtol=1e-12, atol=1e-12)
    torch.manual_seed(5)
    assert not torch.equal(model(images()), model(images()))  # each kind of dropout draws
    assert [block.drop_path1.rate for block in model.decoder.blocks] == [0.0, 0.5]
    assert [block.attn.attention_dropout for block in model.decoder.blocks] == [0.3, 0.3]


def test_a_classifiers_weights_become_the_encoders():
    torch.manual_seed(1)
    shape = {"image_size": 8, "patch_size": 4, "dim": 12, "depth": 3, "heads": 3}
    vit = ViT(**shape, num_classes=7).double()
    model = seeded()
    ac.io.load_checkpoint(model.encoder, {"model": vit.state_dict()})
    assert torch.equal(model.encoder.blocks[2].mlp.fc1.weight, vit.blocks[2].mlp.fc1.weight)
    expected = bilinear(vit.pos_embed[0, 1:].T.reshape(12, 2, 2), (3, 3)).flatten(1).T
    torch.testing.assert_close(model.encoder.pos_embed[0, 1:], expected)
    assert torch.equal(model.encoder.pos_embed[0, 0], vit.pos_embed[0, 0])


def test_the_public_codes_weights_load_without_the_unused_head():
    source = seeded()
    state = source.state_dict() | {"encoder.head.weight": torch.zeros(1000, 12), "encoder.head.bias": torch.zeros(1000)}
    model = seeded(spread=0.0)
    ac.io.load_checkpoint(model, {"model": state})
    assert torch.equal(model(images()), source(images()))
    del state["decoder.cls_emb"]
    with pytest.raises(AcutanceError, match=r"missing: decoder\.cls_emb"):
        ac.io.load_checkpoint(model, {"model": state})


@pytest.mark.parametrize(
    ("part", "depth", "special", "tokens"), [("encoder", 3, (1, 0), 10), ("decoder", 2, (0, 5), 14)]
)
def test_each_part_is_measured_and_mitigated_by_name(part, depth, special, tokens):
    model = seeded()
    seen = []
    hook = ac.sites.final_norm(model.get_submodule(part)).register_forward_hook(lambda *a: seen.append(a[2].shape))
    profile = ac.measure(model, [images()], part=part, metrics="all", tap=["block", "values", "final"], progress=False)
    hook.remove()
    assert seen == [(2, tokens, 12)]
    assert {reading.layer for reading in profile.readings if reading.tap == "block"} == set(range(depth + 1))
    assert ac.sites.special_tokens(model, part) == special
    plain = model(images())
    with ac.mitigate(model, "neutreno:0.6", part=part) as handle:
        assert handle.layers == tuple(range(1, depth + 1))
        assert not torch.equal(model(images()), plain)
    assert torch.equal(model(images()), plain)


def test_patches_alone_are_measured_without_the_special_tokens():
    model = seeded()
    for part in ("encoder", "decoder"):
        last = model.get_submodule(part).blocks[-1]
        seen = []
        hook = last.register_forward_hook(lambda _m, _a, out, kept=seen: kept.append(out[0]))
        profile = ac.measure(model, [images()], part=part, metrics="token_cosine", prefix="out", progress=False)
        hook.remove()
        inner = seen[0][:, 1:] if part == "encoder" else seen[0][:, :-5]
        assert inner.shape[1] == 9
        expected = ac.metrics.token_cosine(inner).mean()
        assert profile.readings[-1].mean == pytest.approx(float(expected), rel=1e-9)


def test_both_parts_mitigated_by_hand_are_the_model_built_so():
    model = seeded()
    for part in ("encoder", "decoder"):
        ac.mitigate(model, "neutreno:0.6", part=part)
    assert torch.equal(model(images()), seeded(mitigation="neutreno:0.6")(images()))
    assert model.config == seeded(mitigation="neutreno:0.6").config


def test_without_a_part_the_parts_are_named():
    with pytest.raises(SeveralStacksError, match=r"\(encoder, decoder\): pass one of them, or name it with part="):
        ac.measure(seeded(), [images()], progress=False)
    with pytest.raises(SeveralStacksError, match="encoder, decoder"):
        ac.mitigate(seeded(), "neutreno:0.6")


def test_each_part_is_explained():
    model = seeded()
    assert len(ac.explain(model.encoder, [images()], progress=False).layers) == 3
    patches = model.encoder(images())[:, 1:]
    assert ac.explain(model.decoder, [patches], progress=False).layers[1].dominance.samples == 2


def test_saved_and_loaded(tmp_path):
    model = seeded(mitigation="neutreno:0.6,learn=head").float()
    again = ac.load(ac.save(model, tmp_path / "segmenter.safetensors")).eval()
    assert again.config == model.config
    assert torch.equal(again(images().float()), model(images().float()))


def test_mitigated_in_one_part_it_is_saved_by_layer(tmp_path):
    model = seeded()
    ac.mitigate(model, "neutreno:0.6,learn=head,start=0.3", part="encoder")
    path = ac.save(model, tmp_path / "segmenter.safetensors")
    with pytest.raises(AcutanceError, match="build a plain one and pass it as model="):
        ac.load(path)
    again = ac.load(path, seeded(spread=0.0))
    assert torch.equal(again(images()), model(images()))


def test_the_configuration_survives_json_and_says_what_it_can():
    config = SegmenterConfig(**TINY, mitigation="neutreno:0.6")
    assert SegmenterConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    model = Segmenter(**config.to_dict())
    assert model.config == config
    other = seeded()
    ac.mitigate(other, "neutreno:0.6", part="decoder")
    with pytest.raises(AcutanceError, match="one configuration cannot say what differs between layers: encoder"):
        _ = other.config


def test_no_weight_decay_names_parameters_that_exist():
    model = seeded(mitigation="neutreno:0.6,learn=head")
    named = model.no_weight_decay()
    assert named <= {name for name, _ in model.named_parameters()}
    assert {"encoder.pos_embed", "decoder.cls_emb", "decoder.blocks.1.attn.mitigation.learnt_strength"} <= named


def test_wrong_shapes_are_named():
    with pytest.raises(ShapeError, match=r"images \(2, 1, 12, 12\): this model takes \(batch, 3, height, width\)"):
        seeded()(images()[:, :1])
