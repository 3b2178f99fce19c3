"""The MLP with its GELU inside the products against float64 and against autocast's own layers.

On a GPU, and on the CPU in Triton's interpreter, which needs triton and TRITON_INTERPRET=1: `make test` runs this
folder a second time so.
"""

import copy

import pytest
import torch
from mlp_cases import DTYPES, LOW, ROUNDING, draw, exact, needs_gpu
from mlp_cases import few_programs as few_programs
from model_cases import recorder
from packed_cases import CUDA, DEVICE, needs_kernels
from torch import nn
from torch.utils.checkpoint import checkpoint

from acutance.attention.kernels import packed
from acutance.models import ViT
from acutance.models.block import Mlp
from acutance.models.kernels import mlp


def model(dropout=0.0, activation=nn.GELU, dim=64, hidden=128):
    torch.manual_seed(0)
    made = Mlp(dim, hidden, dropout, activation).to(DEVICE)
    with torch.no_grad():
        made.fc1.weight.mul_(3)  # so that the GELU bends
    return made


@pytest.fixture
def calls(monkeypatch):
    """Each use of the kernels."""
    made = []
    original = mlp.mlp
    monkeypatch.setattr(mlp, "mlp", lambda *a: made.append("mlp") or original(*a))
    return made


def without_kernels(monkeypatch):
    monkeypatch.setattr(mlp, "is_available", lambda *_: False)


def step(run, layers, x, dtype=LOW, autocast=True):
    """Output and gradients of the input and all parameters."""
    x = x.detach().requires_grad_()
    with torch.autocast(DEVICE, dtype, enabled=autocast):
        out = run(x)
    grad = draw(*out.shape, dtype=out.dtype, seed=5)
    return out.detach(), *torch.autograd.grad(out, [x, *layers.parameters()], grad)


def error(ours, theirs):
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


