"""What is found in a model: sites, blocks, special tokens, the final norm, inside whatever is wrapped around them."""

from dataclasses import replace

import hf_zoo
import pytest
import torch
from tiny_models import Made, encoder, images, recorded, shaken, tokens, vit, with_gradients
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

import acutance as ac
from acutance import metrics, sites
from acutance.errors import AcutanceError, AcutanceWarning
from acutance.mitigations.projection import Projection, Projections
from acutance.sites import AttentionSite


def test_inside_a_cached_lookup_a_model_is_looked_through_once(monkeypatch):
    model, looked = vit(), []
    with sites.cached_lookup():
        sites.find(model).pop()  # is the caller's own
        del model.blocks[2]
        with sites.cached_lookup():
            assert len(sites.find(model)) == 3
        assert len(sites.find(model)) == 3
        assert len(sites.find(vit(depth=1))) == 1
    assert len(sites.find(model)) == 2
    ours = next(library for library in sites.LIBRARIES if library.layers(model))
    monkeypatch.setattr(sites, "LIBRARIES", [replace(ours, layers=lambda m: looked.append(m) or ours.layers(m))])
    options = {"metrics": ["token_cosine", "attention_entropy"], "tap": ["block", "final"], "progress": False}
    assert ac.measure(model, [images()], **options).readings
    assert looked == [model]


ATTENTIVE = {
    "own": lambda: (vit(), images()),
    "symmetric": lambda: (vit(attention="symmetric"), images()),
    "eigen": lambda: (vit(mitigation="eigen:negative"), images()),
    "torch": lambda: (encoder(), tokens()),
    "tokens first": lambda: (encoder(batch_first=False), tokens().transpose(0, 1)),
    "no bias": lambda: (encoder(bias=False), tokens()),
    "pre-norm": lambda: (encoder(norm_first=True), tokens()),
}


@pytest.mark.parametrize("name", ATTENTIVE)
def test_the_weights_are_those_the_tokens_go_through(name):
    model, x = ATTENTIVE[name]()
    memory = {parameter.untyped_storage().data_ptr() for parameter in shaken(model).parameters()}
    for site in sites.find(model):
        inputs = []
        with site.attention.register_forward_pre_hook(lambda _, args, kept=inputs: kept.append(args[0])):
            _, (record,) = recorded(lambda: model(x), [site])
        entered, parts = site.tokens(inputs[0]), site.projections()
        biases = {"value": parts.value.offset(), "projection": parts.output.offset()}
        for which, given, made in (
            ("value", entered, record.values),
            ("projection", record.output.transpose(1, 2).flatten(2), record.branch),
            ("query", entered[1:] - entered[:1], record.A.q[1:] - record.A.q[:1]),  # without their biases
            ("key", entered[1:] - entered[:1], record.A.k[1:] - record.A.k[:1]),
        ):
            weight, bias = getattr(site, f"{which}_weight")(), biases.get(which)
            made = made.transpose(1, 2).flatten(2) if made.ndim == 4 else made
            found = given @ weight.T + (0 if bias is None else bias)
            torch.testing.assert_close(found, made, rtol=1e-10, atol=1e-10)
            assert name == "eigen" or weight.untyped_storage().data_ptr() in memory  # the parameter itself
        assert (site.pre_norm() is None) == (name in ("torch", "tokens first", "no bias"))


def test_sites_that_do_not_know_their_queries_and_keys_say_so():
    linear = Projection(nn.Linear(2, 2))
    parts = {"attention": nn.Identity(), "projections": lambda self: Projections(None, None, linear, linear)}
    parts |= dict.fromkeys(("mitigation", "observe", "install", "replace"))
    other = type("Other", (AttentionSite,), {"name": "encoder.3.attention", **parts})()
    for ask, which in ((other.query_weight, "W_Q"), (other.key_weight, "W_K")):
        with pytest.raises(AcutanceError, match=rf"encoder\.3\.attention: Identity keeps {which} under"):
            ask()


@pytest.mark.parametrize("name", ["own", "torch"])
def test_records_hold_what_attention_did(name):
    (model, x), records = ATTENTIVE[name](), []
    ac.mitigate(model, "neutreno:0.6")
    handles = [site.observe(records.append) for site in sites.find(model)]
    with pytest.raises(AcutanceError, match="is being observed already"):
        sites.find(model)[0].observe(print)
    model(x)
    assert records[0].v0 is None
    for record in records[1:]:
        assert torch.equal(record.v0, records[0].values)
        expected = record.A.dense() @ record.values + 0.6 * (record.v0 - record.values)
        torch.testing.assert_close(record.output, expected)
    for handle in handles:
        handle.remove()
    model(x)
    assert len(records) == 3


def wrap(**parts):
    return Made(lambda self, x: next(self.children())(x), **parts)


def test_models_and_blocks_inside_wrappers_are_found():
    model = vit(registers=2)
    model.blocks[1] = wrap(wrapped=model.blocks[1])
    outer = wrap(inner=wrap(backbone=model))
    paths = [f"inner.backbone.blocks.{path}.attn" for path in ("0", "1.wrapped", "2")]
    assert [site.name for site in sites.find(outer)] == paths
    assert sites.special_tokens(outer, part="inner").front == 3
    assert sites.final_norm(outer) is model.norm


