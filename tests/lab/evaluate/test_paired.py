"""The sign-flip test against brute force."""

from itertools import product

import numpy as np
import pytest

from acutance.errors import AcutanceError
from acutance.lab.evaluate.compare import paired, sign_flip_p


@pytest.mark.parametrize("count", range(1, 11))
def test_it_counts_what_brute_force_counts(count):
    random = np.random.default_rng(count)
    signs = np.array(list(product((1, -1), repeat=count)))
    for differences in (random.normal(0.5, 1, count), random.integers(-2, 3, count).astype(float)):
        expected = (np.abs(signs @ differences) >= abs(differences.sum()) - 1e-9).mean()
        assert sign_flip_p(differences) == pytest.approx(expected, abs=1e-12)


def test_three_seeds_cannot_show_much_and_many_clear_ones_have_a_tiny_p():
    test = paired([70.0, 71.0, 72.0], [71.0, 71.5, 72.25])
    assert test.p == test.smallest_p == 0.25
    assert test.mean == pytest.approx((1 + 0.5 + 0.25) / 3)
    assert test.spread == pytest.approx(np.std([1, 0.5, 0.25], ddof=1))
    assert paired([1.0, 2.0], [1.0, 2.0]).p == 1
    assert sign_flip_p(np.ones(30)) == pytest.approx(2.0**-29)


def test_it_holds_its_level():
    """Under no effect, p ≤ 0.05 comes in at most 5 % of experiments (here 3.1 %, the next possible share, ± noise)."""
    draws = np.random.default_rng(0).normal(size=(4000, 6))
    assert np.mean([sign_flip_p(row) <= 0.05 for row in draws]) == pytest.approx(2 / 64, abs=0.012)


@pytest.mark.parametrize("differences", [[], [float("nan")], np.ones(41)])
def test_what_it_cannot_take(differences):
    with pytest.raises(AcutanceError, match="1 to 40 finite differences"):
        sign_flip_p(differences)
