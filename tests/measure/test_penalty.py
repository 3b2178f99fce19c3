"""Penalties: their formulas, and the gradients of all parameters through a model's own forward pass."""

import copy
from functools import partial
from itertools import combinations, product

import pytest
import torch
from measured_vit import small_images, small_vit
from monitor_worlds import Net, assert_same, build
from test_monitor_frameworks import Lightning, Trainer
from test_structures import DIM, Block, Made, several
from torch import nn
from torch.nn.functional import cosine_similarity

import acutance as ac
from acutance.errors import AcutanceError
from acutance.measure.penalty import TERMS, gram_anchor, mooscomp, patch_diversity

MASK = torch.arange(6) < torch.tensor([6, 4, 5])[:, None]
LABELS = torch.tensor([[1, 0, 1, -100, 0, 0], [0, 1, 1, 0, 1, 0], [1, 1, 1, 1, 1, 0]])  # the third drops only padding
TEACHER = torch.randn(3, 6, 7, generator=torch.Generator().manual_seed(2)).double()
assert_close, cosine = torch.testing.assert_close, partial(cosine_similarity, dim=0)


def mean(values):
    return sum(values) / max(len(values), 1)


def written_cosine(x, change=lambda cos: cos):
    return mean([change(cosine(a, b)) for a, b in combinations(x, 2)])


def written_mooscomp(x, labels):
    kept, dropped = ([h for h, label in zip(x, labels, strict=True) if label == kind] for kind in (1, 0))
    return mean([cosine(a, b) for a, b in product(kept, dropped)])


def written_gram(x, teacher):
    pairs = product(zip(x, teacher, strict=True), repeat=2)
    return mean([(cosine(a, b) - cosine(s, t)) ** 2 for (a, s), (b, t) in pairs])


def gradients(value, model):
    model.zero_grad()
    value.backward()  # re-entrant checkpointing takes no other
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


def watched(model, of, **options):
    found = ac.penalty(of, **{"weight": 1.0, **options})
    found.attach(model)
    return found


@pytest.mark.parametrize(
    ("function", "written", "third"),
    [
        (mooscomp, written_mooscomp, [LABELS]),
        (patch_diversity, partial(written_cosine, change=abs), []),
        (gram_anchor, written_gram, [TEACHER]),
    ],
)
def test_formulas_are_those_of_their_papers(function, written, third):
    x = torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(0)).double()
    dirty = x.masked_fill(~MASK[..., None], torch.nan).requires_grad_()
    found = function(dirty, MASK, *third)
    expected = [written(*(y[i, own] for y in (x, *third))) for i, own in enumerate(MASK)]
    assert_close(found, torch.stack([torch.as_tensor(value).double() for value in expected]))
    assert torch.autograd.grad(found.sum(), dirty)[0].isfinite().all(), "padding may hold anything"
    assert torch.autograd.gradcheck(lambda x: function(x, MASK, *third), x.requires_grad_())


def tokens_of(blocks, run):
    """What the blocks give, by hooks of our own."""
    seen = []
    hooks = [block.register_forward_hook(lambda _m, _a, out: seen.append(out)) for block in blocks]
    run()
    for hook in hooks:
        hook.remove()
    return [x if isinstance(x, torch.Tensor) else x[0] for x in seen]


def vit_case():
    model = small_vit(registers=1).double()
    return model, model.blocks, partial(model, small_images(3).double()), [slice(2, 18)] * 3


def encoder_case():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).double()
    return model, model.layers, partial(model, torch.randn(3, 6, 8).double(), None, ~MASK), MASK


def llama_case():
    transformers, _ = pytest.importorskip("transformers"), torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.LlamaConfig(vocab_size=20, num_key_value_heads=1, use_cache=False, **sizes)
    model, batch = transformers.LlamaForCausalLM(config).double(), {"input_ids": torch.randint(20, (3, 6))}
    return model, model.model.layers, partial(model, **batch, attention_mask=MASK.long()), MASK


@pytest.mark.parametrize("case", [vit_case, encoder_case, llama_case])
def test_gradients_of_all_parameters_are_those_of_the_formula_written_out(case):
    model, blocks, run, counted = case()
    term = watched(model, "token_cosine", weight=0.3, layers=[1, -1], prefix="out")
    run()
    found, streams = term(), tokens_of(blocks, run)
    written = 0.3 * sum(mean([written_cosine(x[i, own]) for i, own in enumerate(counted)]) for x in streams[::2])
    assert_close(found, written)
    assert_close(gradients(found, model), gradients(written, model))