def wrapped_first(name, layers):
    """Output and gradients of a mitigated model, some of whose blocks were wrapped first."""
    model, batch = encoder(norm_first=True), {"src": tokens()}
    if name == "llama":
        model, batch = hf_zoo.build("llama"), hf_zoo.batch("llama") | {"use_cache": False}
    inside = list(model.train().layers)
    for layer in layers:
        model.layers[layer - 1] = checkpoint_wrapper(inside[layer - 1], CheckpointImpl.NO_REENTRANT)
    ac.mitigate(model, "neutreno:0.6")
    assert [(site.layer, site.block) for site in sites.find(model)] == list(enumerate(inside, 1))
    return [*with_gradients(sites.tokens_out(model(**batch)), model.named_parameters()).values()]


@pytest.mark.parametrize("name", ["llama", "torch"])
def test_checkpoints_around_blocks_may_be_there_before_the_mitigation(name):
    expected = wrapped_first(name, ())
    for layers in ((1, 2, 3), (2, 3)):
        torch.testing.assert_close(wrapped_first(name, layers), expected, rtol=1e-12, atol=1e-12)


def test_models_without_one_stack_are_refused():
    with pytest.raises(AcutanceError, match=r"several stacks of layers \(student, teacher\).*part="):
        sites.find(wrap(student=vit(), teacher=vit()))
    with pytest.raises(AcutanceError, match=r"no attention found in torch\.nn\..*Linear; .*acutance\.models"):
        sites.find(nn.Linear(2, 2))


def test_mitigation_spec_says_what_the_model_carries():
    both, some = {"mitigation": "neutreno:0.6+featscale"}, {"mitigation": "attnscale", "mitigation_layers": (1, 3)}
    said = [sites.mitigation_spec(vit(**options)) for options in ({}, both, some)]
    assert said == [None, "neutreno:0.6+featscale", "attnscale in layers 1, 3"]


NAMED = {
    "0 prefix tokens": {"mask_token": (1, 1, 12), "position_embeddings": (1, 17, 12)},
    "1 prefix tokens": {"class_embedding": (12,)},
    "5 prefix tokens": {"cls_token": (1, 1, 12), "register_tokens": (1, 4, 12)},
    "10 prefix tokens": {"cls_register_token": (10, 12)},
    "1 prefix and 100 trailing tokens": {"cls_token": (1, 1, 12), "detection_tokens": (1, 100, 12)},
}


@pytest.mark.parametrize("said", NAMED)
def test_special_tokens_are_told_by_the_names_of_their_parameters(said):
    embeddings = nn.ParameterDict({name: torch.zeros(shape) for name, shape in NAMED[said].items()})
    model = wrap(body=encoder(), embeddings=embeddings)
    assert str(sites.special_tokens(model)) == str(sites.special_tokens(model, part="body")) == said


NORMS = {
    "gpt2": "ln_f",
    "opt": "decoder.final_layer_norm",  # defined before the blocks
    "modernbert": "final_norm",
    "segformer": "stages.1.layer_norm",  # of the last stage
}


@pytest.mark.parametrize("name", NORMS)
def test_the_final_norm_of_transformers(name):
    model = hf_zoo.build(name)
    assert sites.final_norm(model) is model.get_submodule(NORMS[name])


def test_the_final_norm_is_found_around_a_part_that_is_patched_already():
    model, x = nn.Sequential(), tokens()
    model.body, model.norm = encoder(), nn.LayerNorm(12).double()
    with ac.mitigate(model.eval().body, "neutreno:0.6"):  # its sites are named from there
        assert sites.final_norm(model) is model.norm
        profile = ac.measure(model, [x], metrics="token_cosine", tap="final", progress=False)
        assert profile["token_cosine"].tolist() == pytest.approx([metrics.token_cosine(model(x)).mean().item()])


HYBRID = {  # the options, the layers that attend, and those that have a scan
    "Jamba": (
        {"attn_layer_period": 4, "attn_layer_offset": 3, "use_mamba_kernels": False, "num_experts": 2},
        [4],
        [1, 2, 3],
    ),
    "Lfm2": ({"layer_types": ["conv", "full_attention"] * 2}, [2, 4], []),
}


@pytest.mark.parametrize("name", HYBRID)
def test_blocks_without_attention_are_layers_too(name):
    options, attending, scans = HYBRID[name]
    model = hf_zoo.tiny(f"{name}Model", **hf_zoo.DECODER | {"num_hidden_layers": 4} | options)
    ids, read = torch.randint(3, 60, (2, 9)), ["token_cosine", "attention_entropy"]
    profile = ac.measure(model, [ids], metrics=read, tap=["block", "attention"], progress=False)
    assert profile.layers("token_cosine", "block") == [0, 1, 2, 3, 4]
    assert profile.layers("token_cosine", "attention") == sorted(attending + scans)
    assert profile.layers("attention_entropy") == attending
    stream = model(ids, output_hidden_states=True).hidden_states[:-1]  # the last has gone through the final norm
    expected = [metrics.token_cosine(x).mean().item() for x in stream]
    assert profile["token_cosine", "block"][:-1] == pytest.approx(expected)
    with ac.mitigate(model, "attnscale") as handle:  # counts the layers that attend
        assert [*handle.layers] == [site.layer for site in sites.find(model)] == [*range(1, len(attending) + 1)]


def attending():
    return Made(lambda self, x: x + self.mha(x, x, x)[0], mha=nn.MultiheadAttention(16, 2, batch_first=True))


def test_what_stands_between_the_blocks_and_is_unlike_them_is_named():
    model = nn.Sequential(attending(), nn.Linear(16, 16), nn.LayerNorm(16), attending(), nn.Linear(16, 3))
    with pytest.warns(AcutanceWarning, match=r"not counted as layers: 1$"):
        profile = ac.measure(model, [torch.randn(2, 5, 16)], metrics="token_cosine", progress=False)
    assert profile.layers("token_cosine") == [0, 1, 2]
