"""Every remedy against its formula in float64, in three libraries: outputs, and gradients of all parameters.

The formulas are in tests/parity/parity_formula.py: dense matrices, no code of the package. The Llama has grouped
queries, is causal, and half of its batch is padded.
"""

import warnings
from functools import cache

import pytest
import torch

import acutance as ac
from acutance.errors import AcutanceError
from acutance.mitigations import REGISTRY
from parity import parity_subjects as parity
from sites.hf_zoo import in_float64
from sites.test_huggingface_generate import generate, logits, prompts
from sites.tiny_models import left_alone, with_gradients

DEPTH = 3
EXACT = {"rtol": 1e-9, "atol": 1e-11}
SPECS = {  # a remedy's options; what of it starts at the identity
    "attnscale": {"": True},
    "featscale": {"": True, "doubled=true": True},
    "neutreno": {"0.6": False, "0.6,learn=head": True, "0.6,detach=true": False},
    "value_residual": {"": False, "learn=layer": True, "learn=head": True, "shared=true": False},
    "xsa": {"": False, "gated=true": True},
    "gate": {"head": True, "channel": True},
    "shaped": {"": True},
    "sink": {"0.5": False, "0.0,learn=none": False},
    "talking_heads": {"": True},
    "twicing": {"": False, "from_layer=2": False},
    "gfsa": {"": True, "3": True},
    "contranorm": {"0.2": False, "0.1,temperature=0.5,form=identity": False},
    "lsa": {"": False, "diagonal=true": True},
    "reattention": {"": False},
    "elliptical": {"": False},
    "rpc": {"iterations=2,threshold=0.2": False, "iterations=2,threshold=0.5,all_layers=true": False},
    "mv_split": {"": False, "0.5,alpha=0.2": False},
}
CASES = {f"{name}:{options}".rstrip(":"): starts for name, kinds in SPECS.items() for options, starts in kinds.items()}
TOGETHER = (
    "xsa+gate:head+sink:0.5",
    "value_residual:learn=head+attnscale+neutreno:0.6,learn=head",
    "shaped+talking_heads",
)
REFUSED = {"llama": ("featscale", "reattention")}  # because a mask hides tokens, or attention is causal
CACHES = {"mv_split", "twicing", "gfsa", "contranorm", "rpc"}  # refused once generation goes on from a cache
SUBJECTS = {"vit": ("acutance.models", "multi-head"), "torch.nn": ("torch.nn", "multi-head")}
SUBJECTS |= {"llama": ("transformers", "grouped-query")}


def test_every_remedy_is_here():
    known = {name for name, cls in REGISTRY.items() if cls.__module__.startswith("acutance.")}
    assert known - {"none", "eigen"} == SPECS.keys()  # eigen: tests/mitigations/test_eigen.py


def subject(name):
    library, heads = SUBJECTS[name]
    return parity.subject_of(library, DEPTH), heads


def plain_model(name):
    one, heads = subject(name)
    torch.manual_seed(0)
    model = one.library_model(heads).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                0.3 * torch.randn_like(parameter)
                if parameter.ndim > 1
                else parameter + 0.2 * torch.rand_like(parameter)
            )
    return model


def mitigated(name, spec, **options):
    """The model with what it learns away from its start."""
    model = plain_model(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ac.mitigate(model, spec, **options)
    generator = torch.Generator().manual_seed(3)
    for path, parameter in model.named_parameters():
        if ".mitigation." in path:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator).to(parameter)
    return model


@cache
def batch(name, rows=None):
    one, heads = subject(name)
    return {key: x.double() if x.is_floating_point() else x for key, x in one.batch(1, heads).items()}


def run(name, model):
    one, _ = subject(name)
    found = one.output(model, batch(name))
    mask = batch(name).get("attention_mask")
    return found if mask is None else found[mask.bool()]


def expected(name, spec, state):
    one, heads = subject(name)
    parts = spec.split("+")
    strength = next((0.6 for part in parts if part.startswith("neutreno") and "learn" not in part), 0.0)
    found = one.plain_output(heads, state, batch(name), parts=lambda layer: parts, strength=strength)
    mask = batch(name).get("attention_mask")
    return found if mask is None else found[mask.bool()]


