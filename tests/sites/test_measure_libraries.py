"""measure on models of other libraries: padding, packing, parts, and models whose attention we cannot reach."""

import hf_zoo
import pytest
import torch
from hf_zoo import SIZES, TEXT, ZOO, tiny
from tiny_models import Made, left_alone
from tiny_models import readings as table
from torch import nn

import acutance as ac
from acutance import metrics, sites
from acutance.errors import AcutanceError, SeveralStacksError
from acutance.lab.studies import kernel_assumptions
from attention.operator_cases import assert_tensors_below

TAPS = ["block", "attention", "values"]
METRICS = ["token_cosine", "hfc_lfc_frobenius", "attention_entropy", "nonlocal_energy"]


def measured(model, *batches, **options):
    return ac.measure(model, batches, **{"metrics": METRICS, "tap": TAPS, "progress": False, **options})


def cosines(hidden, content=slice(None)):
    return pytest.approx([metrics.token_cosine(h[:, content]).mean().item() for h in hidden])


def assert_mean(together, apart, rel=1e-9):
    """The readings of samples together are the means of those of each by itself."""
    apart = [table(profile) for profile in apart]
    means = {key: sum(one[key] for one in apart) / len(apart) for key in apart[0]}
    assert table(together) == pytest.approx(means, rel=rel)


@pytest.mark.parametrize("name", ["bert", "t5_encoder", "gemma2", "modernbert"])
def test_padding_changes_no_reading(name):
    model, batch = hf_zoo.build(name), hf_zoo.batch(name)
    alone = [{key: x[i : i + 1, :n] for key, x in batch.items()} for i, n in enumerate((12, 9))]
    with left_alone(model, lambda: hf_zoo.output(model, batch)):
        together = measured(model, batch)
    assert_mean(together, [measured(model, one) for one in alone], rel=1e-6)  # Gemma 2 takes its softmax in float32


def test_left_padding_changes_no_reading():
    model, batch = hf_zoo.build("llama"), hf_zoo.batch("llama", padded=False)
    short = {name: value[1:, :9] for name, value in batch.items()}
    padded = {name: nn.functional.pad(value, (3, 0)) for name, value in short.items()}
    padded["position_ids"] = torch.tensor([[0, 0, 0, *range(9)]])
    assert_mean(measured(model, padded), [measured(model, short)])


def test_packed_documents_are_samples_of_their_own():
    model, ids = hf_zoo.build("llama"), hf_zoo.batch("llama", padded=False)["input_ids"]
    positions = torch.tensor([[*range(5), *range(4), *range(3)]])
    packed = measured(model, {"input_ids": ids[:1], "position_ids": positions})
    assert {r.count for r in packed.readings} == {3}
    assert_mean(packed, [measured(model, {"input_ids": part}) for part in ids[:1].split([5, 4, 3], 1)])
    every, one = (measured(model, {"input_ids": ids, "position_ids": p}) for p in (positions.expand(2, -1), positions))
    assert {r.count for r in one.readings} == {6}  # one row of positions packs every row
    assert table(one) == table(every)


REFUSING = {
    "bert": lambda model, batch: measured(model, batch, metrics="token_cosine", tap="block"),
    "roberta": lambda model, batch: measured(model, batch, metrics="attention_entropy"),
    "modernbert": lambda model, batch: ac.explain(model, [batch], progress=False),
    "opt": lambda model, batch: kernel_assumptions(model, [batch]),
}


@pytest.mark.parametrize("name", REFUSING)
def test_documents_that_see_each_other_are_refused(name):
    model, ids = hf_zoo.build(name), hf_zoo.batch(name, padded=False)["input_ids"][:1]
    batch = {"input_ids": ids, "position_ids": torch.tensor([[*range(7), *range(5)]])}
    with left_alone(model), pytest.raises(AcutanceError, match="documents see each other"):
        REFUSING[name](model, batch)


def test_padded_sound_is_refused_with_advice_that_works():
    model, batch = hf_zoo.build("whisper_encoder"), hf_zoo.batch("whisper_encoder")
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[1, 12:] = 0
    with pytest.raises(AcutanceError, match=r"mask is \(2, 24\).*without padding"):
        measured(model, batch | {"attention_mask": mask}, part="encoder")
    assert {r.count for r in measured(model, batch, part="encoder").readings} == {2}


