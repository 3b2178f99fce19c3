from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from acutance.errors import AcutanceError, ShapeError
from acutance.lab.data.augment import (
    DEIT,
    DEIT_SMALL_IMAGES,
    Augment,
    AugmentConfig,
    Draws,
    mix,
    normalise,
    random_erasing,
    soft_targets,
)
from acutance.lab.data.augment.erasing import EraseDraws, draw_erasing, normal_noise, read_erasing
from acutance.lab.data.augment.mixing import MixDraws, beta_parameters, draw_mixing, read_mixing
from acutance.lab.data.seeds import generator

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


def some(count: int = 16, side: int = 16) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    images = torch.randint(256, (count, 3, side, side), dtype=torch.uint8, generator=random)
    return images, torch.randint(10, (count,), generator=random)


def augment(config: AugmentConfig, device: str = "cpu") -> Augment:
    return Augment(config, classes=10, mean=MEAN, std=STD, device=device)


def test_nothing_is_done_unless_asked_for() -> None:
    images, labels = some()
    plain = augment(AugmentConfig())
    values, targets = plain(images, labels, plain.draw(16, generator("cpu", 0)))
    mean, std = (torch.tensor(part, dtype=torch.float64)[:, None, None] for part in (MEAN, STD))
    torch.testing.assert_close(values.double(), (images.double() / 255 - mean) / std, atol=1e-6, rtol=1e-6)
    assert torch.equal(targets, torch.nn.functional.one_hot(labels, 10).float())
    assert torch.equal(values, plain.plain(images))


@pytest.mark.parametrize("config", [DEIT, DEIT_SMALL_IMAGES])
def test_shares_get_what_the_whole_batch_would_get(config: AugmentConfig) -> None:
    images, labels = some()
    deit = augment(config)
    draws = deit.draw(16, generator("cpu", 3, 4))
    whole = deit(images, labels, draws)
    for rows in (slice(0, 8), slice(8, 16)):
        part = deit(images[rows], labels[rows], draws.rows(rows))
        for one, other in zip(part, whole, strict=True):
            assert torch.equal(one, other[rows])


