"""Schedules, parameter groups, the mean of the weights."""

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from acutance.lab.train.config import OptimConfig, ScheduleConfig
from acutance.lab.train.optim import Ema, build_optimiser, learning_rate, parameter_groups, set_learning_rate
from acutance.models import ViT

PER_EPOCH, TOTAL = 10, 100


def rates(**options):
    config = ScheduleConfig(**options)
    return [learning_rate(config, 1.0, step, PER_EPOCH, TOTAL) for step in range(TOTAL + 1)]


@pytest.mark.parametrize("name", ["cosine", "poly", "constant"])
def test_the_warm_up_is_a_line_from_start_to_the_peak(name):
    found = rates(name=name, warmup=2, start=0.1)
    assert found[0] == pytest.approx(0.1)
    assert found[20] == pytest.approx(1.0)
    assert torch.tensor(found[:21]).diff().tolist() == pytest.approx([0.045] * 20, rel=1e-4)


@pytest.mark.parametrize("name", ["cosine", "poly"])
@pytest.mark.parametrize("inside", [False, True])
def test_curves_fall_to_their_end(name, inside):
    found = rates(name=name, warmup=1, final=0.01, warmup_inside=inside)
    assert found[-1] == pytest.approx(0.01)
    assert max(found) == pytest.approx(1.0, abs=0.2 if inside else 1e-6)
    assert (torch.tensor(found[10:]).diff() < 0).all()


def test_the_formulas():
    cosine = rates(name="cosine", final=0.2)
    assert cosine[30] == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * 0.3)))
    assert rates(name="poly", power=0.9)[30] == pytest.approx(0.7**0.9)
    assert rates(name="constant")[99] == 1.0
    # DeiT's: the cosine of the whole training, whose beginning the warm-up hides.
    assert rates(warmup=2, warmup_inside=True)[50] == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.5)))
    assert rates(warmup=2)[60] == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.5)))


def test_per_epoch_it_stays_within_an_epoch():
    smooth, stairs = rates(warmup=2), rates(warmup=2, per="epoch")
    assert stairs == [smooth[step - step % PER_EPOCH] for step in range(TOTAL + 1)]


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        options = {"image_size": 8, "patch_size": 4, "in_chans": 1, "dim": 8, "depth": 1, "heads": 2, "num_classes": 2}
        self.encoder = ViT(mitigation="neutreno:0.6,learn=head", **options)
        self.head = nn.Linear(3, 4)


def test_matrices_are_decayed_and_what_parts_name_is_not():
    model = Outer()
    names = {parameter: name for name, parameter in model.named_parameters()}
    decayed, spared = ({names[p] for p in group["params"]} for group in parameter_groups(model, 0.3))
    assert decayed | spared == set(names.values())
    assert not decayed & spared
    assert {"head.weight", "encoder.blocks.0.mlp.fc1.weight", "encoder.patch_embed.proj.weight"} <= decayed
    assert {"head.bias", "encoder.pos_embed", "encoder.cls_token", "encoder.norm.weight"} <= spared
    assert all(name in spared for name in names.values() if "mitigation" in name)


def test_frozen_parameters_are_left_out():
    model = Outer()
    model.encoder.requires_grad_(False)
    optimiser = build_optimiser(model, OptimConfig())
    assert sum(len(group["params"]) for group in optimiser.param_groups) == 2


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_optimisers_are_what_they_say(name):
    config = OptimConfig(name=name, lr=0.1, weight_decay=0.01, betas=(0.8, 0.9), momentum=0.7, eps=1e-3)
    ours, plain = nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)
    plain.load_state_dict(ours.state_dict())
    kinds = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.01, betas=(0.8, 0.9), eps=1e-3),
        "adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.01, betas=(0.8, 0.9), eps=1e-3),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01, momentum=0.7, nesterov=True),
    }
    for model, optimiser in ((ours, build_optimiser(ours, config)), (plain, kinds[name](plain.parameters()))):
        for step in range(3):
            model(torch.arange(3.0) + step).square().sum().backward()
            optimiser.step()
            optimiser.zero_grad()
    assert torch.equal(ours.weight, plain.weight)


class Fills(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function._schema.name == "aten::fill_"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("restored", [False, True])
def test_a_rate_on_the_device_is_set_for_all_groups_by_one_fill(restored):
    groups = [{"params": [nn.Parameter(torch.ones(2))]} for _ in range(3)]
    optimiser = torch.optim.SGD(groups, lr=torch.tensor(0.1))
    if restored:
        optimiser.load_state_dict(optimiser.state_dict())
    with Fills() as fills:
        set_learning_rate(optimiser, 0.5)
    assert [float(group["lr"]) for group in optimiser.param_groups] == [0.5] * 3
    assert fills.count == 1


def test_a_rate_of_the_host_is_set_for_all_groups():
    optimiser = torch.optim.SGD([{"params": [nn.Parameter(torch.ones(2))]} for _ in range(3)], lr=0.1)
    set_learning_rate(optimiser, 0.5)
    assert [group["lr"] for group in optimiser.param_groups] == [0.5] * 3


def test_the_mean_follows_its_formula_and_swapping_leaves_no_trace():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    ema, expected = Ema(model, 0.75), model[0].weight.detach().double()
    for step in range(4):
        with torch.no_grad():
            model[0].weight.add_(step + 1)
            model[1].running_mean.add_(1)
        ema.update()
        expected = 0.75 * expected + 0.25 * model[0].weight.detach().double()
    torch.testing.assert_close(ema.mean["0.weight"].double(), expected, rtol=1e-6, atol=1e-6)
    assert ema.mean["1.running_mean"].mean() < model[1].running_mean.mean()
    assert "1.num_batches_tracked" not in ema.mean
    before = {name: value.clone() for name, value in model.state_dict().items()}
    mean = {name: value.clone() for name, value in ema.mean.items()}
    with ema.swapped():
        assert torch.equal(model[0].weight, mean["0.weight"])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(value, mean[name]) for name, value in ema.mean.items())
