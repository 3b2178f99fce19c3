import itertools

import torch

from acutance.lab.data.seeds import epoch_order, generator, mixed_seed


def test_seeds_are_a_function_of_all_the_numbers_and_their_order() -> None:
    numbers = [part for length in range(4) for part in itertools.product((-1, 0, 1, 2**40), repeat=length)]
    seeds = {mixed_seed(*part) for part in numbers}
    assert len(seeds) == len(numbers)
    assert mixed_seed(3, 4) == mixed_seed(3, 4)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_generator_starts_afresh_for_the_same_numbers() -> None:
    first = torch.rand(5, generator=generator("cpu", 7, 100))
    assert torch.equal(first, torch.rand(5, generator=generator("cpu", 7, 100)))
    assert not torch.equal(first, torch.rand(5, generator=generator("cpu", 7, 101)))


def test_an_epoch_visits_everything_once_and_epochs_differ() -> None:
    orders = [epoch_order(50, 1, epoch) for epoch in range(3)]
    for order in orders:
        assert torch.equal(order.sort().values, torch.arange(50))
    assert not torch.equal(orders[0], orders[1])
    assert torch.equal(orders[2], epoch_order(50, 1, 2))
