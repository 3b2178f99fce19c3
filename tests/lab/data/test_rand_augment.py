"""RandAugment as a whole: identities, images by themselves, DeiT's distribution. with_timm has each operation."""

import torch

from acutance.lab.data.augment import Augment, AugmentConfig
from acutance.lab.data.rand_augment import NOTHING, RandDraws, rand_augment, rand_draws, warp


def pictures(height, width, count=12):
    return torch.randint(256, (count, 3, height, width), generator=torch.Generator().manual_seed(0)).float()


def test_identities_change_nothing_to_the_bit():
    images = pictures(20, 27)
    identity = torch.eye(3)[:2].expand(len(images), 2, 3)
    assert torch.equal(warp(images, identity, torch.zeros(3)), images)
    nothing = RandDraws(*(torch.full((len(images), 2), value) for value in (NOTHING, 9.0, 1.0)))
    assert torch.equal(rand_augment(images, nothing, torch.zeros(3)), images)


def test_every_image_gets_its_own_operations_in_its_own_order():
    images = pictures(16, 16, count=15)
    operation = torch.stack([torch.arange(15), torch.arange(15).flip(0)], 1)
    magnitude, sign = torch.full((15, 2), 7.3), torch.ones(15, 2)
    together = rand_augment(images, RandDraws(operation, magnitude, sign), torch.zeros(3))
    for i, image in enumerate(images):
        alone = image[None]
        for layer in range(2):
            one = RandDraws(operation[i : i + 1, layer, None], magnitude[:1, :1], sign[:1, :1])
            alone = rand_augment(alone, one, torch.zeros(3))
        assert torch.equal(together[i], alone[0])


def test_draws_have_deits_distribution():
    raw = Augment(AugmentConfig(rand_layers=2), classes=2, mean=[0], std=[1]).draw(20_000, torch.Generator())
    drawn = rand_draws(raw.operation, raw.applied, raw.noise, raw.sign, 9.0, 0.5, 0.5)
    shares = drawn.operation.flatten().bincount(minlength=16) / drawn.operation.numel()
    torch.testing.assert_close(shares[:15], torch.full((15,), 0.5 / 15), atol=0.004, rtol=0)
    assert abs(shares[NOTHING] - 0.5) < 0.01
    assert drawn.magnitude.max() == 10  # cut off there
    assert abs(drawn.magnitude.mean() - 9) < 0.02
    assert abs(drawn.magnitude.std() - 0.5) < 0.03
    assert abs(drawn.sign.mean()) < 0.02
    # With replacement, and independent of the first: the same operation twice in a quarter of a fifteenth.
    twice = (drawn.operation[:, 0] == drawn.operation[:, 1]) & (drawn.operation[:, 0] != NOTHING)
    assert abs(twice.float().mean() - 0.25 / 15) < 0.005
