"""Randomness as a function of numbers such as (seed, step), so that no random state has to be saved."""

import numpy as np
import torch


def mixed_seed(*numbers: int) -> int:
    """One 63-bit seed from several numbers; (1, 2), (2, 1) and (1, 2, 0) give unrelated ones."""
    # SeedSequence takes no negative numbers and ignores trailing zeros: hence the sign and the length.
    words = [len(numbers), *(part for number in numbers for part in (int(number < 0), abs(int(number))))]
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> np.uint64(1))


def generator(device: torch.device | str, *numbers: int) -> torch.Generator:
    """A new generator on a device, always the same one for the same numbers."""
    return torch.Generator(device=device).manual_seed(mixed_seed(*numbers))


def epoch_order(count: int, seed: int, epoch: int) -> torch.Tensor:
    """The order in which an epoch visits `count` samples, on the CPU: the same in every process and on every device."""
    return torch.randperm(count, generator=generator("cpu", seed, epoch))
