"""mitigate in transformers' models: back again without a trace, copies, and what is refused."""

import pytest
import torch
from hf_zoo import DECODER, EXPERTS, TEXT, VISION, ZOO, batch, build, in_float64, output, part_of, records
from torch import nn
from torch_nn_models import inventory

import acutance as ac
from acutance import sites
from acutance.errors import AcutanceError, NoSitesError


@pytest.fixture(scope="module", autouse=True)
def transformers():
    return pytest.importorskip("transformers")


@pytest.mark.parametrize("name", ["vit", "bert", "gpt2", "llama", "t5_decoder", "gemma2"])
@torch.no_grad()
def test_removing_leaves_no_trace(name):
    model, inputs = build(name), batch(name)
    before, left = output(model, inputs), inventory(model)
    handle = ac.mitigate(part_of(name, model), "attnscale+neutreno:0.6,learn=head,start=0.3")
    for path, parameter in model.named_parameters():
        if ".mitigation." in path:
            parameter.add_(0.3)
    assert not torch.equal(output(model, inputs), before)
    handle.remove()
    assert torch.equal(output(model, inputs), before)
    assert inventory(model) == left


@torch.no_grad()
def test_a_change_of_implementation_is_honoured():
    model, other, inputs = build("llama"), build("llama"), batch("llama")
    ac.mitigate(model, "neutreno:0.6")
    sdpa = output(model, inputs)
    model.set_attn_implementation("eager")
    other.set_attn_implementation("eager")
    with ac.mitigate(other, "neutreno:0.6"):
        assert torch.equal(output(model, inputs), output(other, inputs))
    assert not torch.equal(output(model, inputs), sdpa)
    model.set_attn_implementation("sdpa")
    assert torch.equal(output(model, inputs), sdpa)


def test_a_change_to_an_implementation_whose_masks_are_not_known_is_refused(transformers):
    transformers.AttentionInterface.register("somebody_elses", lambda *_, **__: None)
    model = build("vit")
    ac.mitigate(model, "neutreno:0.6")
    model.set_attn_implementation("somebody_elses")
    with pytest.raises(AcutanceError, match="set_attn_implementation"):
        output(model, batch("vit"))


class Shifted(ac.Mitigation):
    """A bias that is the same for all keys, and so changes nothing."""

    def scores(self, q, k, call):
        return q, k, call.v.new_full((1, 1, 1, 1), 0.5)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("padded", [True, False])  # without padding there is no mask
