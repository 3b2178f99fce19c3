import pytest
import torch
from small_models import images as images_of
from small_models import seeded as seeded_model

import acutance as ac
from acutance.errors import AcutanceError, SeveralStacksError
from acutance.models import Segmenter


def images(height=12, width=12):
    return images_of(height, width, batch=2)


def seeded(mitigation=None, **options):
    return seeded_model("segmenter", mitigation, **options).eval()


def test_names_and_shapes_are_the_public_codes():
    """With a DeiT encoder, without its unused head."""
    with torch.device("meta"):
        model = Segmenter(num_classes=150, mitigation="neutreno:0.6")
    expected = {"encoder.cls_token": (1, 1, 192), "encoder.pos_embed": (1, 1 + 32 * 32, 192)}
    expected |= {"decoder.cls_emb": (1, 150, 192)}
    expected |= {"decoder.proj_patch": (192, 192), "decoder.proj_classes": (192, 192)}
    linear = {"decoder.proj_dec": (192, 192), "encoder.patch_embed.proj": (192, 3, 16, 16)}
    norms = {"encoder.norm": 192, "decoder.decoder_norm": 192, "decoder.mask_norm": 150}
    for block in (*(f"encoder.blocks.{i}" for i in range(12)), "decoder.blocks.0", "decoder.blocks.1"):
        linear |= {f"{block}.attn.qkv": (3 * 192, 192), f"{block}.attn.proj": (192, 192)}
        linear |= {f"{block}.mlp.fc1": (4 * 192, 192), f"{block}.mlp.fc2": (192, 4 * 192)}
        norms |= {f"{block}.norm{j}": 192 for j in (1, 2)}
    for name, shape in (linear | {name: (width,) for name, width in norms.items()}).items():
        expected |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    assert {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} == expected
    assert {m.eps for m in model.modules() if hasattr(m, "eps")} == {1e-5}


def test_dropouts_of_the_decoder_reach_its_blocks():
    blocks = seeded(decoder_dropout=0.3, decoder_drop_path=0.5).decoder.blocks
    assert [(block.drop_path1.p, block.attn.attention_dropout) for block in blocks] == [(0.0, 0.3), (0.5, 0.3)]


def test_the_public_codes_weights_load_without_the_unused_head():
    source, model = seeded(), seeded(spread=0.0)
    state = source.state_dict() | {"encoder.head.weight": torch.zeros(1000, 12), "encoder.head.bias": torch.zeros(1000)}
    ac.io.load_checkpoint(model, {"model": state})
    assert torch.equal(model(images()), source(images()))
    del state["decoder.cls_emb"]
    with pytest.raises(AcutanceError, match=r"missing: decoder\.cls_emb"):
        ac.io.load_checkpoint(model, {"model": state})


@pytest.mark.parametrize(("part", "depth", "special"), [("encoder", 3, (1, 0)), ("decoder", 2, (0, 5))])
def test_each_part_is_measured_and_mitigated_by_name(part, depth, special):
    model = seeded()
    stack, seen = model.get_submodule(part), []
    assert ac.sites.special_tokens(model, part) == special
    hook = stack.blocks[-1].register_forward_hook(lambda _m, _a, out: seen.append(out[0]))
    options = {"part": part, "prefix": "out", "tap": ["block", "values", "final"], "progress": False}
    profile = ac.measure(model, [images()], metrics=["token_cosine", "attention_entropy"], **options)
    hook.remove()
    assert {reading.layer for reading in profile.readings if reading.tap == "block"} == set(range(depth + 1))
    patches = seen[0][:, special[0] : seen[0].shape[1] - special[1]]
    assert patches.shape[1] == 9
    (last,) = [r for r in profile.readings if (r.tap, r.layer, r.metric) == ("block", depth, "token_cosine")]
    assert last.mean == pytest.approx(float(ac.metrics.token_cosine(patches).mean()), rel=1e-9)
    plain = model(images())
    with ac.mitigate(model, "neutreno:0.6", part=part) as handle:
        assert handle.layers == tuple(range(2, depth + 1)), "layer 1's own values are v⁰"
        assert not torch.equal(model(images()), plain)
    assert torch.equal(model(images()), plain)
    fed = images() if part == "encoder" else model.encoder(images())[:, 1:]
    assert ac.explain(stack, [fed], progress=False).layers[depth - 1].dominance.samples == 2


def test_mitigated_by_parts_it_is_saved_by_layer_until_both_are_alike(tmp_path):
    model, spec = seeded(), "neutreno:0.6,learn=head,start=0.3"
    for act in (lambda: ac.mitigate(model, spec), lambda: ac.measure(model, [images()], progress=False)):
        with pytest.raises(SeveralStacksError, match=r"\(encoder, decoder\): name one with part="):
            act()
    ac.mitigate(model, spec, part="encoder")
    with pytest.raises(AcutanceError, match=r"cannot say what differs between blocks: .'encoder\.blocks\.0"):
        _ = model.config
    path = ac.save(model, tmp_path / "segmenter.safetensors")
    with pytest.raises(AcutanceError, match="names no model: pass it as model="):
        ac.load(path)
    assert torch.equal(ac.load(path, seeded(spread=0.0))(images()), model(images()))
    ac.mitigate(model, spec, part="decoder")
    assert model.config == seeded(spec).config
