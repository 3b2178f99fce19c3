"""Random models with random mitigations, run in every way, against their formulas in float64: outputs and gradients.

The plain model is a copy made before the mitigation came in. Its attention is replaced by the formula, and its
parameters are those of the mitigated model by name.
"""

import copy
import itertools
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import strategies as st
from laws import law
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.nn import functional as F

import acutance as ac
from acutance.errors import AcutanceError
from acutance.mitigations import REGISTRY
from parity.parity_formula import Plain, with_plain_weights
from sites import tiny_models as tiny
from sites.hf_zoo import DECODER, ENDS, GPT, TEXT, VISION, in_float64, library
from sites.tiny_models import DIM, Made, shaken

BATCH, TOKENS, HEADS, NEW = 2, 8, 4, 4
REFUSES_MORE = False  # as 0.1 does
REMEDIES = {  # every mitigation has a row here, and its formula in parity_formula
    "neutreno": ["", "learn=head", "learn=layer", "detach=true", "learn=head,detach=true"],
    "attnscale": [""],
    "featscale": ["", "doubled=true"],
    "value_residual": ["", "learn=head", "learn=layer", "shared=true"],
    "xsa": ["", "gated=true"],
    "gate": ["head", "channel"],
    "shaped": [""],
    "sink": ["0.5", "-1.0,learn=none"],
    "talking_heads": [""],
    "mv_split": ["", "0.5,alpha=0.2"],
    "twicing": ["", "from_layer=2"],
    "gfsa": ["", "3"],
    "contranorm": ["0.2", "0.1,temperature=0.5,form=identity"],
    "lsa": ["", "diagonal=true"],
    "reattention": [""],
    "elliptical": [""],
    "rpc": ["threshold=0.2", "iterations=2,threshold=0.5,all_layers=true"],
    "eigen": [f"sign=negative,basis={basis},spectrum=square" for basis in ("qr", "polar", "cayley", "householder")]
    + [f"sign={sign},basis=inverse,spectrum={kind}" for sign, kind in (("free", "square"), ("positive", "bounded"))],
}
SQUARE = {"mv_split", "twicing", "gfsa", "contranorm", "rpc"}  # refused once generation goes on from a cache
ORDERS = (  # what cannot come after what
    ({"sink", "twicing", "gfsa", "reattention"}, {"sink", "shaped", "talking_heads", "reattention"}),
    ({"rpc"}, {"lsa", "elliptical"}),
    ({"reattention"}, {"attnscale", "neutreno", "value_residual", "xsa", "gate", "twicing", "gfsa"}),
)
WAYS = ("eager", "no_grad", "checkpointing", "threads", "cache", "no cache")
LAYOUTS = ("none", "padded", "packed", "causal")
NO_DROPOUT = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
GPT_OPTIONS = GPT | dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0) | {"use_cache": False}
LLAMA = DECODER | {"use_cache": False}
GEMMA = LLAMA | {"layer_types": ["sliding_attention", "full_attention"] * 2, "head_dim": 8, "global_head_dim": 16}
GEMMA |= {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 60}
GEMMA |= {"sliding_window": 6, "num_hidden_layers": 4}
FAMILIES = {  # class and options; where a block has its attention, W_V and W_proj; in which layouts it runs
    "llama": ("LlamaForCausalLM", LLAMA, "model.layers", "self_attn", ".v_proj", ".o_proj", LAYOUTS[:3]),
    "gpt2": ("GPT2LMHeadModel", GPT_OPTIONS, "transformer.h", "attn", ".c_attn", ".c_proj", LAYOUTS[:3]),
    "bert": ("BertModel", TEXT | NO_DROPOUT, "encoder.layer", "attention", ".self.value", ".output.dense", LAYOUTS[:2]),
    "vit": ("ViTModel", VISION, "layers", "attention", ".v_proj", ".o_proj", LAYOUTS[:1]),
    "gemma4": ("Gemma4TextModel", GEMMA, "layers", "self_attn", ".v_proj", ".o_proj", LAYOUTS[:3]),
}
CAUSAL = ("llama", "gpt2", "gemma4")


