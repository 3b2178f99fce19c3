"""Eigen in everybody's models: H = V Λ Vᵀ written out in float64, functions and gradients of all parameters.

tests/parity has compilation, checkpointing and several processes; here are bases, layouts, and what becomes of a model.
"""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from eigen_formulas import basis_of, shake
from safetensors.torch import load_file
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import acutance as ac
from acutance.errors import AcutanceError, NonFiniteError, ShapeError
from acutance.mitigations import eigen
from acutance.models import ViT
from acutance.sites import find
from together import in_two_processes

transformers = pytest.importorskip("transformers")

DIM, HEADS, DEPTH, WORDS = 12, 3, 2, 23
BASES = ["qr", "polar", "cayley", "householder", "inverse"]


class Attention(nn.Module):
    """Of a hand-written GPT; `again` names what it checkpoints, and `how`."""

    again, how = "", False

    def __init__(self):
        super().__init__()
        self.n_head, self.c_attn, self.c_proj = HEADS, nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def part(self, name, module, x):
        return checkpoint(module, x, use_reentrant=self.how) if self.again == name else module(x)

    def forward(self, x):
        joint = self.part("W_V", self.c_attn, x).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in joint)
        u = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.part("W_proj", self.c_proj, u)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln, self.attn, self.mlp = nn.LayerNorm(DIM), Attention(), nn.Linear(DIM, DIM)

    def forward(self, x):
        return x + self.attn.part("attention", self.attn, self.ln(x)) + self.mlp(x).tanh()


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.h = nn.Embedding(WORDS, DIM), nn.Sequential(*(Layer() for _ in range(DEPTH)))

    def forward(self, words):
        return self.h(self.wte(words))


def torch_encoder(*, apart):
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 16, dropout=0.0, batch_first=True, norm_first=True)
    if apart:  # weights of their own for q, k and v
        joint = layer.self_attn.in_proj_weight.detach().chunk(3)
        layer.self_attn = nn.MultiheadAttention(DIM, HEADS, batch_first=True, kdim=DIM, vdim=DIM)
        layer.self_attn._qkv_same_embed_dim = False
        for letter, weight in zip("qkv", joint, strict=True):
            layer.self_attn.register_parameter(f"{letter}_proj_weight", nn.Parameter(weight.clone()))
        layer.self_attn.register_parameter("in_proj_weight", None)
    return nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)


def of_transformers(name, **options):
    sizes = {"hidden_size": DIM, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS, "intermediate_size": 16}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    still |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    config = getattr(transformers, f"{name}Config")(**sizes, **still, vocab_size=WORDS, **options)
    return transformers.AutoModel.from_config(config, **({"add_pooling_layer": False} if name == "Bert" else {}))


def vit():
    return ViT(image_size=8, patch_size=4, dim=DIM, depth=DEPTH, heads=HEADS, num_classes=5)


# Where a model keeps W_V and W_proj of layer {i}, as its authors wrote it, and which rows are W_V.
LAST, BY_HEAD = range(2 * DIM, 3 * DIM), torch.arange(3 * DIM).reshape(HEADS, 3, -1)[:, 2].flatten().tolist()
MHA, BERT, NEOX = "layers.{i}.self_attn", "encoder.layer.{i}.attention", "layers.{i}.attention"
H, JOINT = "h.{i}.attn.c_proj.weight", "h.{i}.attn.c_attn.weight"
CASES = {
    "vit": (vit, "blocks.{i}.attn.qkv.weight", "blocks.{i}.attn.proj.weight", LAST),
    "torch.nn": (lambda: torch_encoder(apart=False), f"{MHA}.in_proj_weight", f"{MHA}.out_proj.weight", LAST),
    "apart": (lambda: torch_encoder(apart=True), f"{MHA}.v_proj_weight", f"{MHA}.out_proj.weight", None),
    "bert": (lambda: of_transformers("Bert"), f"{BERT}.self.value.weight", f"{BERT}.output.dense.weight", None),
    "gpt": (GPT, JOINT, H, LAST),
    "gpt2": (lambda: of_transformers("GPT2"), JOINT, H, LAST),  # stored the other way round
    "neox": (lambda: of_transformers("GPTNeoX"), f"{NEOX}.query_key_value.weight", f"{NEOX}.dense.weight", BY_HEAD),
}


def trained(name, change=lambda model: None):
    """Weights far from where they start, in float64."""
    torch.manual_seed(0)
    model = CASES[name][0]().double().train()
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    change(model)
    return model


