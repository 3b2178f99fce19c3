"""measure on models of other libraries: padding, packing, parts, and models whose attention we cannot reach."""

import hf_zoo
import pytest
import torch
from hf_zoo import ZOO
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import acutance as ac
from acutance import metrics, sites
from acutance.errors import AcutanceError, SeveralStacksError
from acutance.lab.studies import kernel_assumptions

pytest.importorskip("transformers")
TAPS = ["block", "attention", "values"]
METRICS = ["token_cosine", "hfc_lfc_frobenius", "attention_entropy", "nonlocal_energy"]


def measured(model, batch, **options):
    return ac.measure(model, [batch], metrics=METRICS, tap=TAPS, progress=False, **options)


def table(profile):
    return {(r.tap, r.layer, r.metric): r.mean for r in profile.readings}


def rows(batch, index, length):
    return {name: value[index : index + 1, :length] for name, value in batch.items()}


@pytest.mark.parametrize("name", ["bert", "llama", "gpt2", "t5_encoder", "gemma2", "modernbert"])
def test_padding_changes_no_reading(name):
    model, batch = hf_zoo.build(name), hf_zoo.batch(name)
    lengths = batch["attention_mask"].sum(1).tolist()
    together = table(measured(model, batch))
    apart = [table(measured(model, rows(batch, i, n))) for i, n in enumerate(lengths)]
    assert lengths == [12, 9]
    for key, value in together.items():
        alone = (apart[0][key] + apart[1][key]) / 2
        assert value == pytest.approx(alone, rel=1e-6), key  # Gemma 2 takes its softmax in float32


def test_left_padding_changes_no_reading():
    model, batch = hf_zoo.build("llama"), hf_zoo.batch("llama", padded=False)
    short = {name: value[1:, :9] for name, value in batch.items()}
    padded = {name: torch.cat([torch.zeros(1, 3, dtype=value.dtype), value], 1) for name, value in short.items()}
    padded["position_ids"] = torch.tensor([[0, 0, 0, *range(9)]])
    alone = table(measured(model, short))
    for key, value in table(measured(model, padded)).items():
        assert value == pytest.approx(alone[key], rel=1e-9), key


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_packed_documents_are_samples_of_their_own(name):
    model, ids = hf_zoo.build(name), hf_zoo.batch(name, padded=False)["input_ids"][:1]
    packed = {"input_ids": ids, "position_ids": torch.tensor([[*range(5), *range(4), *range(3)]])}
    together = measured(model, packed)
    assert {r.count for r in together.readings} == {3}
    apart = [table(measured(model, {"input_ids": part})) for part in ids.split([5, 4, 3], 1)]
    for key, value in table(together).items():
        assert value == pytest.approx(sum(one[key] for one in apart) / 3, rel=1e-9), key


def test_one_row_of_positions_packs_every_row():
    model, ids = hf_zoo.build("llama"), hf_zoo.batch("llama", padded=False)["input_ids"]
    one = torch.tensor([[*range(7), *range(5)]])
    each = measured(model, {"input_ids": ids, "position_ids": one.expand(2, -1)})
    broadcast = measured(model, {"input_ids": ids, "position_ids": one})
    assert {r.count for r in broadcast.readings} == {4}
    assert table(broadcast) == table(each)


READINGS = {
    "tokens": lambda model, batch: ac.measure(model, [batch], metrics="token_cosine", progress=False),
    "attention": lambda model, batch: ac.measure(model, [batch], metrics="attention_entropy", progress=False),
    "spectra": lambda model, batch: ac.explain(model, [batch], progress=False),
    "affinities": lambda model, batch: kernel_assumptions(model, [batch]),
}


@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert", "opt"])
@pytest.mark.parametrize("reading", READINGS)
def test_documents_that_see_each_other_are_refused(name, reading):
    model, ids = hf_zoo.build(name), hf_zoo.batch(name, padded=False)["input_ids"][:1]
    batch = {"input_ids": ids, "position_ids": torch.tensor([[*range(7), *range(5)]])}
    with pytest.raises(AcutanceError, match="this model does not keep such documents apart"):
        READINGS[reading](model, batch)
    assert all(not module._forward_hooks for module in model.modules())


