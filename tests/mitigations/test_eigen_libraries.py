"""Eigen in everybody's models: H = V Λ Vᵀ written out in float64, functions and gradients of all parameters.

tests/parity has compilation, checkpointing and several processes; here are bases, layouts, and what becomes of a model.
"""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch
from eigen_formulas import basis_of
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


class Layer(nn.Module):
    """A block of a hand-written GPT; `again` names what it checkpoints, and `how`."""

    def __init__(self, again="", how=False):
        super().__init__()
        self.ln, self.attn, self.mlp = nn.LayerNorm(DIM), Attention(again, how), nn.Linear(DIM, DIM)
        self.again, self.how = again, how

    def forward(self, x):
        y = self.ln(x)
        u = checkpoint(self.attn, y, use_reentrant=self.how) if self.again == "attention" else self.attn(y)
        return x + u + self.mlp(x).tanh()


class Attention(nn.Module):
    def __init__(self, again, how):
        super().__init__()
        self.n_head, self.again, self.how = HEADS, again, how
        self.c_attn, self.c_proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        joint = checkpoint(self.c_attn, x, use_reentrant=self.how) if self.again == "W_V" else self.c_attn(x)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in joint.chunk(3, dim=-1))
        u = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return checkpoint(self.c_proj, u, use_reentrant=self.how) if self.again == "W_proj" else self.c_proj(u)


class GPT(nn.Module):
    def __init__(self, again="", how=False):
        super().__init__()
        self.wte, self.h = nn.Embedding(WORDS, DIM), nn.ModuleList(Layer(again, how) for _ in range(DEPTH))

    def forward(self, words):
        x = self.wte(words)
        for layer in self.h:
            x = layer(x)
        return x


def torch_encoder(**options):
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 16, dropout=0.0, batch_first=True, norm_first=True)
    if options:  # weights of their own for q, k and v
        layer.self_attn = nn.MultiheadAttention(DIM, HEADS, batch_first=True, kdim=DIM, vdim=DIM)
        layer.self_attn._qkv_same_embed_dim = False
        joint = layer.self_attn.in_proj_weight.detach().chunk(3)
        for letter, weight in zip("qkv", joint, strict=True):
            layer.self_attn.register_parameter(f"{letter}_proj_weight", nn.Parameter(weight.clone()))
        layer.self_attn.register_parameter("in_proj_weight", None)
    return nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)


SIZES = {"hidden_size": DIM, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS, "intermediate_size": 16}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert():
    config = transformers.BertConfig(**SIZES, **STILL, vocab_size=WORDS, max_position_embeddings=8, use_cache=False)
    return transformers.BertModel(config, add_pooling_layer=False)


def hf_vit():
    config = transformers.ViTConfig(**SIZES, **STILL, image_size=8, patch_size=4)
    return transformers.ViTModel(config, add_pooling_layer=False)


def gpt2():
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(
        n_embd=DIM, n_layer=DEPTH, n_head=HEADS, vocab_size=WORDS, n_positions=8, use_cache=False, **dropouts
    )
    return transformers.GPT2Model(config)


def neox():
    config = transformers.GPTNeoXConfig(**SIZES, vocab_size=WORDS, max_position_embeddings=8, use_cache=False)
    return transformers.GPTNeoXModel(config)


def vit():
    return ViT(image_size=8, patch_size=4, dim=DIM, depth=DEPTH, heads=HEADS, num_classes=5)


class Case(NamedTuple):
    """A model, and where it keeps its weights, as its authors wrote it."""

    build: Callable[[], nn.Module]
    kind: str  # of its input
    value: str  # of layer {i}
    output: str
    rows: range | list[int] | None = range(2 * DIM, 3 * DIM)
    transposed: bool = False


