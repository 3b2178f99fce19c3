"""Models of no known library: hand-written attention in its usual forms, by interception."""

import copy
import gc
import warnings
import weakref

import hf_zoo
import pytest
import tiny_models as models
import torch
from tiny_models import DEPTH, DIM, FORMS, HEADS, WRITTEN, Sharper, gpt, ids, joint, left_alone, readings
from torch import nn
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import acutance as ac
from acutance import sites
from acutance.errors import AcutanceError
from parity.parity_formula import Plain, rescale

STRENGTH = 0.6


def formula(model, tokens):
    """NeuTRENO written out, with whole matrices."""
    other = gpt(depth=len(model.h))
    layers = [(layer.attn, layer.attn.c_proj) for layer in other.h]
    plain = Plain(other, layers, heads=HEADS, mask=models.causal(tokens.shape[1]), strength=STRENGTH)
    return plain(dict(model.named_parameters()), tokens)


def gradients(model, out):
    return torch.autograd.grad(out.square().mean(), list(model.parameters()))


def assert_exact(model, run, tokens, out=None):
    out, wanted = run(tokens) if out is None else out, formula(model, tokens)
    torch.testing.assert_close(out, wanted, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gradients(model, out), gradients(model, wanted), rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("form", FORMS)
def test_neutreno_equals_the_formula_and_so_do_all_gradients(form):
    model = gpt(form, checkpointed=True).eval()
    before = model(ids())
    with ac.mitigate(model, f"neutreno:{STRENGTH}"):
        assert_exact(model, model, ids())
        out = model.train()(ids())  # checkpointed
        model(ids(seed=1))
        assert_exact(model, model, ids(), out)
        other = copy.deepcopy(model)  # has passes of its own
        assert_exact(other, other, ids())
    assert torch.equal(model(ids()), before)
    with ac.mitigate(model, "neutreno:0"):
        assert torch.equal(model(ids()), before)


@pytest.mark.parametrize("form", ["function", "bmm", "einsum"])  # the others are exported below
def test_compiled_as_one_graph(form):
    torch._dynamo.reset()
    model = gpt(form, depth=2)
    ac.mitigate(model, f"neutreno:{STRENGTH}")
    assert_exact(model, torch.compile(model, backend="aot_eager", fullgraph=True), ids())


@pytest.mark.parametrize("form", WRITTEN)
def test_attnscale_knows_what_a_row_sees(form):
    """U averages over the visible, so a constant stays one; and equal to the form that hands its mask over."""
    model, other = gpt(form), gpt("sdpa")
    for one in (model, other):
        ac.mitigate(one, "attnscale")
        for layer in one.h:
            layer.attn.mitigation.gain.data = torch.tensor([0.5, -0.3], dtype=torch.float64)
    torch.testing.assert_close(model(ids()), other(ids()), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("form", WRITTEN)
@torch.no_grad()
def test_every_reading_and_every_map_is_that_of_sdpa(form):
    options = {"tap": ["block", "attention", "values", "final"], "metrics": "all", "progress": False}
    found, wanted = (readings(ac.measure(gpt(kind), [ids()], **options)) for kind in (form, "sdpa"))
    assert found == pytest.approx(wanted, rel=1e-6, abs=1e-8)
    maps, expected = (ac.attention_maps(gpt(kind), ids(rows=1), layers=[1, 3]) for kind in (form, "sdpa"))
    for layer in (1, 3):
        assert maps[layer] == pytest.approx(expected[layer], rel=1e-6, abs=1e-8)
        assert maps[layer].sum(-1) == pytest.approx(1)


def test_explain_reads_weights_norm_and_data():
    model = gpt("bmm")
    spectrum = ac.explain(model, [ids()], progress=False)
    attention, gain = model.h[1].attn, model.h[1].norm1.weight
    H = attention.c_proj.weight @ attention.c_attn.weight[2 * DIM :] * gain
    wanted = torch.linalg.eigvals(H.detach()).abs().sort().values
    found = torch.tensor(abs(spectrum.layers[1].eigenvalues)).sort().values
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8)
    assert spectrum.layers[1].norm == "folded"
    assert spectrum.layers[1].dominance.samples == 2
    assert [(s.layer, s.name, s.heads) for s in sites.find(model)] == [(i + 1, f"h.{i}.attn", HEADS) for i in range(3)]


def by_interface(self, x):
    q, k, v = map(models.split, self.c_attn(x).chunk(3, dim=-1))
    u, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](self, q, k, v, None, is_causal=True)
    return self.c_proj(u.flatten(2))


