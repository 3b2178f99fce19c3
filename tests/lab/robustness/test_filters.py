"""Filters against scipy, shifts and streaks against plain loops."""

import math

import numpy as np
import pytest
import torch
from scipy import ndimage

from acutance.lab.robustness import filters

SIZES = [(9, 13), (3, 4)]  # the second is smaller than some of the filters
MODES = {"edge": "nearest", "symmetric": "reflect", "mirror": "mirror"}


def _images(size: tuple[int, int], channels: int = 3) -> torch.Tensor:
    return torch.rand(2, channels, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("border", MODES)
def test_convolve_is_scipys_correlation(border, size):
    x, kernel = _images(size), torch.rand(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = ndimage.correlate(x.numpy(), kernel.numpy()[None, None], mode=MODES[border])
    torch.testing.assert_close(filters.convolve(x, kernel, border), torch.from_numpy(expected))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("border", MODES)
def test_gaussian_is_scipys(border, size):
    x = _images(size)
    expected = ndimage.gaussian_filter(x.numpy(), (0, 0, 1.3, 2.0), mode=MODES[border], truncate=3.0)
    found = filters.gaussian(x, (1.3, 2.0), border, truncate=3.0)
    torch.testing.assert_close(found, torch.from_numpy(expected))


def test_one_row_of_pixels_has_borders_too():
    x = _images((1, 5))
    for border in ("edge", "symmetric", "mirror"):
        torch.testing.assert_close(filters.gaussian(x, (2.0, 1e-3), border), x)


@pytest.mark.parametrize("factor", [1.0, 1.11, 1.3000000000000003, 2.5, 4.5])
def test_zoomed_is_scipys_zoom_of_the_middle(factor):
    x = _images((32, 20))
    high, wide = math.ceil(32 / factor), math.ceil(20 / factor)
    top, left = (32 - high) // 2, (20 - wide) // 2
    middle = x.numpy()[..., top : top + high, left : left + wide]
    expected = ndimage.zoom(middle, (1, 1, factor, factor), order=1)
    found = filters.zoomed(x, factor)
    assert found.size(-2) >= 32
    assert found.size(-1) >= 20
    torch.testing.assert_close(found, torch.from_numpy(expected))


def test_shifted_moves_each_image_by_itself_and_repeats_the_edge():
    x = _images((5, 6))
    down, right = torch.tensor([2, -1]), torch.tensor([-3, 9])
    found = filters.shifted(x, down, right)
    for n in range(2):
        for i in range(5):
            for j in range(6):
                source = x[n, :, min(max(i - int(down[n]), 0), 4), min(max(j - int(right[n]), 0), 5)]
                assert torch.equal(found[n, :, i, j], source)


def test_streak_is_half_a_bell_along_a_line():
    point = torch.zeros(1, 1, 41, 41, dtype=torch.float64)
    point[0, 0, 20, 20] = 1
    weights = np.exp(-(np.arange(21.0) ** 2) / (2 * 5.0**2))
    weights /= weights.sum()
    along = filters.streak(point, 10, 5.0, torch.tensor([0.0]))[0, 0]
    assert along[20].sum() == pytest.approx(1)
    np.testing.assert_allclose(along[20, :21].flip(0), weights)
    upright = filters.streak(point, 10, 5.0, torch.tensor([90.0]))[0, 0]
    np.testing.assert_allclose(upright[:21, 20].flip(0), weights)


def test_filters_keep_a_constant_image():
    x = torch.full((2, 3, 7, 7), 0.3, dtype=torch.float64)
    angles = torch.tensor([-30.0, 100.0])
    for found in (filters.gaussian(x, (3.0, 3.0)), filters.streak(x, 20, 15.0, angles), filters.zoomed(x, 1.2)):
        torch.testing.assert_close(found, torch.full_like(found, 0.3))


@pytest.mark.parametrize(("radius", "soften", "reach", "bell"), [(3, 0.1, 8, 1), (8, 0.5, 8, 1), (10, 0.5, 10, 2)])
def test_disk_is_a_disk_with_a_soft_rim(radius, soften, reach, bell):
    rows, columns = np.mgrid[-reach : reach + 1, -reach : reach + 1]
    inside = (rows**2 + columns**2 <= radius**2).astype(float)
    weights = np.exp(-(np.arange(-bell, bell + 1.0) ** 2) / (2 * soften**2))
    expected = inside / inside.sum()
    for axis in (0, 1):
        expected = ndimage.correlate1d(expected, weights / weights.sum(), axis, mode="mirror")
    np.testing.assert_allclose(filters.disk(radius, soften), expected, atol=1e-15)


def test_luminance_of_grey_is_the_grey():
    grey = torch.rand(2, 1, 4, 4)
    torch.testing.assert_close(filters.luminance(grey.expand(-1, 3, -1, -1)), grey)
    assert filters.luminance(grey) is grey