BY_HEAD = torch.arange(3 * DIM).reshape(HEADS, 3, -1)[:, 2].flatten().tolist()
MHA, BERT, NEOX = "layers.{i}.self_attn", "encoder.layer.{i}.attention", "layers.{i}.attention"
CASES = {
    "vit": Case(vit, "images", "blocks.{i}.attn.qkv.weight", "blocks.{i}.attn.proj.weight"),
    "torch.nn": Case(torch_encoder, "tokens", f"{MHA}.in_proj_weight", f"{MHA}.out_proj.weight"),
    "bert": Case(bert, "words", f"{BERT}.self.value.weight", f"{BERT}.output.dense.weight", None),
    "hf vit": Case(hf_vit, "images", "layers.{i}.attention.v_proj.weight", "layers.{i}.attention.o_proj.weight", None),
    "gpt": Case(GPT, "words", "h.{i}.attn.c_attn.weight", "h.{i}.attn.c_proj.weight"),
}
OTHER_LAYOUTS = {
    "apart": Case(lambda: torch_encoder(apart=True), "tokens", f"{MHA}.v_proj_weight", f"{MHA}.out_proj.weight", None),
    "gpt2": Case(gpt2, "words", "h.{i}.attn.c_attn.weight", "h.{i}.attn.c_proj.weight", transposed=True),
    "neox": Case(neox, "words", f"{NEOX}.query_key_value.weight", f"{NEOX}.dense.weight", BY_HEAD),
}
ALL = CASES | OTHER_LAYOUTS
SOME = ["torch.nn", "bert", "gpt"]  # q, k and v in one, apart, and of no library


def trained(name):
    """Weights far from where they start, in float64."""
    torch.manual_seed(0)
    model = ALL[name].build().double().train()
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def steered(name, basis="polar", sign="negative"):
    """The model with an Eigen whose Θ and ψ have moved on, its handle, and a copy from before."""
    model = trained(name)
    plain = copy.deepcopy(model)
    handle = ac.mitigate(model, f"eigen:{sign},basis={basis}")
    generator = torch.Generator().manual_seed(1)
    for path, parameter in model.named_parameters():
        if ".mitigation." in path:
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model, handle, plain


def inputs(kind, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if kind == "words":
        return torch.randint(0, WORDS, (2, 5), generator=generator)
    shape = (2, 3, 8, 8) if kind == "images" else (2, 5, DIM)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


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
    case = ALL[name]
    own = {path: p.detach().clone().requires_grad_() for path, p in model.named_parameters()}
    mitigation = {site.layer: f"{site.name}.mitigation" for site in find(model)}
    weights = {path: own[path] for path, _ in plain.named_parameters() if path in own}
    for i in range(DEPTH):
        theta, psi = (own[f"{mitigation[i + 1]}.{which}"] for which in ("theta", "psi"))
        v = basis_of(basis, theta)
        left = torch.linalg.inv(v).T if basis == "inverse" else v
        value, output = v.T, left @ torch.diag(-psi.square())
        path = case.value.format(i=i)
        if case.rows is not None:
            module, _, leaf = path.rpartition(".")
            kept = own[f"{module}.parametrizations.{leaf}.original0"]
            kept = iter(kept.T if case.transposed else kept)
            made = dict(zip(case.rows, value, strict=True))
            value = torch.stack([made[row] if row in made else next(kept) for row in range(3 * DIM)])
        weights[path] = value.T if case.transposed else value
        weights[case.output.format(i=i)] = output.T if case.transposed else output
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
    ("name", "basis"), [*(("torch.nn", basis) for basis in BASES), *((name, "cayley") for name in ALL)]
)
def test_function_and_gradients_are_those_of_the_formula(name, basis):
    model, _, plain = steered(name, basis)
    batch = inputs(ALL[name].kind)
    assert_same(gradients(model, batch), written_out(name, plain, model, basis, batch))


def test_a_compiled_model_sees_every_change_of_theta():
    model, _, plain = steered("gpt", "cayley")
    batch = inputs("words")
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        assert_same(gradients(model, batch, compiled), written_out("gpt", plain, model, "cayley", batch))
        with torch.no_grad():
            for site in find(model):
                site.mitigation.theta.mul_(0.9).add_(0.1)


@pytest.mark.parametrize("how", [False, True], ids=["non-reentrant", "re-entrant"])
@pytest.mark.parametrize("again", ["attention", "W_V", "W_proj"])
def test_checkpointing_parts_of_a_block_changes_nothing_or_is_refused(again, how):
    model, _, plain = steered("gpt")
    for layer in model.h:
        layer.again = layer.attn.again = again
        layer.how = layer.attn.how = how
    batch = inputs("words")
    output = model(batch)
    if again == "W_proj":
        with pytest.raises(AcutanceError, match="around the attention or around the whole block"):
            loss_of(output).backward()
        return
    loss_of(output).backward()  # re-entrant checkpointing knows no torch.autograd.grad
    found = output.detach(), {path: p.grad for path, p in model.named_parameters()}
    assert_same(found, written_out("gpt", plain, model, "polar", batch))


