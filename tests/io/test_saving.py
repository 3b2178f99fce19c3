"""A model and its mitigation survive the disk."""

import json
import logging

import pytest
import torch
from safetensors import safe_open
from torch import nn

import acutance as ac
from acutance import sites
from acutance.errors import AcutanceError

transformers = pytest.importorskip("transformers")
LEARNT = "neutreno:0.6,learn=head+attnscale"


def llama(seed=0, **options):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, intermediate_size=24, vocab_size=40, **options)
    return transformers.LlamaForCausalLM(config).eval()


def trained(model, spec, **options):
    """The model with a mitigation whose parameters have left the identity."""
    handle = ac.mitigate(model, spec, **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".mitigation." in name:
                parameter.add_(torch.randn_like(parameter))
    return handle


def logits(model):
    return model(torch.arange(6)[None]).logits


@pytest.mark.parametrize("spec", ["neutreno:0.6", LEARNT])
@pytest.mark.parametrize("how", ["save", "save_pretrained"])
def test_a_transformers_model_comes_back_as_it_was(tmp_path, spec, how):
    model = llama()
    trained(model, spec)
    expected = logits(model)
    ac.save(model, tmp_path) if how == "save" else model.save_pretrained(tmp_path)
    recorded = json.loads((tmp_path / "config.json").read_text())["acutance"]
    assert recorded == {"LlamaForCausalLM": {f"model.layers.{i}.self_attn": spec for i in range(3)}}
    loaded = ac.load(tmp_path)
    assert type(loaded) is transformers.LlamaForCausalLM
    assert torch.equal(logits(loaded), expected)
    assert sites.mitigation_spec(loaded) == spec


def test_a_folder_loads_into_a_model_of_the_user(tmp_path):
    model = llama()
    trained(model, LEARNT, layers=[2])
    ac.save(model, tmp_path)
    given = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert ac.load(tmp_path, given) is given
    assert torch.equal(logits(given), logits(model))
    assert list(sites.record(given)) == ["model.layers.1.self_attn"]


def note(folder):
    return json.loads((folder / "config.json").read_text()).get("acutance")


def t5():
    """Its stacks have copies of the model's configuration."""
    torch.manual_seed(0)
    config = transformers.T5Config(d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4, vocab_size=40)
    return transformers.T5Model(config).eval()


def bart():
    """Its stacks share the model's configuration."""
    torch.manual_seed(0)
    sizes = {"d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "encoder_layers": 2, "decoder_layers": 2}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = transformers.BartConfig(**sizes, **heads, vocab_size=40, max_position_embeddings=32)
    return transformers.BartModel(config).eval()


def clip():
    """Its towers have their configurations inside the model's."""
    torch.manual_seed(0)
    tower = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {**tower, "vocab_size": 40, "max_position_embeddings": 12, "bos_token_id": 1, "eos_token_id": 2}
    vision = {**tower, "image_size": 8, "patch_size": 4}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    return transformers.CLIPModel(config).eval()


IDS = torch.arange(3, 9)[None]
PARTS = {
    (t5, "decoder"): "block.{}.layer.0.SelfAttention",
    (bart, "encoder"): "layers.{}.self_attn",
    (clip, "vision_model"): "encoder.layers.{}.self_attn",
}


def output(model, part):
    """Of a tower, or of the whole model around an encoder or a decoder."""
    if part == "vision_model":
        return model.vision_model(pixel_values=torch.ones(1, 3, 8, 8)).last_hidden_state
    return model(input_ids=IDS, decoder_input_ids=IDS).last_hidden_state


@pytest.mark.parametrize(("build", "part"), PARTS)
@pytest.mark.parametrize("how", ["part=", "by itself"])
def test_a_mitigated_part_comes_back_within_the_whole_and_alone(tmp_path, how, build, part):
    model, path = build(), PARTS[build, part]
    handle = trained(model, LEARNT, part=part) if how == "part=" else trained(model.get_submodule(part), LEARNT)
    expected = output(model, part)
    ac.save(model, tmp_path / "whole")
    whole = ac.load(tmp_path / "whole")
    assert list(sites.record(whole)) == [f"{part}.{path.format(i)}" for i in range(2)]
    assert torch.equal(output(whole, part), expected)
    if build is clip:
        model.get_submodule(part).save_pretrained(tmp_path / "tower")
        alone = ac.load(tmp_path / "tower")
        assert list(sites.record(alone)) == [path.format(i) for i in range(2)]
        if how == "part=":
            with pytest.raises(AcutanceError, match=r"saved from a CLIPModel.*take its part"):
                ac.load(tmp_path / "whole", type(alone).from_pretrained(tmp_path / "whole"))
    handle.remove()
    model.save_pretrained(tmp_path / "after")
    assert note(tmp_path / "after") is None
    assert "acutance" not in json.dumps(model.config.to_dict())


def test_no_note_outlives_a_mitigation_of_a_part(tmp_path):
    model = bart()
    handles = {part: ac.mitigate(model.get_submodule(part), "neutreno:0.6") for part in ("encoder", "decoder")}
    model.save_pretrained(tmp_path / "both")
    assert set(note(tmp_path / "both")) == {"BartEncoder", "BartDecoder"}
    handles["encoder"].remove()
    model.save_pretrained(tmp_path / "one")
    assert note(tmp_path / "one") == {"BartDecoder": {f"layers.{i}.self_attn": "neutreno:0.6" for i in range(2)}}


def test_a_body_saved_by_itself_is_found_in_the_model_around_it(tmp_path):
    body = llama().model
    ac.mitigate(body, "neutreno:0.6")
    ac.save(body, tmp_path)
    around = ac.load(tmp_path, transformers.LlamaForCausalLM.from_pretrained(tmp_path))
    assert list(sites.record(around)) == [f"model.layers.{i}.self_attn" for i in range(3)]
    around.model.save_pretrained(tmp_path / "body")  # by the configuration of the whole
    assert list(sites.record(ac.load(tmp_path / "body"))) == [f"layers.{i}.self_attn" for i in range(3)]


def test_parameters_without_a_record_are_an_error(tmp_path):
    model = t5()
    trained(model, LEARNT, part="decoder")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["acutance"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(AcutanceError, match=r"does not say which.*acutance\.save"):
        ac.load(tmp_path)


def test_models_of_several_libraries_keep_all_they_carry(tmp_path):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = llama().model
            layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True)
            self.top = nn.TransformerEncoder(layer, num_layers=2)

        def forward(self, ids):
            return self.top(self.body(ids).last_hidden_state)

    model, ids = Both().eval(), torch.arange(6)[None]
    with pytest.raises(AcutanceError, match=r"several stacks of layers \(body, top\)"):
        ac.mitigate(model, "neutreno:0.6")
    ac.mitigate(model, "neutreno:0.6", part="body")
    ac.mitigate(model, "neutreno:0.4", part="top")
    file = ac.save(model, tmp_path / "both.safetensors")
    other = ac.load(file, Both().eval())
    assert set(sites.record(other).values()) == {"neutreno:0.6", "neutreno:0.4"}
    assert torch.equal(other(ids), model(ids))


class Tied(nn.Module):
    """A user's own model around a transformers one, with a weight that is shared."""

    def __init__(self):
        super().__init__()
        self.body = llama().model
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.body.embed_tokens.weight

    def forward(self, ids):
        return self.head(self.body(ids).last_hidden_state)


def test_any_model_is_written_as_one_safetensors_file(tmp_path):
    model, file = Tied().eval(), tmp_path / "model.safetensors"
    trained(model, LEARNT)
    ac.save(model, file)
    with safe_open(str(file), framework="pt") as opened:
        assert json.loads(opened.metadata()["acutance.mitigations"])["body.layers.1.self_attn"] == LEARNT
    other = Tied().eval()
    ids = torch.arange(6)[None]
    assert torch.equal(ac.load(file, other)(ids), model(ids))
    assert other.head.weight is other.body.embed_tokens.weight


def test_what_a_mitigation_learnt_is_not_called_unexpected(tmp_path, caplog, monkeypatch):
    """It is loaded, so a report that it was not would only frighten."""
    model = llama()
    trained(model, LEARNT)
    ac.save(model, tmp_path)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    kept = vars(type(model)).copy()
    caplog.clear()
    ac.load(tmp_path)
    assert "UNEXPECTED" not in caplog.text
    assert vars(type(model)) == kept
    type(model).from_pretrained(tmp_path)
    assert "UNEXPECTED" in caplog.text


def test_errors_say_what_to_do(tmp_path):
    model, file = Tied(), tmp_path / "m.safetensors"
    ac.mitigate(model, "attnscale")
    ac.save(model, file)
    with pytest.raises(AcutanceError, match=r"pass it as model="):
        ac.load(file)
    with pytest.raises(AcutanceError, match=r"body\.layers\.0\.self_attn.*does not have"):
        ac.load(file, llama())
    with pytest.raises(AcutanceError, match="no file"):
        ac.load(tmp_path / "missing.safetensors")
    (tmp_path / "empty").mkdir()
    with pytest.raises(AcutanceError, match=r"no file .*empty/model\.safetensors"):
        ac.load(tmp_path / "empty")
    with pytest.raises(AcutanceError, match=r"\.safetensors"):
        ac.save(model, tmp_path / "weights.pt")
    with pytest.raises(AcutanceError, match=r"is a file: a LlamaForCausalLM is written as a folder"):
        ac.save(llama(), file)
    file.write_bytes(b"not tensors")
    with pytest.raises(AcutanceError, match="damaged"):
        ac.load(file, Tied())
