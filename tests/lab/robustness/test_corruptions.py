"""Every corruption: reproducible, in its bounds, growing; and each formula against one written independently."""

import colorsys
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage

from acutance.errors import AcutanceError, ShapeError
from acutance.lab.robustness import CORRUPTIONS, SEVERITIES, blur, corrupt, digital, noise, weather
from acutance.lab.robustness.corruptions import AT_ONCE, corrupt_part
from acutance.lab.robustness.draws import Draws

NOTHING_DRAWN = {
    "defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression", "gaussian_blur", "saturate",
}  # fmt: skip


def _images(count: int = 6, channels: int = 3, size: tuple[int, int] = (32, 32)) -> torch.Tensor:
    """Smooth shapes rather than noise, with dark and bright places."""
    rough = torch.rand(count, channels, 6, 6, generator=torch.Generator().manual_seed(0))
    smooth = torch.nn.functional.interpolate(rough, size, mode="bicubic", align_corners=False)
    return (smooth.clamp(0, 1) * 255).byte()


def _draws() -> Draws:
    return Draws("cpu", 7)


def test_there_are_19_corruptions_of_5_severities():
    assert len(CORRUPTIONS) == 19
    assert all(len(kind.levels) == len(SEVERITIES) == 5 for kind in CORRUPTIONS.values())


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_reproducible_bytes_of_the_same_shape(name):
    for images in (_images(3), _images(2, channels=1, size=(28, 20)), _images(2, channels=1, size=(8, 8))):
        before = images.clone()
        once, again = corrupt(images, name, 5, seed=3), corrupt(images, name, 5, seed=3)
        assert (once.dtype, once.shape) == (torch.uint8, images.shape)
        assert torch.equal(once, again)
        assert torch.equal(images, before)
    unlike = corrupt(_images(3), name, 5, seed=3), corrupt(_images(3), name, 5, seed=4)
    assert torch.equal(*unlike) == (name in NOTHING_DRAWN)


@pytest.mark.parametrize("name", sorted(set(CORRUPTIONS) - NOTHING_DRAWN))
def test_each_image_and_each_severity_is_drawn_for_anew(name):
    same = _images(1).repeat(2, 1, 1, 1)
    first, second = corrupt(same, name, 3)
    assert not torch.equal(first, second)
    assert not torch.equal(corrupt(same, name, 3), corrupt(same, name, 4))


def test_an_image_is_corrupted_by_its_place_among_the_images():
    images = _images(AT_ONCE + 5, size=(8, 8))
    whole = corrupt(images, "gaussian_noise", 2, seed=1)
    assert torch.equal(whole[AT_ONCE:], corrupt_part(images[AT_ONCE:], "gaussian_noise", 2, 1, part=1))
    assert not torch.equal(whole[AT_ONCE:], corrupt_part(images[AT_ONCE:], "gaussian_noise", 2, 1, part=0))


@pytest.mark.parametrize(
    "name", sorted(set(CORRUPTIONS) - {"spatter", "saturate", "glass_blur", "snow", "fog", "frost"})
)
def test_a_higher_severity_changes_more(name):
    # Not those whose published severities differ in kind (mud after water, pale before vivid, a darker image under more
    # frost): they are meant to be harder, not farther from the image.
    images = _images(40)
    changes = [(corrupt(images, name, s).float() - images.float()).abs().mean() for s in SEVERITIES]
    assert changes == sorted(changes), changes


def test_noise_has_the_stated_moments():
    grey = torch.full((20, 3, 32, 32), 0.4)
    count = grey.numel()
    found = noise.gaussian(grey, _draws(), 0.1)
    assert float(found.std()) == pytest.approx(0.1, rel=5 / count**0.5)
    found = noise.shot(grey, _draws(), 12)
    assert float(found.mean()) == pytest.approx(0.4, abs=5 * (0.4 / 12 / count) ** 0.5)
    assert float(found.var()) == pytest.approx(0.4 / 12, rel=0.05)  # Poisson: mean = variance
    found = noise.impulse(grey, _draws(), 0.2)
    black, white = float((found == 0).float().mean()), float((found == 1).float().mean())
    assert (black, white) == (pytest.approx(0.1, abs=0.01), pytest.approx(0.1, abs=0.01))
    assert float((found == 0.4).float().mean()) == pytest.approx(0.8, abs=0.01)
    found = noise.speckle(torch.stack([grey, torch.zeros_like(grey)]), _draws(), 0.5)
    assert float(found[0].std()) == pytest.approx(0.2, rel=0.05)
    assert not found[1].any()


@pytest.mark.parametrize("more", [0.1, 0.5])
def test_brightness_is_hsv_with_more_v(more):
    images = _images(2, size=(6, 6)) * (torch.arange(2) > 0)[:, None, None, None]  # the first is black
    found = digital.brightness(images / 255, _draws(), more)
    for rgb, after in zip(_pixels(images / 255), _pixels(found), strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*rgb)
        assert after == pytest.approx(colorsys.hsv_to_rgb(hue, saturation, min(1, value + more)), abs=1e-6)