@pytest.mark.parametrize(("name", "again"), [("torch.nn", False), ("bert", False), ("bert", True), ("gpt", False)])
def test_a_basis_is_computed_once_a_layer_and_forward(monkeypatch, name, again):
    model, _, _ = steered(name)
    basis, calls = eigen.BASES["polar"], []
    counted = type(basis)(lambda theta: calls.append(1) or basis.map(theta), basis.preimage)
    monkeypatch.setitem(eigen.BASES, "polar", counted)
    if again:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    gradients(model, inputs(ALL[name].kind))
    assert len(calls) == DEPTH * (1 + again)


@pytest.mark.parametrize("name", SOME)
def test_every_step_has_its_own_weights(name):
    """Also after a forward pass that failed between W_V and W_proj, and after reading W_V alone."""
    model, _, plain = steered(name, "qr")
    batch = inputs(ALL[name].kind)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        loss_of(model(batch)).backward()
        optimiser.step()
        optimiser.zero_grad()
        assert_same(gradients(model, batch), written_out(name, plain, model, "qr", batch))
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


def test_threads_do_not_mix():
    model, _, _ = steered("gpt")
    batches = [inputs("words", seed) for seed in range(4)]
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


@pytest.mark.parametrize("name", ALL)
def test_removing_gives_back_everything(name):
    model = trained(name)
    batch = inputs(ALL[name].kind)
    before, output, explained = looks(model), output_of(model(batch)), repr(model)
    with ac.mitigate(model, "eigen:negative,basis=polar+neutreno:0.4"):
        for site in find(model):
            site.mitigation.parts[0].theta.data += 1
        assert not torch.equal(output_of(model(batch)), output)
    assert_untouched(looks(model), before)
    assert torch.equal(output_of(model(batch)), output)
    assert repr(model) == explained


@pytest.mark.parametrize("name", ALL)
def test_folding_leaves_a_plain_model_of_the_same_function(name):
    model, handle, plain = steered(name)
    batch = inputs(ALL[name].kind)
    folded = ac.fold(model)
    torch.testing.assert_close(output_of(folded(batch)), output_of(model(batch)), rtol=0, atol=1e-12)
    assert [type(module) for module in folded.modules()] == [type(module) for module in plain.modules()]
    assert [path for path, _ in folded.named_parameters()] == [path for path, _ in plain.named_parameters()]
    assert find(model)[0].mitigation is not None, "the steered model is left alone"
    model(batch)
    handle.remove()
    assert torch.equal(output_of(model(batch)), output_of(plain(batch)))


def test_folding_keeps_other_mitigations():
    model = trained("bert")
    ac.mitigate(model, "neutreno:0.4+eigen:negative")
    folded = ac.fold(model)
    batch = inputs("words")
    torch.testing.assert_close(output_of(folded(batch)), output_of(model(batch)), rtol=0, atol=1e-12)
    assert ac.sites.mitigation_spec(folded) == "neutreno:0.4"


@pytest.mark.parametrize("name", ["torch.nn", "gpt"])
def test_a_file_loads_with_us_and_without(tmp_path, name):
    model, _, plain = steered(name)
    batch = inputs(ALL[name].kind)
    state = load_file(ac.save(model, tmp_path / "model.safetensors"))
    missing, unexpected = plain.load_state_dict(state, strict=False)
    assert not missing
    assert all(".mitigation." in path for path in unexpected)
    torch.testing.assert_close(output_of(plain(batch)), output_of(model(batch)), rtol=0, atol=1e-12)
    again = ac.load(tmp_path / "model.safetensors", ALL[name].build().double().train())
    assert ac.sites.record(again) == ac.sites.record(model)
    assert torch.equal(output_of(again(batch)), output_of(model(batch)))


@pytest.mark.parametrize("how", ["save", "save_pretrained"])
@pytest.mark.parametrize("name", ["bert", "hf vit", "gpt2"])
def test_a_folder_loads_with_us_and_without(tmp_path, name, how):
    model, _, _ = steered(name)
    model.float().eval()
    batch = inputs(ALL[name].kind)
    batch = batch.float() if batch.is_floating_point() else batch
    ac.save(model, tmp_path) if how == "save" else model.save_pretrained(tmp_path)
    plain = type(model).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(output_of(plain(batch)), output_of(model(batch)), rtol=0, atol=1e-5)
    again = ac.load(tmp_path).eval()
    assert ac.sites.record(again) == ac.sites.record(model)
    assert torch.equal(output_of(again(batch)), output_of(model(batch)))