class Model(SimpleNamespace):
    """A model, what is put into it, and how it is run."""

    @property
    def kinds(self):
        return {part.partition(":")[0] for part in self.parts}

    @property
    def layers(self):
        """The numbers of the layers that are mitigated."""
        depth = 4 if self.family == "gemma4" else 3 if self.family in FAMILIES else self.depth
        return range(1, depth + 1, 2 if self.odd_layers else 1)

    def follows(self, late, early):
        """Whether a part of one of the first kinds comes after a part of one of the others, which it cannot."""
        pairs = itertools.combinations((part.partition(":")[0] for part in self.parts), 2)
        return any(second in late and first in early for first, second in pairs)

    @property
    def must_be_refused(self):
        """Because what a mitigation needs is not there."""
        both = {"gemma4": (8, 16), "written": self.widths}.get(self.family, (3, 3))
        widths = {both[(layer - 1) % 2] for layer in self.layers}
        groups = self.family in ("llama", "written") and self.kv_heads < HEADS
        return (
            (self.kinds & {"featscale", "reattention"} and (self.family in CAUSAL or self.layout != "none"))
            or (self.kinds & {"neutreno", "value_residual", "elliptical"} and widths != {both[0]})
            or ("elliptical" in self.kinds and 3 in self.layers and 2 not in self.layers)
            or (self.kinds & SQUARE and self.way == "cache")
            or any(self.follows(late, early) for late, early in ORDERS)
            or ("eigen" in self.kinds and (groups or widths != {3}))
        )

    @property
    def exists(self):
        if self.family == "gpt2" and "eigen" in self.kinds:
            return False  # its W_V lies across in the matrix of all three: tests/mitigations has it
        if self.family == "gemma4" and self.kinds & {"featscale", "eigen", "reattention", "elliptical"}:
            return False  # always refused
        if "reattention" in self.kinds and self.way == "checkpointing":
            return False  # the formula is that of evaluation: tests/mitigations has training
        if "cache" in self.way and (self.family not in ("llama", "gpt2") or self.layout == "packed"):
            return False
        return self.layout in FAMILIES.get(self.family, (LAYOUTS,))[-1]


@st.composite
def mitigations(draw):
    kinds = draw(st.lists(st.sampled_from(list(REMEDIES)), min_size=1, max_size=3, unique=True))
    return tuple(f"{kind}:{draw(st.sampled_from(REMEDIES[kind]))}".rstrip(":") for kind in kinds)


def models(*families):
    """`widths` are those of the heads in odd and even layers, `form` is how attention is written."""
    return st.builds(
        Model, seed=st.integers(0, 2**20), family=st.sampled_from(families), depth=st.integers(2, 4),
        kv_heads=st.sampled_from([4, 4, 2, 1]), pre_norm=st.booleans(), batch_first=st.booleans(),
        form=st.sampled_from(list(FORMS)), widths=st.tuples(*[st.sampled_from([3, 3, 3, 5])] * 2),
        parts=mitigations(), odd_layers=st.booleans(), way=st.sampled_from(WAYS), layout=st.sampled_from(LAYOUTS),
    ).filter(lambda case: case.exists)  # fmt: skip


FORMS = {"sdpa": tiny.sdpa, "eager": tiny.softmax}
FORMS["bool"] = lambda q, k, v, bias: tiny.sdpa(q, k, v, None if bias is None else bias == 0)


def through_layers(self, x, bias):
    for layer in self.layers:
        x = layer(x, attn_mask=bias)
    return x


def written(case):
    """A model of no library; its heads may have another width in every second layer."""
    sizes = {"heads": HEADS, "key_heads": case.kv_heads}
    attentions = [
        tiny.separate_attention(FORMS[case.form], **sizes, width=width) for width in (case.widths * 2)[: case.depth]
    ]
    run = tiny.pre_norm if case.pre_norm else tiny.post_norm
    return Made(through_layers, layers=nn.ModuleList(tiny.block(attention, run) for attention in attentions))


