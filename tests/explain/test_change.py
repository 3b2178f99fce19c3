"""The measured change of a layer by parts: against hooks set by hand, in every order that blocks come in."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from scipy import stats
from spectrum_worlds import DIM, set_branch, small_vit

import acutance as ac
from acutance import sites
from acutance.explain import ChangeReader, Shift, Spectrum
from acutance.explain.change import NEUTRAL, direction
from acutance.measure.walk import walk
from sites import hf_zoo, tiny_models

ratio = ac.metrics.hfc_lfc_frobenius


def log(tokens):
    """log HFC/LFC written out, by singular values."""
    high = tokens - tokens.mean(1, keepdim=True)
    low = tokens.shape[1] ** 0.5 * tokens.mean(1).norm(dim=-1)
    return (torch.linalg.svdvals(high).square().sum(-1).sqrt() / low).log().numpy()


def steps(*stream):
    return np.diff([log(x) for x in stream], axis=0)


def sequential(x, y, out, seen):
    return dict(zip(("attention", "mlp"), steps(x, x + y, out), strict=True))


def after_sums(x, y, out, seen, norms=("norm1", "norm2")):
    (one, normed), (two, _) = (seen[name] for name in norms)
    torch.testing.assert_close(one, x + y)
    return dict(zip(("attention", "norm1", "mlp", "norm2"), steps(x, one, normed, two, out), strict=True))


def side_by_side(x, y, out, seen):
    (attention, mlp), (last, first) = steps(x, x + y, out), steps(x, out - y, out)
    return {"attention": (attention + first) / 2, "mlp": (mlp + last) / 2}


def bare(name):
    return lambda: (hf_zoo.build(name), hf_zoo.batch(name, padded=False))


def ours(**options):
    return lambda: (tiny_models.shaken(tiny_models.vit(**options)), tiny_models.images())


def encoder(**options):
    return lambda: (tiny_models.encoder(**options), tiny_models.tokens())


def hooked(block):
    """What goes into the block and each of its modules, and comes out, by path; filled when the block runs."""
    seen = {}
    for path, module in block.named_modules():
        keep = partial(lambda path, _, args, out: seen.update({path: (args[0] if args else None, out)}), path)
        module.register_forward_hook(keep)
    return seen


# The model; the path of what puts out the attention's branch in a block; and the parts by hand.
CASES = {
    "vit": (ours(), "attn.proj", sequential),
    "vit post": (ours(norm="post"), "attn.proj", after_sums),
    "vit layer scale": (ours(layer_scale=0.5), "ls1", sequential),
    "torch pre": (encoder(norm_first=True), "dropout1", sequential),
    "torch post": (encoder(), "dropout1", after_sums),
    "gpt": (lambda: (tiny_models.gpt().double(), tiny_models.ids()), "attn.c_proj", sequential),
    "llama": (bare("llama"), "self_attn.o_proj", sequential),
    "gemma2": (bare("gemma2"), "post_attention_layernorm", sequential),
    "gpt_neox": (bare("gpt_neox"), "attention.dense", side_by_side),
    "cohere": (bare("cohere"), "self_attn.o_proj", side_by_side),
    "bert": (
        bare("bert"),
        "attention.output.dense",
        partial(after_sums, norms=("attention.output.LayerNorm", "output.LayerNorm")),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_parts_add_up_to_the_whole_and_are_those_of_hooks(name) -> None:
    build, branch, by_hand = CASES[name]
    with hf_zoo.in_float64(), sites.cached_lookup(), torch.no_grad():
        model, batch = build()
        layers = sites.layers_of(model.eval())
        readers = [ChangeReader(site, number) for site, number in layers]
        walk(model, [batch], *readers)
        for (site, _), reader in zip(layers, readers, strict=True):
            seen = hooked(site.block)
            model(**batch) if isinstance(batch, dict) else model(batch)
            (x, out), y = seen[""], seen[branch][1]
            wanted, found = by_hand(x, y, out if isinstance(out, torch.Tensor) else out[0], seen), reader.result()
            assert (list(found.parts), found.parallel) == (list(wanted), by_hand is side_by_side)
            for part, values in wanted.items():
                np.testing.assert_allclose(found.parts[part].by_sample, values, atol=1e-10)
            parts = [shift.by_sample for shift in found.parts.values()]
            np.testing.assert_allclose(np.sum(parts, 0), found.whole.by_sample, atol=1e-10)
            assert abs(found.attention.by_sample).max() > 1e-3, "the case must tell something"


def test_where_the_split_is_not_known_only_the_whole_is_given() -> None:
    """A norm on the sum, and nothing after it."""
    model = torch.nn.Sequential(*[tiny_models.PostNorm() for _ in range(2)]).double()
    seen, x = hooked(model[0]), tiny_models.tokens()
    found = ac.explain(model, [x], progress=False)
    np.testing.assert_allclose(found[1].change.whole.by_sample, steps(x, seen[""][1])[0], atol=1e-10)
    assert found[1].change.parts == {}
    assert "not known where only its whole is given" in " ".join(str(found).split())


def test_padding_counts_nowhere() -> None:
    model, batch = hf_zoo.build("bert"), hf_zoo.batch("bert")
    alone = {name: values[1:, :9] for name, values in batch.items()}
    with hf_zoo.in_float64():
        padded, single = (ac.explain(model, [each], progress=False)[2] for each in (batch, alone))
    for part, shift in padded.change.parts.items():
        np.testing.assert_allclose(shift.by_sample[1:], single.change.parts[part].by_sample, atol=1e-9)


def test_the_interval_is_students() -> None:
    values = np.array([-0.3, -0.1, -0.25, -0.2])
    wanted = stats.t.interval(0.95, 3, values.mean(), stats.sem(values))
    assert Shift(values).interval == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([-0.3, -0.31, -0.29], "smoothing"),
        ([0.3, 0.31, 0.29], "sharpening"),
        ([NEUTRAL, NEUTRAL / 2], "neutral"),
        ([-0.5, 0.3, 0.9], "unknown"),  # too few samples to tell the sign
        ([-0.5], "unknown"),
        ([0.0], "neutral"),
    ],
)
def test_verdicts_need_a_change_outside_the_band_whose_sign_is_sure(values, verdict) -> None:
    assert Shift(np.array(values)).verdict == verdict


def planted(*branches, **options) -> Spectrum:
    """Explained on noise: a ViT whose attention is uniform, with these H layer by layer."""
    model = small_vit(depth=len(branches), **options).double()
    for layer, H in enumerate(branches, 1):
        set_branch(model, layer, H)
        model.blocks[layer - 1].attn.qkv.weight.data[: 2 * DIM] = 0
    noise = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return ac.explain(model, [noise], progress=False)


def test_planted_layers_are_told() -> None:
    """Uniform attention changes the mean token alone, by 1 + s λ."""
    eye = torch.eye(DIM, dtype=torch.float64)
    nothing, sharp, smooth = (planted(factor * eye, class_token=False)[1] for factor in (0.0, -0.25, 5.0))
    assert nothing.change.attention.by_sample.tolist() == [0] * 8
    assert [at.change.attention.verdict for at in (nothing, sharp, smooth)] == ["neutral", "sharpening", "smoothing"]
    assert [at.verdict for at in (sharp, smooth)] == ["sharpening", "smoothing"]
    for at in (sharp, smooth):
        assert direction(at.tendency) == at.verdict
        assert at.tendency == pytest.approx(at.change.attention.mean, abs=0.3)


@pytest.mark.parametrize("seed", range(6))
def test_a_verdict_never_contradicts_its_row(seed) -> None:
    """Random models with weights of any size: what the row prints has the verdict's sign and size."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.empty(4, dtype=torch.float64).uniform_(-2, 2, generator=generator)
    H = torch.randn(4, DIM, DIM, generator=generator, dtype=torch.float64) / DIM
    found = planted(
        *[10**size * h + size * torch.eye(DIM) for size, h in zip(sizes, H, strict=True)],
        norm=["pre", "post"][seed % 2],
    )
    for layer, row in zip(found.layers, found.table().rows, strict=True):
        change, margin = map(float, row["change"].split(" ±"))
        low, high = layer.change.whole.interval
        wanted = {"smoothing": high < 0, "sharpening": low > 0, "neutral": abs(change) <= NEUTRAL + 0.005}
        assert wanted.get(layer.verdict, low <= 0 <= high), (row, margin)
        assert layer.verdict == row["verdict"] == layer.change.whole.verdict
        assert sum(shift.mean for shift in layer.change.parts.values()) == pytest.approx(change, abs=0.005)
    weights = Spectrum(tuple(replace(layer, change=None, scale=1.0) for layer in found.layers))
    for layer, row in zip(weights.layers, weights.table().rows, strict=True):
        word, number = row["tendency"].split()
        assert direction(layer.tendency) == word == layer.verdict
        assert float(number) == pytest.approx(layer.tendency, abs=0.005)
    correlation, share = found.agreement()
    pairs = [(layer.tendency, layer.change.attention.mean) for layer in found.layers]
    assert share == np.mean([a * b > 0 for a, b in pairs])
    assert correlation == pytest.approx(stats.spearmanr(pairs).statistic)


