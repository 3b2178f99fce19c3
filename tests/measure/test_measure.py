"""measure reads what it says it reads, and leaves the model as it found it."""

import json

import numpy as np
import pytest
import torch
from embedding import embedded

import acutance as ac
from acutance.errors import AcutanceError, NonFiniteError
from acutance.measure.reader import available_metrics
from acutance.models import ViT


@pytest.fixture
def model() -> ViT:
    torch.manual_seed(0)
    return ViT(
        image_size=8,
        patch_size=2,
        in_chans=1,
        dim=24,
        depth=3,
        heads=2,
        num_classes=4,
        registers=1,
        drop_path=0.5,
    )


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(7, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def batches(images: torch.Tensor, size: int) -> list[torch.Tensor]:
    return list(images.split(size))


@torch.no_grad()
def residual_stream(model: ViT, images: torch.Tensor) -> list[torch.Tensor]:
    """Written out, block by block."""
    x, v0 = embedded(model, images), None
    stream = [x]
    for block in model.blocks:
        x, v0 = block(x, v0)
        stream.append(x)
    return stream


def test_block_tap_is_the_residual_stream(model: ViT, images: torch.Tensor) -> None:
    profile = ac.measure(model, batches(images, 3), metrics=["token_cosine", "rank_residual"], progress=False)
    model.eval()
    for layer, tokens in enumerate(residual_stream(model, images)):
        per_sample = ac.metrics.token_cosine(tokens).double()
        reading = profile.select("token_cosine")[layer]
        assert reading.layer == layer
        assert reading.mean == pytest.approx(per_sample.mean().item(), abs=1e-6)
        assert reading.std == pytest.approx(per_sample.std().item(), abs=1e-6)
        assert reading.count == 7


@pytest.mark.parametrize("size", [1, 2, 7])
def test_batch_size_does_not_matter(model: ViT, images: torch.Tensor, size: int) -> None:
    kwargs = {"metrics": "all", "tap": ("block", "attention", "values", "final"), "progress": False}
    one, other = (
        ac.measure(model, batches(images, 7), **kwargs),
        ac.measure(model, batches(images, size), **kwargs),
    )
    assert [r.metric for r in one.readings] == [r.metric for r in other.readings]
    for a, b in zip(one.readings, other.readings, strict=True):
        assert b.mean == pytest.approx(a.mean, rel=1e-4, abs=1e-5), a
        assert b.std == pytest.approx(a.std, rel=1e-3, abs=1e-4), a


def test_other_taps_read_the_branch_the_values_and_the_final_norm(model: ViT, images: torch.Tensor) -> None:
    profile = ac.measure(model, [images], metrics=["norm_spread"], tap=["attention", "values", "final"], progress=False)
    model.eval()
    with torch.no_grad():
        block = model.blocks[0]
        normed = block.norm1(embedded(model, images))
        branch = block.attn(normed, None)[0]
        values = block.attn.qkv(normed)[..., -24:]
        expected = {"attention": branch, "values": values, "final": model.forward_features(images)}
    for tap, tokens in expected.items():
        want = ac.metrics.norm_spread(tokens).mean().item()
        assert profile["norm_spread", tap][0] == pytest.approx(want, abs=1e-6)
    assert profile.layers("norm_spread", "final") == [3]
    assert profile.layers("norm_spread", "values") == [1, 2, 3]


def test_prefix_tokens_in_or_out(model: ViT, images: torch.Tensor) -> None:
    out = ac.measure(model, [images], metrics="token_cosine", prefix="out", progress=False)
    model.eval()
    patches = [tokens[:, 2:] for tokens in residual_stream(model, images)]  # class token and one register
    want = [ac.metrics.token_cosine(tokens).mean().item() for tokens in patches]
    np.testing.assert_allclose(out["token_cosine"], want, atol=1e-6)
    assert out.context["prefix"] == "2 prefix tokens out"
    inside = ac.measure(model, [images], metrics="token_cosine", progress=False)
    assert np.abs(inside["token_cosine"] - out["token_cosine"]).max() > 1e-4


def test_attention_metrics_read_the_operator(model: ViT, images: torch.Tensor) -> None:
    names = ["attention_entropy", "head_cosine", "attention_cosine", "nonlocal_energy"]
    profile = ac.measure(model, [images], metrics=names, progress=False)
    maps = [ac.attention_maps(model, image, layers=[1, 2, 3]) for image in images]
    dense = {layer: torch.tensor(np.stack([m[layer] for m in maps])).double() for layer in (1, 2, 3)}
    for layer, A in dense.items():
        entropy = -(A * A.log()).sum(-1).mean()
        assert profile["attention_entropy", "attention_matrix"][layer - 1] == pytest.approx(entropy.item(), abs=1e-5)
    flat = {layer: A.flatten(2) for layer, A in dense.items()}
    successive = [torch.cosine_similarity(flat[n], flat[n + 1], dim=-1).mean().item() for n in (1, 2)]
    np.testing.assert_allclose(profile["attention_cosine"], successive, atol=1e-5)
    assert profile.layers("attention_cosine") == [2, 3]
    assert profile.layers("head_cosine") == [1, 2, 3]


def test_leaves_the_model_as_it_found_it(model: ViT, images: torch.Tensor) -> None:
    model.train()
    model.blocks[1].eval()  # frozen by its owner
    state, rng = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    ac.measure(model, [images], metrics="all", tap=["block", "attention", "final"], progress=False)
    assert model.training
    assert model.blocks[2].attn.training
    assert not model.blocks[1].mlp.training
    assert torch.equal(rng, torch.get_rng_state())
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert all(block.attn.observer is None for block in model.blocks)


def test_hooks_go_even_when_a_batch_fails(model: ViT) -> None:
    with pytest.raises(AcutanceError):
        ac.measure(model, [torch.randn(2, 1, 9, 9)], tap=["block", "attention"], progress=False)
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert all(block.attn.observer is None for block in model.blocks)


def test_a_nan_token_names_layer_and_metric(model: ViT, images: torch.Tensor) -> None:
    with torch.no_grad():
        model.blocks[1].mlp.fc2.bias[3] = torch.nan
    with pytest.raises(NonFiniteError, match=r"layer 2.*token_cosine at block"):
        ac.measure(model, [images], progress=False)


@pytest.mark.parametrize("metric", available_metrics())
def test_no_metric_averages_a_nan(model: ViT, images: torch.Tensor, metric: str) -> None:
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match=metric):
        ac.measure(model, [images], metrics=metric, tap="attention", progress=False)