def speech(kind):
    """A model of sound, a batch of which the second sample is padded, and a part that hears it."""
    import transformers

    torch.manual_seed(0)
    depths = {"encoder_layers": 2, "decoder_layers": 1, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    tokens = {"vocab_size": 60, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    if kind == "whisper":
        lengths = {"num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 12}
        config = transformers.WhisperConfig(d_model=16, **depths, **heads, **tokens, **lengths)
        batch = {"input_features": torch.randn(2, 8, 24), "decoder_input_ids": torch.ones(2, 3, dtype=torch.long)}
        mask = torch.ones(2, 24, dtype=torch.long)
        model, part = transformers.WhisperModel(config), "encoder"
    else:
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
        stem = {"conv_dim": (8, 8), "conv_kernel": (8, 4), "conv_stride": (4, 4)}
        config = transformers.Wav2Vec2Config(
            **sizes, **stem, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, feat_extract_norm="layer"
        )
        batch, mask = {"input_values": torch.randn(2, 400)}, torch.ones(2, 400, dtype=torch.long)
        model, part = transformers.Wav2Vec2Model(config), None
    mask[1, mask.shape[1] // 2 :] = 0
    return model.eval(), batch | {"attention_mask": mask}, part


@pytest.mark.parametrize("kind", ["wav2vec2", "whisper"])
def test_padded_sound_is_refused_with_advice_that_works(kind):
    model, batch, part = speech(kind)
    length = batch["attention_mask"].shape[1]

    def read(*batches):
        return ac.measure(model, batches, metrics="token_cosine", tap=TAPS, part=part, progress=False)

    with pytest.raises(
        AcutanceError, match=rf"mask is \(2, {length}\).*one by one.*Whisper, are fed without this mask"
    ):
        read(batch)
    whole = {name: value for name, value in batch.items() if name != "attention_mask"}
    if kind == "whisper":
        assert {r.count for r in read(whole).readings} == {2}
    else:
        long, short = ({"input_values": batch["input_values"][i : i + 1, :n]} for i, n in enumerate((400, 200)))
        alone = [table(read(one)) for one in (long, short)]
        for key, value in table(read(long, short)).items():
            assert value == pytest.approx((alone[0][key] + alone[1][key]) / 2), key


def test_towers_with_attention_between_them_are_read_by_part():
    from transformers import Kosmos2Config, Kosmos2Model

    sizes = {"ffn_dim": 24, "layers": 2, "attention_heads": 2, "vocab_size": 60, "max_position_embeddings": 32}
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Kosmos2Config(
        text_config={"embed_dim": 16, **sizes},
        vision_config={"image_size": 16, "patch_size": 8, **vision},
        latent_query_num=3,
    )
    model = Kosmos2Model(config).eval()
    image = torch.tensor([[0, 1, 1, 1, 0, 0]], dtype=torch.bool)
    batch = {"pixel_values": torch.randn(1, 3, 16, 16), "input_ids": torch.arange(4, 10)[None]}
    batch["image_embeds_position_mask"] = image
    with pytest.raises(SeveralStacksError, match=r"image_to_text_projection\.x_attn: name one with part=") as refused:
        measured(model, batch)
    with pytest.raises(SeveralStacksError, match="name one with part="):
        ac.mitigate(model, "neutreno:0.6")
    for part in refused.value.parts:
        assert {r.layer for r in measured(model, batch, part=part).readings} == {0, 1, 2}


def test_padded_images_are_read_without_their_padding():
    from transformers import Siglip2VisionConfig, Siglip2VisionModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = Siglip2VisionModel(Siglip2VisionConfig(**sizes, num_patches=16, patch_size=2)).double().eval()
    pixels, valid = torch.randn(2, 16, 12, dtype=torch.float64), torch.ones(2, 16, dtype=torch.long)
    valid[1, 8:] = 0
    batch = {"pixel_values": pixels, "pixel_attention_mask": valid, "spatial_shapes": torch.tensor([[4, 4], [2, 4]])}
    hidden = model(**batch, output_hidden_states=True).hidden_states
    junk = batch | {"pixel_values": pixels.masked_fill(valid[..., None] == 0, 5.0)}
    profile, other = (measured(model, given) for given in (batch, junk))
    expected = [(metrics.token_cosine(h[:1]) + metrics.token_cosine(h[1:, :8])).item() / 2 for h in hidden]
    assert profile["token_cosine", "block"].tolist() == pytest.approx(expected)
    for key, value in table(other).items():
        assert value == pytest.approx(table(profile)[key], rel=1e-6), key


def test_special_tokens_are_left_out_with_the_prefix():
    model, batch = hf_zoo.build("bert"), hf_zoo.batch("bert", padded=False)
    special = torch.zeros_like(batch["input_ids"])
    special[:, [0, -1]] = 1
    hidden = model(**batch, output_hidden_states=True).hidden_states
    profile = ac.measure(model, [batch | {"special_tokens_mask": special}], prefix="out", progress=False)
    expected = [metrics.token_cosine(h[:, 1:-1]).mean().item() for h in hidden]
    assert profile["token_cosine"].tolist() == pytest.approx(expected)
    assert profile.context["prefix"] == "the tokeniser's special tokens out"
    assert ac.measure(model, [batch], prefix="out", progress=False).context["prefix"] == "0 prefix tokens out"


@pytest.mark.parametrize("name", ["vit", "dinov2_registers", "llama", "gpt2", "bart_encoder"])
def test_blocks_are_the_library_own_hidden_states(name):
    model, batch, entry = hf_zoo.build(name), hf_zoo.batch(name, padded=False), ZOO[name]
    out = model(**batch, output_hidden_states=True)
    hidden = out.encoder_hidden_states if entry.kind == "seq2seq" else out.hidden_states
    profile = ac.measure(model, [batch], part=entry.part, prefix="out", progress=False)
    inner = hidden[: len(hidden) - 1]  # the last one has gone through the final norm in some models
    expected = [metrics.token_cosine(h[:, entry.prefix :]).mean().item() for h in inner]
    assert profile["token_cosine"][: len(inner)].tolist() == pytest.approx(expected)


def test_a_model_of_two_stacks_is_read_by_part():
    model, batch = hf_zoo.build("bart_encoder"), hf_zoo.batch("bart_encoder")
    with pytest.raises(AcutanceError, match=r"encoder\.layers, decoder\.layers.*part='encoder'"):
        measured(model, batch)
    with pytest.raises(AcutanceError, match=r"no part 'middle'.*encoder"):
        measured(model, batch, part="middle")
    encoder, decoder = (measured(model, batch, part=part) for part in ("encoder", "decoder"))
    assert encoder.context["part"] == "encoder"
    for profile, stack in ((encoder, model.encoder), (decoder, model.decoder)):
        assert len(profile["token_cosine", "block"]) == len(stack.layers) + 1


def git(transformers, head="GitModel"):
    return getattr(transformers, head)(transformers.GitConfig(vision_config=hf_zoo.VISION, **hf_zoo.TEXT))


def longt5(transformers):
    return transformers.LongT5Model(transformers.LongT5Config(**hf_zoo.T5, local_radius=3))


@pytest.mark.parametrize(
    ("build", "parts"),
    [
        (git, ["image_encoder.vision_model.encoder", "encoder"]),
        (
            lambda library: git(library, "GitForCausalLM"),
            ["git.image_encoder.vision_model.encoder", "git.encoder"],
        ),
        (longt5, ["encoder", "decoder"]),
    ],
)
def test_a_stack_beside_another_is_named(build, parts):
    model = build(pytest.importorskip("transformers")).eval()
    with pytest.raises(SeveralStacksError, match=rf"part='{parts[0]}'") as refused:
        sites.find(model)
    assert refused.value.parts == parts
    assert len(sites.find(model.get_submodule(parts[1]))) == 3
    ac.mitigate(model, "neutreno:0.6", part=parts[0])
    assert len(sites.record(model)) == len(sites.find(model.get_submodule(parts[0]))) == 3


class AroundADecoder(nn.Module):
    """A user's own model: only the path of the layers says that they are a decoder's."""

    def __init__(self):
        super().__init__()
        self.read = nn.Embedding(60, 32, dtype=torch.float64)
        self.decoder = hf_zoo.build("t5_decoder").decoder

    def forward(self, input_ids, attention_mask, decoder_input_ids):
        return self.decoder(
            input_ids=decoder_input_ids,
            encoder_hidden_states=self.read(input_ids),
            encoder_attention_mask=attention_mask,
        )


def test_the_mask_of_a_decoder_is_told_by_its_path():
    model, batch = AroundADecoder().eval(), hf_zoo.batch("t5_decoder")
    assert batch["attention_mask"].shape != batch["decoder_input_ids"].shape
    assert table(measured(model, batch)) == table(measured(model, batch, part="decoder"))
    model.encoder_decoder = nn.ModuleDict({"encoder": hf_zoo.build("t5_encoder").encoder})
    assert [sites.sides(model, part)["decoder"] for part in ("decoder", "encoder_decoder.encoder")] == [True, False]


@pytest.mark.parametrize("name", ["swin", "segformer"])
def test_pyramids_are_measured(name):
    model, batch = hf_zoo.build(name), hf_zoo.batch(name)
    profile = ac.measure(model, [batch], metrics=["token_cosine", "attention_entropy"], tap=TAPS, progress=False)
    depth = len(sites.find(model))
    assert [r.layer for r in profile.select("token_cosine", "block")] == list(range(depth + 1))
    assert [r.layer for r in profile.select("attention_entropy")] == list(range(1, depth + 1))
    assert {r.count for r in profile.readings} == {2}


@pytest.mark.parametrize("tap", ["block", "attention"])
def test_windows_are_not_taken_for_samples(tap):
    model, batch = hf_zoo.build("swin"), hf_zoo.batch("swin")
    alone = ac.measure(model, [batch], metrics="attention_entropy", tap=tap, progress=False)
    beside = ac.measure(model, [batch], metrics=["token_cosine", "attention_entropy"], progress=False)
    assert alone.readings == tuple(r for r in beside.readings if r.metric == "attention_entropy")
    assert {r.count for r in alone.readings} == {2}
    if tap == "attention":
        branch = ac.measure(model, [batch], metrics="token_cosine", tap=tap, progress=False)
        assert {r.count for r in branch.readings} == {2}


def test_windows_that_move_are_not_compared():
    model, batch = hf_zoo.build("swin"), hf_zoo.batch("swin")
    profile = ac.measure(model, [batch], metrics=["attention_entropy", "attention_cosine"], progress=False)
    assert {r.metric for r in profile.readings} == {"attention_entropy"}
    with pytest.raises(AcutanceError, match="windows that move"):
        ac.measure(model, [batch], metrics="attention_cosine", progress=False)


def test_a_model_past_the_interface_is_read():
    from transformers import BloomConfig, BloomModel

    torch.manual_seed(0)
    model = BloomModel(BloomConfig(hidden_size=32, n_layer=3, n_head=4, vocab_size=60)).eval()
    ids = torch.randint(3, 60, (2, 8))
    assert len(ac.measure(model, [ids], metrics="attention_entropy", progress=False).readings) == 3
    profile = ac.measure(model, [ids], progress=False)
    hidden = model(ids, output_hidden_states=True).hidden_states
    expected = [metrics.token_cosine(h).mean().item() for h in hidden[:-1]]
    assert profile["token_cosine"][:3].tolist() == pytest.approx(expected)
    assert len(profile["token_cosine"]) == 4


def albert():
    from transformers import AlbertConfig, AlbertModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 60}
    return AlbertModel(AlbertConfig(num_hidden_layers=4, **sizes)).double().eval()


def test_layers_that_share_a_module_are_read_one_by_one():
    model, ids = albert(), torch.randint(3, 60, (2, 8))
    profile = ac.measure(model, [ids, ids], metrics=["token_cosine", "attention_entropy"], progress=False)
    hidden = model(ids, output_hidden_states=True).hidden_states
    assert profile["token_cosine"].tolist() == pytest.approx([metrics.token_cosine(h).mean().item() for h in hidden])
    model.set_attn_implementation("eager")
    weights = model(ids, output_attentions=True).attentions
    entropy = [-(A * A.clamp_min(1e-300).log()).sum(-1).mean().item() for A in weights]
    assert profile["attention_entropy"].tolist() == pytest.approx(entropy, rel=1e-6)
    with pytest.raises(AcutanceError, match="all its layers are one module"):
        ac.mitigate(model, "neutreno:0.6")


def test_layers_that_run_twice_are_an_error():
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body = hf_zoo.build("bert")

        def forward(self, ids):
            return self.body(ids).last_hidden_state + self.body(ids.flip(1)).last_hidden_state

    with pytest.raises(AcutanceError, match="layer 1 ran again after layer 3"):
        ac.measure(Twice(), [torch.randint(3, 60, (2, 8))], progress=False)


@pytest.mark.parametrize("channels_last", [False, True])
def test_grids_of_unknown_models_are_read_as_tokens(channels_last):
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.LayerNorm(6)

        def forward(self, x):
            return self.norm(x) if channels_last else self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    model = torch.nn.Sequential(Block(), Block()).double()
    x = torch.randn(2, 4, 5, 6, dtype=torch.float64)
    grid = x if channels_last else x.permute(0, 3, 1, 2)
    expected = [metrics.token_cosine(y.flatten(1, 2)).mean().item() for y in (x, model[0].norm(x))]
    assert ac.measure(model, [grid], progress=False)["token_cosine"][:2].tolist() == pytest.approx(expected)


def test_measuring_leaves_no_trace():
    model, batch = hf_zoo.build("llama"), hf_zoo.batch("llama")
    before = hf_zoo.output(model, batch)
    measured(model, batch)
    assert torch.equal(hf_zoo.output(model, batch), before)
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert "_acutance_site" not in module.__dict__
    attention = model.layers[0].self_attn
    assert attention.config is model.config


@pytest.mark.parametrize("part", ["vision_model", "vision_model.encoder"])
def test_prefix_tokens_of_a_part_are_found_around_it(part):
    from transformers import CLIPConfig, CLIPModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    text = sizes | {"vocab_size": 60, "max_position_embeddings": 32, "eos_token_id": 2}
    torch.manual_seed(0)
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=sizes | {"image_size": 16, "patch_size": 4})).eval()
    batch = {
        "input_ids": torch.randint(3, 60, (2, 9)),
        "attention_mask": torch.tensor([[1] * 9, [1] * 6 + [0] * 3]),  # the text's: it says nothing of the image
        "pixel_values": torch.randn(2, 3, 16, 16),
    }
    hidden = model.vision_model(batch["pixel_values"], output_hidden_states=True).hidden_states
    profile = ac.measure(model, [batch], part=part, prefix="out", progress=False)
    assert profile["token_cosine"].tolist() == pytest.approx(
        [metrics.token_cosine(h[:, 1:]).mean().item() for h in hidden]
    )
    text_part = part.replace("vision", "text")
    assert (
        "0 prefix tokens" in ac.measure(model, [batch], part=text_part, prefix="out", progress=False).context["prefix"]
    )


@pytest.mark.parametrize("part", [None, "encoder"])
def test_detection_tokens_behind_the_image_are_left_out_with_the_prefix(part):
    model, batch = hf_zoo.build("yolos"), hf_zoo.batch("yolos")
    hidden = model(**batch, output_hidden_states=True).hidden_states
    assert hidden[0].shape[1] == 1 + 4 * 4 + 3
    profiles = {
        prefix: ac.measure(model, [batch], prefix=prefix, part=part, progress=False) for prefix in ("in", "out")
    }
    for prefix, content in (("in", slice(None)), ("out", slice(1, -3))):
        assert profiles[prefix].context["prefix"] == f"1 prefix and 3 trailing tokens {prefix}"
        # the library's own last state has gone through the final norm
        assert profiles[prefix]["token_cosine"][:-1].tolist() == pytest.approx(
            [metrics.token_cosine(h[:, content]).mean().item() for h in hidden[:-1]]
        )


@pytest.mark.parametrize("tap", ["block", "attention"])
def test_tokens_that_join_on_the_way_are_not_taken_for_content(tap):
    from transformers import EomtConfig, EomtForUniversalSegmentation

    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3, "image_size": 32, "patch_size": 8}
    model = EomtForUniversalSegmentation(EomtConfig(**sizes, num_blocks=1, num_queries=5, num_register_tokens=2))
    batch, options = {"pixel_values": torch.randn(2, 3, 32, 32)}, {"tap": tap, "progress": False}
    assert len(ac.measure(model, [batch, batch], **options)["token_cosine"]) >= 3
    with pytest.raises(AcutanceError, match=r"layer 3 has 24 tokens, the first reading had 19.*prefix='in'"):
        ac.measure(model, [batch], prefix="out", **options)


