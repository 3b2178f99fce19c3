"""measure and attention_maps read what they say they read, and leave the model as they found it."""

import gc
import weakref
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from measured_vit import embedded, small_images, small_vit
from torch.utils.data import DataLoader, IterableDataset

import acutance as ac
from acutance import sites
from acutance.errors import AcutanceError, AcutanceWarning, NonFiniteError
from acutance.measure.reader import available_metrics
from acutance.models import ViT
from sites.tiny_models import left_alone
from tiny_folders import tiny

measure = partial(ac.measure, progress=False)


@torch.no_grad()
def residual_stream(model: ViT, images: torch.Tensor) -> list[torch.Tensor]:
    """Written out, block by block."""
    x, v0 = embedded(model.eval(), images), None
    stream = [x]
    for block in model.blocks:
        x, v0 = block(x, v0)
        stream.append(x)
    return stream


@pytest.mark.parametrize(("prefix", "skipped"), [("in", 0), ("out", 2)])  # class token and one register
def test_block_tap_is_the_residual_stream(model: ViT, images: torch.Tensor, prefix, skipped) -> None:
    profile = measure(model, images.split(3), metrics=["token_cosine", "rank_residual"], prefix=prefix)
    for layer, tokens in enumerate(residual_stream(model, images)):
        per_sample = ac.metrics.token_cosine(tokens[:, skipped:]).double()
        reading = profile.select("token_cosine")[layer]
        assert (reading.layer, reading.count) == (layer, 7)
        expected = per_sample.mean().item(), per_sample.std().item()
        assert (reading.mean, reading.std) == pytest.approx(expected, abs=1e-6)
    assert profile.context["prefix"] == f"2 prefix tokens {prefix}"


def test_other_taps_read_the_branch_the_values_and_the_final_norm(model: ViT, images: torch.Tensor) -> None:
    profile = measure(model, [images], metrics=["norm_spread"], tap=["attention", "values", "final"])
    block = model.eval().blocks[0]
    with torch.no_grad():
        normed = block.norm1(embedded(model, images))
        branch, values = block.attn(normed, None)[0], block.attn.qkv(normed)[..., -24:]
        expected = {"attention": branch, "values": values, "final": model.forward_features(images)}
    for tap, tokens in expected.items():
        want = ac.metrics.norm_spread(tokens).mean().item()
        assert profile["norm_spread", tap][0] == pytest.approx(want, abs=1e-6)
    assert profile.layers("norm_spread", "final") == [3]
    assert profile.layers("norm_spread", "values") == [1, 2, 3]
    assert (profile.context["taps"], profile.context["dtype"]) == (["attention", "values", "final"], "float32")


def test_attention_metrics_read_the_operator(model: ViT, images: torch.Tensor) -> None:
    names = ["attention_entropy", "head_cosine", "attention_cosine", "nonlocal_energy"]
    profile = measure(model, [images], metrics=names)
    maps = [ac.attention_maps(model, image, layers=[1, 2, 3]) for image in images]
    dense = [torch.tensor(np.stack([m[layer] for m in maps])).double() for layer in (1, 2, 3)]
    entropies = [-(A * A.log()).sum(-1).mean().item() for A in dense]
    np.testing.assert_allclose(profile["attention_entropy", "attention_matrix"], entropies, atol=1e-5)
    successive = [torch.cosine_similarity(a.flatten(2), b.flatten(2), dim=-1).mean().item() for a, b in pairwise(dense)]
    np.testing.assert_allclose(profile["attention_cosine"], successive, atol=1e-5)
    assert profile.layers("attention_cosine") == [2, 3]
    assert profile.layers("head_cosine") == [1, 2, 3]


@pytest.mark.parametrize(
    "read",
    [
        lambda model, images: measure(model, [images], metrics="all", tap=["block", "attention", "final"]),
        lambda model, images: ac.explain(model, [images], progress=False),
        lambda model, images: ac.attention_maps(model, images[0], layers=[1]),
        lambda model, images: ac.laboratory.kernel_assumptions(model, [images]),
    ],
    ids=["measure", "explain", "attention_maps", "kernel_assumptions"],
)
def test_every_reader_leaves_the_model_as_it_found_it(model: ViT, images: torch.Tensor, read) -> None:
    model.train()
    model.blocks[1].eval()  # frozen by its owner
    rng = torch.get_rng_state()
    with left_alone(model):
        read(model, images)
    assert torch.equal(rng, torch.get_rng_state())


@pytest.mark.parametrize(
    ("block", "options", "message"),
    [(0, {"metrics": metric, "tap": "attention"}, metric) for metric in available_metrics()]
    + [(1, {"metrics": ["token_cosine", "nonlocal_energy"]}, r"layer 2.*token_cosine at block")],  # read anyway
)
def test_no_metric_averages_a_nan(model: ViT, images: torch.Tensor, block, options, message) -> None:
    with torch.no_grad():
        model.blocks[block].attn.qkv.weight[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match=message):
        measure(model, [images], **options)