def test_draws_are_a_function_of_the_generator_alone() -> None:
    def flat(draws: Draws) -> list[Tensor]:
        return [draws.crop, draws.flip, *draws.rand, *draws.erase, *draws.mix]

    deit = augment(DEIT_SMALL_IMAGES)
    one, same, other = (flat(deit.draw(8, generator("cpu", 1, step))) for step in (5, 5, 6))
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class Launches(TorchDispatchMode):
    """Names of the operations that read or write numbers; views are none."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not function.is_view:
            self.names.append(function._schema.name)
        return function(*args, **(kwargs or {}))


def test_a_batch_is_drawn_by_ten_launches_at_most() -> None:
    """Beside a step of a few milliseconds the host has no time for more."""
    deit, random = augment(DEIT_SMALL_IMAGES), generator("cpu", 0)
    with Launches() as launches:
        deit.draw(16, random).rows(slice(4, 8))
    assert 0 < len(launches.names) <= 10, launches.names


def test_a_row_draws_what_it_would_draw_in_the_whole_batch() -> None:
    drawn = augment(DEIT_SMALL_IMAGES).draw(64, generator("cpu", 0))
    whole = read_erasing(drawn.erase, 0.9, 32, 32), read_mixing(drawn.mix, 0.8, 1.0, 0.5, 32, 32)
    for start in range(0, 64, 3):
        rows = slice(start, start + 3)
        part = drawn.rows(rows)
        cut = read_erasing(part.erase, 0.9, 32, 32), read_mixing(part.mix, 0.8, 1.0, 0.5, 32, 32)
        for ours, wholes in zip((*cut[0], *cut[1]), (*whole[0], *whole[1]), strict=True):
            assert torch.equal(ours, wholes[rows])


def test_targets_stay_distributions() -> None:
    images, labels = some()
    deit = augment(DEIT)
    for step in range(10):
        _, targets = deit(images, labels, deit.draw(16, generator("cpu", step)))
        torch.testing.assert_close(targets.sum(1), torch.ones(16))
        assert (targets > 0.009).all()  # smoothing spreads a tenth over ten classes


def test_smoothing_is_deits() -> None:
    targets = soft_targets(torch.tensor([2]), 4, 0.1)
    torch.testing.assert_close(targets, torch.tensor([[0.025, 0.025, 0.925, 0.025]]))


def test_the_pipeline_is_one_graph() -> None:
    images, labels = some()
    deit = augment(DEIT_SMALL_IMAGES)
    compiled = torch.compile(deit.__call__, fullgraph=True, backend="eager")
    for step in range(2):
        draws = deit.draw(16, generator("cpu", step))
        for one, other in zip(compiled(images, labels, draws), deit(images, labels, draws), strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_pipeline_never_waits_for_the_device_and_compiles() -> None:
    images, labels = (part.cuda() for part in some())
    deit = augment(DEIT_SMALL_IMAGES, "cuda")
    deit(images, labels, deit.draw(16, generator("cuda", 0)))
    torch.cuda.set_sync_debug_mode("error")
    try:
        draws = deit.draw(16, generator("cuda", 1))
        plain = deit(images, labels, draws)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    compiled = torch.compile(deit.__call__, fullgraph=True)(images, labels, draws)
    # A fused multiply-add may fall on the other side of a whole number: a level, 1 / 255 / std, for few pixels.
    difference = (compiled[0] - plain[0]).abs()
    assert (difference > 1e-4).float().mean() < 1e-2
    torch.testing.assert_close(compiled[1], plain[1])


def test_noise_is_normal_and_a_function_of_its_seed_alone() -> None:
    like = torch.zeros(40, 3, 32, 32)
    seeds = torch.arange(40)
    noise = normal_noise(seeds, like)
    assert torch.equal(noise[7:9], normal_noise(seeds[7:9], like[:2]))
    flat = noise.flatten().numpy()
    assert stats.kstest(flat, "norm").pvalue > 0.01
    rows = noise.flatten(1)
    correlation = torch.corrcoef(rows)[~torch.eye(40, dtype=torch.bool)]
    assert correlation.abs().max() < 5 / rows.shape[1] ** 0.5
    neighbours = torch.corrcoef(torch.stack([noise[..., :-1].flatten(), noise[..., 1:].flatten()]))[0, 1]
    assert neighbours.abs() < 0.01


def hashed(x: Any) -> Any:
    """Wellons' mixing of 32 bits, in 64 unsigned ones."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> np.uint64(shift))) * np.uint64(factor)) & np.uint64(0xFFFFFFFF)
    return x ^ (x >> np.uint64(16))


def test_noise_is_box_and_mullers_of_two_hashes() -> None:
    seeds = torch.tensor([0, 1, 2**31 - 1, 2**31, 2**32 - 2])
    found = normal_noise(seeds, torch.zeros(5, 2, 40, 30, dtype=torch.float64)).flatten(1)
    first = hashed(hashed(seeds.numpy().astype(np.uint64))[:, None] ^ np.arange(2400, dtype=np.uint64))
    second = hashed(first ^ np.uint64(0x9E3779B9))
    expected = np.sqrt(-2 * np.log((first + 1) / (2**32 + 1))) * np.cos(2 * np.pi * second / 2**32)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9, atol=1e-9)


def test_erasing_fills_its_rectangle_and_nothing_else() -> None:
    images = torch.full((3, 2, 10, 12), 9.0)
    box = torch.tensor([[2, 3, 4, 5], [0, 0, 0, 0], [9, 11, 1, 1]])
    erased = random_erasing(images, EraseDraws(box, torch.tensor([1, 2, 3])))
    changed = (erased != 9).all(1)
    expected = torch.zeros(3, 10, 12, dtype=torch.bool)
    expected[0, 2:6, 3:8] = True
    expected[2, 9, 11] = True
    assert torch.equal(changed, expected)


def test_rectangles_to_erase_fit_and_have_the_stated_areas() -> None:
    drawn = read_erasing(draw_erasing(20_000, torch.Generator().manual_seed(0)), 0.25, 32, 40).box
    top, left, height, width = drawn.T
    erased = height > 0
    assert abs(erased.float().mean() - 0.25) < 0.01
    assert (top + height <= 32).all()
    assert (left + width <= 40).all()
    area = (height * width)[erased] / 1280
    assert area.min() > 0.015
    assert 0.3 < area.max() < 0.36
    aspect = (height / width)[erased]
    assert aspect.min() > 0.2
    assert aspect.max() < 4
    assert abs(aspect.log().median()) < 0.1
    assert (drawn[~erased] == 0).all()


