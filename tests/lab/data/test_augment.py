from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from acutance.errors import AcutanceError, ShapeError
from acutance.lab.data import augment as augmentation
from acutance.lab.data.augment import DEIT, DEIT_SMALL_IMAGES, Augment, AugmentConfig, mix, mix_plan, soft_targets
from acutance.lab.data.rand_augment import NOTHING, RandDraws, rand_augment, rand_draws, warp
from acutance.lab.data.seeds import generator
from attention.operator_cases import LargestTensor

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
PARTNERS = [1, 0, 3, 2, 5, 4, 7, 6]


def some(count=16, side=16, channels=3):
    random = torch.Generator().manual_seed(0)
    images = torch.randint(256, (count, channels, side, side), dtype=torch.uint8, generator=random)
    return images, torch.randint(10, (count,), generator=random)


def augment(config=DEIT_SMALL_IMAGES, device="cpu", channels=3):
    return Augment(config, classes=10, mean=MEAN[:channels], std=STD[:channels], device=device)


def test_nothing_is_done_unless_asked_for():
    images, labels = some()
    plain = augment(AugmentConfig())
    values, targets = plain(images, labels, plain.draw(16, generator("cpu", 0)))
    mean, std = (torch.tensor(part, dtype=torch.float64)[:, None, None] for part in (MEAN, STD))
    torch.testing.assert_close(values.double(), (images.double() / 255 - mean) / std, atol=1e-6, rtol=1e-6)
    assert torch.equal(targets, torch.nn.functional.one_hot(labels, 10).float())
    assert torch.equal(values, plain.plain(images))


def test_a_batch_is_drawn_by_ten_launches_at_most():
    """Beside a step of a few milliseconds the host has no time for more."""
    deit, random = augment(), generator("cpu", 0)
    with LargestTensor() as seen:
        deit.draw(16, random).rows(slice(4, 8))
    launches = [function for function in seen.operations if not function.is_view]  # views read and write no numbers
    assert 0 < len(launches) <= 10, launches


def test_targets_stay_distributions():
    images, labels = some()
    for step in range(10):
        _, targets = augment(DEIT)(images, labels, augment(DEIT).draw(16, generator("cpu", step)))
        torch.testing.assert_close(targets.sum(1), torch.ones(16))
        assert (targets > 0.009).all()  # smoothing spreads a tenth over ten classes
    torch.testing.assert_close(soft_targets(torch.tensor([2]), 4, 0.1), torch.tensor([[0.025, 0.025, 0.925, 0.025]]))


def test_the_pipeline_is_one_graph():
    images, labels = some(4, 8)
    deit = augment()
    draws = deit.draw(4, generator("cpu", 0))
    compiled = torch.compile(deit.__call__, fullgraph=True, backend="eager")(images, labels, draws)
    torch.testing.assert_close(compiled, deit(images, labels, draws), atol=1e-5, rtol=0)


@pytest.mark.cuda
def test_the_pipeline_compiles_for_a_device():
    """That it never waits for one is seen of a task's batches."""
    images, labels = (part.cuda() for part in some())
    deit = augment(device="cuda")
    draws = deit.draw(16, generator("cuda", 1))
    plain = deit(images, labels, draws)
    compiled = torch.compile(deit.__call__, fullgraph=True)(images, labels, draws)
    # A fused multiply-add may fall on the other side of a whole number: a level, 1 / 255 / std, for few pixels.
    assert ((compiled[0] - plain[0]).abs() > 1e-4).float().mean() < 1e-2
    torch.testing.assert_close(compiled[1], plain[1])


def test_crops_are_windows_of_the_padded_image_and_chosen_ones_are_mirrored():
    images = some(12, 11)[0][..., :9, :]
    offsets = torch.randint(5, (len(images), 2), generator=torch.Generator().manual_seed(1))
    padded = torch.nn.functional.pad(images, (2, 2, 2, 2))
    for image, whole, (down, right) in zip(
        augmentation.random_crop(images, 2, offsets), padded, offsets.tolist(), strict=True
    ):
        assert torch.equal(image, whole[:, down : down + 9, right : right + 11])
    flipped = augmentation.flip(images, torch.arange(len(images)) % 2 == 0)
    assert torch.equal(flipped[1::2], images[1::2])
    assert torch.equal(flipped[::2], images[::2].flip(-1))


