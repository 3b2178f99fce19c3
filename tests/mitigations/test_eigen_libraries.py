"""Eigen in everybody's models against H = V Λ Vᵀ in float64: layouts of the weights, and what becomes of a model."""

import copy
import pickle
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from steered import SPEC, assert_it_goes_stays_and_comes_back
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.func import functional_call
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

import acutance as ac
from acutance.errors import AcutanceError, NonFiniteError, ShapeError
from acutance.mitigations import eigen
from acutance.sites import find
from parity.parity_formula import with_plain_weights
from sites import hf_zoo, tiny_models
from sites.tiny_models import DEPTH, encoder, gpt, ids, images, left_alone, mitigated, shaken, tokens, vit
from together import in_two_processes


def apart():
    """Weights of their own for q, k and v."""
    model = encoder(norm_first=True)
    for layer in model.layers:
        joint, attention = layer.self_attn.in_proj_weight.detach().chunk(3), layer.self_attn
        attention._qkv_same_embed_dim = False
        for letter, weight in zip("qkv", joint, strict=True):
            attention.register_parameter(f"{letter}_proj_weight", nn.Parameter(weight.clone()))
        attention.register_parameter("in_proj_weight", None)
    return model


def bert():
    return hf_zoo.build("bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).train()


# How a model is made, where a block keeps W_V and W_proj, and how they lie there.
BY_HEAD = {"rows": torch.arange(3 * 32).reshape(4, 3, -1)[:, 2].flatten().tolist()}
CASES = {
    "vit": (lambda: shaken(vit()), "attn.qkv.weight", "attn.proj.weight", {}),
    "torch.nn": (partial(encoder, norm_first=True), "self_attn.in_proj_weight", "self_attn.out_proj.weight", {}),
    "apart": (apart, "self_attn.v_proj_weight", "self_attn.out_proj.weight", {}),
    "bert": (bert, "attention.self.value.weight", "attention.output.dense.weight", {}),
    "gpt": (lambda: shaken(gpt()), "attn.c_attn.weight", "attn.c_proj.weight", {}),
    "gpt2": (lambda: hf_zoo.build("gpt2"), "attn.c_attn.weight", "attn.c_proj.weight", {"across": True}),
    "neox": (lambda: hf_zoo.build("gpt_neox"), "attention.query_key_value.weight", "attention.dense.weight", BY_HEAD),
}


def trained(name, change=lambda model: None):
    model = CASES[name][0]()
    change(model)
    return model


def steered(name, spec=SPEC):
    """The model with an Eigen whose Θ and ψ have moved on, its handle, and the same from before."""
    model = trained(name)
    return model, mitigated(model, spec, 0.2), trained(name)


def inputs(name):
    own = {"vit": images, "torch.nn": tokens, "apart": tokens, "gpt": ids}
    return own[name]() if name in own else ids(rows=2, count=5)


def output_of(model, name):
    result = model(inputs(name))
    return result if isinstance(result, torch.Tensor) else result[0]


def written_out(name, plain, model, basis="polar"):
    """The plain model, with W_V = Vᵀ and W_proj = V Λ put where its authors have them."""
    _, value, output, layout = CASES[name]
    leaves = tiny_models.leaves_of(model)
    weights = with_plain_weights(leaves, value, output, basis, **layout)
    own = {path: weights[path] for path, _ in plain.named_parameters()}
    return tiny_models.with_gradients(output_of(lambda batch: functional_call(plain, own, (batch,)), name), leaves)


assert_same = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-10)


def assert_is_the_formula(name, model, plain, run=None, basis="polar"):
    found = tiny_models.with_gradients(output_of(model if run is None else run, name), model.named_parameters())
    assert_same(found, written_out(name, plain, model, basis))


@pytest.mark.parametrize("name", CASES)
def test_function_and_gradients_are_those_of_the_formula(name):
    model, _, plain = steered(name, "eigen:negative,basis=cayley")
    assert_is_the_formula(name, model, plain, basis="cayley")