def mixing(mixup: float, cutmix: float, height: int, width: int, seed: int, count: int = 2) -> MixDraws:
    chance = draw_mixing(count, beta_parameters(mixup, cutmix, "cpu"), generator("cpu", seed))
    return read_mixing(chance, mixup, cutmix, 0.5, height, width)


def mixed_once(**options: float) -> tuple[Tensor, Tensor, Tensor, Tensor, MixDraws]:
    images, labels = some(8, 12)
    values, targets = images.float(), soft_targets(labels, 10, 0.0)
    draws = mixing(options["mixup"], options["cutmix"], 12, 12, int(options["seed"]), count=8)
    return values, targets, *mix(values, targets, draws), draws


PARTNERS = [1, 0, 3, 2, 5, 4, 7, 6]


def test_mixup_blends_neighbours() -> None:
    values, targets, mixed, soft, draws = mixed_once(mixup=0.8, cutmix=0, seed=2)
    keep = draws.keep[0].item()
    assert 0 < keep < 1
    torch.testing.assert_close(mixed, keep * values + (1 - keep) * values[PARTNERS])
    torch.testing.assert_close(soft, keep * targets + (1 - keep) * targets[PARTNERS])


@pytest.mark.parametrize("seed", range(5))
def test_cutmix_takes_a_rectangle_and_weighs_by_its_true_area(seed: int) -> None:
    values, targets, mixed, soft, draws = mixed_once(mixup=0, cutmix=1.0, seed=seed)
    top, bottom, left, right = draws.box[0].tolist()
    inside = torch.zeros(12, 12, dtype=torch.bool)
    inside[top:bottom, left:right] = True
    assert torch.equal(mixed, torch.where(inside, values[PARTNERS], values))
    keep = 1 - inside.float().mean().item()
    torch.testing.assert_close(soft, keep * targets + (1 - keep) * targets[PARTNERS])


def test_lambda_is_beta_and_the_switch_is_even() -> None:
    drawn = [mixing(0.8, 1.0, 64, 64, step) for step in range(2000)]
    cut = np.array([draws.cut[0].item() for draws in drawn])
    assert abs(cut.mean() - 0.5) < 0.04
    keep = np.array([draws.keep[0].item() for draws in drawn])[~cut]
    assert stats.kstest(keep, "beta", args=(0.8, 0.8)).pvalue > 0.01


def test_rectangles_of_cutmix_have_the_drawn_area_unless_cut_off() -> None:
    drawn = [mixing(0.0, 1.0, 64, 48, step) for step in range(500)]
    boxes = torch.stack([draws.box[0] for draws in drawn])
    top, bottom, left, right = boxes.T
    assert (boxes >= 0).all()
    assert (bottom <= 64).all()
    assert (right <= 48).all()
    whole = (top > 0) & (bottom < 64) & (left > 0) & (right < 48)
    height, width = (bottom - top)[whole], (right - left)[whole]
    assert ((height / 64 - width / 48).abs() < 1 / 48).all()  # the image's own proportions


def test_odd_batches_cannot_be_mixed() -> None:
    images, labels = some(3)
    deit = augment(DEIT)
    with pytest.raises(ShapeError, match="must be even; got 3"):
        deit(images, labels, deit.draw(3, generator("cpu", 0)))


def test_one_channel_is_augmented_too() -> None:
    images, labels = some()
    grey = Augment(DEIT_SMALL_IMAGES, classes=10, mean=MEAN[:1], std=STD[:1])
    values, _ = grey(images[:, :1], labels, grey.draw(16, generator("cpu", 0)))
    assert values.shape == (16, 1, 16, 16)
    assert values.isfinite().all()


@pytest.mark.parametrize("change", [{"flip": 1.5}, {"erase": -0.1}, {"mixup": -1.0}, {"crop_pad": -1}])
def test_impossible_settings_are_named(change: dict[str, float]) -> None:
    with pytest.raises(AcutanceError, match=f"augment.{next(iter(change))}"):
        replace(DEIT, **change)


def test_normalise_undoes_itself() -> None:
    images, _ = some()
    values = normalise(images.float(), torch.tensor(MEAN), torch.tensor(STD))
    back = (values * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]) * 255
    assert torch.equal(back.round().to(torch.uint8), images)