@pytest.mark.parametrize(("name", "center"), [("llama", False), ("gpt2", True)])
def test_the_tendency_takes_the_size_of_the_tokens_that_enter(name, center) -> None:
    with hf_zoo.in_float64(), torch.no_grad():
        model, batch = hf_zoo.build(name), hf_zoo.batch(name, padded=False)
        site = sites.find(model)[1]
        seen = hooked(site.block)
        layer = ac.explain(model, [batch], progress=False)[2]
        x = seen[next(path for path, module in site.block.named_modules() if module is site.pre_norm())][0]
    x = x - x.mean(-1, keepdim=True) if center else x
    s, H = float((1 / x.square().mean(-1).sqrt()).mean()), torch.zeros(32, 32, dtype=torch.float64)
    value, projection = (site.value_weight() * site.pre_norm_gain()).detach(), site.projection_weight().detach()
    for head in range(4):
        group, size = head // (site.heads // site.kv_heads), site.head_dim
        H += projection[:, head * size :][:, :size] @ value[group * size :][:size]
    d = len(H)
    assert layer.scale == pytest.approx(s, rel=1e-6)
    wanted = -0.5 * np.log(1 + 2 * s * float(H.trace()) / d + s**2 * float(H.square().sum()) / d)
    assert layer.tendency == pytest.approx(wanted, rel=1e-6)