def test_towers_with_attention_between_them_are_read_by_part():
    sizes = {"embed_dim": 16, "ffn_dim": 24, "layers": 2, "attention_heads": 2, "vocab_size": 60}
    vision = SIZES | {"num_hidden_layers": 2, "image_size": 16, "patch_size": 8}
    text = sizes | {"max_position_embeddings": 32}
    model = tiny("Kosmos2Model", text_config=text, vision_config=vision, latent_query_num=3)
    batch = {"pixel_values": torch.randn(1, 3, 16, 16), "input_ids": torch.arange(4, 10)[None]}
    batch["image_embeds_position_mask"] = torch.tensor([[0, 1, 1, 1, 0, 0]], dtype=torch.bool)
    with pytest.raises(SeveralStacksError, match="name one with part=") as refused:
        measured(model, batch)
    with pytest.raises(SeveralStacksError, match="name one with part="):
        ac.mitigate(model, "neutreno:0.6")
    for part in refused.value.parts:
        assert {r.layer for r in measured(model, batch, part=part).readings} == {0, 1, 2}


def test_padded_images_are_read_without_their_padding():
    model = tiny("Siglip2VisionModel", **SIZES, num_patches=16, patch_size=2).double()
    pixels, valid = torch.randn(2, 16, 12, dtype=torch.float64), torch.ones(2, 16, dtype=torch.long)
    valid[1, 8:] = 0
    batch = {"pixel_values": pixels, "pixel_attention_mask": valid, "spatial_shapes": torch.tensor([[4, 4], [2, 4]])}
    hidden = model(**batch, output_hidden_states=True).hidden_states
    junk = batch | {"pixel_values": pixels.masked_fill(valid[..., None] == 0, 5.0)}
    profile = measured(model, batch)
    expected = [(metrics.token_cosine(h[:1]) + metrics.token_cosine(h[1:, :8])).item() / 2 for h in hidden]
    assert profile["token_cosine", "block"].tolist() == pytest.approx(expected)
    assert_mean(measured(model, junk), [profile], rel=1e-6)


def test_special_tokens_are_left_out_with_the_prefix():
    model, batch = hf_zoo.build("bert"), hf_zoo.batch("bert", padded=False)
    special = torch.zeros_like(batch["input_ids"])
    special[:, [0, -1]] = 1
    hidden = model(**batch, output_hidden_states=True).hidden_states
    profile = measured(model, batch | {"special_tokens_mask": special}, prefix="out", metrics="token_cosine")
    assert profile["token_cosine", "block"].tolist() == cosines(hidden, slice(1, -1))
    assert profile.context["prefix"] == "the tokeniser's special tokens out"


@pytest.mark.parametrize(
    ("name", "part", "special"),
    [
        *(("vit", None, (1,)), ("dinov2_registers", None, (4,)), ("llama", None, ()), ("gpt2", None, ())),
        *(("bart_encoder", "encoder", ()), ("clip", "text_model", ())),
        *(("clip", "vision_model", (1,)), ("clip", "vision_model.encoder", (1,))),  # the class token is around the part
        *(("yolos", None, (1, 3)), ("yolos", "encoder", (1, 3))),  # detection tokens stand behind the image
    ],
)
def test_blocks_are_the_library_own_hidden_states(name, part, special):
    padded = part is not None and "vision" in part  # a text's mask says nothing of the image beside it
    model, batch, special = hf_zoo.build(name), hf_zoo.batch(name, padded=padded), sites.SpecialTokens(*special)
    tower, inputs = model, batch
    if name == "clip":
        taken = "input_ids" if "text" in part else "pixel_values"
        tower, inputs = model.get_submodule(part.split(".")[0]), {taken: batch[taken]}
    out = tower(**inputs, output_hidden_states=True)
    hidden = out.encoder_hidden_states if ZOO[name].kind == "seq2seq" else out.hidden_states
    for prefix, content in (("in", slice(None)), ("out", slice(special.front, hidden[0].shape[1] - special.back))):
        profile = ac.measure(model, [batch], part=part, prefix=prefix, progress=False)
        assert profile.context["prefix"] == f"{special} {prefix}"
        # The last one has gone through the final norm in some models.
        assert profile["token_cosine"][:-1].tolist() == cosines(hidden[:-1], content)