@pytest.mark.parametrize("name", TERMS)
def test_every_penalty_is_differentiable_through_a_model(name):
    model, _, run, _ = vit_case()
    for p in model.parameters():
        p.data += 0.2 * torch.randn_like(p)  # far from uniform attention
    teacher = small_vit(depth=2, registers=1, dim=16).double() if name == "gram_anchor" else None
    term, direction = watched(model, name, teacher=teacher), [torch.randn_like(p) for p in model.parameters()]

    def value(step):
        for p, d in zip(model.parameters(), direction, strict=True):
            p.data += step * d
        run()
        return term(torch.arange(18).expand(3, -1) % 3)

    slope = sum((g * d).sum() for g, d in zip(gradients(value(0), model), direction, strict=True))
    assert_close(slope, (value(1e-6) - value(-2e-6)) / 2e-6, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("tap", ["block", "attention", "values", "final"])
def test_a_penalty_is_what_measure_reads(tap):
    model, images, read = small_vit(registers=1).eval(), small_images(), {"tap": tap, "prefix": "out"}
    with (one := ac.penalty("rank_residual", weight=1.0, **read)).attach(model):
        model(images)
        found = one().item()
    expected = ac.measure(model, [images], metrics="rank_residual", progress=False, **read)
    assert found == pytest.approx(expected["rank_residual"][-1], rel=1e-5)


def test_packed_documents_are_samples_of_their_own():
    model, *_ = llama_case()
    ids, positions = torch.randint(20, (1, 9)), torch.cat([torch.arange(4), torch.arange(5)])[None]
    terms = [watched(model, name, layers=[2]) for name in ("token_cosine", "attention_entropy")]
    read = lambda **batch: (model(**batch), *(term() for term in terms))[1:]  # noqa: E731
    alone = [read(input_ids=ids[:, own]) for own in (slice(0, 4), slice(4, 9))]
    assert_close(read(input_ids=ids, position_ids=positions), tuple(map(mean, zip(*alone, strict=True))))


@pytest.mark.parametrize("name", ["token_cosine", "nonlocal_energy"])
def test_checkpointing_gives_the_same_gradients_or_is_refused(name):
    (model, _, own, _), (llama, _, theirs, _) = vit_case(), llama_case()
    llama.train().enable_input_require_grads()
    terms = [watched(each, name, layers=[1, 2, 3]) for each in (model, llama)]

    def found():
        return gradients(own().square().sum() + terms[0](), model) + gradients(
            theirs().logits.square().sum() + terms[1](), llama
        )

    expected = found()
    model.set_grad_checkpointing()
    llama.gradient_checkpointing_enable({"use_reentrant": False})
    assert_close(found(), expected)
    llama.gradient_checkpointing_enable({"use_reentrant": True})
    if name == "token_cosine":  # what a block gives has its gradient also so
        assert_close(found(), expected)
    else:
        with pytest.raises(AcutanceError, match=r"layer 1.*use_reentrant=False"):
            found()


def test_only_the_last_pass_with_gradients_counts_and_it_counts_once():
    model, images = small_vit(registers=1), small_images()
    term, nothing = ac.penalty("token_cosine", weight=1.0), partial(pytest.raises, AcutanceError, match="has no value")
    with term.attach(model):
        with nothing(), torch.no_grad():
            model(images)
            term()
        average = torch.optim.swa_utils.AveragedModel(model)  # a copy of the model, hooks included
        model(images[:1])
        model(images)
        with torch.no_grad():
            model.eval()(images[:2])
            average(images[:2])
        found = term().item()
        with nothing():
            term()
        with torch.autocast("cpu", torch.bfloat16):
            model(images)
            low = term()
        assert low.dtype == torch.float32, "tokens may be in half precision, sums are not"
        assert low.item() == pytest.approx(found, abs=1e-2)
        model.requires_grad_(False)(images)
        with pytest.raises(AcutanceError, match="no gradient at layer 3: it is frozen"):
            term()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_teacher_is_given_the_same_batch_and_stays_apart():
    model, blocks, run, _ = vit_case()
    teacher = small_vit(depth=2, registers=1, drop_path=0.9, dim=16).double()
    (patches,) = tokens_of(teacher.blocks[-1:], partial(teacher.eval(), *run.args))
    before, modules = copy.deepcopy(teacher.train().state_dict()), [*model.modules()]
    term = watched(model, "gram_anchor", teacher=teacher, weight=2.0)
    run()
    state, found = torch.get_rng_state(), term()
    assert torch.equal(torch.get_rng_state(), state), "the teacher draws nothing"
    (own,) = tokens_of(blocks[-1:], run)
    written = 2 * mean([written_gram(x[2:], y[2:].detach()) for x, y in zip(own, patches, strict=True)])
    assert_close(found, written)
    assert_close(gradients(found, model), gradients(written, model))
    assert_same(teacher.state_dict(), before)
    assert teacher.training
    assert modules == [*model.modules()]


def test_compiled_models_have_the_same_term():
    model, images = small_vit(), small_images()
    term, run = watched(model, "token_cosine", layers=[1, 2]), torch.compile(model, fullgraph=True, backend="eager")
    assert_close(*[(step(images), gradients(term(), model))[1] for step in (model, run)])
    with pytest.raises(AcutanceError, match=r"attach, then torch\.compile"):
        ac.penalty("token_cosine", weight=1.0).attach(run)


class Written(Net):
    """Its loss holds the penalty already, written out."""

    def forward(self, images, labels=None):
        output = {}
        (x,) = tokens_of(self.vit.blocks[-1:], lambda: output.update(super(Written, self).forward(images, labels)))
        return output | {"loss": output["loss"] + 0.5 * mean(list(map(written_cosine, x)))}


@pytest.mark.parametrize("kind", [Trainer, Lightning])
def test_frameworks_train_with_the_term(kind, tmp_path):
    framework, net, written = kind(), build(), build()
    written.__class__ = Written
    plain = framework.fit(tmp_path, build(), steps=3)
    with ac.penalty("token_cosine", weight=0.5).attach(net, add_to_loss=True):
        found = framework.fit(tmp_path, net, steps=3)
    assert_close(found, framework.fit(tmp_path, written, steps=3), rtol=1e-3, atol=1e-3)
    name = "state vit.blocks.1.mlp.fc2.weight"
    assert (found[name] - plain[name]).abs().max() > 1e-2, "the term matters"


def test_the_loss_has_the_batchs_share_where_the_trainer_adds_up():
    model, _, alone, _ = llama_case()
    labels, options = alone.keywords["input_ids"].masked_fill(~MASK, -100), {"weight": 7.0}
    run, term = partial(alone, labels=labels, num_items_in_batch=30), watched(model, "token_cosine", **options)
    plain, value = run().loss, term()
    ac.penalty("token_cosine", **options).attach(model, add_to_loss=True)
    assert_close(run().loss - plain, value * 12 / 30)  # 15 tokens, 12 of which are predicted
    with torch.no_grad():
        assert_close(run().loss, plain)
    with pytest.raises(AcutanceError, match="returned no 'loss'"):
        alone()


REFUSED = [
    ("token_cosin", {}, "unknown penalty token_cosin; known: token_cosine"),
    ("token_cosine", {"weight": float("nan")}, "weight=nan"),
    ("token_cosine", {"layers": 3}, "layers=3: give a list"),
    ("token_cosine", {"layers": [4]}, r"layers \[4\].*\[1, 2, 3\]"),
    ("token_cosine", {"tap": "final", "layers": [1]}, r"layers \[1\] have no tap 'final'.*\[3\]"),
    ("gram_anchor", {}, "teacher=None: gram_anchor needs a model"),
    ("gram_anchor", {"teacher": "run/last"}, "teacher='run/last': gram_anchor needs a model"),
    ("token_cosine", {"teacher": small_vit()}, r"gram_anchor needs a model.*others take none"),
]


def test_what_cannot_be_a_penalty_is_refused_and_changes_nothing():
    model, images = small_vit(), small_images()
    for given, options, said in [*REFUSED, ("gram_anchor", {"teacher": model}, "the teacher is the model itself")]:
        with pytest.raises(AcutanceError, match=said):
            watched(model, given, **options)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    for given, said in (("mooscomp", "needs labels"), (lambda x, _: x.mean(), r"gave \(\) for \(7, 17, 24\)")):
        term = ac.penalty(given, weight=1.0)
        with term.attach(model):
            model(images)
            with pytest.raises(AcutanceError, match=said):
                term()
            with pytest.raises(AcutanceError, match="attached already"):
                term.attach(model)
    watched(other := Made(lambda self, x: self.blocks(x.transpose(0, 1)), blocks=several(Block, 3)), "token_cosine")
    with pytest.raises(AcutanceError, match="first axis is not the batch"):
        other(torch.randn(5, 6, DIM))
