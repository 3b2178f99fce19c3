"""Each operation beside Pillow's. Those on single values are equal to the bit; affine maps differ where Pillow's double
precision and our single fall on two sides of a whole number."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from acutance.lab.data.augment import Augment, AugmentConfig
from acutance.lab.data.rand_augment import NOTHING, NUMBER, OPERATIONS, RandDraws, rand_augment, rand_draws, warp

FILL = (124, 116, 104)
AFFINE = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")
each_shape = pytest.mark.parametrize(("channels", "size"), [(1, (32, 32)), (3, (32, 32)), (3, (21, 34))])


def pillows(name, image, magnitude, sign):
    """An operation at a magnitude from 0 to 10, the arguments as timm's "increasing" set has them."""
    share = magnitude / 10
    level = share * sign
    factor = max(0.1, 1 + 0.9 * level)
    width, height = image.size
    fill = FILL if image.mode == "RGB" else FILL[0]
    bits, amount = 4 - int(share * 4), int(share * 110)

    def affine(*matrix):
        return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC, fillcolor=fill)

    operations = {
        "auto_contrast": lambda: ImageOps.autocontrast(image),
        "equalise": lambda: ImageOps.equalize(image),
        "invert": lambda: ImageOps.invert(image),
        # Pillow refuses 0 bits since version 13; before, and in DeiT's day, that was black.
        "posterise": lambda: ImageOps.posterize(image, bits) if bits else image.point(lambda value: 0),
        "solarise": lambda: ImageOps.solarize(image, 256 - int(share * 256)),
        "solarise_add": lambda: image.point(
            [min(255, i + amount) if i < 128 else i for i in range(256)] * len(image.getbands())
        ),
        "colour": lambda: ImageEnhance.Color(image).enhance(factor),
        "contrast": lambda: ImageEnhance.Contrast(image).enhance(factor),
        "brightness": lambda: ImageEnhance.Brightness(image).enhance(factor),
        "sharpness": lambda: ImageEnhance.Sharpness(image).enhance(factor),
        "rotate": lambda: image.rotate(30 * level, Image.Resampling.BICUBIC, fillcolor=fill),
        "shear_x": lambda: affine(1, 0.3 * level, 0, 0, 1, 0),
        "shear_y": lambda: affine(1, 0, 0, 0.3 * level, 1, 0),
        "translate_x": lambda: affine(1, 0, 0.45 * level * width, 0, 1, 0),
        "translate_y": lambda: affine(1, 0, 0, 0, 1, 0.45 * level * height),
    }
    return operations[name]()


def pictures(channels, height, width, count=12):
    """Noise, waves, few levels, and a flat one."""
    generator = torch.Generator().manual_seed(height)
    noise = torch.randint(256, (count, channels, height, width), generator=generator).float()
    waves = torch.sin(torch.arange(width) / 5) + torch.cos(torch.arange(height) / 7)[:, None]
    noise[::3] = (120 + 50 * waves + noise[::3] / 20).floor()
    noise[1::3] = (noise[1::3] / 64).floor() * 50 + 20
    noise[-1] = 77
    return noise


def both(name, channels, size):
    """The images, ours, and how Pillow is to be asked for each."""
    images = pictures(channels, *size)
    magnitude = 10 * torch.rand(len(images), 1, generator=torch.Generator().manual_seed(NUMBER[name]))
    magnitude[:2, 0] = torch.tensor([0.0, 10.0])
    sign = torch.ones(len(images), 1)
    sign[::2] = -1
    ours = rand_augment(
        images, RandDraws(torch.full_like(sign, NUMBER[name]), magnitude, sign), torch.tensor(FILL[:channels]).float()
    )
    return ours, list(zip(images.numpy(), magnitude[:, 0].tolist(), sign[:, 0].tolist(), strict=True))


def by_pillow(name, asked):
    found = []
    for image, *how in asked:
        pixels = image.transpose(1, 2, 0).astype(np.uint8)
        after = np.asarray(pillows(name, Image.fromarray(pixels[:, :, 0] if len(image) == 1 else pixels), *how))
        found.append(np.atleast_3d(after).transpose(2, 0, 1))
    return torch.from_numpy(np.stack(found)).float()


@each_shape
@pytest.mark.parametrize("name", sorted(set(OPERATIONS) - set(AFFINE)))
def test_operations_on_values_are_pillows_to_the_bit(name, channels, size):
    ours, asked = both(name, channels, size)
    assert torch.equal(ours, by_pillow(name, asked))


@each_shape
@pytest.mark.parametrize("name", AFFINE)
def test_affine_operations_are_pillows_up_to_rounding(name, channels, size):
    ours, asked = both(name, channels, size)
    differs = ours - by_pillow(name, asked)
    # Pillow's images of floats keep the interpolated values before they are cut to whole numbers.
    floats = [[np.asarray(pillows(name, Image.fromarray(part), *how)) for part in image] for image, *how in asked]
    exact = torch.from_numpy(np.array(floats))
    on_a_whole_number = (exact - exact.round()).abs() < 1e-3
    assert ((differs != 0) & ~on_a_whole_number).float().mean() < 1e-4  # the very border may be outside for one
    assert (differs.abs() > 1).float().mean() < 1e-4


def test_identities_change_nothing_to_the_bit():
    images = pictures(3, 20, 27)
    identity = torch.eye(3)[:2].expand(len(images), 2, 3)
    assert torch.equal(warp(images, identity, torch.zeros(3)), images)
    nothing = RandDraws(*(torch.full((len(images), 2), value) for value in (NOTHING, 9.0, 1.0)))
    assert torch.equal(rand_augment(images, nothing, torch.zeros(3)), images)


def test_every_image_gets_its_own_operations_in_its_own_order():
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
