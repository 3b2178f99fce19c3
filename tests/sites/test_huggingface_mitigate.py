"""mitigate in transformers' models: back again without a trace, copies, and what is refused."""

import hf_zoo
import pytest
import torch
from hf_zoo import VISION, ZOO, batch, build, in_float64, output, records, tiny
from tiny_models import Sharper, left_alone
from torch import nn

import acutance as ac
from acutance import sites
from acutance.errors import AcutanceError, NoSitesError


def untouched(model, inputs):
    """No trace is left in the model, nor in its output."""
    return left_alone(model, lambda: output(model, inputs))


@torch.no_grad()
def test_a_change_of_implementation_is_honoured_unless_its_masks_are_not_known():
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
    hf_zoo.library().AttentionInterface.register("somebody_elses", lambda *_, **__: None)
    model.set_attn_implementation("somebody_elses")
    with pytest.raises(AcutanceError, match="set_attn_implementation"):
        output(model, inputs)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("padded", [True, False])  # without padding there is no mask
@torch.no_grad()
def test_a_bias_on_the_logits_shows_no_token_the_future(implementation, padded):
    model, inputs, shifted = build("llama"), batch("llama", padded=padded), Sharper()
    shifted.times = 1  # a bias alone, which is the same for all keys
    model.set_attn_implementation(implementation)
    with in_float64():
        before = output(model, inputs)
        with ac.mitigate(model, shifted):
            torch.testing.assert_close(output(model, inputs), before, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_attention_weights_are_still_returned():
    model, inputs = build("vit"), batch("vit")
    model.set_attn_implementation("eager")
    expected = model(**inputs, output_attentions=True).attentions
    with ac.mitigate(model, "neutreno:0"):
        torch.testing.assert_close(model(**inputs, output_attentions=True).attentions, expected, rtol=0, atol=0)


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flex_attention", "paged|sdpa"])
def test_implementations_whose_masks_are_not_known_are_refused(implementation):
    model = build("llama")
    model.config._attn_implementation = implementation
    with left_alone(model), pytest.raises(AcutanceError, match="set_attn_implementation"):
        ac.mitigate(model, "neutreno:0.6")


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
GLOBAL = {"attention_types": [[["global"], 2]]}
PAST_THE_INTERFACE = {
    **{"Data2VecVision": VISION, "BlipVision": VISION},
    **dict.fromkeys(("DebertaV2", "MPNet", "Falcon"), hf_zoo.TEXT),
    **{"Bloom": SMALL | {"hidden_size": 32}, "Mpt": {"vocab_size": 60, "d_model": 32, "n_layers": 2, "n_heads": 4}},
    **dict.fromkeys(("CodeGen", "GPTJ"), SMALL | {"n_embd": 32, "rotary_dim": 4}),
    "GPTNeo": {"vocab_size": 60, "hidden_size": 32, "num_layers": 2, "num_heads": 4, **GLOBAL},
    "XGLM": {"vocab_size": 60, "d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4},
}


@pytest.mark.parametrize("name", PAST_THE_INTERFACE)
@torch.no_grad()
def test_architectures_past_the_interface_are_intercepted(name):
    """No term, no change, bit for bit; a term, a change; and A is the model's own."""
    options = PAST_THE_INTERFACE[name]
    model = tiny(f"{name}Model", **options).to(torch.float32 if name == "XGLM" else torch.float64)  # which has no other
    inputs = batch("vit" if options is VISION else "llama")
    with untouched(model, inputs) as before:
        _, seen = records(model, inputs, sites.find(model))
        for record in seen:
            torch.testing.assert_close(record.A @ record.values, record.output, rtol=1e-6, atol=1e-7)
        with ac.mitigate(model, "neutreno:0.0"):
            assert torch.equal(output(model, inputs), before)
        with ac.mitigate(model, "neutreno:0.6"):
            assert not torch.equal(output(model, inputs), before)
    profile = ac.measure(model, [inputs], metrics=["token_cosine"], progress=False)
    assert len(profile["token_cosine", "block"]) == len(seen) + 1  # with what enters the first


def test_latent_values_are_refused():
    options = {"n_routed_experts": 2, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    with pytest.raises(NoSitesError, match=r"DeepseekV3Attention.*W_V"):
        ac.explain(tiny("DeepseekV3Model", **hf_zoo.DECODER | options | {"qk_nope_head_dim": 4}), progress=False)


def test_operators_are_not_built_for_what_needs_none(monkeypatch):
    built = []
    monkeypatch.setattr(ac.AttentionOperator, "__init__", lambda self, *_, **__: built.append(self))
    for name in ("llama", "bert", "vit"):
        model = build(name)
        with ac.mitigate(model, "neutreno:0.6,learn=head"):
            output(model, batch(name))
    assert not built


@torch.no_grad()
def test_sinks_take_neutreno():
    """Equal to hooks on v_proj and o_proj that add λ (v⁰ − v) by hand."""
    options = hf_zoo.DECODER | {"num_local_experts": 2, "head_dim": 8, **hf_zoo.EXPERTS}
    model, inputs, values = tiny("GptOssModel", **options).double(), batch("llama"), []
    with ac.mitigate(model, "neutreno:0.6"):
        found = output(model, inputs)

    def correct(_module, args):
        term = (values[0] - values[-1]).unflatten(-1, (-1, 8)).repeat_interleave(2, dim=2).flatten(2)
        return (args[0] + 0.6 * term,)

    for block in model.layers:
        block.self_attn.v_proj.register_forward_hook(lambda _module, _args, v: values.append(v))
        block.self_attn.o_proj.register_forward_pre_hook(correct)
    torch.testing.assert_close(found, output(model, inputs), rtol=1e-12, atol=1e-12)
    with pytest.raises(AcutanceError, match="sinks"):  # whose rows do not sum to one
        ac.measure(model, [inputs], metrics=["attention_entropy"], progress=False)


@pytest.mark.parametrize("name", [name for name, entry in ZOO.items() if not entry.first_values])
@torch.no_grad()
def test_windows_and_pyramids(name):
    model, inputs = build(name), batch(name)
    with untouched(model, inputs) as before:
        with pytest.raises(AcutanceError, match="v⁰"):
            ac.mitigate(model, "neutreno:0.6")
        with ac.mitigate(model, "attnscale"):
            assert torch.equal(output(model, inputs), before)


@torch.no_grad()
def test_first_values_stay_within_a_stage():
    model, inputs = build("segformer", hidden_sizes=[32, 32]), batch("segformer")
    with untouched(model, inputs) as before:
        with pytest.raises(AcutanceError, match=r"stages.*part="):  # though the widths would fit
            ac.mitigate(model, "neutreno:0.6", layers=[2, 3])
        with pytest.raises(AcutanceError, match="before making keys and values"):
            ac.mitigate(model, "neutreno:0.6", part="stages.0")
        with ac.mitigate(model, "neutreno:0.6", part="stages.1"):
            assert not torch.equal(output(model, inputs), before)


@pytest.mark.parametrize(("name", "part"), [("segformer", "stages.1"), ("swin", "encoder.layers.0")])
@torch.no_grad()
def test_a_part_that_is_mitigated_by_itself(name, part):
    model, inputs = build(name), batch(name)
    handle = ac.mitigate(model, "attnscale", part=part)
    for parameter in model.get_submodule(part).parameters():
        parameter.add_(0.1)
    read = {"metrics": ["attention_entropy"], "progress": False}
    for options in ({"progress": False}, read):
        match = rf"part '{part}' by itself.*part='{part}'.*layers="
        with untouched(model, inputs), pytest.raises(AcutanceError, match=match):
            ac.measure(model, [inputs], tap="attention", **options)
    assert len(ac.measure(model, [inputs], part=part, **read).readings) == 2
    handle.remove()
    ac.measure(model, [inputs], **read)


def test_means_over_tokens_are_refused_where_some_are_hidden():
    for name, match in (("swin", "one window at a time"), ("llama", "causal")):
        with pytest.raises(AcutanceError, match=match):
            ac.mitigate(build(name), "attnscale+featscale")
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
    model = build("vit", attention_probs_dropout_prob=0.999999).train()
    ac.mitigate(model, "neutreno:0.6")
    _, seen = records(model, batch("vit"), sites.find(model))
    for record in seen[1:]:  # all weights are dropped: what is left is the correction
        torch.testing.assert_close(record.output, 0.6 * (record.v0 - record.values), rtol=1e-9, atol=1e-9)