def test_a_documented_infinity_is_reported_as_such(model: ViT, images: torch.Tensor) -> None:
    """Tokens whose mean is zero have HFC/LFC = ∞, with no NaN beside it."""
    model.norm.register_forward_hook(lambda *_: torch.tensor([1.0, -1.0]).repeat(7, 9)[..., None].expand(7, 18, 24))
    reading = measure(model, [images], metrics="hfc_lfc_frobenius", tap="final").readings[0]
    assert (reading.mean, reading.std, reading.count) == (np.inf, np.inf, 7)


class Endless(IterableDataset):
    """Samples of which nobody knows the number, such as a stream's."""

    def __iter__(self):
        return iter(small_images())


def test_batches_may_be_tuples_mappings_or_a_stream(model: ViT, images: torch.Tensor) -> None:
    stream = DataLoader(Endless(), batch_size=7)
    forms = ([images], [(images, torch.zeros(7))], iter([{"images": images}]), stream)
    plain, *others = (ac.measure(model, form, metrics="token_cosine") for form in forms)
    others.append(ac.measure(model, stream, metrics="token_cosine", across_processes=True))
    assert [other.readings for other in others] == [plain.readings] * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"metrics": []}, "unknown metric .none.; known: token_cosine"),
        ({"prefix": "maybe"}, "unknown prefix maybe; known: in, out"),
        ({"tap": "head"}, "unknown tap head; known: block"),
        ({"batches": []}, "no batches"),
        ({"batches": ["text"]}, "not str"),
        ({"batches": [torch.randn(2, 1, 9, 9)], "tap": ["block", "attention"]}, r"images \(2, 1, 9, 9\)"),
        ({"batches": torch.zeros(2, 1, 8, 8)}, r"a Tensor in place of batches: write \[batch\]"),
        ({"model": small_vit(depth=1), "metrics": "attention_cosine"}, "nothing was read: .* needs two layers"),
    ],
)
def test_errors_say_what_to_do(model: ViT, images: torch.Tensor, arguments: dict, message: str) -> None:
    with left_alone(model), pytest.raises(AcutanceError, match=message):
        measure(**{"model": model, "batches": [images], **arguments})


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("gpt2", r"torch\.nn\.Module, not 'gpt2': load it first"),
        ([torch.zeros(1)], "not a list: the model comes first"),
        ({"weight": torch.zeros(1)}, "if it is a state dict, build the model"),
        (ViT, "not the class ViT: pass an instance"),
        (small_vit(depth=1).to("meta"), "of ViT is on the meta device"),
    ],
)
@pytest.mark.parametrize("verb", [ac.measure, ac.explain])
def test_what_is_no_model_is_told_what_to_pass(verb, model, message) -> None:
    with pytest.raises(AcutanceError, match=message):
        verb(model, [torch.zeros(1)])


IDS = torch.arange(20).view(2, 10)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([IDS.numpy()], r"ndarray: make a tensor of it, torch\.from_numpy"),
        (IDS.numpy(), r"ndarray: make a tensor of it"),
        ([{"input_ids": IDS.numpy()}], "dict of ndarray: make a tensor of it"),
        (["some text"], "str: tokenise it first"),
        ("some text", "str: tokenise it first"),
        ([{"text": ["some text"]}], "dict of str: tokenise it first"),
        ([IDS.tolist()], r"list of int: make a tensor of the ids"),
        (IDS[0].tolist(), r"int: make a tensor of the ids"),
        ([{"input_ids": IDS.tolist()}], r"dict of int: make a tensor of the ids"),
        ([IDS[0]], r"input_ids \(10,\) have no axis of samples: pass input_ids\[None\]"),
        ([{"tokens": IDS}], "BertModel takes no tokens: it takes input_ids, attention_mask"),
        ([{"input_ids": IDS.float()}], r"input_ids are torch\.float32.*pass input_ids\.long"),
        ([IDS + 5], "input_ids run from 5 to 24, BertModel has tokens 0 to 19: use the model's own tokenizer"),
        ([IDS - 1], "from -1 to 18"),
        ([IDS.to("meta")], "a batch is on the meta device"),
        ([IDS.repeat(1, 60)], r"weights are float32 on cpu, does not run on \(2, 600\) int64: The expanded size"),
        (3, "a list or a DataLoader of tensors or mappings, not a int"),
        (small_vit(), "a list or a DataLoader of tensors or mappings, not a ViT"),
        (None, "no batches: pass at least one"),
    ],
)
def test_batches_that_cannot_be_fed_are_told_what_to_pass(batches, message) -> None:
    bert = tiny("bert", vocab_size=20)
    with left_alone(bert), pytest.raises(AcutanceError, match=message) as caught:
        measure(bert, batches)
    assert "\n" not in str(caught.value)