@pytest.mark.parametrize("kind", CheckpointImpl)
@pytest.mark.parametrize("part", ["attn", "attn.c_attn", "attn.c_proj"])
def test_checkpointing_parts_of_a_block_changes_nothing_or_is_refused(part, kind):
    model, _, plain = steered("gpt")
    expected = written_out("gpt", plain, model)
    for layer in model.h:
        layer.set_submodule(part, checkpoint_wrapper(layer.get_submodule(part), kind))
    output = model(inputs("gpt"))
    if part == "attn.c_proj":
        with pytest.raises(AcutanceError, match="around the attention or around the whole block"):
            output.sum().backward()
        return
    parameters = {name.replace("_checkpoint_wrapped_module.", ""): p for name, p in model.named_parameters()}
    assert_same(tiny_models.with_gradients(output, parameters), expected)


@pytest.mark.parametrize(("name", "again"), [("torch.nn", False), ("bert", False), ("bert", True), ("gpt", False)])
def test_a_basis_is_computed_once_a_layer_and_forward(monkeypatch, name, again):
    model, _, _ = steered(name)
    basis, calls = eigen.BASES["polar"], []
    counted = type(basis)(lambda theta: calls.append(1) or basis.map(theta), basis.preimage)
    monkeypatch.setitem(eigen.BASES, "polar", counted)
    if again:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    output_of(model, name).sum().backward()
    assert len(calls) == DEPTH * (1 + again)


@pytest.mark.parametrize("name", ["torch.nn", "bert", "gpt", "compiled"])
def test_every_step_has_its_own_weights(name):
    """Also after a forward pass that failed between W_V and W_proj, and after reading W_V alone."""
    name, compiled = ("gpt", True) if name == "compiled" else (name, False)
    model, _, plain = steered(name, "eigen:negative,basis=qr")
    optimiser = torch.optim.SGD(model.parameters(), lr=0.001)
    torch.compiler.reset()
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    for _ in range(2):
        output_of(run, name).square().mean().backward()
        optimiser.step()
        optimiser.zero_grad()
        assert_is_the_formula(name, model, plain, run, "qr")
    sites = find(model)
    sites[0].mitigation.values = Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        model(inputs(name))
    del sites[0].mitigation.values
    sites[1].value_weight()
    for site in sites:
        site.mitigation.psi.data.mul_(1.1)  # by .data, which no version counter sees
        found = torch.linalg.eigvalsh(site.projection_weight() @ site.value_weight())
        torch.testing.assert_close(found, site.mitigation.eigenvalues().flatten().sort().values)
    assert_is_the_formula(name, model, plain, basis="qr")


def test_a_copy_does_not_take_what_the_original_made():
    model, _, _ = steered("gpt")
    other = copy.deepcopy(model)
    original, copied = find(model)[0], find(other)[0]
    copied.mitigation.psi.data.mul_(2)
    original.mitigation.enter()
    original.value_weight()  # which makes W_proj too, for the block that runs
    torch.testing.assert_close(copied.projection_weight(), 4 * original.projection_weight())
    original.mitigation.leave()


@pytest.mark.parametrize("name", ["vit", "gpt"])
def test_pickling_is_refused_with_what_to_do_which_works(name):
    model, handle, plain = steered(name)
    for each in (model, copy.deepcopy(model)):
        with pytest.raises(AcutanceError, match=r"acutance\.save, or pickle acutance\.fold\(model\)"):
            pickle.dumps(each)
    folded = pickle.loads(pickle.dumps(ac.fold(model)))
    torch.testing.assert_close(output_of(folded, name), output_of(model, name), rtol=0, atol=1e-12)
    handle.remove()
    assert torch.equal(output_of(pickle.loads(pickle.dumps(model)), name), output_of(plain, name))


@pytest.mark.parametrize("name", CASES)
def test_it_goes_stays_and_comes_back(tmp_path, name):
    file = None if name in ("vit", "bert", "gpt2", "neox") else tmp_path / "model.safetensors"  # they have folders
    assert_it_goes_stays_and_comes_back(CASES[name][0], lambda model: output_of(model, name), file)


@pytest.mark.parametrize("how", ["save", "save_pretrained"])
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_a_folder_loads_with_us_and_without(tmp_path, name, how):
    model = steered(name)[0].float().eval()
    ac.save(model, tmp_path) if how == "save" else model.save_pretrained(tmp_path)
    plain, again = type(model).from_pretrained(tmp_path).eval(), ac.load(tmp_path).eval()
    torch.testing.assert_close(output_of(plain, name), output_of(model, name), rtol=0, atol=1e-5)
    assert ac.sites.record(again) == ac.sites.record(model)
    assert torch.equal(output_of(again, name), output_of(model, name))