@pytest.mark.parametrize("spec", [*CASES, *TOGETHER])
@pytest.mark.parametrize("name", SUBJECTS)
def test_a_remedy_is_its_formula_and_so_are_all_gradients(name, spec):
    with in_float64():
        if spec.partition(":")[0] in REFUSED.get(name, ()):
            with pytest.raises(AcutanceError, match=r"averages over|show them the future"):
                run(name, mitigated(name, spec))
            return
        model = mitigated(name, spec)
        state = {path: p.detach().clone().requires_grad_() for path, p in model.named_parameters()}
        mine = with_gradients(run(name, model), model.named_parameters())
        right = with_gradients(expected(name, spec, state), state)
    assert not torch.allclose(mine["output"], run(name, plain_model(name)), rtol=1e-4, atol=1e-4)
    for path, wanted in right.items():
        torch.testing.assert_close(
            mine[path], wanted, rtol=1e-8, atol=1e-10, msg=lambda text, path=path: f"{path}: {text}"
        )


@pytest.mark.parametrize(("spec", "is_identity"), CASES.items())
def test_what_starts_at_the_identity_changes_no_bit_and_learns(spec, is_identity):
    model = plain_model("vit")
    with left_alone(model, lambda: run("vit", model)) as before, ac.mitigate(model, spec):
        found = run("vit", model)
        assert torch.equal(found, before) == is_identity
        found.square().sum().backward()
        added = [p.grad for path, p in model.named_parameters() if ".mitigation." in path]
        assert all(gradient is not None and gradient.any() for gradient in added)
        for parameter in model.parameters():
            parameter.grad = None


@pytest.mark.parametrize("spec", CASES)
def test_a_cache_changes_nothing_or_is_refused(spec):
    """Llama with grouped queries; the prompt of one row is padded on the left."""
    name = spec.partition(":")[0]
    if name in REFUSED["llama"]:
        return
    library = pytest.importorskip("transformers")
    body = mitigated("llama", spec)
    model = library.LlamaForCausalLM(body.config).double().eval()
    model.model = body
    ids = prompts(2, 5)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    given = {"attention_mask": mask, "pad_token_id": 0, "max_new_tokens": 4, "min_new_tokens": 4}
    without = logits(generate(model, ids, use_cache=False, **given))
    if name in CACHES:
        with pytest.raises(AcutanceError, match="use_cache=False"):
            generate(model, ids, use_cache=True, **given)
        return
    torch.testing.assert_close(logits(generate(model, ids, use_cache=True, **given)), without, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("spec", CASES)
def test_checkpointing_changes_no_gradient(spec):
    name = spec.partition(":")[0]
    subjects = ["vit", "torch.nn" if name in REFUSED["llama"] else "llama"]
    for which in subjects:
        one, _ = subject(which)
        found = []
        for checkpointed in (False, True):
            model = mitigated(which, spec).train()
            if checkpointed:
                one.checkpoint(model, False)
            with in_float64():
                found.append(with_gradients(run(which, model), model.named_parameters()))
        plain, again = (
            {path.replace("_checkpoint_wrapped_module.", ""): x for path, x in each.items()} for each in found
        )
        for path, wanted in plain.items():
            torch.testing.assert_close(again[path], wanted, rtol=1e-9, atol=1e-11)


def test_a_sink_is_in_the_operator_that_is_read():
    model = mitigated("vit", "sink:1.0")
    records = []
    with ac.sites.find(model)[1].observe(records.append):
        run("vit", model)
    (call,) = records
    A, sums = call.A, call.A.dense().sum(-1)
    assert (sums < 1).all()
    torch.testing.assert_close(sums, A.row_scale.squeeze(-1))
    torch.testing.assert_close(A @ call.values, call.output, rtol=1e-10, atol=1e-12)


def test_orders_without_meaning_are_refused():
    with pytest.raises(AcutanceError, match=r"twicing needs .*: write twicing\+sink:0.0"):
        ac.mitigate(plain_model("vit"), "sink+twicing")


def test_bad_options_leave_the_model_alone():
    model = plain_model("vit")
    with left_alone(model):
        for spec, words in (("xsa:0.5", "cannot take"), ("gate:token", "'head' or 'channel'"), ("sink:inf", "finite"),
                            ("value_residual:learn=head,shared=true", "no weights to learn"),
                            ("mv_split:strength=1", "its options.*beta"), ("xas", "did you mean 'xsa'")):  # fmt: skip
            with pytest.raises(AcutanceError, match=words):
                ac.mitigate(model, spec)


def test_all_that_go_together_compile_as_one_graph():
    spec = "value_residual:learn=head+attnscale+neutreno:0.6,learn=head+xsa:gated=true+gate+sink:0.5+mv_split:0.5"
    for name in ("vit", "llama"):
        torch._dynamo.reset()
        model = mitigated(name, spec)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        found = with_gradients(run(name, compiled), model.named_parameters())
        torch.testing.assert_close(found, with_gradients(run(name, model), model.named_parameters()), **EXACT)
