"""Attacks: their bounds, their optimum on a linear model, and which is the stronger."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from acutance.errors import AcutanceError, NonFiniteError
from acutance.lab.robustness import FGSM, PGD, as_attack
from acutance.lab.robustness.attacks import loss_gradient
from acutance.lab.robustness.draws import Draws

ATTACKS = [FGSM(8), PGD(8, 5), PGD(8, 5, step_size=40)]


class Curved(nn.Module):
    """A small network whose gradient turns within ε."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(3 * 16, 64)
        self.outer = nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.sin(8 * self.inner(x.flatten(1))))


def _linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 16, 2))


def _samples(classes: int, *, low: float = 0.0, high: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(1)
    images = low + (high - low) * torch.rand(40, 3, 4, 4, generator=source)
    return images, torch.randint(classes, (40,), generator=source)


def _losses(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return F.cross_entropy(model(images), labels, reduction="none")


def _draws() -> Draws:
    return Draws("cpu", 0)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_no_value_moves_by_more_than_epsilon_or_out_of_range(attack):
    images, labels = _samples(4)
    images[0], images[1] = 0.0, 1.0
    changed = attack(Curved(), images, labels, _draws())
    assert (changed >= (images - 8 / 255).clamp_min(0)).all()
    assert (changed <= (images + 8 / 255).clamp_max(1)).all()
    assert float((changed - images).abs().max()) > 7.9 / 255


@pytest.mark.parametrize("attack", [FGSM(0), PGD(0, 5), PGD(0, 5, step_size=4)], ids=lambda attack: attack.name)
def test_epsilon_0_changes_nothing(attack):
    images, labels = _samples(4)
    assert torch.equal(attack(Curved(), images, labels, _draws()), images)


def test_on_a_linear_model_both_are_the_closed_form_optimum():
    # With two classes the loss falls in the margin (w_y − w_other) x, whose minimum over the box is a corner.
    model = _linear().double()
    weight = model[1].weight.detach()
    images, labels = _samples(2, low=0.1, high=0.9)
    images = images.double()
    margin = (weight[labels] - weight[1 - labels]).view_as(images)
    optimum = images - 8 / 255 * margin.sign()
    torch.testing.assert_close(FGSM(8)(model, images, labels, _draws()), optimum, rtol=0, atol=1e-12)
    torch.testing.assert_close(PGD(8, 10)(model, images, labels, _draws()), optimum, rtol=0, atol=1e-12)


def test_pgd_finds_a_higher_loss_than_fgsm_and_fgsm_than_none():
    model = Curved()
    images, labels = _samples(4)
    none = _losses(model, images, labels).mean()
    once = _losses(model, FGSM(8)(model, images, labels, _draws()), labels).mean()
    often = _losses(model, PGD(8, 20)(model, images, labels, _draws()), labels).mean()
    assert none < once < often


def test_the_gradient_is_that_of_finite_differences_and_parameters_get_none():
    model = Curved().double()
    images, labels = _samples(4)
    images = images.double()
    gradient = loss_gradient(model, images, labels)
    for place in ((0, 0, 0, 0), (7, 2, 1, 3)):
        step = torch.zeros_like(images)
        step[place] = 1e-6
        slope = (_losses(model, images + step, labels) - _losses(model, images - step, labels)).sum() / 2e-6
        assert float(gradient[place]) == pytest.approx(float(slope), rel=1e-5)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_image_is_attacked_by_itself_whatever_is_beside_it():
    model, (images, labels) = Curved().double(), _samples(4)
    images = images.double()
    together = FGSM(8)(model, images, labels, _draws())
    alone = FGSM(8)(model, images[3:4], labels[3:4], _draws())
    torch.testing.assert_close(together[3:4], alone, rtol=0, atol=1e-12)


def test_pgd_starts_at_random_and_its_draws_decide():
    model, (images, labels) = Curved(), _samples(4)
    attack = PGD(8, 1, step_size=0)  # the start alone
    start = attack(model, images, labels, _draws())
    assert torch.equal(start, attack(model, images, labels, _draws()))
    assert not torch.equal(start, attack(model, images, labels, Draws("cpu", 1)))
    inner = (images > 8 / 255) & (images < 1 - 8 / 255)
    moves = 255 * (start - images)[inner]
    assert float(moves.mean()) == pytest.approx(0, abs=0.5)
    assert float(moves.std()) == pytest.approx(16 / 12**0.5, rel=0.1)  # uniform over 16 levels


def test_attacks_are_written_as_they_are_named():
    assert as_attack("fgsm:8") == FGSM(8)
    assert as_attack("pgd:8") == PGD(8)
    assert as_attack("pgd:0.5:10:0.1") == PGD(0.5, 10, 0.1)
    assert as_attack("fgsm") == FGSM()
    assert PGD(8, 20).size == 1.0
    for attack in ATTACKS:
        assert as_attack(as_attack(attack).name).name == attack.name
    for wrong in ("cw:8", "fgsm:8:2", "pgd:8:x", "pgd:8:2.5", ""):
        with pytest.raises(AcutanceError, match="no attack"):
            as_attack(wrong)
    for wrong in ("fgsm:-1", "pgd:nan", "pgd:8:5:-1", "fgsm:inf"):
        with pytest.raises(AcutanceError, match="from 0 on"):
            as_attack(wrong)
    with pytest.raises(AcutanceError, match="1 step or more, not 0"):
        as_attack("pgd:8:0")


def test_a_gradient_that_is_no_number_is_refused():
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.flatten(1)[:, :2].sub(x.flatten(1)[:, :2]).sqrt()  # an infinite slope at 0

    images, labels = _samples(2)
    with pytest.raises(NonFiniteError, match="gradient"):
        FGSM(8)(Broken(), images, labels, _draws())