@pytest.mark.parametrize(("times", "more"), [(0.3, 0.0), (5.0, 0.1), (20.0, 0.2)])
def test_saturate_is_hsv_with_another_s(times, more):
    images = _images(2, size=(6, 6)).double() / 255
    images[0] = images[0, :1]  # the first is grey
    found = digital.saturate(images, _draws(), times, more)
    for rgb, after in zip(_pixels(images), _pixels(found), strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*rgb)
        saturation = min(1, saturation * times + more)
        assert after == pytest.approx(colorsys.hsv_to_rgb(hue, saturation, value), abs=1e-9)


def test_values_are_cut_to_whole_levels_and_not_rounded():
    image = torch.tensor([0, 255], dtype=torch.uint8).repeat(1, 1, 4, 2)
    found = corrupt(image, "contrast", 2)  # 127.5 ∓ 0.3 · 127.5, which is 89.25 and 165.75
    assert found.unique().tolist() == [89, 165]


def test_contrast_keeps_the_mean_and_scales_the_rest():
    x = _images().double() / 255
    found = digital.contrast(x, _draws(), 0.2)
    torch.testing.assert_close(found.mean((2, 3)), x.mean((2, 3)))
    torch.testing.assert_close(found.std((2, 3)), 0.2 * x.std((2, 3)))


@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize("size", [(32, 32), (28, 45)])
def test_pixelate_is_pillows_box_and_nearest(severity, size):
    images, scale = _images(size=size), (0.6, 0.5, 0.4, 0.3, 0.25)[severity - 1]
    found = corrupt(images, "pixelate", severity)
    for image, after in zip(images, found, strict=True):
        picture = Image.fromarray(image.permute(1, 2, 0).numpy())
        small = picture.resize((int(size[1] * scale), int(size[0] * scale)), Image.Resampling.BOX)
        expected = np.asarray(small.resize((size[1], size[0]), Image.Resampling.NEAREST))
        np.testing.assert_array_equal(after.permute(1, 2, 0).numpy(), expected)


@pytest.mark.parametrize("channels", [1, 3])
def test_jpeg_is_pillows(channels):
    images = _images(channels=channels)
    found = corrupt(images, "jpeg_compression", 2)
    for image, after in zip(images, found, strict=True):
        buffer = BytesIO()
        Image.fromarray(image.permute(1, 2, 0).squeeze(-1).numpy()).save(buffer, "JPEG", quality=18)
        expected = np.asarray(Image.open(buffer)).reshape(32, 32, channels)
        np.testing.assert_array_equal(after.permute(1, 2, 0).numpy(), expected)


def test_elastic_is_scipys_interpolation_at_the_same_places():
    x = _images(2, size=(32, 24)) / 255
    found = digital.elastic(x, _draws(), 30.0)
    offsets = _draws().uniform(2, 2, 32, 24, low=-0.16, high=0.16).numpy()
    smooth = ndimage.gaussian_filter(offsets, (0, 0, 0.32, 0.24), mode="reflect", truncate=3.0) * 30
    rows, columns = np.mgrid[:32, :24]
    for n in range(2):
        places = np.stack([rows + smooth[1, n], columns + smooth[0, n]])
        for c in range(3):
            expected = ndimage.map_coordinates(x[n, c].numpy(), places, order=1, mode="reflect")
            np.testing.assert_allclose(found[n, c], expected, atol=1e-5)


def test_glass_copies_from_the_neighbourhood_one_pixel_after_the_other():
    x = _images(2, size=(9, 11)).double() / 255
    found = blur.glass(x, _draws(), 0.7, 2, 2)
    draws = _draws()
    levels = np.floor(ndimage.gaussian_filter(x.numpy(), (0, 0, 0.7, 0.7), mode="nearest") * 255) / 255
    spots = [(i, j) for i in range(7, 2, -1) for j in range(9, 2, -1)]
    for _ in range(2):
        steps = draws.integers(2, len(spots), 2, low=-2, high=2)
        for n in range(2):
            for index, (i, j) in enumerate(spots):
                levels[n, :, i, j] = levels[n, :, i + int(steps[0, index, n]), j + int(steps[1, index, n])]
    expected = ndimage.gaussian_filter(levels, (0, 0, 0.7, 0.7), mode="nearest")
    torch.testing.assert_close(found, torch.from_numpy(expected))


def test_zoom_blur_of_severity_1_averages_twelve_enlargements(monkeypatch):
    factors = []
    monkeypatch.setattr(blur.filters, "zoomed", lambda x, factor: factors.append(factor) or x)
    corrupt(_images(1), "zoom_blur", 1)
    assert factors == pytest.approx([1 + i / 100 for i in range(12)])


