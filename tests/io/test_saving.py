import json
import logging

import pytest
import torch
from safetensors import safe_open
from torch import nn

import acutance as ac
from acutance import sites
from acutance.errors import AcutanceError
from sites.tiny_models import mitigated
from tiny_folders import tiny

transformers = pytest.importorskip("transformers")
LEARNT = "neutreno:0.6,learn=head+attnscale"
IDS = torch.arange(3, 9)[None]


def llama():
    return tiny("llama", "AutoModelForCausalLM", vocab_size=40)


@pytest.mark.parametrize(("spec", "layers"), [("neutreno:0.6", (0, 1)), (LEARNT, (0, 1)), (LEARNT, (1,))])
@pytest.mark.parametrize("how", ["save", "save_pretrained"])
def test_a_transformers_model_comes_back_as_it_was(tmp_path, spec, layers, how):
    model = llama()
    mitigated(model, spec, layers=[layer + 1 for layer in layers])
    expected = model(IDS).logits
    ac.save(model, tmp_path) if how == "save" else model.save_pretrained(tmp_path)
    assert note(tmp_path) == {"LlamaForCausalLM": {f"model.layers.{i}.self_attn": spec for i in layers}}
    given = transformers.LlamaForCausalLM.from_pretrained(tmp_path)  # of the user
    assert ac.load(tmp_path, given) is given
    for loaded in (ac.load(tmp_path), given):
        assert type(loaded) is transformers.LlamaForCausalLM
        assert torch.equal(loaded(IDS).logits, expected)
        assert sites.record(loaded) == {f"model.layers.{i}.self_attn": spec for i in layers}


def note(folder):
    return json.loads((folder / "config.json").read_text()).get("acutance")


TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {"vocab_size": 40, "max_position_embeddings": 12, "bos_token_id": 1, "eos_token_id": 2}
# The stacks of T5 have copies of the model's configuration, BART's share it, CLIP's towers have theirs inside it.
OPTIONS = {
    "t5": {"vocab_size": 40},
    "bart": {"vocab_size": 40},
    "clip": {"text_config": TOWER | TEXT, "vision_config": TOWER | {"image_size": 8, "patch_size": 4}},
}
PARTS = {
    ("t5", "decoder"): "block.{}.layer.0.SelfAttention",
    ("bart", "encoder"): "layers.{}.self_attn",
    ("clip", "vision_model"): "encoder.layers.{}.self_attn",
}


def output(model, part):
    """Of a tower, or of the whole model around an encoder or a decoder."""
    if part == "vision_model":
        return model.vision_model(pixel_values=torch.ones(1, 3, 8, 8)).last_hidden_state
    return model(input_ids=IDS, decoder_input_ids=IDS).last_hidden_state


@pytest.mark.parametrize(("kind", "part"), PARTS)
@pytest.mark.parametrize("how", ["part=", "by itself"])
def test_a_mitigated_part_comes_back_within_the_whole_and_alone(tmp_path, how, kind, part):
    model, path = tiny(kind, **OPTIONS[kind]), PARTS[kind, part]
    handle = mitigated(model, LEARNT, part=part) if how == "part=" else mitigated(model.get_submodule(part), LEARNT)
    expected = output(model, part)
    ac.save(model, tmp_path / "whole")
    whole = ac.load(tmp_path / "whole")
    assert list(sites.record(whole)) == [f"{part}.{path.format(i)}" for i in range(2)]
    assert torch.equal(output(whole, part), expected)
    if kind == "clip":
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
    model = tiny("bart", **OPTIONS["bart"])
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
    assert list(sites.record(around)) == [f"model.layers.{i}.self_attn" for i in range(2)]
    around.model.save_pretrained(tmp_path / "body")  # by the configuration of the whole
    assert list(sites.record(ac.load(tmp_path / "body"))) == [f"layers.{i}.self_attn" for i in range(2)]


def test_parameters_without_a_record_are_an_error(tmp_path):
    model = tiny("t5", vocab_size=40)
    mitigated(model, LEARNT, part="decoder")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["acutance"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(AcutanceError, match=r"does not say which.*acutance\.save"):
        ac.load(tmp_path)


class Tied(nn.Module):
    """A user's own model of layers of two libraries, with a weight that is shared."""

    def __init__(self):
        super().__init__()
        self.body = llama().model
        self.top = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 24, batch_first=True), num_layers=2)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.body.embed_tokens.weight

    def forward(self, ids):
        return self.head(self.top(self.body(ids).last_hidden_state))


def test_any_model_is_written_as_one_safetensors_file_with_all_it_carries(tmp_path):
    model, other, file = Tied().eval(), Tied().eval(), tmp_path / "model.safetensors"
    with pytest.raises(AcutanceError, match=r"several stacks of layers \(body, top\)"):
        ac.mitigate(model, "neutreno:0.6")
    mitigated(model, LEARNT, part="body")
    ac.mitigate(model, "neutreno:0.4", part="top")
    ac.save(model, file)
    with safe_open(str(file), framework="pt") as opened:
        assert json.loads(opened.metadata()["acutance.mitigations"])["body.layers.1.self_attn"] == LEARNT
    assert torch.equal(ac.load(file, other)(IDS), model(IDS))
    assert set(sites.record(other).values()) == {LEARNT, "neutreno:0.4"}
    assert other.head.weight is other.body.embed_tokens.weight


def test_what_a_mitigation_learnt_is_not_called_unexpected(tmp_path, caplog, monkeypatch):
    """It is loaded, so a report that it was not would only frighten."""
    model = llama()
    mitigated(model, LEARNT)
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
    ac.mitigate(model, "attnscale", part="body")
    ac.save(model, file)
    (tmp_path / "empty").mkdir()
    for act, given, message in (
        (ac.load, (file,), "pass it as model="),
        (ac.load, (file, llama()), r"body\.layers\.0\.self_attn.*does not have"),
        (ac.load, (tmp_path / "missing.safetensors",), "no file"),
        (ac.load, (tmp_path / "empty",), r"no file .*empty/model\.safetensors"),
        (ac.save, (model, tmp_path / "weights.pt"), r"\.safetensors"),
        (ac.save, (llama(), file), "is a file: a LlamaForCausalLM is written as a folder"),
    ):
        with pytest.raises(AcutanceError, match=message):
            act(*given)