@pytest.mark.parametrize("name", ALL)
def test_a_state_dict_comes_back(name):
    model, _, plain = steered(name)
    state = model.state_dict()
    assert {path for path in state if ".mitigation." not in path} == plain.state_dict().keys()
    other = trained(name)
    ac.mitigate(other, "eigen:negative,basis=polar")
    other.load_state_dict(state)
    batch = inputs(ALL[name].kind)
    assert torch.equal(output_of(other(batch)), output_of(model(batch)))
    path = ALL[name].value.format(i=0)
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_state_dict(state | {path: state[path][1:]})


def test_explain_reads_the_weights_that_are_made():
    model, _, _ = steered("hf vit")
    found, folded = (ac.explain(each, progress=False) for each in (model, ac.fold(model)))
    for one, other in zip(found.layers, folded.layers, strict=True):
        assert abs(one.spectrum.real - other.spectrum.real).max() < 1e-10
        assert (one.spectrum.real < 0).all()


def test_a_model_moves_and_comes_back():
    """To another dtype and back, by way of the interleaved layout, whose order of rows moves along."""
    model = trained("neox").float()
    before = model.layers[0].attention.query_key_value.weight.detach().clone()
    handle = ac.mitigate(model, "eigen:negative,basis=cayley")
    model.to(torch.bfloat16)(inputs("words"))
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    model.float()
    handle.remove()
    value = model.layers[0].attention.query_key_value.weight
    assert value.dtype == torch.float32
    assert torch.equal(value[BY_HEAD], before[BY_HEAD])


class Lora(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base_layer, self.down = base, nn.Linear(DIM, DIM, bias=False).double()

    def forward(self, x):
        return self.base_layer(x) + self.down(x)


def llama():
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=1, vocab_size=WORDS)
    return transformers.LlamaModel(config)


def t5():
    config = transformers.T5Config(d_model=DIM, d_kv=8, num_heads=HEADS, num_layers=DEPTH, d_ff=16, vocab_size=WORDS)
    return transformers.T5EncoderModel(config)


def changed(name, change):
    model = trained(name)
    change(model)
    return model


def with_lora(model):
    model.encoder.layer[1].attention.self.value = Lora(model.encoder.layer[1].attention.self.value)


def tied(model):
    model.h[1].attn.c_proj.weight = model.h[0].attn.c_proj.weight


def shares_memory(model):
    model.other = nn.Linear(DIM, DIM)
    model.other.weight = nn.Parameter(model.encoder.layer[0].attention.self.value.weight.data.view(DIM, DIM))


def not_finite(model):
    model.encoder.layer[1].attention.self.value.weight.data[0, 0] = torch.nan


@pytest.mark.parametrize(
    ("build", "error", "reason"),
    [
        (llama, ShapeError, "a value head for every query head"),
        (t5, ShapeError, "heads · head_dim = dim"),
        (lambda: changed("bert", with_lora), AcutanceError, "Lora, which does more than multiply"),
        (lambda: changed("gpt", tied), AcutanceError, r"h\.0\.attn\.c_proj\.weight and h\.1.* are one parameter"),
        (lambda: changed("bert", shares_memory), AcutanceError, "share its memory"),
        (lambda: changed("gpt", lambda m: weight_norm(m.h[1].attn.c_proj)), AcutanceError, "is not a parameter"),
        (lambda: changed("bert", not_finite), NonFiniteError, "W_V or W_proj of layer 2 holds NaN or infinite"),
    ],
)
def test_what_is_refused_is_left_as_it_was(build, error, reason):
    model = build()
    before = looks(model)
    with pytest.raises(error, match=reason):
        ac.mitigate(model, "neutreno:0.4+eigen:negative")
    assert_untouched(looks(model), before)


@pytest.mark.parametrize("name", ["vit", "bert"])
def test_two_of_them_are_refused(name):
    model = trained(name)
    before = looks(model)
    with pytest.raises(AcutanceError, match="another mitigation makes W_V and W_proj already"):
        ac.mitigate(model, "featscale+eigen:negative+eigen:positive")
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
    model(inputs("words"))
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
