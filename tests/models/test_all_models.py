"""What holds for every reference model: a second, plain implementation, checkpointing, files, refusals."""

import json

import pytest
import torch
from plain_models import plain_language, plain_segmenter, plain_vit
from small_models import KINDS, assert_same, gradients, images, inputs, seeded, words

import acutance as ac
from acutance.errors import AcutanceError, ShapeError
from acutance.mitigations import Mitigation
from acutance.models import Block
from sites.tiny_models import leaves_of, with_gradients

NEUTRENO = {"mitigation": "neutreno:0.6"}


def assert_equals_plain(model, found, plain, tolerance):
    """Outputs and the gradient of every parameter; `plain` is called with the model's parameters."""
    leaves = leaves_of(model)
    expected = with_gradients(plain(leaves), leaves)
    assert all(gradient.any() for gradient in expected.values()), "the comparison would prove nothing"
    found = with_gradients(found, model.named_parameters())
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("options", "plain"),
    [
        ({}, {}),
        *(({"mitigation": f"neutreno:{s}"}, {"strength": s}) for s in (0.6, -0.3)),
        *(({"mitigation": f"neutreno:0.6,learn={learn}"}, {}) for learn in ("layer", "head")),
        *(
            ({**NEUTRENO, "attention": kernel}, {"strength": 0.6, "kernel": kernel})
            for kernel in ("symmetric", "rbf", "linear", "polynomial")
        ),
        ({"mitigation": "neutreno:0.6,detach=true"}, {"strength": 0.6, "detach": True}),
        ({"norm": "post"}, {"post": True}),
        ({"class_token": False}, {}),
        ({"layer_scale": 0.1}, {}),
    ],
    ids=str,
)
def test_vit_equals_the_plain_model(options, plain):
    model = seeded(depth=5, **options)
    assert_equals_plain(model, model(images()), lambda state: plain_vit(state, images(), **plain), 1e-9)


@pytest.mark.parametrize("cutoffs", [(5, 9, 16), (22,), ()])
@pytest.mark.parametrize(("mitigation", "strength"), [(None, 0.0), ("neutreno:0.4", 0.4)])
def test_language_equals_the_plain_model(mitigation, strength, cutoffs):
    model, text = seeded("language", mitigation, cutoffs=cutoffs).eval(), words(length=8)
    tokens, targets = text[:, :-1], text[:, 1:, None]

    def plain(state):
        logs = plain_language(state, tokens, cutoffs=cutoffs, strength=strength)
        torch.testing.assert_close(model.log_probabilities(tokens), logs, rtol=1e-10, atol=1e-10)
        return -logs.gather(-1, targets).squeeze(-1)

    assert_equals_plain(model, model(tokens, targets.squeeze(-1)), plain, 1e-10)