@pytest.mark.parametrize("name", ["torch.nn", "gpt2", "neox"])
def test_made_weights_of_another_shape_are_not_loaded(name):
    model = steered(name)[0]
    state = {path: x[1:] if path.endswith(CASES[name][1]) else x for path, x in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(state)


def test_a_model_moves_and_comes_back():
    """To another dtype and back, by way of the interleaved layout, whose order of rows moves along."""
    model = trained("neox").float()
    before = model.layers[0].attention.query_key_value.weight.detach().clone()
    handle = ac.mitigate(model, "eigen:negative,basis=cayley")
    model.to(torch.bfloat16)(inputs("neox"))
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    model.float()
    handle.remove()
    value = model.layers[0].attention.query_key_value.weight
    assert value.dtype == torch.float32
    assert torch.equal(value[BY_HEAD["rows"]], before[BY_HEAD["rows"]])


VALUE = "encoder.layer.1.attention.self.value"
HARM = {
    "wrapped": lambda bert: bert.set_submodule(VALUE, nn.Sequential(bert.get_submodule(VALUE), nn.Identity())),
    "tied": lambda gpt: setattr(gpt.h[1].attn.c_proj, "weight", gpt.h[0].attn.c_proj.weight),
    "shared": lambda bert: setattr(bert, "other", nn.Parameter(bert.get_submodule(VALUE).weight.data.view(32, 32))),
    "not finite": lambda bert: bert.get_submodule(VALUE).weight.data.fill_(torch.nan),
}
TIED = r"h\.0\.attn\.c_proj\.weight and h\.1.* are one parameter"
TWO = "another mitigation makes W_V and W_proj already"


@pytest.mark.parametrize(
    ("build", "error", "reason", "spec"),
    [
        (lambda: hf_zoo.build("llama"), ShapeError, "a value head for every query", ""),
        (lambda: hf_zoo.build("t5_encoder", d_kv=4), ShapeError, "heads · head_dim = dim", ""),
        (lambda: trained("bert", HARM["wrapped"]), AcutanceError, "Sequential, which does more than multiply", ""),
        (lambda: trained("gpt", HARM["tied"]), AcutanceError, TIED, ""),
        (lambda: trained("bert", HARM["shared"]), AcutanceError, "share its memory", ""),
        (lambda: trained("gpt", lambda m: weight_norm(m.h[1].attn.c_proj)), AcutanceError, "is not a parameter", ""),
        (lambda: trained("bert", HARM["not finite"]), NonFiniteError, "layer 2: W_V", ""),
        (lambda: trained("vit"), AcutanceError, TWO, "+eigen:positive"),
        (lambda: trained("bert"), AcutanceError, TWO, "+eigen:positive"),
    ],
)
def test_what_is_refused_is_left_as_it_was(build, error, reason, spec):
    model = build()
    with left_alone(model), pytest.raises(error, match=reason):
        ac.mitigate(model, f"neutreno:0.4+eigen:negative{spec}")


def test_other_parametrizations_beside_it():
    """One of another tensor does not matter; one of the same weight must go first, then all can go."""
    model = trained("gpt")
    with left_alone(model):
        handle = ac.mitigate(model, "eigen:negative")
        layer = model.h[0].attn.c_proj
        parametrize.register_parametrization(layer, "bias", nn.Identity())
        parametrize.register_parametrization(model.h[1].attn.c_attn, "weight", nn.Identity())
        with pytest.raises(AcutanceError, match="parametrised once more by Identity"):
            handle.remove()
        del model.h[1].attn.c_attn.parametrizations.weight[1]
        handle.remove()
        assert isinstance(layer._parameters["weight"], nn.Parameter)
        model(inputs("gpt"))
        parametrize.remove_parametrizations(layer, "bias", leave_parametrized=False)


def sharded_worker(rank):
    from torch.distributed.fsdp import fully_shard

    model, handle, _ = steered("bert")
    for part in (*model.encoder.layer, model):
        fully_shard(part)
    for refused in (handle.remove, lambda: ac.fold(model)):
        with pytest.raises(AcutanceError, match="FSDP leaves each process a part"):
            refused()


def test_what_is_sharded_is_neither_removed_nor_folded():
    in_two_processes(sharded_worker)