def test_anybody_may_call_transformers_interface():
    ac.mitigate(hf_zoo.build("llama"), "neutreno:0.6").remove()  # takes it over
    model = gpt(run=by_interface)
    with ac.mitigate(model, f"neutreno:{STRENGTH}"):
        assert_exact(model, model, ids())


KEPT = []


class Halfway(ac.Mitigation):
    """The stream after a block, moved halfway back; and what the layer before kept."""

    def stream(self, x_in, x_out, call):
        assert call.residual is x_in
        return (x_in + x_out) / 2

    def output(self, u, w, call):
        KEPT.append((call.layer, call.previous))
        call.keep(call.layer)
        return u


@pytest.mark.parametrize("form", ["sdpa", "matmul"])
def test_the_stream_after_a_block_and_what_a_layer_keeps(form):
    model, tokens = gpt(form), ids()
    x = model.wte(tokens)
    for layer in model.h:
        x = (x + layer(x)) / 2
    expected = model.head(model.norm(x))
    KEPT.clear()
    with ac.mitigate(model, Halfway()):
        torch.testing.assert_close(model(tokens), expected, rtol=1e-12, atol=1e-12)
    assert KEPT == [(1, None), (2, 1), (3, 2)]


def test_scores_are_changed_before_the_softmax_where_q_is_known():
    model = gpt("sdpa")
    with ac.mitigate(model, Sharper()):
        found = model(ids())
    for layer in model.h:
        layer.attn.c_attn.weight.data[:DIM] *= 2
        layer.attn.c_attn.bias.data[:DIM] *= 2
    torch.testing.assert_close(found, model(ids()), rtol=1e-10, atol=1e-12)


def test_weights_of_unknown_names_are_needed_only_by_who_asks():
    model = gpt(run=lambda self, x: self.b(self.form(*self.a(x).chunk(3, dim=-1))), names=("a", "b"))
    with left_alone(model, lambda: model(ids())) as before:
        with pytest.raises(AcutanceError, match=r"layer 1: heads is not known.*W_"):
            ac.mitigate(model, "attnscale")
        with ac.mitigate(model, "neutreno:0.6"):
            assert not torch.equal(model(ids()), before)


def test_weights_that_are_not_all_there_is_are_refused():
    with pytest.raises(AcutanceError, match="does more than multiply"):
        ac.explain(gpt(run=lambda self, x: 2 * joint(self, x)), progress=False)


def test_a_block_that_does_not_reach_attend_is_an_error():
    model = gpt()
    model.h[1].run = lambda self, x: x + self.mlp(self.norm2(x))
    ac.mitigate(model, "neutreno:0.6")
    with pytest.raises(AcutanceError, match="1 of 3 blocks"):
        model(ids())


def test_a_branch_ends_where_the_weight_of_w_proj_is_handed_to_a_function():
    """As in WavLM: FeatScale did nothing there."""
    sizes = {"conv_dim": (8,), "conv_kernel": (4,), "conv_stride": (4,), "num_conv_pos_embedding_groups": 2}
    model, found = hf_zoo.tiny("WavLMModel", **hf_zoo.SIZES, **sizes), []
    sites.find(model)[0].attention.register_forward_hook(lambda _module, _args, out: found.append(out[0]))
    model(sound := torch.ones(1, 32).cumsum(1).sin())
    models.mitigated(model, "featscale")
    model(sound)
    own = dict(sites.find(model)[0].attention.mitigation.named_parameters())
    torch.testing.assert_close(found[1], rescale(found[0], own))


@pytest.mark.parametrize("name", ["SqueezeBertModel", "IBertModel"])  # a dict, and tensors with their scales
def test_what_is_no_tensor_and_no_tuple_is_refused(name):
    model = hf_zoo.tiny(name, **hf_zoo.TEXT, embedding_size=32)
    with pytest.raises(AcutanceError, match="in place of tokens"):
        ac.measure(model, [ids()], metrics=["attention_entropy"], progress=False)