def make(case):
    """The model in float64, where its blocks are, and the paths of attention, W_V and W_proj in a block."""
    if case.family == "written":
        model, paths = written(case), ("layers", "attn", ".v_proj.weight", ".out_proj")
    elif case.family == "torch":
        options = {"dropout": 0.0, "batch_first": case.batch_first, "norm_first": case.pre_norm}
        layer, nested = nn.TransformerEncoderLayer(DIM, HEADS, 16, **options), not case.pre_norm and case.batch_first
        model = nn.TransformerEncoder(layer, case.depth, enable_nested_tensor=nested)
        paths = ("layers", "self_attn", ".in_proj_weight", ".out_proj")
    else:
        name, options, blocks, attn, value, output, _ = FAMILIES[case.family]
        options = options | ({"num_key_value_heads": case.kv_heads} if case.family == "llama" else {})
        model_class, paths = getattr(library(), name), (blocks, attn, f"{value}.weight", output)
        model = model_class(model_class.config_class(**options | ENDS))
        model.set_attn_implementation("eager" if case.form == "eager" else "sdpa")
    return shaken(model.double(), case.seed), paths


def formula(case, model, blocks, attention, value, output):
    """The model as its formulas say it: a function of the mitigated model's parameters and of what is put in."""
    layers = [
        (block.get_submodule(attention + ".self" * (case.family == "bert")), block.get_submodule(attention + output))
        for block in model.get_submodule(blocks)
    ]
    parts = lambda layer: case.parts if layer in case.layers else ()  # noqa: E731
    plain = Plain(model, layers, heads=HEADS, parts=parts, strength=0.6)
    eigen = next((part.partition(":")[2] for part in case.parts if part.startswith("eigen")), "")
    options = dict(option.split("=") for option in eigen.split(",") if option)

    def run(state, *args, **given):
        weights = with_plain_weights(state, attention + value, f"{attention}{output}.weight", **options)
        return plain(weights, *args, **given)

    return run


def inputs(case, seed):
    """Arguments, and which tokens are compared."""
    generator, places = torch.Generator().manual_seed(seed), torch.arange(TOKENS)
    cut = int(torch.randint(2, TOKENS, (), generator=generator))
    valid = torch.ones(BATCH, TOKENS, dtype=torch.bool)
    valid[1] = places < (cut if case.layout == "padded" else TOKENS)
    if case.family == "vit":
        return {"pixel_values": torch.randn(BATCH, 3, 16, 16, generator=generator).double()}, torch.ones(BATCH, 17) > 0
    if case.family in FAMILIES:
        valid = valid.flip(1) if case.seed % 2 or "cache" in case.way else valid
        given = {"input_ids": torch.randint(3, 60, (BATCH, TOKENS), generator=generator)}
        if case.layout == "packed":
            given["position_ids"] = torch.where(places < cut, places, places - cut).expand(BATCH, -1)
        elif case.layout == "padded":
            given["attention_mask"] = valid.long()
        return given, valid
    x = torch.randn(BATCH, TOKENS, DIM, generator=generator).double()
    hidden = {"causal": places > places[:, None], "packed": (places < cut) != (places < cut)[:, None]}
    hidden |= {"padded": ~valid[:, None, None]} if case.family == "written" else {}
    bias = None if case.layout not in hidden else torch.where(hidden[case.layout], -torch.inf, 0.0).double()
    if case.family == "written":
        return {"x": x, "bias": bias}, valid
    mask = hidden[case.layout] if bias is not None and case.seed % 2 else bias
    keys = ~valid if case.layout == "padded" else None
    return {"x": x if case.batch_first else x.transpose(0, 1), "mask": mask, "keys": keys}, valid


