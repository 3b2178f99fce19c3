from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from acutance.errors import AcutanceError, NonFiniteError
from acutance.lab.robustness import FGSM, PGD, as_attack
from acutance.lab.robustness.filters import Draws

ATTACKS = [FGSM(8), PGD(8, 5), PGD(8, 5, step_size=40)]


class Curved(nn.Module):
    """A small network whose gradient turns within ε."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(3 * 16, 64), nn.Linear(64, 4)

    def forward(self, x):
        return self.outer(torch.sin(8 * self.inner(x.flatten(1))))


def samples(classes=4):
    source = torch.Generator().manual_seed(1)
    images = torch.rand(40, 3, 4, 4, generator=source, dtype=torch.float64)
    return images, torch.randint(classes, (40,), generator=source)


def attacked(attack, model=None, seed=0, rows=slice(None)):
    images, labels = samples()
    return attack(model or Curved().double(), images[rows], labels[rows], Draws("cpu", seed))


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_no_value_moves_by_more_than_epsilon_or_out_of_range(attack):
    images, labels = samples()
    images[0], images[1] = 0.0, 1.0
    changed = attack(Curved().double(), images, labels, Draws("cpu", 0))
    assert (changed >= (images - 8 / 255).clamp_min(0)).all()
    assert (changed <= (images + 8 / 255).clamp_max(1)).all()
    assert float((changed - images).abs().max()) > 7.9 / 255
    assert torch.equal(attacked(replace(attack, epsilon=0)), samples()[0])


@pytest.mark.parametrize("attack", [FGSM(8), PGD(8, 10)], ids=lambda attack: attack.name)
def test_on_a_linear_model_both_are_the_closed_form_optimum(attack):
    # With two classes the loss falls in the margin (w_y − w_other) x, whose minimum over the box is a corner.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16, 2)).double()
    weight = model[1].weight.detach()
    images, labels = samples(2)
    images = 0.1 + 0.8 * images
    margin = (weight[labels] - weight[1 - labels]).view_as(images)
    found = attack(model, images, labels, Draws("cpu", 0))
    torch.testing.assert_close(found, images - 8 / 255 * margin.sign(), rtol=0, atol=1e-12)


def test_pgd_finds_a_higher_loss_than_fgsm_and_fgsm_than_none():
    model, (images, labels) = Curved().double(), samples()
    changed = (images, attacked(FGSM(8), model), attacked(PGD(8, 20), model))
    none, once, often = (F.cross_entropy(model(shown), labels).item() for shown in changed)
    assert none < once < often
    alone = attacked(FGSM(8), rows=slice(3, 4))  # whatever is beside it
    torch.testing.assert_close(attacked(FGSM(8))[3:4], alone, rtol=0, atol=1e-12)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_pgd_starts_at_random_and_its_draws_decide():
    attack = PGD(8, 1, step_size=0)  # the start alone
    start, (images, _) = attacked(attack), samples()
    assert torch.equal(start, attacked(attack))
    assert not torch.equal(start, attacked(attack, seed=1))
    moves = 255 * (start - images)[(images > 8 / 255) & (images < 1 - 8 / 255)]
    assert float(moves.mean()) == pytest.approx(0, abs=0.5)
    assert float(moves.std()) == pytest.approx(16 / 12**0.5, rel=0.1)  # uniform over 16 levels


def test_attacks_are_written_as_they_are_named_and_others_are_refused():
    specs = {"fgsm:8": FGSM(8), "pgd:8": PGD(8), "pgd:0.5:10:0.1": PGD(0.5, 10, 0.1), "fgsm": FGSM()}
    assert {spec: as_attack(spec) for spec in specs} == specs
    assert PGD(8, 20).size == 1.0
    for attack in ATTACKS:
        assert as_attack(as_attack(attack).name).name == attack.name
    refusals = {"no attack": ["cw:8", "fgsm:8:2", "pgd:8:2.5", ""], "0 or more": ["fgsm:-1", "pgd:nan", "pgd:8:5:-1"]}
    for words, wrong in {**refusals, "1 step or more, not 0": ["pgd:8:0"]}.items():
        for spec in wrong:
            with pytest.raises(AcutanceError, match=words):
                as_attack(spec)
    with pytest.raises(NonFiniteError, match="gradient"):  # an infinite slope at 0
        attacked(FGSM(8), model=lambda x: x.flatten(1)[:, :4].sub(x.flatten(1)[:, :4]).sqrt())
