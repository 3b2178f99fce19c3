import copy
import math
import os

import pytest
import torch
from tiny_runs import fit, tiny
from torch import nn

from acutance.errors import AcutanceError
from acutance.lab.train import OptimConfig, ScheduleConfig, optim
from acutance.lab.train.engine import Engine
from acutance.lab.train.log import attention_backend
from acutance.lab.train.optim import Ema, build_optimiser, learning_rate, orthogonal
from acutance.models import ViT

PER_EPOCH, TOTAL = 10, 100
SMALL = {"image_size": 8, "patch_size": 4, "in_chans": 1, "dim": 16, "depth": 2, "heads": 2, "num_classes": 3}
MUON = OptimConfig(name="muon", lr=1e-2, weight_decay=0.1, momentum=0.9)
LEARNT = "neutreno:0.6,learn=head"


def rates(**options):
    config = ScheduleConfig(**options)
    return [learning_rate(config, 1.0, step, PER_EPOCH, TOTAL) for step in range(TOTAL + 1)]


@pytest.mark.parametrize("name", ["cosine", "poly", "constant"])
def test_the_warm_up_is_a_line_from_start_to_the_peak(name):
    found = rates(name=name, warmup=2, start=0.1)
    assert found[:21] == pytest.approx([0.1 + 0.045 * step for step in range(21)])


def test_curves_follow_their_formulas_to_their_end():
    assert rates(final=0.2)[30] == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * 0.3)))
    assert rates(name="poly", power=0.9)[30] == pytest.approx(0.7**0.9)
    assert rates(name="constant")[99] == 1.0
    # DeiT's: the cosine of the whole training, whose beginning the warm-up hides.
    assert rates(warmup=2, warmup_inside=True)[50] == pytest.approx(0.5)
    assert rates(warmup=2)[60] == pytest.approx(0.5)
    smooth, stairs = rates(warmup=2), rates(warmup=2, per="epoch")
    assert stairs == [smooth[step - step % PER_EPOCH] for step in range(TOTAL + 1)]
    assert [rates(name=name, final=0.01)[-1] for name in ("cosine", "poly")] == pytest.approx([0.01] * 2)


def test_matrices_are_decayed_and_what_parts_name_or_is_frozen_is_not():
    outer = nn.ModuleDict({"encoder": ViT(mitigation=LEARNT, **SMALL), "head": nn.Linear(3, 4)})
    names = {parameter: name for name, parameter in outer.named_parameters()}
    decayed, spared = ({names[p] for p in group["params"]} for group in optim.parameter_groups(outer, 0.3))
    assert decayed | spared == set(names.values())
    assert not decayed & spared
    assert {"head.weight", "encoder.blocks.0.mlp.fc1.weight", "encoder.patch_embed.proj.weight"} <= decayed
    assert {"head.bias", "encoder.pos_embed", "encoder.cls_token", "encoder.norm.weight"} <= spared
    assert all(name in spared for name in names.values() if "mitigation" in name)
    outer["encoder"].requires_grad_(False)
    assert sum(len(group["params"]) for group in build_optimiser(outer, OptimConfig()).param_groups) == 2


@pytest.mark.parametrize("rate", [torch.tensor(0.1), 0.1])
def test_the_rate_is_set_for_all_groups(rate):
    optimiser = torch.optim.SGD([{"params": [nn.Parameter(torch.ones(2))]} for _ in range(3)], lr=rate)
    optimiser.load_state_dict(optimiser.state_dict())  # as a restored one
    optim.set_learning_rate(optimiser, 0.5)
    assert [float(group["lr"]) for group in optimiser.param_groups] == [0.5] * 3


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_optimisers_are_what_they_say(name):
    config = OptimConfig(name=name, lr=0.1, weight_decay=0.01, betas=(0.8, 0.9), momentum=0.7, eps=1e-3)
    ours, plain = nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)
    plain.load_state_dict(ours.state_dict())
    own = {"momentum": 0.7, "nesterov": True} if name == "sgd" else {"betas": (0.8, 0.9), "eps": 1e-3}
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}[name]
    theirs = kind(plain.parameters(), lr=0.1, weight_decay=0.01, **own)
    for model, optimiser in ((ours, build_optimiser(ours, config)), (plain, theirs)):
        for step in range(3):
            model(torch.arange(3.0) + step).square().sum().backward()
            optimiser.step()
            optimiser.zero_grad()
    assert torch.equal(ours.weight, plain.weight)