def steered(name, basis="polar"):
    """The model with an Eigen whose Θ and ψ have moved on, its handle, and a copy from before."""
    model = trained(name)
    plain = copy.deepcopy(model)
    handle = ac.mitigate(model, f"eigen:negative,basis={basis}")
    return shake(model, 0.2), handle, plain


def inputs(name, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if name in ("vit", "torch.nn", "apart"):
        shape = (2, 3, 8, 8) if name == "vit" else (2, 5, DIM)
        return torch.randn(shape, dtype=torch.float64, generator=generator)
    return torch.randint(0, WORDS, (2, 5), generator=generator)


def output_of(result):
    return result if isinstance(result, torch.Tensor) else result[0]


def loss_of(result):
    output = output_of(result)
    return (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)).sum()


def gradients(model, batch, run=None):
    """The output, and the gradients of all parameters; zero where there is none."""
    result = (model if run is None else run)(batch)
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss_of(result), parameters, allow_unused=True, materialize_grads=True)
    return output_of(result).detach(), dict(zip(names, found, strict=True))


def written_out(name, plain, model, basis, batch):
    """The plain model, with W_V = Vᵀ and W_proj = V Λ put where its authors have them."""
    _, value_path, output_path, rows = CASES[name]
    own = {path: p.detach().clone().requires_grad_() for path, p in model.named_parameters()}
    weights = {path: own[path] for path, _ in plain.named_parameters() if path in own}
    for i, site in enumerate(find(model)):
        theta, psi = (own[f"{site.name}.mitigation.{which}"] for which in ("theta", "psi"))
        v, path = basis_of(basis, theta), value_path.format(i=i)
        value, output = v.T, (torch.linalg.inv(v).T if basis == "inverse" else v) @ torch.diag(-psi.square())
        if rows is not None:
            module, _, leaf = path.rpartition(".")
            kept = own[f"{module}.parametrizations.{leaf}.original0"]
            kept, made = iter(kept.T if name == "gpt2" else kept), dict(zip(rows, value, strict=True))
            value = torch.stack([made[row] if row in made else next(kept) for row in range(3 * DIM)])
        weights[path] = value.T if name == "gpt2" else value
        weights[output_path.format(i=i)] = output.T if name == "gpt2" else output
    assert weights.keys() == dict(plain.named_parameters()).keys()
    result = functional_call(plain, weights, (batch,))
    found = torch.autograd.grad(loss_of(result), list(own.values()), allow_unused=True, materialize_grads=True)
    return output_of(result).detach(), dict(zip(own, found, strict=True))


def assert_same(found, expected, tolerance=1e-9):
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-9)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert (found[1][name] - gradient).norm() <= tolerance * (1 + gradient.norm()), name


@pytest.mark.parametrize(
    ("name", "basis"), [*(("torch.nn", basis) for basis in BASES), *((name, "cayley") for name in CASES)]
)
def test_function_and_gradients_are_those_of_the_formula(name, basis):
    model, _, plain = steered(name, basis)
    assert_same(gradients(model, inputs(name)), written_out(name, plain, model, basis, inputs(name)))


@pytest.mark.parametrize("how", [False, True], ids=["non-reentrant", "re-entrant"])
@pytest.mark.parametrize("again", ["attention", "W_V", "W_proj"])
def test_checkpointing_parts_of_a_block_changes_nothing_or_is_refused(again, how):
    model, _, plain = steered("gpt")
    for layer in model.h:
        layer.attn.again, layer.attn.how = again, how
    output = model(inputs("gpt"))
    if again == "W_proj":
        with pytest.raises(AcutanceError, match="around the attention or around the whole block"):
            loss_of(output).backward()
        return
    loss_of(output).backward()  # re-entrant checkpointing knows no torch.autograd.grad
    found = output.detach(), {path: p.grad for path, p in model.named_parameters()}
    assert_same(found, written_out("gpt", plain, model, "polar", inputs("gpt")))


@pytest.mark.parametrize(("name", "again"), [("torch.nn", False), ("bert", False), ("bert", True), ("gpt", False)])
def test_a_basis_is_computed_once_a_layer_and_forward(monkeypatch, name, again):
    model, _, _ = steered(name)
    basis, calls = eigen.BASES["polar"], []
    counted = type(basis)(lambda theta: calls.append(1) or basis.map(theta), basis.preimage)
    monkeypatch.setitem(eigen.BASES, "polar", counted)
    if again:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    gradients(model, inputs(name))
    assert len(calls) == DEPTH * (1 + again)


