"""Every corruption: reproducible, in its bounds, growing; and each formula against one written independently."""

import colorsys
import math
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage

from acutance.errors import AcutanceError, ShapeError
from acutance.lab.robustness import CORRUPTIONS, SEVERITIES, corrupt, corruptions, filters
from acutance.lab.robustness.corruptions import AT_ONCE, CIFAR_C, corrupt_part
from acutance.lab.robustness.filters import Draws

NOTHING_DRAWN = {
    "defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression", "gaussian_blur", "saturate",
}  # fmt: skip
# Their published severities differ in kind (mud after water, pale before vivid, a darker image under more frost).
NOT_GROWING = {"spatter", "saturate", "glass_blur", "snow", "fog", "frost", "elastic_transform"}
MODES = {"edge": "nearest", "symmetric": "reflect", "mirror": "mirror"}


def pictures(count=6, channels=3, size=(32, 32)):
    """Smooth shapes rather than noise, with dark and bright places."""
    rough = torch.rand(count, channels, 6, 6, generator=torch.Generator().manual_seed(0))
    smooth = torch.nn.functional.interpolate(rough, size, mode="bicubic", align_corners=False)
    return (smooth.clamp(0, 1) * 255).byte()


def noise(*size):
    return torch.rand(2, 3, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def draws():
    return Draws("cpu", 7)


def pixels(x):
    return x.permute(0, 2, 3, 1).reshape(-1, 3).tolist()


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_reproducible_bytes_of_the_same_shape(name):
    assert len(CORRUPTIONS[name]) - 1 == len(SEVERITIES) == 5
    for images in (pictures(3), pictures(2, channels=1, size=(28, 20)), pictures(2, channels=1, size=(8, 8))):
        before = images.clone()
        once, again = corrupt(images, name, 5, seed=3), corrupt(images, name, 5, seed=3)
        assert (once.dtype, once.shape) == (torch.uint8, images.shape)
        assert torch.equal(once, again)
        assert torch.equal(images, before)
    unlike = corrupt(pictures(3), name, 5, seed=3), corrupt(pictures(3), name, 5, seed=4)
    assert torch.equal(*unlike) == (name in NOTHING_DRAWN)
    if name not in NOTHING_DRAWN:  # each image and each severity is drawn for anew
        same = pictures(1).repeat(2, 1, 1, 1)
        third, fourth = corrupt(same, name, 3), corrupt(same, name, 4)
        assert not torch.equal(third[0], third[1])
        assert not torch.equal(third, fourth)
    if name not in NOT_GROWING:
        images = pictures(40)
        changes = [(corrupt(images, name, s).float() - images.float()).abs().mean() for s in SEVERITIES]
        assert changes == sorted(changes), changes


def test_an_image_is_corrupted_by_its_place_among_the_images():
    assert len(CORRUPTIONS) == 19
    images = pictures(AT_ONCE + 5, size=(8, 8))
    whole = corrupt(images, "gaussian_noise", 2, seed=1)
    assert torch.equal(whole[AT_ONCE:], corrupt_part(images[AT_ONCE:], "gaussian_noise", 2, 1, part=1))
    assert not torch.equal(whole[AT_ONCE:], corrupt_part(images[AT_ONCE:], "gaussian_noise", 2, 1, part=0))


def test_noise_has_the_stated_moments():
    grey = torch.full((20, 3, 32, 32), 0.4)
    count = grey.numel()
    assert float(corruptions.gaussian_noise(grey, draws(), 0.1).std()) == pytest.approx(0.1, rel=5 / count**0.5)
    found = corruptions.shot_noise(grey, draws(), 12)
    assert float(found.mean()) == pytest.approx(0.4, abs=5 * (0.4 / 12 / count) ** 0.5)
    assert float(found.var()) == pytest.approx(0.4 / 12, rel=0.05)  # Poisson: mean = variance
    found = corruptions.impulse_noise(grey, draws(), 0.2)
    for value, share in ((0, 0.1), (1, 0.1), (0.4, 0.8)):
        assert float((found == value).float().mean()) == pytest.approx(share, abs=0.01)
    found = corruptions.speckle_noise(torch.stack([grey, torch.zeros_like(grey)]), draws(), 0.5)
    assert float(found[0].std()) == pytest.approx(0.2, rel=0.05)
    assert not found[1].any()


@pytest.mark.parametrize(("times", "more"), [(0.3, 0.0), (5.0, 0.1), (20.0, 0.2)])
def test_brightness_and_saturate_are_hsv_with_another_v_or_s(times, more):
    images = pictures(2, size=(6, 6)).double() / 255
    images[0] = images[0, :1]  # the first is grey
    images[0, :, 0] = 0  # and partly black
    brighter = corruptions.brightness(images, draws(), more)
    saturated = corruptions.saturate(images, draws(), times, more)
    for rgb, bright, vivid in zip(pixels(images), pixels(brighter), pixels(saturated), strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*rgb)
        assert bright == pytest.approx(colorsys.hsv_to_rgb(hue, saturation, min(1, value + more)), abs=1e-9)
        wanted = min(1, saturation * times + more)
        assert vivid == pytest.approx(colorsys.hsv_to_rgb(hue, wanted, value), abs=1e-9)


def test_values_are_cut_to_whole_levels_and_not_rounded():
    image = torch.tensor([0, 255], dtype=torch.uint8).repeat(1, 1, 4, 2)
    found = corrupt(image, "contrast", 2)  # 127.5 ∓ 0.5 · 127.5, which is 63.75 and 191.25
    assert found.unique().tolist() == [63, 191]


@pytest.mark.parametrize("channels", [1, 3])
def test_pixelate_is_pillows_box_and_nearest_and_jpeg_pillows(channels):
    images = pictures(channels=channels, size=(28, 45))
    for severity, scale, quality in zip(SEVERITIES, (0.6, 0.5, 0.4, 0.3, 0.25), (25, 18, 15, 10, 7), strict=True):
        coarse, packed = (corrupt(images, name, severity) for name in ("pixelate", "jpeg_compression"))
        for index, image in enumerate(images):
            picture, buffer = Image.fromarray(image.permute(1, 2, 0).squeeze(-1).numpy()), BytesIO()
            small = picture.resize((int(45 * scale), int(28 * scale)), Image.Resampling.BOX)
            picture.save(buffer, "JPEG", quality=quality)
            for found, expected in (
                (coarse, small.resize((45, 28), Image.Resampling.NEAREST)),
                (packed, Image.open(buffer)),
            ):
                expected = np.asarray(expected).reshape(28, 45, channels)
                np.testing.assert_array_equal(found[index].permute(1, 2, 0).numpy(), expected)


def read_at(image, rows, columns, mode="reflect"):
    """Each channel interpolated at these places, by SciPy."""
    planes = np.asarray(image)
    return np.stack([ndimage.map_coordinates(plane, [rows, columns], order=1, mode=mode) for plane in planes])


def test_elastic_is_scipys_interpolation_at_the_same_places():
    x = pictures(2, size=(32, 24)) / 255
    found = corruptions.elastic_transform(x, draws(), 30.0)
    offsets = draws().uniform(2, 2, 32, 24, low=-0.16, high=0.16).numpy()
    smooth = ndimage.gaussian_filter(offsets, (0, 0, 0.32, 0.24), mode="reflect", truncate=3.0) * 30
    rows, columns = np.mgrid[:32, :24]
    for n in range(2):
        expected = read_at(x[n], rows + smooth[1, n], columns + smooth[0, n])
        np.testing.assert_allclose(found[n], expected, atol=1e-5)


def test_small_images_have_the_severities_of_cifar_c():
    grey = torch.full((20, 3, 32, 32), 102, dtype=torch.uint8)
    for side, deviations in ((32, (0.04, 0.06, 0.08, 0.09, 0.10)), (33, (0.08, 0.12, 0.18))):
        for severity, deviation in enumerate(deviations, 1):
            images = torch.nn.functional.pad(grey, (0, side - 32, 0, side - 32), value=102)
            found = corrupt(images, "gaussian_noise", severity).float() / 255
            assert float(found.std()) == pytest.approx(deviation, rel=0.02)
    names, sizes = ([*each] for each in (CORRUPTIONS, CIFAR_C)), [len(levels) for levels in CIFAR_C.values()]
    assert next(names) == next(names)
    assert set(sizes) == {6}


@pytest.mark.parametrize(("strength", "sigma", "shift"), [(0, 0, 0.08), (0.05, 0.2, 0.07), (0.1, 0.03, 0.0)])
def test_cifar_cs_elastic_is_an_affine_map_then_scipys_interpolation(strength, sigma, shift):
    x, side = pictures(2) / 255, 32
    found = corruptions.elastic_with_affine(x, draws(), strength, sigma, shift)
    random = draws()
    moves = random.uniform(2, 3, 2, low=-shift * side, high=shift * side).numpy()
    noise = random.uniform(2, 2, side, side, low=-1, high=1).numpy()
    before = np.array([[26, 26], [26, 6], [6, 6]], dtype=float)  # x and y: the middle ± a third
    rows, columns = np.mgrid[:side, :side]
    for n in range(2):
        forth = np.linalg.lstsq(np.c_[before, np.ones(3)], before + moves[n], rcond=None)[0].T
        back = np.linalg.inv(np.vstack([forth, [0, 0, 1]]))
        across, down, _ = np.einsum("ij,jhw->ihw", back, np.stack([columns, rows, np.ones_like(rows)]))
        widths = (0, sigma * side, sigma * side)
        right, below = strength * side * ndimage.gaussian_filter(noise[:, n], widths, mode="reflect", truncate=3.0)
        expected = read_at(read_at(x[n], down, across, "mirror"), rows + below, columns + right)
        np.testing.assert_allclose(found[n], expected, atol=2e-4)


def test_glass_copies_from_the_neighbourhood_one_pixel_after_the_other():
    x = pictures(2, size=(9, 11)).double() / 255
    found, drawn = corruptions.glass_blur(x, draws(), 0.7, 2, 2), draws()
    levels = np.floor(ndimage.gaussian_filter(x.numpy(), (0, 0, 0.7, 0.7), mode="nearest") * 255) / 255
    spots = [(i, j) for i in range(7, 2, -1) for j in range(9, 2, -1)]
    for _ in range(2):
        steps = drawn.integers(2, len(spots), 2, low=-2, high=2)
        for n in range(2):
            for index, (i, j) in enumerate(spots):
                levels[n, :, i, j] = levels[n, :, i + int(steps[0, index, n]), j + int(steps[1, index, n])]
    expected = ndimage.gaussian_filter(levels, (0, 0, 0.7, 0.7), mode="nearest")
    torch.testing.assert_close(found, torch.from_numpy(expected))


def test_fog_is_clouds_from_0_to_1_that_leave_the_brightest_value():
    clouds = corruptions.plasma(draws(), 3, 32, 2.0)
    assert clouds.shape == (3, 32, 32)
    assert torch.equal(clouds.amin((1, 2)), torch.zeros(3))
    torch.testing.assert_close(clouds.amax((1, 2)), torch.ones(3))
    # Neighbours are alike: far more so than in noise of the same values.
    steps, anywhere = clouds.diff(dim=-1).abs().mean(), (clouds - clouds.roll(16, -1)).abs().mean()
    assert steps < anywhere / 3
    x = pictures() / 255
    assert (corruptions.fog(x, draws(), 2.0, 2.0).amax((1, 2, 3)) <= x.amax((1, 2, 3)) + 1e-6).all()


def test_frost_has_the_stated_brightness_contrast_and_spectrum():
    texture = corruptions.frost(torch.zeros(200, 3, 32, 32), draws(), 1.0, 1.0)
    grey = texture.mean(1)
    low, high = corruptions.FROST_BRIGHTNESS
    assert low - 0.02 < float(grey.mean((1, 2)).min()) < float(grey.mean((1, 2)).max()) < high + 0.02
    assert float(grey.std((1, 2)).mean()) == pytest.approx(corruptions.FROST_CONTRAST, rel=0.05)
    power = (torch.fft.fft2(grey - grey.mean((1, 2), keepdim=True)).abs() ** 2).mean(0)
    # From 2 to 8 cycles the power falls by 4^1.8.
    assert float((power[0, 2] / power[0, 8]).log()) / math.log(4) == pytest.approx(1.8, abs=0.3)
    red, green, blue = texture.mean((0, 2, 3)).tolist()
    assert red < green < blue


def test_snow_whitens_and_lies_on_its_point_reflection():
    found = corruptions.snow(torch.full((4, 3, 32, 32), 0.2), draws(), 0.55, 0.3, 4.0, 0.9, 12, 8, 0.7)
    flakes = found - (0.7 * 0.2 + 0.3 * (1.5 * 0.2 + 0.5))  # over the whitened image
    assert float(flakes.min()) >= -1e-6
    assert float(flakes.max()) > 0.1
    torch.testing.assert_close(flakes, flakes.rot90(2, (-2, -1)))


def test_spatter_finds_rims_and_distances_makes_histograms_flat_and_leaves_an_image_without_drops():
    rims = torch.rand(3, 1, 40, 50, generator=torch.Generator().manual_seed(0)) < 0.002
    assert rims.flatten(1).any(1).all()
    expected = np.stack([ndimage.distance_transform_edt(~plane) for plane in rims[:, 0].numpy()])
    np.testing.assert_allclose(corruptions._distance(rims)[:, 0], expected.clip(max=20), rtol=1e-6)
    assert (corruptions._distance(torch.zeros(1, 1, 8, 8, dtype=torch.bool)) == 20).all()
    away = torch.hypot(torch.arange(-16.0, 16)[:, None], torch.arange(-15.0, 17))
    rims = corruptions._rims(torch.where(away < 9, 200.0, 0.0)[None, None])[0, 0]
    assert rims.sum() >= 2 * 9 * 3  # about its circumference
    assert (away[rims] - 9).abs().max() <= 1.5
    levels = torch.tensor([[3.0, 3, 3, 5, 5, 9, 20, 20]]).view(1, 1, 2, 4)
    expected = torch.tensor([[0.0, 0, 0, 102, 102, 153, 255, 255]]).view(1, 1, 2, 4)  # share of the 5 above the lowest
    assert torch.equal(corruptions._equalised(levels), expected)
    constant = torch.full((1, 1, 2, 2), 20.0)
    assert torch.equal(corruptions._equalised(constant), constant)
    x = pictures() / 255
    for mud in (False, True):
        assert torch.equal(corruptions.spatter(x, draws(), 0.65, 0.3, 4, 0.99, 1.5, mud), x)


def test_what_does_not_exist_is_refused_by_name():
    for error, words, *arguments in (
        (AcutanceError, "no corruption smoke; there are gaussian_noise, ", pictures(), "smoke", 1),
        (AcutanceError, "from 1 to 5, not 6", pictures(), "fog", 6),
        (ShapeError, r"\(6, 2, 32, 32\)", pictures(channels=2), "fog", 1),
        (ShapeError, "float32", pictures() / 255, "fog", 1),
    ):
        with pytest.raises(error, match=words):
            corrupt(*arguments)


@pytest.mark.cuda
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_every_device_sees_the_same_draws(name):
    images = pictures(20)
    here, there = corrupt(images, name, 3), corrupt(images.cuda(), name, 3).cpu()
    # Rounding differs, and may move a value over a level.
    assert float((here.float() - there.float()).abs().mean()) < 0.05


@pytest.mark.parametrize("size", [(9, 13), (3, 4)])  # the second is smaller than some of the filters
@pytest.mark.parametrize("border", MODES)
def test_filters_are_scipys(border, size):
    x, kernel = noise(*size), torch.rand(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = ndimage.correlate(x.numpy(), kernel.numpy()[None, None], mode=MODES[border])
    torch.testing.assert_close(filters.convolve(x, kernel, border), torch.from_numpy(expected))
    expected = ndimage.gaussian_filter(x.numpy(), (0, 0, 1.3, 2.0), mode=MODES[border], truncate=3.0)
    torch.testing.assert_close(filters.gaussian(x, (1.3, 2.0), border, truncate=3.0), torch.from_numpy(expected))
    row = noise(1, 5)  # has borders, too
    torch.testing.assert_close(filters.gaussian(row, (2.0, 1e-3), border), row)


@pytest.mark.parametrize("factor", [1.0, 1.3000000000000003, 4.5])
def test_zoomed_is_scipys_zoom_of_the_middle_and_zoom_blur_averages_several(factor, monkeypatch):
    x = noise(32, 20)
    high, wide = math.ceil(32 / factor), math.ceil(20 / factor)
    top, left = (32 - high) // 2, (20 - wide) // 2
    middle = x.numpy()[..., top : top + high, left : left + wide]
    found = filters.zoomed(x, factor)
    assert (found.size(-2) >= 32, found.size(-1) >= 20) == (True, True)
    torch.testing.assert_close(found, torch.from_numpy(ndimage.zoom(middle, (1, 1, factor, factor), order=1)))
    factors = []
    monkeypatch.setattr(filters, "zoomed", lambda x, factor: factors.append(factor) or x)
    corrupt(pictures(1, size=(40, 40)), "zoom_blur", 1)
    assert factors == pytest.approx([1 + i / 100 for i in range(12)])


def test_streak_is_half_a_bell_along_a_line_for_each_image():
    x = noise(41, 41)
    weights = np.exp(-(np.arange(21.0) ** 2) / (2 * 5.0**2))
    weights /= weights.sum()
    found = filters.streak(x, 10, 5.0, torch.tensor([0.0, 90.0])).numpy()
    padded = np.pad(x.numpy(), [(0, 0), (0, 0), (0, 20), (0, 20)], mode="edge")  # the edge is repeated
    along, upright = (
        sum(w * padded[n].take(range(i, i + 41), axis=2 - n) for i, w in enumerate(weights)) for n in (0, 1)
    )
    np.testing.assert_allclose(found[0], along[:, :41])
    np.testing.assert_allclose(found[1], upright[..., :41])


@pytest.mark.parametrize(("radius", "soften", "reach", "bell"), [(3, 0.1, 8, 1), (8, 0.5, 8, 1), (10, 0.5, 10, 2)])
def test_disk_is_a_disk_with_a_soft_rim(radius, soften, reach, bell):
    rows, columns = np.mgrid[-reach : reach + 1, -reach : reach + 1]
    inside = (rows**2 + columns**2 <= radius**2).astype(float)
    weights = np.exp(-(np.arange(-bell, bell + 1.0) ** 2) / (2 * soften**2))
    expected = inside / inside.sum()
    for axis in (0, 1):
        expected = ndimage.correlate1d(expected, weights / weights.sum(), axis, mode="mirror")
    np.testing.assert_allclose(filters.disk(radius, soften), expected, atol=1e-15)