@torch.no_grad()
def test_a_bias_on_the_logits_shows_no_token_the_future(implementation, padded):
    model, inputs = build("llama"), batch("llama", padded=padded)
    model.set_attn_implementation(implementation)
    with in_float64():
        before = output(model, inputs)
        with ac.mitigate(model, Shifted()):
            torch.testing.assert_close(output(model, inputs), before, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_attention_weights_are_still_returned():
    model, inputs = build("vit"), batch("vit")
    model.set_attn_implementation("eager")
    with ac.mitigate(model, "neutreno:0"):
        weights = model(**inputs, output_attentions=True).attentions
    assert all(
        torch.equal(w, v) for w, v in zip(weights, model(**inputs, output_attentions=True).attentions, strict=True)
    )


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flex_attention", "paged|sdpa"])
def test_implementations_whose_masks_are_not_known_are_refused(implementation):
    model = build("llama")
    model.config._attn_implementation = implementation
    left = inventory(model)
    with pytest.raises(AcutanceError, match="set_attn_implementation"):
        ac.mitigate(model, "neutreno:0.6")
    assert inventory(model) == left


def test_data_parallel_is_refused():
    model = build("vit")
    ac.mitigate(model, "neutreno:0.6")
    assert isinstance(output(nn.DataParallel(model), batch("vit")), torch.Tensor)  # without devices it makes no copies
    replicas = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for replica in replicas.values():
        for name, child in replica._modules.items():
            replica._modules[name] = replicas.get(child)
    with pytest.raises(AcutanceError, match="DistributedDataParallel"):
        output(replicas[model], batch("vit"))


SMALL = {"vocab_size": 60, "n_layer": 2, "n_head": 4}
PAST_THE_INTERFACE = {
    **{"Data2VecVision": VISION, "BlipVision": VISION, "DebertaV2": TEXT, "MPNet": TEXT, "Falcon": TEXT},
    **{"Bloom": SMALL | {"hidden_size": 32}, "Mpt": {"vocab_size": 60, "d_model": 32, "n_layers": 2, "n_heads": 4}},
    **dict.fromkeys(("CodeGen", "GPTJ"), SMALL | {"n_embd": 32, "rotary_dim": 4}),
    "GPTNeo": {"vocab_size": 60, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
    | {"attention_types": [[["global"], 2]]},
    "XGLM": {"vocab_size": 60, "d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4},
}


@pytest.mark.parametrize("name", PAST_THE_INTERFACE)
@torch.no_grad()
def test_architectures_past_the_interface_are_intercepted(transformers, name):
    """No term, no change, bit for bit; a term, a change; and A is the model's own."""
    options = PAST_THE_INTERFACE[name]
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**options)).eval()
    model.to(torch.float32 if name == "XGLM" else torch.float64)  # which knows no float64
    inputs = batch("vit" if options is VISION else "llama")
    before, left = output(model, inputs), inventory(model)
    _, seen = records(model, inputs, sites.find(model))
    for record in seen:
        torch.testing.assert_close(record.A @ record.values, record.output, rtol=1e-6, atol=1e-7)
    with ac.mitigate(model, "neutreno:0.0"):
        assert torch.equal(output(model, inputs), before)
    with ac.mitigate(model, "neutreno:0.6"):
        assert not torch.equal(output(model, inputs), before)
    assert inventory(model) == left
    assert torch.equal(output(model, inputs), before)
    profile = ac.measure(model, [inputs], metrics=["token_cosine"], progress=False)
    assert len(profile["token_cosine", "block"]) == len(seen) + 1  # with what enters the first


def test_latent_values_are_refused(transformers):
    options = {"n_routed_experts": 2, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    model = transformers.DeepseekV3Model(transformers.DeepseekV3Config(**DECODER | options | {"qk_nope_head_dim": 4}))
    with pytest.raises(NoSitesError, match=r"DeepseekV3Attention.*W_V"):
        ac.explain(model, progress=False)


def test_operators_are_not_built_for_what_needs_none(transformers, monkeypatch):
    built = []
    monkeypatch.setattr(ac.AttentionOperator, "__init__", lambda self, *_, **__: built.append(self))
    for name in ("llama", "bert", "vit"):
        model = build(name)
        with ac.mitigate(model, "neutreno:0.6,learn=head"):
            output(model, batch(name))
    assert not built


def gpt_oss(transformers):
    torch.manual_seed(0)
    options = DECODER | {"num_local_experts": 2, "head_dim": 8, **EXPERTS}
    return transformers.GptOssModel(transformers.GptOssConfig(**options)).eval().double()


@torch.no_grad()
def test_sinks_take_neutreno(transformers):
    """Equal to hooks on v_proj and o_proj that add λ (v⁰ − v) by hand."""
    model, inputs = gpt_oss(transformers), batch("llama")
    with ac.mitigate(model, "neutreno:0.6"):
        found = output(model, inputs)
    values, hooks = {}, []
    for layer, block in enumerate(model.layers):
        attention = block.self_attn
        groups = attention.num_key_value_groups

        def remember(_module, _args, v, layer=layer):
            values[layer] = v

        def correct(_module, args, layer=layer, groups=groups):
            term = (values[0] - values[layer]).unflatten(-1, (-1, 8)).repeat_interleave(groups, dim=2).flatten(2)
            return (args[0] + 0.6 * term,)

        hooks += [attention.v_proj.register_forward_hook(remember), attention.o_proj.register_forward_pre_hook(correct)]
    torch.testing.assert_close(found, output(model, inputs), rtol=1e-12, atol=1e-12)


def test_sinks_have_no_rows_that_sum_to_one(transformers):
    with pytest.raises(AcutanceError, match="sinks"):
        ac.measure(gpt_oss(transformers), [batch("llama")], metrics=["attention_entropy"], progress=False)


def test_one_module_for_all_layers(transformers):
    model = transformers.AlbertModel(transformers.AlbertConfig(**TEXT, embedding_size=16)).eval()
    with pytest.raises(AcutanceError, match="one module"):
        ac.mitigate(model, "neutreno:0.6")
    assert len(sites.find(model)) == 1


@pytest.mark.parametrize("name", ["clip", "siglip", "bart_encoder", "t5_decoder"])
def test_several_stacks_must_be_told_apart(name):
    with pytest.raises(AcutanceError, match="part="):
        sites.find(build(name))


@pytest.mark.parametrize("name", [name for name, entry in ZOO.items() if not entry.first_values])
@torch.no_grad()
def test_windows_and_pyramids(name):
    model, inputs = build(name), batch(name)
    before, left = output(model, inputs), inventory(model)
    with pytest.raises(AcutanceError, match="v⁰"):
        ac.mitigate(model, "neutreno:0.6")
    assert inventory(model) == left
    with ac.mitigate(model, "attnscale"):
        assert torch.equal(output(model, inputs), before)
    assert torch.equal(output(model, inputs), before)


@torch.no_grad()
def test_first_values_stay_within_a_stage():
    model, inputs = build("segformer", hidden_sizes=[32, 32]), batch("segformer")
    before, left = output(model, inputs), inventory(model)
    with pytest.raises(AcutanceError, match=r"stages.*part="):  # though the widths would fit
        ac.mitigate(model, "neutreno:0.6", layers=[2, 3])
    with pytest.raises(AcutanceError, match="before making keys and values"):
        ac.mitigate(model, "neutreno:0.6", part="stages.0")
    assert inventory(model) == left
    with ac.mitigate(model, "neutreno:0.6", part="stages.1"):
        assert not torch.equal(output(model, inputs), before)


@pytest.mark.parametrize(("name", "part"), [("segformer", "stages.1"), ("swin", "encoder.layers.0")])
@torch.no_grad()
def test_a_part_that_is_mitigated_by_itself(name, part):
    model, inputs = build(name), batch(name)
    before = output(model, inputs)
    handle = ac.mitigate(model, "attnscale", part=part)
    for parameter in model.get_submodule(part).parameters():
        parameter.add_(0.1)
    mitigated, left = output(model, inputs), inventory(model)
    for options in ({}, {"metrics": ["attention_entropy"]}):
        with pytest.raises(AcutanceError, match=rf"part '{part}' by itself.*part='{part}'.*layers="):
            ac.measure(model, [inputs], tap="attention", progress=False, **options)
        assert inventory(model) == left
        assert torch.equal(output(model, inputs), mitigated)
    profile = ac.measure(model, [inputs], part=part, metrics=["attention_entropy"], progress=False)
    assert len(profile.readings) == 2
    handle.remove()
    ac.measure(model, [inputs], metrics=["attention_entropy"], progress=False)
    assert not torch.equal(output(model, inputs), before)  # the parameters were changed for good


def test_means_over_tokens_are_refused_where_some_are_hidden():
    with pytest.raises(AcutanceError, match="one window at a time"):
        ac.mitigate(build("swin"), "featscale")
    with pytest.raises(AcutanceError, match="causal"):
        ac.mitigate(build("llama"), "attnscale+featscale")
    model = build("bert")
    ac.mitigate(model, "featscale")
    output(model, batch("bert", padded=False))
    with pytest.raises(AcutanceError, match="padding"):
        output(model, batch("bert", padded=True))
    text = build("clip_text")  # causal by an argument alone
    with ac.mitigate(text, "featscale"), pytest.raises(AcutanceError, match="the future"):
        output(text, batch("clip_text"))


@torch.no_grad()
def test_dropout_is_the_models_own():
    for name, options in (("llama", {"attention_dropout": 0.5}), ("vit", {"attention_probs_dropout_prob": 0.5})):
        model, inputs = build(name, **options).train(), batch(name)
        before = output(model, inputs)  # which seeds
        with ac.mitigate(model, "neutreno:0"):
            assert torch.equal(output(model, inputs), before)
        assert not torch.equal(output(model.eval(), inputs), before)


@torch.no_grad()
def test_the_correction_is_outside_dropout():
    model, inputs = build("vit", attention_probs_dropout_prob=0.999999).train(), batch("vit")
    records = []
    ac.mitigate(model, "neutreno:0.6")
    found = sites.find(model)
    for site in found:
        site.observe(records.append)
    output(model, inputs)
    for record in records[1:]:  # all weights are dropped: what is left is the correction
        torch.testing.assert_close(record.output, 0.6 * (record.v0 - record.values), rtol=1e-9, atol=1e-9)