def test_a_model_of_mixed_dtypes_says_so(model: ViT, images: torch.Tensor) -> None:
    model.blocks[1].half()
    with pytest.raises(AcutanceError, match=r"ViT, whose weights are float32 on cpu, float16 on cpu, does not run on"):
        measure(model, [images])


def test_samples_of_one_token_are_warned_of_once() -> None:
    bert, mask = tiny("bert", vocab_size=20), torch.tensor([[1, 0], [0, 1]])
    for batches in ([IDS[:, :1]] * 2, [{"input_ids": IDS[:, :2], "attention_mask": mask}]):
        with pytest.warns(AcutanceWarning, match="samples of one token") as caught:
            measure(bert, batches)
        assert len(caught) == 1


def test_memory_does_not_grow_with_the_number_of_batches(model: ViT, images: torch.Tensor) -> None:
    """Only running means are kept: no activation of a finished batch is alive when the next one comes."""
    alive: list[weakref.ref] = []

    def stream():
        for _ in range(3):
            gc.collect()
            assert all(ref() is None for ref in alive)
            yield images

    with model.blocks[0].register_forward_hook(lambda _m, _a, out: alive.append(weakref.ref(out[0]))):
        measure(model, stream(), metrics="all", tap=["block", "attention"])
    assert len(alive) == 3


def test_compiled_models_are_measured_eagerly(images: torch.Tensor) -> None:
    model = small_vit(depth=1)
    plain = measure(model, [images], metrics=["token_cosine", "attention_entropy"])
    wrapped = torch.compile(model, backend="eager")
    model.compile(backend="eager")
    model.eval()(images)
    for compiled in (wrapped, model):
        assert measure(compiled, [images], metrics=plain.metrics).readings == plain.readings


def test_fully_masked_samples_are_skipped_and_batch_sizes_do_not_matter() -> None:
    def padded(lengths: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
        src = torch.randn(len(lengths), 6, 16, generator=torch.Generator().manual_seed(seed))
        return {"src": src, "src_key_padding_mask": torch.arange(6) >= torch.tensor(lengths)[:, None]}

    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    first, second, third = padded([6, 4, 0]), padded([0, 0, 0], 1), padded([0, 5, 6], 2)
    read = partial(measure, encoder, metrics="all", tap=["block", "attention", "values"])
    profile = read([first, second, third])
    alone = read([{k: v[:2] for k, v in first.items()}, {k: v[1:] for k, v in third.items()}])
    assert profile.context["samples"] == 4
    for a, b in zip(profile.readings, alone.readings, strict=True):
        assert (a.mean, a.std, a.count) == pytest.approx((b.mean, b.std, 4), rel=1e-5, abs=1e-6)
    with pytest.raises(AcutanceError, match="no sample has a token that counts"):
        read([padded([0, 0])])


def test_special_tokens_alone_are_no_content(model: ViT, images: torch.Tensor, monkeypatch) -> None:
    monkeypatch.setattr(sites, "special_tokens", lambda *_: sites.SpecialTokens(20))
    with pytest.raises(AcutanceError, match=r"all 18 tokens of a sample are special.*prefix='in'"):
        measure(model, [images], prefix="out")


def test_maps_are_the_softmax_matrices() -> None:
    model, sample = small_vit(depth=12, heads=3).double(), small_images(1)[0].double()
    maps = ac.attention_maps(model, sample, layers=[1, 6, 12])
    assert list(maps) == [1, 6, 12]
    with torch.no_grad():
        block = model.blocks[0]
        q, k, _ = block.attn.qkv(block.norm1(embedded(model, sample[None])))[0].view(17, 3, 3, 8).permute(1, 2, 0, 3)
    np.testing.assert_allclose(maps[1], (q @ k.mT / 8**0.5).softmax(-1), atol=1e-6)
    np.testing.assert_allclose(maps[12].sum(-1), 1, atol=1e-6)
    assert len(maps.plot().axes) == 9
    assert repr(maps) == "AttentionMaps({1: (3, 17, 17), 6: (3, 17, 17), 12: (3, 17, 17)})"


def test_maps_are_those_of_evaluation_and_training_goes_on(images: torch.Tensor) -> None:
    model = small_vit(depth=2, dropout=0.5)
    expected, found = (ac.attention_maps(model.train(mode), images[0], layers=[2])[2] for mode in (False, True))
    np.testing.assert_array_equal(found, expected)
    assert model.training


@pytest.mark.parametrize(
    ("samples", "layers", "message"),
    [(1, [4], "layers .4.: .* from 1 to 3"), (1, [], "at least one, from 1 to 3"), (2, [1], "a batch of 2")],
)
def test_maps_that_cannot_be_are_refused(model: ViT, images: torch.Tensor, samples, layers, message) -> None:
    with left_alone(model), pytest.raises(AcutanceError, match=message):
        ac.attention_maps(model, images[:samples], layers=layers)