def test_the_mean_follows_its_formula_and_swapping_leaves_no_trace():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    ema, expected = Ema(model, 0.3), model[0].weight.detach().double()
    for step, decay in enumerate([0.1, 2 / 11, 0.25, 0.3, 0.3]):  # (1 + t) / (10 + t), until the decay is reached
        with torch.no_grad():
            model[0].weight.add_(step + 1)
            model[1].running_mean.add_(1)
        ema.update(step)
        expected = decay * expected + (1 - decay) * model[0].weight.detach().double()
    torch.testing.assert_close(ema.mean["0.weight"].double(), expected, rtol=1e-6, atol=1e-6)
    assert ema.mean["1.running_mean"].mean() < model[1].running_mean.mean()
    assert "1.num_batches_tracked" not in ema.mean
    before, mean = copy.deepcopy((model.state_dict(), ema.mean))
    with ema.swapped():
        assert torch.equal(model[0].weight, mean["0.weight"])
    torch.testing.assert_close((model.state_dict(), ema.mean), (before, mean), rtol=0, atol=0)


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


def two_alike(**options):
    torch.manual_seed(0)
    one, other = ViT(**SMALL, **options), ViT(**SMALL, **options)
    other.load_state_dict(one.state_dict())
    return one, other


def two_steps(model, optimiser):
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        assert optimiser.step(lambda: 7.0) == 7.0


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon to compare with")
@pytest.mark.parametrize(("part", "longer"), [("mlp.fc1", 64), ("mlp.fc2", 64), ("attn.proj", 16)])
def test_it_moves_matrices_as_torch_does(part, longer):
    ours, torchs = two_alike()
    two_steps(ours, build_optimiser(ours, MUON))
    matrix = torchs.blocks[1].get_submodule(part).weight
    same = {"lr": 1e-2, "weight_decay": 0.1, "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"}
    two_steps(torchs, torch.optim.Muon([matrix], **same))
    moved = ours.blocks[1].get_submodule(part).weight
    # Torch's iteration is in bfloat16.
    assert (moved - matrix).abs().max() < 0.02 * 1e-2 * 0.2 * longer**0.5 * 2


def test_everything_else_moves_by_adamw():
    ours, plain = two_alike(mitigation=LEARNT)
    two_steps(ours, build_optimiser(ours, MUON))
    two_steps(plain, build_optimiser(plain, OptimConfig(name="adamw", lr=1e-2, weight_decay=0.1)))
    expected = dict(plain.named_parameters())
    differing = {name for name, value in ours.named_parameters() if not torch.equal(value, expected[name])}
    linear = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    assert differing == {f"blocks.{block}.{part}.weight" for block in range(2) for part in linear}


@pytest.mark.parametrize(
    ("options", "name", "pieces"),
    [
        ({}, "attn.qkv.weight", 3),
        ({"attention": "symmetric"}, "attn.kv.weight", 2),
        ({"mitigation": "eigen"}, "attn.qkv.parametrizations.weight.original0", 2),
        ({"mitigation": "eigen", "attention": "symmetric"}, "attn.kv.parametrizations.weight.original0", 1),
        ({"mlp_ratio": 3}, "mlp.fc1.weight", 1),
    ],
)
def test_each_projection_of_a_joint_one_moves_by_itself_and_an_mlp_as_a_whole(options, name, pieces):
    model, _ = two_alike(**options)
    joint = dict(model.named_parameters())[f"blocks.1.{name}"]
    rows = len(joint) // pieces
    apart = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(16, rows, bias=False) for _ in range(pieces))})
    grad = torch.randn(joint.shape, generator=torch.Generator().manual_seed(2))
    for part, own, piece in zip(apart["blocks"], joint.split(rows), grad.split(rows), strict=True):
        part.weight.data.copy_(own)
        part.weight.grad = piece.clone()
    joint.grad = grad.clone()
    build_optimiser(model, MUON).step()
    build_optimiser(apart, MUON).step()
    moved = torch.cat([part.weight for part in apart["blocks"]])
    torch.testing.assert_close(joint, moved, atol=1e-7, rtol=1e-6)


def test_blocks_may_be_compiled_one_by_one():
    model, _ = two_alike()
    engine = Engine(tiny("loop.compile=true", "loop.compile_blocks=true").loop, device="cpu")
    engine.wrap(model)
    compiled = {name for name, module in model.named_modules() if module._compiled_call_impl is not None}
    assert compiled == {"blocks.0", "blocks.1"}
    assert torch._dynamo.config.recompile_limit >= 8
    torch._dynamo.utils.counters.clear()
    with engine.eager():  # as it is read and evaluated
        assert "SDPA" in attention_backend(model, lambda: model(torch.randn(2, 1, 8, 8)))
    assert not torch._dynamo.utils.counters["stats"]


def test_sharded_matrices_are_refused_before_a_run_is_begun(tmp_path):
    config, before = tiny("optim.name=muon", "loop.strategy=fsdp"), dict(os.environ)
    with pytest.raises(AcutanceError, match=r"needs whole matrices, which loop\.strategy=fsdp shards"):
        fit(config, tmp_path / "run", processes=1)
    assert not (tmp_path / "run").exists()
    assert {name for name in os.environ.keys() - before.keys() if "RANK" in name or "MASTER" in name} == set()