@needs_kernels
@pytest.mark.parametrize("autocast", [False, True], ids=["half", "autocast"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_mlp_has_the_gradients_of_float64_and_is_no_further_from_it_than_pytorch(
    dtype, autocast, monkeypatch, calls
):
    own = torch.float32 if autocast else dtype
    layers, x = model(dim=192, hidden=256).to(own), draw(2, 65, 192, dtype=own)
    found = step(layers, layers, x, dtype, autocast)
    assert calls == ["mlp"]
    without_kernels(monkeypatch)
    plain = step(layers, layers, x, dtype, autocast)
    assert calls == ["mlp"]
    double = copy.deepcopy(layers).double()
    x64 = x.double().requires_grad_()
    out = double.fc2(exact(double.fc1(x64)))
    grad = draw(*out.shape, dtype=dtype, seed=5).double()
    expected = out, *torch.autograd.grad(out, [x64, *double.parameters()], grad)
    assert [part.dtype for part in found] == [part.dtype for part in plain] == [dtype, *[own] * 5]
    for ours, theirs, right in zip(found, plain, expected, strict=True):
        assert ours.shape == right.shape
        assert error(ours, right) < 2 * ROUNDING[dtype]
        assert error(ours, right) < 1.1 * error(theirs, right) + 0.1 * ROUNDING[dtype]


@needs_kernels
def test_frozen_parameters_get_no_gradient():
    layers, x = model(), draw(70, 64, dtype=torch.float32)
    everything = step(layers, layers, x)
    for frozen in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"):
        layers.get_parameter(frozen).requires_grad_(False)
        with torch.autocast(DEVICE, LOW):
            out = layers(x)
        rest = [(n, p) for n, p in layers.named_parameters() if n != frozen]
        found = torch.autograd.grad(out, [p for _, p in rest], draw(*out.shape, dtype=out.dtype, seed=5))
        all_of_them = dict(zip([n for n, _ in layers.named_parameters()], everything[2:], strict=True))
        assert all(torch.equal(grad, all_of_them[name]) for (name, _), grad in zip(rest, found, strict=True))
        layers.get_parameter(frozen).requires_grad_()


@needs_kernels
def test_without_gradients_nothing_is_kept(monkeypatch):
    layers, x = model().to(LOW), draw(70, 64, dtype=LOW)
    kept = []
    for name in ("mlp_forward", "_forward"):  # the operation, and what is called where nobody looks
        original = getattr(mlp, name)
        monkeypatch.setattr(mlp, name, lambda *a, name=name, run=original: kept.append((name, a[-1])) or run(*a))
    learning = layers(x)
    with torch.no_grad():
        assert torch.equal(layers(x), learning)
    assert kept == [("mlp_forward", True), ("_forward", False)]


@needs_kernels
@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
def test_a_compiled_mlp_is_one_graph_with_the_kernels_in_it(checkpointed):
    layers, x = model(), draw(3, 30, 64, dtype=torch.float32)
    expected = step(layers, layers, x)
    torch._dynamo.reset()
    graphs = []

    def run(x):
        return checkpoint(layers, x, use_reentrant=False) if checkpointed else layers(x)

    found = step(torch.compile(run, fullgraph=True, backend=recorder(graphs)), layers, x)
    assert [part.dtype for part in found] == [part.dtype for part in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert error(ours, theirs) < 2 * ROUNDING[LOW]
    (graph,) = graphs
    parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]  # a checkpoint has its own
    targets = [str(node.target) for part in parts for node in part.graph.nodes]
    assert sum("acutance.mlp_forward" in target for target in targets) == 1


@needs_kernels
def test_a_checkpointed_mlp_runs_the_kernels_again(calls):
    layers, x = model(), draw(3, 30, 64, dtype=torch.float32)
    expected = step(layers, layers, x)
    found = step(lambda x: checkpoint(layers, x, use_reentrant=False), layers, x)
    assert calls == ["mlp"] * 3
    assert all(map(torch.equal, found, expected))


@needs_kernels
@pytest.mark.parametrize("learning", [False, True])
def test_an_exported_mlp_has_the_kernels_in_it(learning):
    layers, x = model().to(LOW).eval(), draw(3, 30, 64, dtype=LOW)
    with torch.set_grad_enabled(learning):
        exported = torch.export.export(layers, (x,))
        assert sum("acutance.mlp_forward" in str(node.target) for node in exported.graph.nodes) == 1
        torch.testing.assert_close(exported.module()(x), layers(x))


@needs_kernels
def test_a_vit_asks_for_it_in_every_layer(calls):
    vit = ViT(image_size=8, patch_size=4, dim=64, depth=3, heads=1, num_classes=3, mlp_ratio=2).to(DEVICE)
    images = draw(2, 3, 8, 8, dtype=torch.float32)
    with torch.autocast(DEVICE, LOW):
        vit(images).square().mean().backward()
    assert calls == ["mlp"] * 3
    assert all(parameter.grad.abs().sum() > 0 for block in vit.blocks for parameter in block.mlp.parameters())


@needs_kernels
def test_a_compiled_vit_learns_as_without_the_kernels(monkeypatch):
    """On a GPU in CUDA graphs, replayed."""
    vit = ViT(image_size=8, patch_size=4, dim=64, depth=2, heads=1, num_classes=3, mlp_ratio=2, stream="autocast")
    vit, images = vit.to(DEVICE), draw(26, 3, 8, 8, dtype=torch.float32)
    monkeypatch.setattr(packed, "is_available", lambda *_: False)  # has tests of its own

    def gradients(run):
        vit.zero_grad()
        with torch.autocast(DEVICE, LOW):
            loss = run(images).float().square().mean()
        loss.backward()
        return {name: parameter.grad.clone() for name, parameter in vit.named_parameters()}

    with monkeypatch.context() as patch:
        without_kernels(patch)
        expected = gradients(vit)
    torch._dynamo.reset()
    options = {"mode": "reduce-overhead"} if CUDA else {"backend": "aot_eager"}
    run = torch.compile(vit, fullgraph=True, **options)
    for _ in range(4 if CUDA else 1):
        found = gradients(run)
    for name, grad in expected.items():
        assert error(found[name], grad) < 20 * ROUNDING[LOW], name


def changed(case):
    """An MLP that is not plain, or does not have the sizes."""
    sizes = {"channels": (48, 128), "many channels": (320, 128), "hidden": (64, 192)}.get(case, (64, 128))
    layers = model(0.1 if case == "dropout" else 0.0, nn.ReLU if case == "relu" else nn.GELU, *sizes)
    if case in ("fc1", "act", "fc2", "drop"):
        getattr(layers, case).register_forward_hook(lambda *_: None)
    if case == "backward hook":
        layers.act.register_full_backward_hook(lambda *_: None)
    if case == "own forward":
        layers.fc2.forward = lambda x, original=layers.fc2.forward: original(x)
    if case == "tanh":
        layers.act = nn.GELU("tanh")
    if case == "other layer":
        nn.utils.parametrizations.weight_norm(layers.fc2)
    if case == "another class":
        layers.fc1 = nn.Sequential(layers.fc1)
    if case == "no bias":
        layers.fc2.bias = None
    return layers


CASES = [
    *("float32", "float64", "empty", "relu", "tanh", "dropout"),
    *("fc1", "act", "fc2", "drop", "backward hook", "own forward", "other layer", "another class"),
    *("no bias", "channels", "many channels", "hidden"),
]


@needs_kernels
@pytest.mark.parametrize("case", CASES)
def test_where_it_does_not_apply_the_layers_are_called(case, calls):
    layers = changed(case)
    x = draw(0 if case == "empty" else 3, layers.fc2.out_features, dtype=torch.float32)
    if case == "float64":
        layers, x = layers.double(), x.double()
    with torch.autocast(DEVICE, LOW, enabled=case != "float32"):
        assert layers(x).shape == x.shape
    assert not calls


@needs_kernels
def test_dropout_that_is_not_active_does_not_stand_in_the_way(calls):
    model(0.1).to(LOW).eval()(draw(3, 64, dtype=LOW))
    assert calls == ["mlp"]
    with pytest.raises(RuntimeError, match="dtype"):  # layers of another precision
        model()(draw(3, 64, dtype=LOW))
    assert list(model().state_dict()) == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]


@pytest.mark.skipif(packed.INTERPRETED, reason="the interpreter takes CPU tensors")
def test_on_a_cpu_pytorch_computes_it():
    layers = model().to(torch.bfloat16)
    assert not mlp.is_available(torch.zeros(2, 64, dtype=torch.bfloat16), layers.fc1, layers.fc2)


@pytest.mark.cuda
@needs_gpu
def test_the_same_inputs_give_the_same_bits_and_a_cuda_graph_replays_them():
    layers, x = model(dim=192, hidden=768), draw(512, 65, 192, dtype=torch.float32)
    expected, again = (step(layers, layers, x, torch.bfloat16) for _ in range(2))
    assert all(map(torch.equal, expected, again))
    run = torch.compile(layers, mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        found = [part.clone() for part in step(run, layers, x, torch.bfloat16)]
    assert all(error(a, b) < 2 * ROUNDING[torch.bfloat16] for a, b in zip(found, expected, strict=True))
