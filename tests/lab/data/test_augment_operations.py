"""Each operation beside Pillow's. Those on single values are equal to the bit; affine maps differ where Pillow's double
precision and our single fall on two sides of a whole number."""

import numpy as np
import pytest
import torch
from PIL import Image
from pillow_operations import EXACT, FILL, INTERPOLATED, apply, from_pillow, to_pillow
from torch import Tensor

from acutance.lab.data.augment import OPERATIONS, flip, rand_augment, random_crop, warp
from acutance.lab.data.augment.operations import NOTHING, NUMBER, RandDraws, draw_rand_augment, read_rand_augment

SIZES = [(32, 32), (21, 34)]


def pictures(channels: int, height: int, width: int, count: int = 12) -> Tensor:
    """Noise, waves, few levels, and a flat one."""
    generator = torch.Generator().manual_seed(height)
    noise = torch.randint(256, (count, channels, height, width), generator=generator).float()
    waves = torch.sin(torch.arange(width) / 5) + torch.cos(torch.arange(height) / 7)[:, None]
    noise[::3] = (120 + 50 * waves + noise[::3] / 20).floor()
    noise[1::3] = (noise[1::3] / 64).floor() * 50 + 20
    noise[-1] = 77
    return noise


def draws(name: str, count: int) -> RandDraws:
    generator = torch.Generator().manual_seed(NUMBER[name])
    magnitude = 10 * torch.rand(count, 1, generator=generator)
    magnitude[:2, 0] = torch.tensor([0.0, 10.0])
    sign = torch.ones(count, 1)
    sign[::2] = -1
    return RandDraws(torch.full((count, 1), NUMBER[name]), magnitude, sign)


def both(name: str, channels: int, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    images = pictures(channels, *size)
    drawn = draws(name, len(images))
    ours = rand_augment(images, drawn, torch.tensor(FILL[:channels]).float())
    arguments = zip(images, drawn.magnitude[:, 0].tolist(), drawn.sign[:, 0].tolist(), strict=True)
    return ours, torch.stack([from_pillow(apply(name, to_pillow(image), *how)) for image, *how in arguments])


def test_every_operation_has_an_oracle() -> None:
    assert set(EXACT) | set(INTERPOLATED) == set(OPERATIONS)
    assert len(OPERATIONS) == 15


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", EXACT)
def test_operations_on_values_are_pillows_to_the_bit(name: str, channels: int, size: tuple[int, int]) -> None:
    ours, pillows = both(name, channels, size)
    assert torch.equal(ours, pillows)


def before_cutting_off(name: str, channels: int, size: tuple[int, int]) -> Tensor:
    """Pillow's interpolated values before they are cut to whole numbers, which its images of floats keep."""
    images = pictures(channels, *size)
    drawn = draws(name, len(images))
    arguments = zip(images, drawn.magnitude[:, 0].tolist(), drawn.sign[:, 0].tolist(), strict=True)
    floats = [[apply(name, Image.fromarray(part.numpy()), *how) for part in image] for image, *how in arguments]
    return torch.tensor(np.array([[np.asarray(part) for part in image] for image in floats]))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", INTERPOLATED)
def test_affine_operations_are_pillows_up_to_rounding(name: str, channels: int, size: tuple[int, int]) -> None:
    ours, pillows = both(name, channels, size)
    exact = before_cutting_off(name, channels, size)
    differs = ours != pillows
    on_a_whole_number = (exact - exact.round()).abs() < 1e-3
    assert (differs & ~on_a_whole_number).float().mean() < 1e-4  # the very border may be outside for one of the two
    assert ((ours - pillows).abs() > 1).float().mean() < 1e-4


def test_identities_change_nothing_to_the_bit() -> None:
    images = pictures(3, 20, 27)
    identity = torch.eye(3)[:2].expand(len(images), 2, 3)
    assert torch.equal(warp(images, identity, torch.zeros(3)), images)
    nothing = RandDraws(*(torch.full((len(images), 2), value) for value in (NOTHING, 9.0, 1.0)))
    assert torch.equal(rand_augment(images, nothing, torch.zeros(3)), images)


def test_every_image_gets_its_own_operations_in_its_own_order() -> None:
    images = pictures(3, 16, 16, count=15)
    operation = torch.stack([torch.arange(15), torch.arange(15).flip(0)], 1)
    magnitude, sign = torch.full((15, 2), 7.3), torch.ones(15, 2)
    together = rand_augment(images, RandDraws(operation, magnitude, sign), torch.zeros(3))
    for i, image in enumerate(images):
        alone = image[None]
        for layer in range(2):
            one = RandDraws(operation[i : i + 1, layer, None], magnitude[:1, :1], sign[:1, :1])
            alone = rand_augment(alone, one, torch.zeros(3))
        assert torch.equal(together[i], alone[0])


def test_draws_have_deits_distribution() -> None:
    drawn = read_rand_augment(draw_rand_augment(20_000, 2, torch.Generator().manual_seed(0)), 9.0, 0.5, 0.5)
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


def test_crops_are_windows_of_the_padded_image() -> None:
    images = pictures(3, 9, 11)
    offsets = torch.randint(5, (len(images), 2), generator=torch.Generator().manual_seed(1))
    cropped = random_crop(images, 2, offsets)
    padded = torch.nn.functional.pad(images, (2, 2, 2, 2))
    for image, whole, (down, right) in zip(cropped, padded, offsets.tolist(), strict=True):
        assert torch.equal(image, whole[:, down : down + 9, right : right + 11])


def test_mirror_images_where_chosen() -> None:
    images = pictures(3, 5, 6)
    chosen = torch.arange(len(images)) % 2 == 0
    flipped = flip(images, chosen)
    assert torch.equal(flipped[1::2], images[1::2])
    assert torch.equal(flipped[::2], images[::2].flip(-1))