BESIDE = {
    "Git": ({"vision_config": hf_zoo.VISION, **TEXT}, ["image_encoder.vision_model.encoder", "encoder"]),
    "LongT5": (hf_zoo.T5 | {"local_radius": 3}, ["encoder", "decoder"]),
    "Bart": (hf_zoo.BART, ["encoder", "decoder"]),
    "T5": (hf_zoo.T5, ["encoder", "decoder"]),
    "CLIP": (hf_zoo.TOWERS, ["text_model.encoder", "vision_model.encoder"]),
}


@pytest.mark.parametrize("name", BESIDE)
def test_a_stack_beside_another_is_named(name):
    options, parts = BESIDE[name]
    model = tiny(f"{name}Model", **options)
    with pytest.raises(SeveralStacksError, match=rf"part='{parts[0]}'") as refused:
        sites.find(model)
    assert refused.value.parts == parts
    assert len(sites.find(model.get_submodule(parts[1]))) == 3
    ac.mitigate(model, "neutreno:0.6", part=parts[0])
    assert len(sites.record(model)) == len(sites.find(model.get_submodule(parts[0]))) == 3
    with pytest.raises(AcutanceError, match=rf"no part 'middle'.*{parts[1].partition('.')[0]}"):
        sites.part_of(model, "middle")


def around_a_decoder():
    """A user's own model: only the path of the layers says that they are a decoder's."""

    def forward(input_ids, attention_mask, decoder_input_ids):
        read = {"encoder_hidden_states": model.read(input_ids), "encoder_attention_mask": attention_mask}
        return model.decoder(input_ids=decoder_input_ids, **read)

    parts = {"read": nn.Embedding(60, 32, dtype=torch.float64), "decoder": hf_zoo.build("t5_decoder").decoder}
    model = Made(None, **parts).eval()
    model.forward = forward
    return model


def test_the_mask_of_a_decoder_is_told_by_its_path():
    model, batch = around_a_decoder(), hf_zoo.batch("t5_decoder")
    assert batch["attention_mask"].shape != batch["decoder_input_ids"].shape
    assert table(measured(model, batch)) == table(measured(model, batch, part="decoder"))
    model.encoder_decoder = nn.ModuleDict({"encoder": hf_zoo.build("t5_encoder").encoder})
    parts = ("decoder", "encoder_decoder.encoder")
    assert [sites.token_kind(model, part)["decoder"] for part in parts] == [True, False]
    model, batch = hf_zoo.build("opt"), hf_zoo.batch("opt")  # a decoder without an encoder has the usual mask
    assert table(measured(model, batch, part="decoder")) == table(measured(model, batch))


@pytest.mark.parametrize("name", ["swin", "segformer"])
def test_pyramids_are_measured(name):
    model, batch = hf_zoo.build(name), hf_zoo.batch(name)
    profile = measured(model, batch, metrics=["token_cosine", "attention_entropy"])
    depth = len(sites.find(model))
    assert [r.layer for r in profile.select("token_cosine", "block")] == list(range(depth + 1))
    assert [r.layer for r in profile.select("attention_entropy")] == list(range(1, depth + 1))
    assert {r.count for r in profile.readings} == {2}  # windows are no samples
    for tap in ("block", "attention"):
        alone = measured(model, batch, metrics="attention_entropy", tap=tap)
        assert list(alone.readings) == profile.select("attention_entropy")


def test_windows_that_move_are_not_compared_nor_averaged(monkeypatch):
    model, batch = hf_zoo.build("swin"), hf_zoo.batch("swin")
    profile = measured(model, batch, metrics=["attention_entropy", "attention_cosine"])
    assert {r.metric for r in profile.readings} == {"attention_entropy"}
    with pytest.raises(AcutanceError, match="windows that move"):
        measured(model, batch, metrics="attention_cosine")
    monkeypatch.setattr("acutance.sites.patched.has_windows", lambda attention: False)
    with ac.mitigate(model, "featscale"), pytest.raises(AcutanceError, match="a batch of 8, perhaps of windows"):
        hf_zoo.output(model, batch)