def test_attention_metrics_leave_detection_tokens_out_too():
    model, batch = hf_zoo.build("yolos"), hf_zoo.batch("yolos")
    tokens = measured(model, batch, prefix="out")
    with torch.no_grad():
        records = []
        handles = [site.observe(records.append) for site in sites.find(model)]
        model(**batch)
        for handle in handles:
            handle.remove()
    content = torch.zeros(2, 20, dtype=torch.bool)
    content[:, 1:17] = True
    for layer, record in enumerate(records, 1):
        rows = record.A.dense()[:, :, 1:17]
        entropy = -(rows * rows.log()).sum(-1).mean().item()
        assert table(tokens)["attention_matrix", layer, "attention_entropy"] == pytest.approx(entropy)
        branch = metrics.token_cosine(record.branch, content).mean().item()
        assert table(tokens)["attention", layer, "token_cosine"] == pytest.approx(branch)


def test_a_decoder_without_an_encoder_has_the_usual_mask():
    model, batch = hf_zoo.build("opt"), hf_zoo.batch("opt")
    assert table(measured(model, batch, part="decoder")) == table(measured(model, batch))


def test_a_model_may_be_called_cross_something():
    class Ranker(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.cross_encoder = hf_zoo.build("bert")

    assert len(sites.find(Ranker())) == 3


def test_windows_are_noticed_where_nobody_knew_of_them(monkeypatch):
    model, batch = hf_zoo.build("swin"), hf_zoo.batch("swin")
    monkeypatch.setattr("acutance.sites.patched.has_windows", lambda attention: False)
    with ac.mitigate(model, "featscale"), pytest.raises(AcutanceError, match=r"into a batch of 8, perhaps windows"):
        hf_zoo.output(model, batch)


def test_no_attention_matrix_is_formed():
    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **kwargs or {})
            for tensor in tree_leaves(out):
                if isinstance(tensor, torch.Tensor):
                    self.size = max(self.size, tensor.numel())
            return out

    tokens = 1500
    model = hf_zoo.build("llama", max_position_embeddings=2048).float()
    ids = torch.randint(3, 60, (1, tokens))
    with Largest() as largest:
        ac.measure(model, [ids], metrics=["attention_entropy", "nonlocal_energy"], tap=TAPS, progress=False)
    assert 0 < largest.size < tokens**2  # not even one head's