def test_noise_is_box_and_mullers_of_two_hashes():
    def hashed(x):
        """Wellons' mixing of 32 bits, in 64 unsigned ones."""
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            x = ((x ^ (x >> np.uint64(shift))) * np.uint64(factor)) & np.uint64(0xFFFFFFFF)
        return x ^ (x >> np.uint64(16))

    seeds = torch.tensor([0, 1, 2**31 - 1, 2**31, 2**32 - 2])
    found = augmentation.normal_noise(seeds, torch.zeros(5, 2, 40, 30, dtype=torch.float64)).flatten(1)
    first = hashed(hashed(seeds.numpy().astype(np.uint64))[:, None] ^ np.arange(2400, dtype=np.uint64))
    second = hashed(first ^ np.uint64(0x9E3779B9))
    expected = np.sqrt(-2 * np.log((first + 1) / (2**32 + 1))) * np.cos(2 * np.pi * second / 2**32)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9, atol=1e-9)


def test_erasing_fills_its_rectangle_and_nothing_else():
    boxes = torch.tensor([[2, 6, 3, 8], [0, 0, 0, 0], [9, 10, 11, 12]])
    erased = augmentation.random_erasing(torch.full((3, 2, 10, 12), 9.0), boxes, torch.tensor([1, 2, 3]))
    expected = torch.zeros(3, 10, 12, dtype=torch.bool)
    expected[0, 2:6, 3:8] = True
    expected[2, 9, 11] = True
    assert torch.equal((erased != 9).all(1), expected)


def test_rectangles_to_erase_fit_and_have_the_stated_areas():
    drawn = augmentation.erase_boxes(augment().draw(20_000, generator("cpu", 0)).erase, 0.25, 32, 40)
    top, bottom, left, right = drawn.T
    height, width = bottom - top, right - left
    erased = height > 0
    assert abs(erased.float().mean() - 0.25) < 0.01
    assert (drawn.min() >= 0, bottom.max() <= 32, right.max() <= 40) == (True, True, True)
    area, aspect = (height * width)[erased] / 1280, (height / width)[erased]
    assert 0.015 < area.min() < 0.3 < area.max() < 0.36
    assert 0.2 < aspect.min() < aspect.max() < 4
    assert abs(aspect.log().median()) < 0.1
    assert (drawn[~erased] == 0).all()


def mixing(mixup, cutmix, height, width, seed, count=2):
    config = AugmentConfig(mixup=mixup, cutmix=cutmix)
    drawn = augment(config).draw(count, generator("cpu", seed))
    return mix_plan(drawn.mix, drawn.keep, config, height, width)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("cutmix", [0, 1.0])
def test_neighbours_are_blended_or_cut_and_targets_by_the_true_area(seed, cutmix):
    images, labels = some(8, 12)
    values, targets = images.float(), soft_targets(labels, 10, 0.0)
    kept, cut, boxes = mixing(0 if cutmix else 0.8, cutmix, 12, 12, seed, count=8)
    mixed, soft = mix(values, targets, kept, cut, boxes)
    keep = kept[0].item()
    if cutmix:
        top, bottom, left, right = boxes[0].tolist()
        inside = torch.zeros(12, 12, dtype=torch.bool)
        inside[top:bottom, left:right] = True
        assert torch.equal(mixed, torch.where(inside, values[PARTNERS], values))
        assert keep == pytest.approx(1 - inside.float().mean().item())
    else:
        assert 0 < keep < 1
        torch.testing.assert_close(mixed, keep * values + (1 - keep) * values[PARTNERS])
    torch.testing.assert_close(soft, keep * targets + (1 - keep) * targets[PARTNERS])