def test_layers_that_share_a_module_are_read_one_by_one():
    model = tiny("AlbertModel", **TEXT | {"num_hidden_layers": 4}).double()
    ids = torch.randint(3, 60, (2, 8))
    profile = measured(model, ids, ids, metrics=["token_cosine", "attention_entropy"], tap="block")
    assert profile["token_cosine"].tolist() == cosines(model(ids, output_hidden_states=True).hidden_states)
    model.set_attn_implementation("eager")
    weights = model(ids, output_attentions=True).attentions
    entropy = [-(A * A.clamp_min(1e-300).log()).sum(-1).mean().item() for A in weights]
    assert profile["attention_entropy"].tolist() == pytest.approx(entropy, rel=1e-6)
    assert len(sites.find(model)) == 1
    with pytest.raises(AcutanceError, match="all its layers are one module"):
        ac.mitigate(model, "neutreno:0.6")


def test_layers_that_run_twice_are_an_error():
    def twice(self, ids):
        return sum(self.cross_encoder(x).last_hidden_state for x in (ids, ids.flip(1)))

    model = Made(twice, cross_encoder=hf_zoo.build("bert"))  # whose own name says nothing of its attention
    with pytest.raises(AcutanceError, match="layer 1 ran again after layer 3"):
        ac.measure(model, [torch.randint(3, 60, (2, 8))], progress=False)


@pytest.mark.parametrize("channels_last", [False, True])
def test_grids_of_unknown_models_are_read_as_tokens(channels_last):
    def run(self, x):
        return self.norm(x) if channels_last else self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    model = nn.Sequential(*(Made(run, norm=nn.LayerNorm(6)) for _ in range(2))).double()
    x = torch.randn(2, 4, 5, 6, dtype=torch.float64)
    profile = ac.measure(model, [x if channels_last else x.permute(0, 3, 1, 2)], progress=False)
    assert profile["token_cosine"][:2].tolist() == cosines([y.flatten(1, 2) for y in (x, model[0].norm(x))])


@torch.no_grad()
def test_attention_metrics_leave_detection_tokens_out_too():
    model, batch = hf_zoo.build("yolos"), hf_zoo.batch("yolos")
    found = table(measured(model, batch, prefix="out"))
    _, records = hf_zoo.records(model, batch, sites.find(model))
    for layer, record in enumerate(records, 1):
        rows = record.A.dense()[:, :, 1:17]
        entropy = [value for (_, n, metric), value in found.items() if (n, metric) == (layer, "attention_entropy")]
        assert entropy == pytest.approx([-(rows * rows.log()).sum(-1).mean().item()])
        branch = metrics.token_cosine(record.branch[:, 1:17]).mean().item()
        assert found["attention", layer, "token_cosine"] == pytest.approx(branch)


@pytest.mark.parametrize("tap", ["block", "attention"])
def test_tokens_that_join_on_the_way_are_not_taken_for_content(tap):
    queries = {"num_blocks": 1, "num_queries": 5, "num_register_tokens": 2}
    model = tiny("EomtForUniversalSegmentation", **hf_zoo.VISION | queries)
    batch, options = {"pixel_values": torch.randn(2, 3, 16, 16)}, {"tap": tap, "progress": False}
    assert len(ac.measure(model, [batch, batch], **options)["token_cosine"]) >= 3
    with pytest.raises(AcutanceError, match=r"layer has 24 tokens, the first reading had 19.*prefix='in'"):
        ac.measure(model, [batch], prefix="out", **options)


def test_no_attention_matrix_is_formed():
    model = hf_zoo.build("llama", max_position_embeddings=2048).float()
    with assert_tensors_below(1500**2):  # not even one head's
        measured(model, torch.randint(3, 60, (1, 1500)), metrics=["attention_entropy", "nonlocal_energy"])