def test_a_nan_in_attention_is_told_of_by_the_block_that_is_read_anyway(model: ViT, images: torch.Tensor) -> None:
    with torch.no_grad():
        model.blocks[1].attn.qkv.weight[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match=r"layer 2.*token_cosine at block"):
        ac.measure(model, [images], metrics=["token_cosine", "nonlocal_energy"], tap="block", progress=False)


def test_a_documented_infinity_is_reported_as_such(model: ViT, images: torch.Tensor) -> None:
    """Tokens whose mean is zero have HFC/LFC = ∞, with no NaN beside it."""
    for name, parameter in model.named_parameters():
        if name in ("norm.bias", "norm.weight"):
            parameter.data.zero_()
    model.norm.register_forward_hook(lambda *_: torch.tensor([1.0, -1.0]).repeat(7, 9)[..., None].expand(7, 18, 24))
    reading = ac.measure(model, [images], metrics="hfc_lfc_frobenius", tap="final", progress=False).readings[0]
    assert (reading.mean, reading.std, reading.count) == (np.inf, np.inf, 7)


def test_batches_may_be_tuples_or_mappings(model: ViT, images: torch.Tensor) -> None:
    plain = ac.measure(model, [images], metrics="token_cosine", progress=False)
    labelled = ac.measure(model, [(images, torch.zeros(7))], metrics="token_cosine", progress=False)
    named = ac.measure(model, iter([{"images": images}]), metrics="token_cosine", progress=True)
    assert plain.readings == labelled.readings == named.readings


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"metrics": []}, "unknown metric .none.; known: token_cosine"),
        ({"tap": ()}, "unknown tap .none."),
        ({"prefix": "maybe"}, "'in' or 'out', not 'maybe'"),
        ({"metrics": "smoothness"}, "unknown metric smoothness; known: token_cosine"),
        ({"tap": "head"}, "unknown tap head; known: block"),
        ({"batches": []}, "no batches"),
        ({"batches": ["text"]}, "not str"),
        ({"batches": torch.zeros(2, 1, 8, 8)}, r"a tensor \(2, 1, 8, 8\), which is one batch: write \[batch\]"),
        ({"batches": {"x": torch.zeros(2, 1, 8, 8)}}, r"a dict, which is one batch"),
    ],
)
def test_errors_say_what_to_do(model: ViT, images: torch.Tensor, arguments: dict, message: str) -> None:
    with pytest.raises(AcutanceError, match=message):
        ac.measure(model, **{"batches": [images], "progress": False, **arguments})


@pytest.mark.parametrize("verb", [ac.measure, ac.explain, ac.mitigate])
def test_a_name_is_no_model(verb) -> None:
    with pytest.raises(AcutanceError, match=r"torch\.nn\.Module, not 'gpt2': load it first"):
        verb("gpt2", [torch.zeros(1)])


def test_explain_refuses_a_batch_by_itself(model: ViT, images: torch.Tensor) -> None:
    with pytest.raises(AcutanceError, match="which is one batch"):
        ac.explain(model, images)


def test_successive_layers_need_two(images: torch.Tensor) -> None:
    shallow = ViT(image_size=8, patch_size=2, in_chans=1, dim=24, depth=1, heads=2, num_classes=4)
    with pytest.raises(AcutanceError, match="needs two of them"):
        ac.measure(shallow, [images], metrics="attention_cosine", progress=False)


