"""RandAugment beside timm's own, which DeiT trained with: operation for operation, magnitude for magnitude."""

import random

import numpy as np
import pytest
import timm.data.auto_augment as theirs
import torch
from PIL import Image

from acutance.lab.data.rand_augment import NUMBER, OPERATIONS, RandDraws, rand_augment


@pytest.mark.parametrize(("name", "timms"), list(zip(OPERATIONS, theirs._RAND_INCREASING_TRANSFORMS, strict=True)))
@pytest.mark.parametrize("channels", [1, 3])
def test_each_operation_is_timms(name: str, timms: str, channels: int) -> None:
    """On noise, few levels and a flat image."""
    numbers = np.random.default_rng(0)
    for seed in range(8):
        pixels = numbers.integers(0, 256, (24, 30, channels), dtype=np.uint8)
        pixels = np.full_like(pixels, 77) if seed == 7 else pixels // 64 * 50 + 20 if seed % 2 else pixels
        magnitude = 0.0 if seed == 0 else float(np.float32(numbers.uniform(0, 9.9)))
        fill = (124, 116, 104)[:channels]
        settings = {"img_mean": fill if channels == 3 else fill[0], "interpolation": Image.Resampling.BICUBIC}
        operation = theirs.AugmentOp(timms, prob=1.0, magnitude=magnitude, hparams=settings)
        random.seed(seed)
        expected = np.atleast_3d(np.asarray(operation(Image.fromarray(pixels.squeeze()))))
        sign = -1.0 if random.Random(seed).random() > 0.5 else 1.0  # the one number that an operation draws
        draws = RandDraws(torch.tensor([[NUMBER[name]]]), torch.tensor([[magnitude]]), torch.tensor([[sign]]))
        ours = rand_augment(torch.from_numpy(pixels).permute(2, 0, 1)[None].float(), draws, torch.tensor(fill).float())
        difference = np.abs(ours[0].permute(1, 2, 0).numpy() - expected)
        interpolated = name.startswith(("rotate", "shear", "translate"))  # in single, not double precision
        assert (difference > 0).mean() <= 0.005 * interpolated


def test_the_configuration_is_deits() -> None:
    deits = theirs.rand_augment_transform("rand-m9-mstd0.5-inc1", {})
    assert deits.num_layers == 2
    assert {(op.prob, op.magnitude, op.magnitude_std) for op in deits.ops} == {(0.5, 9, 0.5)}