@pytest.mark.parametrize("name", ["torch.nn", "bert", "gpt", "compiled"])
def test_every_step_has_its_own_weights(name):
    """Also after a forward pass that failed between W_V and W_proj, and after reading W_V alone."""
    name, compiled = ("gpt", True) if name == "compiled" else (name, False)
    model, _, plain = steered(name, "qr")
    batch, optimiser = inputs(name), torch.optim.SGD(model.parameters(), lr=0.01)
    torch.compiler.reset()
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    for _ in range(2):
        loss_of(run(batch)).backward()
        optimiser.step()
        optimiser.zero_grad()
        assert_same(gradients(model, batch, run), written_out(name, plain, model, "qr", batch))
    sites = find(model)

    def fail(v, call):
        raise KeyboardInterrupt

    sites[0].mitigation.values = fail
    with pytest.raises(KeyboardInterrupt):
        model(batch)
    del sites[0].mitigation.values
    sites[1].value_weight()
    for site in sites:
        site.mitigation.psi.data.mul_(1.1)  # by .data, which no version counter sees
        found = torch.linalg.eigvalsh(site.projection_weight() @ site.value_weight())
        torch.testing.assert_close(found, site.mitigation.eigenvalues().flatten().sort().values)
    assert_same(gradients(model, batch), written_out(name, plain, model, "qr", batch))


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
    batch = inputs(name)
    for each in (model, copy.deepcopy(model)):
        with pytest.raises(AcutanceError, match=r"acutance\.save, or pickle acutance\.fold\(model\)"):
            pickle.dumps(each)
    folded = pickle.loads(pickle.dumps(ac.fold(model)))
    torch.testing.assert_close(output_of(folded(batch)), output_of(model(batch)), rtol=0, atol=1e-12)
    handle.remove()
    assert torch.equal(output_of(pickle.loads(pickle.dumps(model))(batch)), output_of(plain(batch)))


def test_threads_do_not_mix():
    model, _, _ = steered("gpt")
    batches = [inputs("gpt", seed) for seed in range(4)]
    expected = [gradients(model, batch) for batch in batches]
    with ThreadPoolExecutor(len(batches)) as pool:
        found = list(pool.map(lambda batch: [gradients(model, batch) for _ in range(3)], batches))
    for runs, wanted in zip(found, expected, strict=True):
        for run in runs:
            assert_same(run, wanted, 0.0)


def looks(model):
    """All that a model is, module by module; tensors apart."""
    hooks = [kind for kind in vars(model) if kind.endswith("hooks")]
    modules = [
        [path, type(m), sorted(vars(m)), list(m._parameters), list(m._modules), *(dict(getattr(m, h)) for h in hooks)]
        for path, m in model.named_modules()
    ]
    parameters = [(path, id(p), p.requires_grad) for path, p in model.named_parameters(remove_duplicate=False)]
    return modules, parameters, [tensor.clone() for tensor in model.state_dict().values()]


