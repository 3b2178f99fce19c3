import itertools

import pytest
import torch

from acutance.errors import AcutanceError
from acutance.lab.data import fraction, held_out
from acutance.lab.data.seeds import epoch_order, generator, mixed_seed

LABELS = torch.randint(7, (400,), generator=torch.Generator().manual_seed(0))
BY_CLASS = [(label == LABELS).nonzero()[:, 0] for label in range(7)]


def test_the_held_out_slice_is_every_tenth_of_each_class():
    for of_class in BY_CLASS:
        assert of_class[9::10].tolist() == of_class[held_out(LABELS)[of_class]].tolist()


def test_fractions_are_balanced_nested_and_the_first_of_each_class():
    parts = {share: fraction(LABELS, share) for share in (0.1, 0.5, 1.0)}
    assert parts[1.0].tolist() == list(range(400))
    assert set(parts[0.1].tolist()) < set(parts[0.5].tolist())
    for share, indices in parts.items():
        for label, of_class in enumerate(BY_CLASS):
            size = -(-len(of_class) * round(10 * share) // 10)
            assert indices[LABELS[indices] == label].tolist() == of_class[:size].tolist()
    # 0.1 as a binary number is a little over a tenth: its ceiling would be one too many.
    assert len(fraction(torch.zeros(500, dtype=torch.long), 0.1)) == 50


@pytest.mark.parametrize("part", [0.0, -0.5, 1.5])
def test_impossible_fractions_are_refused(part):
    with pytest.raises(AcutanceError, match=r"\(0, 1\]"):
        fraction(LABELS, part)


def test_seeds_are_a_function_of_all_the_numbers_and_their_order():
    numbers = [part for length in range(4) for part in itertools.product((-1, 0, 1, 2**40), repeat=length)]
    seeds = {mixed_seed(*part) for part in numbers}
    assert len(seeds) == len(numbers)
    assert mixed_seed(3, 4) == mixed_seed(3, 4)
    assert all(0 <= seed < 2**63 for seed in seeds)
    first, same, other = (torch.rand(5, generator=generator("cpu", 7, step)) for step in (100, 100, 101))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_an_epoch_visits_everything_once_and_epochs_differ():
    orders = [epoch_order(50, 1, epoch) for epoch in range(3)]
    for order in orders:
        assert torch.equal(order.sort().values, torch.arange(50))
    assert not torch.equal(orders[0], orders[1])
    assert torch.equal(orders[2], epoch_order(50, 1, 2))