def answer(case, run, given, valid):
    """Of the tokens that count."""
    found = run(**given)[0] if case.family in FAMILIES else run(*given.values())
    return (found.transpose(0, 1) if case.family == "torch" and not case.batch_first else found)[valid]


def patched(case):
    """The mitigated model, what it learns moved away from its start, and the plain one."""
    torch.manual_seed(case.seed)
    model, paths = make(case)
    plain = formula(case, copy.deepcopy(model).train(), *paths)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ac.mitigate(model, "+".join(case.parts), layers=list(case.layers))
    for name, parameter in model.named_parameters():
        parameter.data += 0.05 * torch.randn_like(parameter) * (".mitigation." in name)  # Θ stays well-conditioned
    if case.way == "checkpointing" and case.family in FAMILIES:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    elif case.way == "checkpointing":
        for number, layer in enumerate(model.layers):
            model.layers[number] = checkpoint_wrapper(layer, CheckpointImpl.NO_REENTRANT)
    return model.train(case.way == "checkpointing"), plain


def generated(case, model, given):
    """The logits of what the model writes, and the arguments that give them at once."""
    options = {"do_sample": False, "min_new_tokens": NEW, "max_new_tokens": NEW, "use_cache": case.way == "cache"}
    result = model.generate(**given, **options, return_dict_in_generate=True, output_logits=True)
    ids = result.sequences[:, :-1]
    mask = F.pad(given.get("attention_mask", torch.ones_like(ids)[:, :TOKENS]), (0, NEW - 1), value=1)
    again = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp_min(0)}
    return torch.stack(result.logits, 1), again


def assert_same(found, wanted, what):
    error = (found - wanted).detach().abs().max() / (1 + wanted.detach().abs().max())
    assert error < 1e-8, f"{what} is off by {error:.3g}"


@in_float64()
def check(case):
    """Whether it was refused, as it should be; else it is right."""
    try:
        model, plain = patched(case)
        fed = [inputs(case, case.seed + more) for more in range(2)]
        leaves = {name.replace("_checkpoint_wrapped_module.", ""): p for name, p in model.named_parameters()}
        state = {name: p.detach().clone().requires_grad_() for name, p in leaves.items()}
        if "cache" in case.way:
            found, again = generated(case, model, fed[0][0])
        else:
            with torch.set_grad_enabled(case.way in ("eager", "checkpointing")):
                found = answer(case, model, *fed[0])
    except AcutanceError:
        if not (case.must_be_refused or REFUSES_MORE):
            raise
        return True
    assert not case.must_be_refused, "it should have been refused"
    if "cache" in case.way:
        assert_same(found, plain(state, **again)[0][:, -NEW:], "what is generated")
        return False
    wanted = [answer(case, partial(plain, state), *each) for each in fed]
    assert_same(found, wanted[0], "the output")
    work = torch.no_grad()(lambda number: answer(case, model, *fed[number]))
    for right, answers in zip(wanted, tiny.in_threads(2, work) if case.way == "threads" else ([], []), strict=True):
        for each in answers:
            assert_same(each, right, "an answer of one of two threads")
    if case.way in ("eager", "checkpointing"):
        mine, right = tiny.with_gradients(found, leaves), tiny.with_gradients(wanted[0], state)
        for name, gradient in right.items():
            assert_same(mine[name], gradient, f"the gradient of {name}")
    return False


@law(models("torch"), 100)
def test_models_of_torch(case):
    return check(case)


@law(models("written"), 120)
def test_models_written_by_hand(case):
    return check(case)


@pytest.mark.slow
@law(models("llama", "bert", "vit", "gpt2"), 200)
def test_models_of_transformers(case):
    return check(case)


@law(models("gemma4"), 30)
def test_models_whose_head_widths_differ(case):
    return check(case)


def test_every_mitigation_is_fuzzed():
    known = {name for name, cls in REGISTRY.items() if cls.__module__.startswith("acutance.")}
    assert known - {"none"} == REMEDIES.keys()