def test_lambda_is_beta_the_switch_is_even_and_rectangles_have_the_images_proportions_unless_cut_off():
    drawn = [mixing(0.8, 1.0, 64, 64, step) for step in range(2000)]
    cut = np.array([draws[1][0].item() for draws in drawn])
    assert abs(cut.mean() - 0.5) < 0.04
    keep = np.array([draws[0][0].item() for draws in drawn])[~cut]
    assert stats.kstest(keep, "beta", args=(0.8, 0.8)).pvalue > 0.01
    boxes = torch.stack([mixing(0.0, 1.0, 64, 48, step)[2][0] for step in range(500)])
    top, bottom, left, right = boxes.T
    assert 0 <= boxes.min() <= bottom.max() <= 64
    assert right.max() <= 48
    whole = (top > 0) & (bottom < 64) & (left > 0) & (right < 48)
    height, width = (bottom - top)[whole], (right - left)[whole]
    assert ((height / 64 - width / 48).abs() < 1 / 48).all()


def test_a_share_of_the_batches_is_not_mixed_and_draws_what_it_would_draw_otherwise():
    images, labels = some(8)
    sometimes, always, never = (
        augment(AugmentConfig(mixup=0.8, cutmix=1.0, mix_probability=share)) for share in (0.3, 1.0, 0.0)
    )
    found = 0
    for step in range(60):
        draws = sometimes.draw(8, generator("cpu", step))
        chosen, mixed, plain = (each(images, labels, draws) for each in (sometimes, always, never))
        assert torch.equal(plain[0], never.plain(images))
        assert torch.equal(plain[1], soft_targets(labels, 10, 0.0))
        is_mixed = bool(draws.mix[0, 3] < 0.3)
        found += is_mixed
        assert all(map(torch.equal, chosen, mixed if is_mixed else plain))
    assert 8 <= found <= 28


def test_odd_batches_cannot_be_mixed_and_impossible_settings_are_named():
    images, labels = some(3)
    with pytest.raises(ShapeError, match="must be even; got 3"):
        augment(DEIT)(images, labels, augment(DEIT).draw(3, generator("cpu", 0)))
    for change in ({"flip": 1.5}, {"erase": -0.1}, {"mix_probability": 2.0}, {"mixup": -1.0}, {"crop_pad": -1}):
        with pytest.raises(AcutanceError, match=f"augment.{next(iter(change))}"):
            replace(DEIT, **change)


# RandAugment as a whole; with_timm has each operation


def test_identities_change_nothing_to_the_bit():
    images = some(12, 27)[0][..., :20, :].float()
    identity = torch.eye(3)[:2].expand(len(images), 2, 3)
    assert torch.equal(warp(images, identity, torch.zeros(3)), images)
    nothing = RandDraws(*(torch.full((len(images), 2), value) for value in (NOTHING, 9.0, 1.0)))
    assert torch.equal(rand_augment(images, nothing, torch.zeros(3)), images)


def test_every_image_gets_its_own_operations_in_its_own_order():
    images = some(15)[0].float()
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
    raw = augment(AugmentConfig(rand_layers=2)).draw(20_000, torch.Generator())
    drawn = rand_draws(raw.operation, raw.applied, raw.noise, raw.sign, 9.0, 0.5, 0.5)
    shares = drawn.operation.flatten().bincount(minlength=16) / drawn.operation.numel()
    torch.testing.assert_close(shares[:15], torch.full((15,), 0.5 / 15), atol=0.004, rtol=0)
    assert abs(shares[NOTHING] - 0.5) < 0.01
    assert drawn.magnitude.max() == 10  # cut off there
    found = torch.stack([drawn.magnitude.mean(), drawn.magnitude.std(), drawn.sign.mean()])
    torch.testing.assert_close(found, torch.tensor([9.0, 0.5, 0.0]), atol=0.02, rtol=0)
    # With replacement, and independent of the first: the same operation twice in a quarter of a fifteenth.
    twice = (drawn.operation[:, 0] == drawn.operation[:, 1]) & (drawn.operation[:, 0] != NOTHING)
    assert abs(twice.float().mean() - 0.25 / 15) < 0.005
