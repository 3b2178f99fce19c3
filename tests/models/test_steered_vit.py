"""A ViT with Eigen trains the same however it is run, and survives the disk."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from acutance.errors import AcutanceError
from acutance.explain.steer import fold
from acutance.io.saving import load, load_checkpoint, save
from acutance.mitigations import Eigen, eigen
from acutance.models import ViT
from acutance.sites import find
from acutance.sites.mitigate import mitigate
from together import in_two_processes

TINY = {"image_size": 8, "patch_size": 4, "dim": 12, "depth": 3, "heads": 3, "num_classes": 5}
BASES = ["qr", "polar", "cayley", "householder", "inverse"]


def seeded(mitigation="eigen:negative,basis=polar", dtype=torch.float64, **options):
    torch.manual_seed(0)
    model = ViT(**{**TINY, **options}, mitigation=mitigation)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model.to(dtype)


def images(dtype=torch.float64):
    return torch.randn(4, 3, 8, 8, dtype=dtype, generator=torch.Generator().manual_seed(0))


def gradients(model, run=None):
    model.zero_grad()
    run = model if run is None else run
    loss = run(images(next(model.parameters()).dtype)).square().mean()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same(found, expected, tolerance=1e-6):
    torch.testing.assert_close(found[0], expected[0])
    for name, gradient in expected[1].items():
        error = (found[1][name] - gradient).norm()
        assert error <= tolerance * gradient.norm(), f"{name}: {error} of {gradient.norm()}"


@pytest.mark.parametrize("basis", BASES)
def test_gradient_checkpointing_changes_nothing(basis):
    model = seeded(f"eigen:negative,basis={basis}")
    expected = gradients(model)
    model.set_grad_checkpointing()
    assert_same(gradients(model), expected, 1e-11)


class Reentrant(nn.Module):
    """A wrapper that knows nothing of steering."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x, v0):
        return checkpoint(self.block, x, v0, use_reentrant=True)


def test_wrapped_blocks_make_their_own_weights():
    model = seeded("eigen:free,basis=cayley,spectrum=clipped+featscale")
    wrapped = copy.deepcopy(model)
    wrapped.blocks = nn.ModuleList(Reentrant(block) for block in wrapped.blocks)
    loss, found = gradients(wrapped)
    assert_same((loss, {name.replace(".block.", "."): g for name, g in found.items()}), gradients(model), 1e-10)


@pytest.mark.parametrize(
    ("mitigation", "checkpointing"),
    [
        ("eigen:negative,basis=polar,spectrum=clipped", False),
        ("eigen:positive,basis=cayley,spectrum=bounded+neutreno:0.6", True),
    ],
)
def test_compiled_whole_graph_has_the_same_gradients(mitigation, checkpointing):
    model = seeded(mitigation, depth=2)
    expected = gradients(model)
    model.set_grad_checkpointing(checkpointing)
    torch._dynamo.reset()
    assert_same(gradients(model, torch.compile(model, backend="aot_eager", fullgraph=True)), expected, 1e-10)


@pytest.mark.parametrize("basis", ["qr", "householder", "inverse"])
def test_the_other_bases_compile_too(basis):
    model = seeded(f"eigen:negative,basis={basis}", depth=2)
    expected = gradients(model)
    torch._dynamo.reset()
    assert_same(gradients(model, torch.compile(model, backend="aot_eager", fullgraph=True)), expected, 1e-10)


@pytest.mark.parametrize("basis", BASES)
def test_autocast_leaves_the_basis_in_float32(basis):
    model = seeded(f"eigen:negative,basis={basis}", dtype=torch.float32)
    exact = model.blocks[0].attn.mitigation.weights()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(torch.equal(*pair) for pair in zip(model.blocks[0].attn.mitigation.weights(), exact, strict=True))
        assert model(images(torch.float32)).dtype == torch.bfloat16
        loss, rounded = gradients(model)
    expected_loss, expected = gradients(model)
    assert abs(loss - expected_loss) < 0.03 * expected_loss
    norm = torch.stack([g.square().sum() for g in expected.values()]).sum().sqrt()
    error = torch.stack([(rounded[name] - g).square().sum() for name, g in expected.items()]).sum().sqrt()
    assert error < 0.05 * norm