def test_context_says_where_and_with_what(model: ViT, images: torch.Tensor) -> None:
    ac.mitigate(model, ac.NeuTRENO(0.4))
    profile = ac.measure(model.double(), [images.double()], progress=False)
    context = json.loads(profile.to_json())["context"]
    assert context["mitigation"] == "neutreno:0.4"
    assert context["dtype"] == "float64"
    assert context["taps"] == ["block"]
    assert context["samples"] == 7
    assert context["versions"]["torch"] == torch.__version__


def test_memory_does_not_grow_with_the_number_of_batches(model: ViT, images: torch.Tensor) -> None:
    """Only running means are kept: no activation of a finished batch is alive when the next one comes."""
    import gc
    import weakref

    alive: list[weakref.ref] = []

    def stream():
        for _ in range(4):
            gc.collect()
            assert all(ref() is None for ref in alive)
            yield images

    hook = model.blocks[0].register_forward_hook(lambda _m, _a, out: alive.append(weakref.ref(out[0])))
    ac.measure(model, stream(), metrics="all", tap=["block", "attention"], progress=False)
    hook.remove()
    assert len(alive) == 4


def test_compiled_models_are_measured_eagerly(model: ViT, images: torch.Tensor) -> None:
    plain = ac.measure(model, [images], metrics="all", progress=False)
    wrapped = torch.compile(model, backend="aot_eager")
    assert ac.measure(wrapped, [images], metrics="all", progress=False).readings == plain.readings
    model.compile(backend="aot_eager")
    model.eval()(images)
    assert ac.measure(model, [images], metrics="all", progress=False).readings == plain.readings
    assert list(ac.attention_maps(wrapped, images[0], layers=[1])) == [1]


def test_available_metrics_are_all_measured(model: ViT, images: torch.Tensor) -> None:
    assert ac.measure(model, [images], metrics="all", progress=False).metrics == available_metrics()


@pytest.mark.parametrize(
    "read",
    [
        lambda model, images: ac.measure(model, [images], progress=False),
        lambda model, images: ac.explain(model, [images], progress=False),
        lambda model, images: ac.attention_maps(model, images[0], layers=[1]),
        lambda model, images: ac.laboratory.kernel_assumptions(model, [images]),
    ],
    ids=["measure", "explain", "attention_maps", "kernel_assumptions"],
)
def test_every_reader_leaves_each_module_in_its_own_mode(model: ViT, images: torch.Tensor, read) -> None:
    model.train()
    model.blocks[1].eval()  # frozen by its owner
    before = {name: module.training for name, module in model.named_modules()}
    read(model, images)
    assert {name: module.training for name, module in model.named_modules()} == before


def encoder() -> torch.nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()


def padded(lengths: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
    src = torch.randn(len(lengths), 6, 16, generator=torch.Generator().manual_seed(seed))
    return {"src": src, "src_key_padding_mask": torch.arange(6) >= torch.tensor(lengths)[:, None]}


def rows(batch: dict[str, torch.Tensor], *kept: int) -> dict[str, torch.Tensor]:
    return {name: value[list(kept)] for name, value in batch.items()}


@pytest.mark.parametrize("metrics", [["token_cosine", "norm_spread"], "all"])
def test_a_sample_without_tokens_is_no_sample(metrics) -> None:
    first, second, third = padded([6, 4, 0]), padded([0, 0, 0], 1), padded([0, 5, 6], 2)
    options = {"metrics": metrics, "tap": ["block", "attention", "values"], "progress": False}
    model = encoder()
    profile = ac.measure(model, [first, second, third], **options)
    alone = ac.measure(model, [rows(first, 0, 1), rows(third, 1, 2)], **options)
    assert profile.context["samples"] == 4
    assert {r.count for r in profile.readings} == {4}
    for a, b in zip(profile.readings, alone.readings, strict=True):
        assert (a.mean, a.std) == pytest.approx((b.mean, b.std), rel=1e-5, abs=1e-6)


def test_samples_without_any_tokens_are_refused() -> None:
    with pytest.raises(AcutanceError, match="no sample has a token that counts"):
        ac.measure(encoder(), [padded([0, 0])], progress=False)


def test_special_tokens_alone_are_no_content(images: torch.Tensor, monkeypatch) -> None:
    from acutance import sites

    monkeypatch.setattr(sites, "special_tokens", lambda *_: sites.SpecialTokens(20))
    model = ViT(image_size=8, patch_size=2, in_chans=1, dim=24, depth=1, heads=2, num_classes=4)
    with pytest.raises(AcutanceError, match=r"all 17 tokens of a sample are special.*prefix='in'"):
        ac.measure(model, [images], prefix="out", progress=False)


def test_nothing_to_compare_is_said_of_what_was_asked_for(images: torch.Tensor) -> None:
    model = ViT(image_size=8, patch_size=2, in_chans=1, dim=24, depth=1, heads=2, num_classes=4)
    with pytest.raises(AcutanceError, match=r"nothing was read: attention_cosine compares successive layers"):
        ac.measure(model, [images], metrics="attention_cosine", progress=False)