@pytest.mark.parametrize("kinds", [{}, {"multi_query": False}, {"new_decoder_architecture": True, "num_kv_heads": 2}])
def test_rows_of_a_joint_projection_are_found_however_they_stand(kinds):
    model = hf_zoo.tiny("FalconModel", **hf_zoo.TEXT, **kinds)
    site, seen = sites.find(model)[0], []
    with site.observe(seen.append):
        model(ids())
    values = models.F.linear(seen[0].x, site.value_weight()).unflatten(-1, (site.kv_heads, -1)).transpose(1, 2)
    torch.testing.assert_close(seen[0].v, values.repeat_interleave(seen[0].v.shape[1] // site.kv_heads, 1))


WIDTHS = {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "vocab_size": 60}


@pytest.mark.parametrize(
    ("name", "options"),
    [("CodeGen", WIDTHS), ("Deberta", hf_zoo.TEXT), ("ConvBert", hf_zoo.TEXT | {"embedding_size": 32})],
)
def test_rows_in_another_order_are_refused_and_not_explained(name, options):
    """H had the rows of keys or of other heads for those of values."""
    model = hf_zoo.tiny(f"{name}Model", **options)
    for ask in (lambda: ac.explain(model, progress=False), lambda: ac.mitigate(model, "eigen:negative")):
        with pytest.raises(AcutanceError, match=r"order|heads · head_dim"):
            ask()


def maps(q, k, count=1):
    return [F.softmax(part @ k.mT, dim=-1) for part in q.chunk(count, dim=2)]


PARTS = {
    "of queries": lambda q, k, v: torch.cat([maps(part, k)[0] @ v for part in q.chunk(2, dim=2)], 2),
    "after all softmaxes": lambda q, k, v: torch.cat([A @ v for A in maps(q, k, 2)], 2),
    "of channels": lambda q, k, v: torch.cat([A @ part for A in maps(q, k) for part in v.chunk(2, dim=-1)], -1),
}


@pytest.mark.parametrize("form", PARTS.values(), ids=PARTS)
def test_attention_in_several_products_is_refused(form):
    split = lambda self, x: (models.split(part) for part in self.c_attn(x).chunk(3, dim=-1))  # noqa: E731
    model = gpt(run=lambda self, x: self.c_proj(models.merge(form(*split(self, x)))))
    with ac.mitigate(model, "neutreno:0.6"), pytest.raises(AcutanceError, match="several attention products"):
        model(ids())


def linear(self, x):
    q, k, v = (models.split(part) for part in self.c_attn(x).chunk(3, dim=-1))
    return self.c_proj(models.merge(F.elu(q) @ (F.elu(k).transpose(-2, -1) @ v)))


def test_attention_without_a_softmax_is_refused_and_its_tokens_are_read():
    model = gpt(run=linear)
    with ac.mitigate(model, "neutreno:0.6"), pytest.raises(AcutanceError, match="softmax and a product"):
        model(ids())
    assert len(ac.measure(model, [ids()], metrics=["token_cosine"], progress=False).readings) == DEPTH + 1


def test_what_nobody_sees_is_not_explained():
    with pytest.raises(AcutanceError, match="nobody saw the attention of 3 of 3 blocks"):
        ac.explain(hf_zoo.tiny("YosoModel", **hf_zoo.TEXT), [ids()], progress=False)


def test_a_norm_that_cannot_be_placed_is_not_known_rather_than_none():
    both = lambda self, x: x + joint(self, self.norm(x))  # noqa: E731, a block that is its own attention
    whole = [models.attention(run=both) for _ in range(DEPTH)]
    for one in whole:
        one.norm = nn.LayerNorm(DIM)
    with pytest.raises(AcutanceError, match="is not known"):
        sites.find(nn.Sequential(*whole))[0].pre_norm()
    hides = lambda self, x: next(x + f(self.norm1(x)) for f in list(self.children())[1:])  # noqa: E731
    hidden = [models.block(models.attention(), hides) for _ in range(2)]
    assert sites.find(nn.Sequential(*hidden))[0].pre_norm() is hidden[0].norm1


@pytest.mark.parametrize(
    ("name", "spec"), [*((n, "neutreno:0.6") for n in ("sdpa", "matmul", "llama")), ("sdpa", "eigen:negative")]
)
def test_threads_on_one_model_do_not_mix(name, spec):
    model = hf_zoo.build(name) if name == "llama" else gpt(name, checkpointed=True)
    ac.mitigate(model, spec)

    def work(number):
        return gradients(model, sites.tokens_out(model(ids(seed=number, count=5 + number))))

    expected = [[work(number)] * 5 for number in range(3)]
    torch.testing.assert_close(models.in_threads(3, work), expected, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("form", ["sdpa", "einsum"])
def test_an_exported_program_is_exact_or_refused(form, strict):
    torch._dynamo.reset()
    model, tokens = gpt(form, depth=2).eval(), ids()
    ac.mitigate(model, f"neutreno:{STRENGTH}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(model, (tokens,), strict=strict)
    except (AcutanceError, torch._dynamo.exc.TorchDynamoException, RuntimeError, AssertionError):
        assert strict, "only what Dynamo traces may be refused"  # on torch 2.6 by an assertion of its own
        return
    torch.testing.assert_close(program.module()(tokens), formula(model, tokens), rtol=1e-10, atol=1e-12)


def test_nothing_outlives_a_pass_whose_graph_is_gone():
    model = gpt()
    ac.mitigate(model, f"neutreno:{STRENGTH}")
    passes = sites.find(model)[0].stack.passes
    kept = []
    sites.find(model)[1].attention.register_forward_hook(lambda *_: kept.append(weakref.ref(passes.current().v0)))
    for seed in range(4):
        gradients(model, model(ids(seed)))
    model(ids())  # without a backward pass
    with torch.no_grad():
        model(ids())  # what is gone is forgotten as the next pass begins
    gc.collect()
    assert passes.current() is None
    assert not any(ref() is not None for ref in kept)
    assert not passes._by_input


def test_a_pass_that_fails_leaves_none_under_way():
    model = gpt()
    ac.mitigate(model, f"neutreno:{STRENGTH}")
    with pytest.raises(IndexError):
        model(ids() + 100)
    assert sites.find(model)[0].stack.passes.current() is None
    torch.testing.assert_close(model(ids()), formula(model, ids()), rtol=1e-10, atol=1e-12)


def test_a_gradient_taken_in_the_middle_of_a_pass_leaves_it_as_it_was():
    """Recomputation in it belongs to another pass, after which the first one goes on."""
    model = gpt(checkpointed=True)
    ac.mitigate(model, f"neutreno:{STRENGTH}")
    others = [model(ids(seed=1))]
    model.checkpointed = False

    def interrupt(*_):
        if others:
            gradients(model, others.pop())

    hook = model.h[1].register_forward_hook(interrupt)
    out = model(ids())
    hook.remove()
    assert_exact(model, None, ids(), out)


REFUSED = [
    ({"layers": [1.5]}, "whole numbers"),
    ({"layers": "1"}, "list of numbers"),
    ({"layers": [True]}, "whole numbers"),
    ({"layers": [1, 4]}, "1 to 3"),
    ({"layers": []}, "1 to 3"),
    ({"part": "encoder"}, "no part 'encoder'"),
]


@pytest.mark.parametrize(("options", "match"), REFUSED, ids=str)
def test_bad_input_is_refused_before_anything_changes(options, match):
    model = gpt()
    with left_alone(model, lambda: model(ids())), pytest.raises(AcutanceError, match=match):
        ac.mitigate(model, f"neutreno:{STRENGTH}", **options)


def test_an_optimiser_that_was_made_before_is_told_of_new_parameters():
    model = gpt()
    optimiser = torch.optim.AdamW(model.parameters())
    with pytest.warns(ac.AcutanceWarning, match="parameter_groups"):
        handle = ac.mitigate(model, "attnscale")
    groups = handle.parameter_groups(lr=0.1, weight_decay=0.0)
    optimiser.add_param_group(groups[0])
    new = {id(p) for name, p in model.named_parameters() if ".mitigation." in name}
    assert {id(p) for group in groups for p in group["params"]} == new
    assert groups[0]["lr"] == 0.1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ac.mitigate(nn.Sequential(*gpt().h), "attnscale")  # another model's optimiser is none of its business