def assert_untouched(found, before):
    assert found[:2] == before[:2]
    for one, other in zip(found[2], before[2], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", CASES)
def test_removing_gives_back_everything(name):
    model, batch = trained(name), inputs(name)
    before, output, shown = looks(model), output_of(model(batch)), repr(model)
    with ac.mitigate(model, "eigen:negative,basis=polar+neutreno:0.4"):
        for site in find(model):
            site.mitigation.parts[0].theta.data += 1
        assert not torch.equal(output_of(model(batch)), output)
    assert_untouched(looks(model), before)
    assert torch.equal(output_of(model(batch)), output)
    assert repr(model) == shown


@pytest.mark.filterwarnings("ignore::acutance.errors.AcutanceWarning")  # a spectrum beyond the bound
@pytest.mark.parametrize("name", CASES)
def test_folding_leaves_a_plain_model_of_the_same_function(name):
    model, _, plain = steered(name)
    batch, folded = inputs(name), ac.fold(model)
    torch.testing.assert_close(output_of(folded(batch)), output_of(model(batch)), rtol=0, atol=1e-12)
    assert [type(module) for module in folded.modules()] == [type(module) for module in plain.modules()]
    assert [path for path, _ in folded.named_parameters()] == [path for path, _ in plain.named_parameters()]
    found = [ac.explain(each, progress=False).layers[1].spectrum.real for each in (model, folded)]
    assert abs(found[0] - found[1]).max() < 1e-10
    assert (found[0] < 0).all()


@pytest.mark.parametrize("name", ["torch.nn", "gpt"])
def test_a_file_loads_with_us_and_without(tmp_path, name):
    model, _, plain = steered(name)
    batch = inputs(name)
    state = load_file(ac.save(model, tmp_path / "model.safetensors"))
    missing, unexpected = plain.load_state_dict(state, strict=False)
    assert not missing
    assert all(".mitigation." in path for path in unexpected)
    torch.testing.assert_close(output_of(plain(batch)), output_of(model(batch)), rtol=0, atol=1e-12)
    again = ac.load(tmp_path / "model.safetensors", CASES[name][0]().double().train())
    assert ac.sites.record(again) == ac.sites.record(model)
    assert torch.equal(output_of(again(batch)), output_of(model(batch)))


@pytest.mark.parametrize("how", ["save", "save_pretrained"])
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_a_folder_loads_with_us_and_without(tmp_path, name, how):
    model, batch = steered(name)[0].float().eval(), inputs(name)
    ac.save(model, tmp_path) if how == "save" else model.save_pretrained(tmp_path)
    plain, again = type(model).from_pretrained(tmp_path).eval(), ac.load(tmp_path).eval()
    torch.testing.assert_close(output_of(plain(batch)), output_of(model(batch)), rtol=0, atol=1e-5)
    assert ac.sites.record(again) == ac.sites.record(model)
    assert torch.equal(output_of(again(batch)), output_of(model(batch)))


@pytest.mark.parametrize("name", CASES)
def test_a_state_dict_comes_back(name):
    model, _, plain = steered(name)
    state, other = model.state_dict(), trained(name)
    assert {path for path in state if ".mitigation." not in path} == plain.state_dict().keys()
    ac.mitigate(other, "eigen:negative,basis=polar")
    other.load_state_dict(state)
    assert torch.equal(output_of(other(inputs(name))), output_of(model(inputs(name))))
    path = CASES[name][1].format(i=0)
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_state_dict(state | {path: state[path][1:]})


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
    assert torch.equal(value[BY_HEAD], before[BY_HEAD])


def t5():
    config = transformers.T5Config(d_model=DIM, d_kv=8, num_heads=HEADS, num_layers=DEPTH, d_ff=16, vocab_size=WORDS)
    return transformers.T5EncoderModel(config)


def value_of(bert):
    return bert.encoder.layer[1].attention.self.value


def wrapped(bert):
    bert.encoder.layer[1].attention.self.value = nn.Sequential(value_of(bert), nn.Identity())


def tied(gpt):
    gpt.h[1].attn.c_proj.weight = gpt.h[0].attn.c_proj.weight


def shared(bert):
    bert.register_parameter("other", nn.Parameter(value_of(bert).weight.data.view(DIM, DIM)))


TWO = "another mitigation makes W_V and W_proj already"


@pytest.mark.parametrize(
    ("build", "error", "reason", "spec"),
    [
        (lambda: of_transformers("Llama", num_key_value_heads=1), ShapeError, "a value head for every query", ""),
        (t5, ShapeError, "heads · head_dim = dim", ""),
        (lambda: trained("bert", wrapped), AcutanceError, "Sequential, which does more than multiply", ""),
        (lambda: trained("gpt", tied), AcutanceError, r"h\.0\.attn\.c_proj\.weight and h\.1.* are one parameter", ""),
        (lambda: trained("bert", shared), AcutanceError, "share its memory", ""),
        (lambda: trained("gpt", lambda m: weight_norm(m.h[1].attn.c_proj)), AcutanceError, "is not a parameter", ""),
        (lambda: trained("bert", lambda m: value_of(m).weight.data.fill_(torch.nan)), NonFiniteError, "r 2: W_V", ""),
        (lambda: trained("vit"), AcutanceError, TWO, "+eigen:positive"),
        (lambda: trained("bert"), AcutanceError, TWO, "+eigen:positive"),
    ],
)
def test_what_is_refused_is_left_as_it_was(build, error, reason, spec):
    model = build()
    before = looks(model)
    with pytest.raises(error, match=reason):
        ac.mitigate(model, f"neutreno:0.4+eigen:negative{spec}")
    assert_untouched(looks(model), before)


def test_other_parametrizations_beside_it():
    """One of another tensor does not matter; one of the same weight must go first, then all can go."""
    model = trained("gpt")
    before = looks(model)
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
    assert_untouched(looks(model), before)


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
