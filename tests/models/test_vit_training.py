"""Training must see the same gradients however it is run: checkpointed, compiled, in bfloat16, in two processes."""

import copy
import warnings

import pytest
import torch
from small_models import assert_same, gradients, images, seeded
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import acutance as ac
from acutance.errors import AcutanceError
from acutance.mitigations import Eigen, eigen
from acutance.mitigations.eigen import weights_together
from together import in_two_processes

NEUTRENO = "neutreno:0.6"
MITIGATIONS = [None, NEUTRENO, "neutreno:0.6,learn=head+featscale", "attnscale"]
BASES = [f"eigen:negative,basis={basis}" for basis in ("qr", "polar", "cayley", "householder", "inverse")]


@pytest.mark.parametrize("mitigation", [NEUTRENO, *BASES])
def test_checkpointing_repeats_each_block_once_and_changes_nothing(mitigation):
    model, calls = seeded(mitigation=mitigation), []
    expected = gradients(model)
    model.blocks[2].register_forward_pre_hook(lambda *_: calls.append(1))
    for enable, runs in ((True, 2), (False, 1)):
        model.set_grad_checkpointing(enable)
        assert_same(gradients(model), expected, 1e-11)
        assert len(calls) == runs
        calls.clear()


class Reentrant(nn.Module):
    """What checkpoint wrappers of training libraries make of a block."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x, v0):
        return checkpoint(self.block, x, v0, use_reentrant=True)


def make_reentrant(model):
    wrapped = copy.deepcopy(model)
    wrapped.blocks = nn.ModuleList(Reentrant(block) for block in wrapped.blocks)
    return wrapped


@pytest.mark.parametrize("mitigation", [*MITIGATIONS, "eigen:free,basis=cayley,spectrum=clipped+featscale"])
def test_reentrant_checkpointing_is_exact_because_v0_is_positional(mitigation):
    model = seeded(mitigation=mitigation)
    loss, found = gradients(make_reentrant(model))
    found = {name.replace(".block.", "."): gradient for name, gradient in found.items()}
    assert_same((loss, found), gradients(model), 1e-10)


def test_reentrant_checkpointing_that_would_lose_gradients_is_refused():
    model = make_reentrant(seeded(mitigation=NEUTRENO))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(("cls_token", "pos_embed", "patch_embed")))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own hint that the inputs need no gradient
        with pytest.raises(AcutanceError, match="set_grad_checkpointing"):
            model(images())
        model.blocks = nn.ModuleList(wrapped.block for wrapped in model.blocks)
        model.set_grad_checkpointing()
        model(images()).sum().backward()  # the model's own checkpointing trains
        assert model.blocks[0].attn.qkv.weight.grad is not None
        model.requires_grad_(False)(images())  # nothing to train, nothing to refuse
        with torch.no_grad():
            model.requires_grad_(True)(images())


@pytest.mark.parametrize(
    ("mitigation", "checkpointing"),
    [
        ("neutreno:0.6,learn=head+featscale", True),
        ("eigen:positive,basis=cayley,spectrum=bounded+attnscale", False),
        *((basis, False) for basis in (BASES[0], BASES[1], BASES[3])),
    ],
)
def test_compiled_whole_graph_has_the_same_gradients(mitigation, checkpointing):
    model = seeded(mitigation=mitigation, depth=2)
    expected = gradients(model)
    model.set_grad_checkpointing(checkpointing)
    torch._dynamo.reset()
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_same(gradients(model, run=run), expected, 1e-10)


@pytest.mark.parametrize("mitigation", [*MITIGATIONS, *BASES])
def test_bfloat16_autocast_stays_within_its_precision(mitigation):
    """bfloat16 carries 8 bits, so one rounding is 0.4 %; a dozen in a row must stay under a few percent in norm.

    A single parameter's gradient may be a small difference of large terms and keep their rounding.
    """
    model = seeded(mitigation=mitigation, dtype=torch.float32, spread=0.2, depth=4)
    loss, exact = gradients(model)
    made = weights_together([model.blocks[0].attn.mitigation])[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(images(dtype=torch.float32)).dtype == torch.bfloat16
        rounded_loss, rounded = gradients(model)
        again = weights_together([model.blocks[0].attn.mitigation])[0]
    assert made is None or all(map(torch.equal, made, again)), "a basis is computed in float32"
    assert abs(rounded_loss - loss) < 0.03 * loss
    total = torch.stack([gradient.norm() for gradient in exact.values()]).norm()
    errors = {name: (rounded[name] - gradient).norm() for name, gradient in exact.items()}
    assert torch.stack(list(errors.values())).norm() < (0.03 if made is None else 0.05) * total
    if made is None:
        beyond = {n: error for n, error in errors.items() if error > 0.05 * exact[n].norm() + 0.005 * total}
        assert not beyond


def test_a_bfloat16_model_rounds_only_the_finished_weights():
    model = seeded(mitigation=BASES[1], dtype=torch.bfloat16)
    value, projection = model.blocks[0].attn.mitigation.weights()
    assert value.dtype == projection.dtype == torch.bfloat16
    torch.testing.assert_close(value.float() @ value.float().mT, torch.eye(12), rtol=0, atol=0.01)
    assert model(images(dtype=torch.bfloat16)).isfinite().all()


@pytest.mark.parametrize(("stream", "expected"), [("float32", torch.float32), ("autocast", torch.bfloat16)])
def test_the_stream_has_the_dtype_that_was_chosen(stream, expected):
    model, seen = seeded(mitigation=NEUTRENO, dtype=torch.float32, stream=stream), []
    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, outputs: seen.append((inputs[0].dtype, outputs[0].dtype)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(images(dtype=torch.float32)).sum().backward()
    assert set(seen) == {(expected, expected)}
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    exact = [gradients(seeded(mitigation=NEUTRENO, stream=chosen)) for chosen in (stream, "float32")]
    assert_same(*exact, tolerance=0)  # without autocast it makes no difference


def test_float64_is_float64_all_the_way():
    model, records = seeded(mitigation="neutreno:0.6,learn=head+featscale"), []
    for block in model.blocks:
        block.attn.observer = records.append
    assert model(images()).dtype == torch.float64
    assert {t.dtype for r in records for t in (r.A.q, r.values, r.output, r.branch)} == {torch.float64}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_basis_is_computed_once_per_forward_for_all_layers(monkeypatch, checkpointing):
    batches, basis = [], eigen.BASES["polar"]
    counted = type(basis)(lambda theta: batches.append(len(theta)) or basis.map(theta), basis.preimage)
    model = seeded(mitigation=BASES[1])
    model.set_grad_checkpointing(checkpointing)
    monkeypatch.setitem(eigen.BASES, "polar", counted)
    gradients(model)
    assert batches == [3]  # W_V and W_proj share it, and no recomputation repeats it
    batches.clear()
    model.blocks[0](torch.zeros(1, 5, 12, dtype=torch.float64), None)  # a block by itself makes its own
    assert batches == [1]


def test_layers_of_different_kinds_are_computed_apart():
    model = seeded()
    for site, chosen in zip(ac.sites.find(model), [Eigen("negative"), None, Eigen("positive", "polar")], strict=True):
        if chosen is not None:
            site.install(chosen.for_layer(site.shape(pretrained=True)).double())
    found = [torch.linalg.eigvals(site.projection_weight() @ site.value_weight()).real for site in ac.sites.find(model)]
    assert (found[0] < 0).all()
    assert (found[2] > 0).all()
    torch.testing.assert_close(model(images()), ac.fold(model)(images()), rtol=1e-12, atol=1e-12)


def test_copies_are_independent():
    model = seeded()
    handle = ac.mitigate(model, Eigen("negative"))
    before, other = model(images()), copy.deepcopy(model)
    other.blocks[0].attn.mitigation.psi.data += 1
    assert torch.equal(model(images()), before)
    assert not torch.equal(other(images()), before)
    handle.remove()
    assert other.config.mitigation == "eigen:negative"


def two_steps(model, batch):
    """Gradients of a second step: an unused parameter in the first makes the second fail under DDP."""
    for _ in range(2):
        model.zero_grad()
        model(batch).square().mean().backward()
    return {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}


SHARED = ["neutreno:0.6,learn=head", BASES[2]]


def worker(rank, folder):
    from torch.distributed.fsdp import fully_shard

    half = images()[2 * rank : 2 * rank + 2]
    found = {spec: two_steps(DistributedDataParallel(seeded(mitigation=spec)), half) for spec in SHARED}
    model = seeded(mitigation=BASES[1])
    for block in model.blocks:
        fully_shard(block)
    sharded = two_steps(fully_shard(model), images())
    found[BASES[1]] = {name: gradient.full_tensor() for name, gradient in sharded.items()}
    torch.save(found, f"{folder}/{rank}.pt")


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    """Data-parallel on half of the batch each, and sharded on the whole."""
    in_two_processes(worker, tmp_path)
    results = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    for spec in (*SHARED, BASES[1]):
        expected = two_steps(seeded(mitigation=spec), images())
        for found in results:
            torch.testing.assert_close(found[spec], expected, rtol=1e-9, atol=1e-13)