@pytest.mark.parametrize("size", [(12, 12), (10, 17), (4, 24)])
@pytest.mark.parametrize(
    ("options", "plain"),
    [
        (NEUTRENO, {"strength": 0.6}),
        ({"mitigation": "neutreno:0.6,learn=layer"}, {}),
        ({**NEUTRENO, "attention": "symmetric"}, {"strength": 0.6, "kernel": "symmetric"}),
    ],
)
def test_segmenter_equals_the_plain_model(options, plain, size):
    model, batch = seeded("segmenter", **options).eval(), images(*size, batch=2)
    assert model(batch).shape == (2, 5, *size)
    assert_equals_plain(model, model(batch), lambda state: plain_segmenter(state, batch, **plain), 1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_zero_strength_is_the_plain_model_bit_for_bit(kind):
    plain, treated = seeded(kind).eval(), seeded(kind, "neutreno:0").eval()
    assert list(plain.state_dict()) == list(treated.state_dict())
    assert_same(gradients(treated, kind), gradients(plain, kind), 0)


DROPOUTS = {
    "vit": {"dropout": 0.2, "drop_path": 0.3, "attention_dropout": 0.1},
    "language": {"dropout": 0.3},
    "segmenter": {"dropout": 0.2, "drop_path": 0.3, "decoder_dropout": 0.3, "decoder_drop_path": 0.5},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mitigation", [None, "neutreno:0.6,learn=head", "attnscale"])
def test_gradient_checkpointing_changes_nothing(kind, mitigation):
    model = seeded(kind, mitigation, **DROPOUTS[kind])
    results, runs = [], []
    for block in (module for module in model.modules() if isinstance(module, Block)):
        block.register_forward_pre_hook(lambda *_: runs.append(enable))
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        torch.manual_seed(5)
        results.append(gradients(model, kind))
    assert_same(*results)
    assert runs.count(True) == 2 * runs.count(False)
    assert not torch.equal(model(*inputs(kind)), model(*inputs(kind))), "dropout draws"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mitigation", ["neutreno:0.4,learn=head", "neutreno:0.6,learn=head+eigen:free"])
def test_a_model_comes_back_from_its_file_and_its_configuration(kind, mitigation, tmp_path):
    options = {} if kind == "segmenter" else {"mitigation_layers": (2, 3)}
    options |= {"distilled": True, "registers": 1, "layer_scale": 0.1} if kind == "vit" else {}
    model = seeded(kind, mitigation, dtype=torch.float32, **options).eval()
    path = ac.save(model, tmp_path / "run" / "model.safetensors")
    for again in (ac.load(path), ac.load(path.parent)):
        assert again.config == model.config
        assert again.state_dict().keys() == model.state_dict().keys()
        assert torch.equal(again.eval()(*inputs(kind, torch.float32)), model(*inputs(kind, torch.float32)))
    assert list(path.parent.iterdir()) == [path]  # nothing temporary stays
    config = type(model.config)(**json.loads(json.dumps(model.config.to_dict())))
    assert config == model.config == KINDS[kind][0](**config.to_dict()).config


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("vit", {"image_size": 9}, "image_size 9 is no multiple of patch_size 4"),
        ("vit", {"dim": 13}, "dim 13 cannot be shared out among 3 heads"),
        ("vit", {"depth": 0}, "depth must be at least 1"),
        ("vit", {"attention": "cosine"}, "unknown attention 'cosine'; known: softmax, symmetric"),
        ("vit", {"distilled": True, "class_token": False}, "set class_token=True"),
        ("vit", {"mitigation": "neutreno", "mitigation_layers": [4]}, "the layers are numbered 1 to 3"),
        ("vit", {"mitigation": "neutron"}, "unknown mitigation 'neutron'"),
        ("vit", {"norm": "sandwich"}, "unknown norm 'sandwich'; known: pre, post"),
        ("vit", {"stream": "autocast", "norm": "post"}, "give float32 tokens"),
        ("language", {"cutoffs": (20_000, 40_000)}, r"to below 23: \(\) is a plain"),
        ("language", {"cutoffs": (9, 5)}, "must grow"),
        ("language", {"dim": 9}, "dim 9 must be even"),
        ("language", {"hidden": 0}, "hidden must be at least 1"),
        ("segmenter", {"decoder_heads": 5}, "cannot be shared out among 5 heads"),
    ],
)
def test_impossible_options_say_what_to_do(kind, options, message):
    build, sizes = KINDS[kind]
    with pytest.raises(AcutanceError, match=message):
        build(**{**sizes, **options})


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("vit", (torch.zeros(2, 3, 8, 12),), r"give \(batch, \*\(3, 8, 8\)\)"),
        ("vit", (torch.zeros(3, 8, 8),), r"give \(batch, \*\(3, 8, 8\)\)"),
        ("segmenter", (torch.zeros(2, 1, 12, 12),), r"images \(2, 1, 12, 12\): give \(batch, 3, height"),
        ("language", (words()[0],), r"tokens \(7,\)"),
        ("language", (words(), words(length=8)), r"targets \(3, 8\) are not the words after tokens \(3, 7\)"),
    ],
)
def test_wrong_shapes_are_named(kind, given, message):
    with pytest.raises(ShapeError, match=message):
        seeded(kind)(*given)


def test_no_weight_decay_names_parameters_that_exist():
    found = seeded(distilled=True, registers=1, mitigation="neutreno:0.6,learn=layer+featscale").no_weight_decay()
    scales = {f"blocks.{i}.attn.mitigation.parts.1.{name}" for i in range(3) for name in ("low", "high")}
    learnt = {f"blocks.{i}.attn.mitigation.parts.0.learnt_strength" for i in (1, 2)}
    assert found == {"pos_embed", "cls_token", "dist_token", "reg_token"} | learnt | scales
    model = seeded("segmenter", "neutreno:0.6,learn=head")
    assert model.no_weight_decay() <= dict(model.named_parameters()).keys()
    learnt = "decoder.blocks.1.attn.mitigation.learnt_strength"
    assert {"encoder.pos_embed", "encoder.cls_token", "decoder.cls_emb", learnt} <= model.no_weight_decay()


class Halfway(Mitigation):
    """The block's output, moved halfway back to its input, plus a tenth of the mean value."""

    def stream(self, x_in, x_out, call):
        assert call.residual is x_in
        return (x_in + x_out) / 2 + call.v.mean() / 10


def halfway(model, x):
    """The same by the formula."""
    v0 = None
    for block in model.blocks:
        after, v0 = block(x, v0)
        v = block.attn.qkv(x if block.post_norm else block.norm1(x))[..., -block.attn.qkv.in_features :]
        x = (x + after) / 2 + v.mean() / 10
    return x


@pytest.mark.parametrize("kind", ["vit", "language"])
@pytest.mark.parametrize("run", ["checkpointed", "compiled"])
def test_the_stream_is_changed_after_every_block_with_its_gradients(kind, run):
    model = seeded(kind, depth=2).eval()
    plain_run, model.run_blocks = model.run_blocks, lambda x: halfway(model, x)
    expected = model.forward_features(inputs(kind)[0])
    wanted = torch.autograd.grad(expected.square().sum(), list(model.parameters()), allow_unused=True)
    model.run_blocks = plain_run
    with ac.mitigate(model, Halfway()):
        model.set_grad_checkpointing(run == "checkpointed")
        features = model.forward_features
        if run == "compiled":
            features = torch.compile(features, backend="aot_eager", fullgraph=True)
        out = features(inputs(kind)[0])
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
        found = torch.autograd.grad(out.square().sum(), list(model.parameters()), allow_unused=True)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