def test_fog_is_clouds_from_0_to_1_that_leave_the_brightest_value():
    clouds = weather.plasma(_draws(), 3, 32, 2.0)
    assert clouds.shape == (3, 32, 32)
    assert torch.equal(clouds.amin((1, 2)), torch.zeros(3))
    torch.testing.assert_close(clouds.amax((1, 2)), torch.ones(3))
    # Neighbours are alike: far more so than in noise of the same values.
    steps, anywhere = clouds.diff(dim=-1).abs().mean(), (clouds - clouds.roll(16, -1)).abs().mean()
    assert steps < anywhere / 3
    x = _images() / 255
    assert (weather.fog(x, _draws(), 2.0, 2.0).amax((1, 2, 3)) <= x.amax((1, 2, 3)) + 1e-6).all()


def test_frost_has_the_stated_brightness_contrast_and_spectrum():
    texture = weather.frost(torch.zeros(200, 3, 32, 32), _draws(), 1.0, 1.0)
    grey = texture.mean(1)
    low, high = weather.BRIGHTNESS
    assert low - 0.02 < float(grey.mean((1, 2)).min()) < float(grey.mean((1, 2)).max()) < high + 0.02
    assert float(grey.std((1, 2)).mean()) == pytest.approx(weather.CONTRAST, rel=0.05)
    power = (torch.fft.fft2(grey - grey.mean((1, 2), keepdim=True)).abs() ** 2).mean(0)
    # From 2 to 8 cycles the power falls by 4^1.8.
    assert float((power[0, 2] / power[0, 8]).log() / torch.tensor(4.0).log()) == pytest.approx(1.8, abs=0.3)
    red, green, blue = texture.mean((0, 2, 3)).tolist()
    assert red < green < blue


def test_snow_whitens_and_lies_on_its_point_reflection():
    x = torch.full((4, 3, 32, 32), 0.2)
    found = weather.snow(x, _draws(), 0.55, 0.3, 4.0, 0.9, 12, 8, 0.7)
    whitened = 0.7 * 0.2 + 0.3 * (1.5 * 0.2 + 0.5)
    assert float(found.min()) >= whitened - 1e-6
    flakes = found - whitened
    assert float(flakes.max()) > 0.1
    torch.testing.assert_close(flakes, flakes.rot90(2, (-2, -1)))


def test_spatter_measures_the_distance_to_the_rims():
    rims = torch.rand(3, 1, 40, 50, generator=torch.Generator().manual_seed(0)) < 0.002
    assert rims.flatten(1).any(1).all()
    expected = np.stack([ndimage.distance_transform_edt(~plane) for plane in rims[:, 0].numpy()])
    np.testing.assert_allclose(weather._distance(rims)[:, 0], expected.clip(max=20), rtol=1e-6)
    assert torch.equal(weather._distance(torch.zeros(1, 1, 8, 8, dtype=torch.bool)), torch.full((1, 1, 8, 8), 20.0))


def test_spatter_finds_the_rim_of_a_drop():
    rows, columns = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    away = ((rows - 16) ** 2 + (columns - 15) ** 2).sqrt()
    rims = weather._rims(torch.where(away < 9, 200.0, 0.0)[None, None])[0, 0]
    assert rims.sum() >= 2 * 9 * 3  # about its circumference
    assert (away[rims] - 9).abs().max() <= 1.5


def test_spatter_makes_histograms_flat():
    levels = torch.tensor([[3.0, 3, 3, 5, 5, 9, 20, 20]]).view(1, 1, 2, 4)
    expected = torch.tensor([[0.0, 0, 0, 102, 102, 153, 255, 255]]).view(1, 1, 2, 4)  # share of the 5 above the lowest
    assert torch.equal(weather._equalised(levels), expected)
    constant = torch.full((1, 1, 2, 2), 20.0)
    assert torch.equal(weather._equalised(constant), constant)


def test_spatter_without_a_drop_leaves_the_image():
    x = _images() / 255
    assert torch.equal(weather.spatter(x, _draws(), 0.65, 0.3, 4, 0.99, 0.6, False), x)
    assert torch.equal(weather.spatter(x, _draws(), 0.65, 0.3, 4, 0.99, 1.5, True), x)


def test_what_does_not_exist_is_refused_by_name():
    with pytest.raises(AcutanceError, match="no corruption smoke; there are gaussian_noise, "):
        corrupt(_images(), "smoke", 1)
    with pytest.raises(AcutanceError, match="from 1 to 5, not 6"):
        corrupt(_images(), "fog", 6)
    with pytest.raises(ShapeError, match=r"\(6, 2, 32, 32\)"):
        corrupt(_images(channels=2), "fog", 1)
    with pytest.raises(ShapeError, match="float32"):
        corrupt(_images() / 255, "fog", 1)


def _pixels(x: torch.Tensor) -> list[list[float]]:
    return x.permute(0, 2, 3, 1).reshape(-1, 3).tolist()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_every_device_sees_the_same_draws(name):
    images = _images(20)
    here, there = corrupt(images, name, 3), corrupt(images.cuda(), name, 3).cpu()
    # Rounding differs, and may move a value over a level.
    assert float((here.float() - there.float()).abs().mean()) < 0.05
