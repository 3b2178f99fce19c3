"""Muon: its directions, its equality with torch's own, and what it leaves to AdamW."""

import os

import pytest
import torch
from torch import nn
from train_worlds import assert_same_bits, bits, die_in, fit, tiny

from acutance.errors import AcutanceError
from acutance.lab.train.config import OptimConfig
from acutance.lab.train.optim import build_optimiser, orthogonal
from acutance.models import ViT

SMALL = {"image_size": 8, "patch_size": 4, "in_chans": 1, "dim": 16, "depth": 2, "heads": 2, "num_classes": 3}
CHOSEN = OptimConfig(name="muon", lr=1e-2, weight_decay=0.1)


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 8, 24)])
def test_directions_have_singular_values_around_one_and_the_singular_vectors_of_the_momentum(shape):
    matrices = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = orthogonal(matrices)
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.3  # where a singular value is tiny, five iterations do not lift it all the way
    assert values.max() < 1.3
    product = matrices.mT @ found  # V S Uᵀ U S′ Vᵀ: symmetric and positive
    torch.testing.assert_close(product, product.mT, atol=1e-10, rtol=0)
    assert torch.linalg.eigvalsh(product).min() > -1e-10


def two_steps(model, optimiser):
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimiser.step()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon to compare with")
@pytest.mark.parametrize(("part", "longer"), [("mlp.fc1", 64), ("mlp.fc2", 64), ("attn.proj", 16)])
def test_it_moves_matrices_as_torch_does(part, longer):
    torch.manual_seed(0)
    ours = ViT(**SMALL)
    torchs = ViT(**SMALL)
    torchs.load_state_dict(ours.state_dict())
    two_steps(ours, build_optimiser(ours, CHOSEN))
    matrix = torchs.blocks[1].get_submodule(part).weight
    two_steps(torchs, torch.optim.Muon([matrix], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"))
    moved = ours.blocks[1].get_submodule(part).weight
    # Torch's iteration is in bfloat16.
    assert (moved - matrix).abs().max() < 0.02 * 1e-2 * 0.2 * longer**0.5 * 2


def test_matrices_of_one_shape_go_together_and_those_of_its_transpose(monkeypatch):
    shapes = []

    def watched(matrices):
        shapes.append(tuple(matrices.shape))
        return orthogonal(matrices)

    monkeypatch.setattr("acutance.lab.train.optim.orthogonal", watched)
    model = ViT(**SMALL)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    build_optimiser(model, CHOSEN).step()
    assert sorted(shapes) == [(4, 16, 64), (8, 16, 16)]  # of 2 blocks: fc1ᵀ and fc2; queries, keys, values and proj


@pytest.mark.parametrize(("name", "pieces"), [("qkv", 3), ("kv", 2), ("fc1", 1)])
def test_a_joint_projection_moves_as_several_and_an_mlp_as_one(name, pieces):
    torch.manual_seed(0)
    joint = nn.ModuleDict({"blocks": nn.ModuleDict({name: nn.Linear(4, 12, bias=False)})})
    apart = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(4, 12 // pieces, bias=False) for _ in range(pieces))})
    weight, grad = joint["blocks"][name].weight, torch.randn(12, 4)
    for part, own, piece in zip(apart["blocks"], weight.chunk(pieces), grad.chunk(pieces), strict=True):
        part.weight.data.copy_(own)
        part.weight.grad = piece.clone()
    weight.grad = grad.clone()
    build_optimiser(joint, CHOSEN).step()
    build_optimiser(apart, CHOSEN).step()
    moved = torch.cat([part.weight for part in apart["blocks"]])
    torch.testing.assert_close(weight, moved, atol=1e-7, rtol=1e-6)


def test_a_closure_is_asked_first():
    model = ViT(**SMALL)
    optimiser = build_optimiser(model, CHOSEN)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def closure():
        optimiser.zero_grad()
        loss = model(torch.ones(2, 1, 8, 8)).square().sum()
        loss.backward()
        return loss

    assert optimiser.step(closure) > 0
    assert not torch.equal(model.blocks[0].mlp.fc1.weight, before["blocks.0.mlp.fc1.weight"])


def test_another_optimiser_cannot_go_on(tmp_path):
    die_in(7, tiny(), tmp_path / "run")
    with pytest.raises(AcutanceError, match="trained by adamw, whose moments muon cannot go on from"):
        fit(tiny("optim.name=muon"), tmp_path / "run", resume=True)


def test_sharded_matrices_are_refused_before_a_run_is_begun(tmp_path):
    config, before = tiny("optim.name=muon", "loop.strategy=fsdp"), dict(os.environ)
    with pytest.raises(AcutanceError, match=r"needs whole matrices, which loop\.strategy=fsdp shards"):
        fit(config, tmp_path / "run", processes=1)
    assert not (tmp_path / "run").exists()
    assert {name for name in os.environ.keys() - before.keys() if "RANK" in name or "MASTER" in name} == set()


def test_everything_else_moves_by_adamw():
    torch.manual_seed(0)
    ours, plain = ViT(**SMALL, mitigation="neutreno:0.6,learn=head"), ViT(**SMALL, mitigation="neutreno:0.6,learn=head")
    plain.load_state_dict(ours.state_dict())
    two_steps(ours, build_optimiser(ours, CHOSEN))
    two_steps(plain, build_optimiser(plain, OptimConfig(name="adamw", lr=1e-2, weight_decay=0.1)))
    expected = dict(plain.named_parameters())
    differing = {name for name, value in ours.named_parameters() if not torch.equal(value, expected[name])}
    linear = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    assert differing == {f"blocks.{block}.{part}.weight" for block in range(2) for part in linear}


def test_a_run_that_dies_goes_on_to_the_same_bits(tmp_path):
    config = tiny("optim.name=muon")
    fit(config, tmp_path / "whole")
    die_in(7, config, tmp_path / "cut")
    fit(config, tmp_path / "cut", resume=True)
    assert_same_bits(bits(tmp_path / "cut"), bits(tmp_path / "whole"))