def test_a_bfloat16_model_rounds_only_the_finished_weights():
    model = seeded(dtype=torch.bfloat16)
    value, projection = model.blocks[0].attn.mitigation.weights()
    assert value.dtype == projection.dtype == torch.bfloat16
    gram = value.float() @ value.float().mT
    torch.testing.assert_close(gram, torch.eye(12), rtol=0, atol=0.01)
    assert model(images(torch.bfloat16)).isfinite().all()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_basis_is_computed_once_per_forward_for_all_layers(monkeypatch, checkpointing):
    batches = []
    basis = eigen.BASES["polar"]
    counted = type(basis)(lambda theta: batches.append(len(theta)) or basis.map(theta), basis.preimage)
    model = seeded()
    model.set_grad_checkpointing(checkpointing)
    monkeypatch.setitem(eigen.BASES, "polar", counted)
    gradients(model)
    assert batches == [3]  # W_V and W_proj share it, and no recomputation repeats it
    batches.clear()
    model.blocks[0](torch.zeros(1, 5, 12, dtype=torch.float64), None)  # a block by itself makes its own
    assert batches == [1]


def test_layers_of_different_kinds_are_computed_apart():
    model = seeded(None)
    for site, chosen in zip(find(model), [Eigen("negative"), None, Eigen("positive", "polar")], strict=True):
        if chosen is not None:
            site.install(chosen.for_layer(site.shape(pretrained=True)).double())
    found = [torch.linalg.eigvals(site.projection_weight() @ site.value_weight()).real for site in find(model)]
    assert (found[0] < 0).all()
    assert (found[2] > 0).all()
    torch.testing.assert_close(model(images()), fold(model)(images()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mitigation", ["eigen:negative,basis=cayley", "neutreno:0.6,learn=head+eigen:free"])
@pytest.mark.parametrize("layers", [None, (2,)])
def test_a_saved_model_comes_back_whole(tmp_path, mitigation, layers):
    model = seeded(mitigation, dtype=torch.float32, mitigation_layers=layers).eval()
    found = load(save(model, tmp_path / "model.safetensors")).eval()
    assert found.config == model.config
    assert torch.equal(found(images(torch.float32)), model(images(torch.float32)))


def test_a_patched_model_is_saved_as_it_is(tmp_path):
    model = seeded(None, dtype=torch.float32).eval()
    with mitigate(model, "eigen:negative,basis=polar"):
        found = load(save(model, tmp_path / "model.safetensors")).eval()
        assert torch.equal(found(images(torch.float32)), model(images(torch.float32)))


def test_plain_weights_do_not_load_into_a_steered_model():
    with pytest.raises(AcutanceError, match="load it into a plain model, then add the mitigation"):
        load_checkpoint(seeded(), seeded(None).state_dict())


def test_copies_are_independent():
    model = seeded(None)
    handle = mitigate(model, Eigen("negative"))
    output, other = model(images()), copy.deepcopy(model)
    other.blocks[0].attn.mitigation.psi.data += 1
    assert torch.equal(model(images()), output)
    assert not torch.equal(other(images()), output)
    handle.remove()
    assert other.config.mitigation == "eigen:negative"


def two_steps(model, batch):
    """Gradients of a second step: an unused parameter in the first makes the second fail under DDP."""
    for _ in range(2):
        model.zero_grad()
        model(batch).square().mean().backward()
    return {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}


def worker(rank, folder):
    found = two_steps(DistributedDataParallel(seeded("eigen:negative,basis=cayley")), images()[2 * rank : 2 * rank + 2])
    torch.save(found, f"{folder}/{rank}.pt")


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    in_two_processes(worker, tmp_path)
    expected = two_steps(seeded("eigen:negative,basis=cayley"), images())
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")


def shard_worker(rank, folder):
    from torch.distributed.fsdp import fully_shard

    model = seeded()
    for block in model.blocks:
        fully_shard(block)
    found = two_steps(fully_shard(model), images())
    torch.save({name: g.full_tensor() for name, g in found.items()}, f"{folder}/{rank}.pt")


@pytest.mark.slow
def test_sharded_training_has_the_same_gradients(tmp_path):
    in_two_processes(shard_worker, tmp_path)
    expected = two_steps(seeded(), images())
    found = torch.load(tmp_path / "0.pt", weights_only=True)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")
