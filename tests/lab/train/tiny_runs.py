"""Tiny runs on real digits, ways to interrupt them, and comparisons of their results."""

import io
from contextlib import contextmanager
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from acutance.lab.data.augment import Augment
from acutance.lab.tasks import segmentation
from acutance.lab.tasks.classification import ClassificationConfig
from acutance.lab.train import Config, LoopConfig, OptimConfig, ScheduleConfig, override, train
from acutance.lab.train.checkpointer import checkpoint_paths, read_checkpoint
from acutance.lab.train.loop import Loop
from acutance.models import ViTConfig

MODEL = ViTConfig(
    image_size=8, patch_size=2, in_chans=1, dim=8, depth=2, heads=2, num_classes=10, mlp_ratio=2.0, dropout=0.1
)
STEPS_PER_EPOCH = 8  # 129 images (a tenth of each class), in batches of 16


def tiny(*changes, **task):
    """Two epochs with everything that has a state: AdamW, a mean of the weights, dropout, a changing learning rate."""
    config = Config(
        task=ClassificationConfig(dataset="digits", model=MODEL, fraction=0.1, **task),
        optim=OptimConfig(lr=1e-2, clip=1.0),
        schedule=ScheduleConfig(warmup=0.5),
        loop=LoopConfig(epochs=2, batch_size=16, ema=0.9, checkpoint_every=5, log_every=3, evaluate_every=1),
    )
    return override(config, changes)


def fit(config, folder, *, device="cpu", **options):
    """Train quietly in this process. Returns the result and all that was printed."""
    output = io.StringIO()
    result = train(config, folder, device=device, console=Console(file=output, width=200), **options)
    return result, output.getvalue()


@contextmanager
def stepping(step, act):
    """Inside, `act()` happens before this step."""
    real = Loop._step

    def acting(self, now, parts):
        if now == step:
            act()
        return real(self, now, parts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "_step", acting)
        yield


class DiedError(Exception):
    """Simulates a crash: nothing is saved afterwards."""


def die_in(step, config, folder, **options):
    """Train until a crash at the start of a step, before it changes the weights."""
    with stepping(step, Mock(side_effect=DiedError)), pytest.raises(DiedError):
        fit(config, folder, **options)


def weights_at(folder, step):
    return read_checkpoint(folder / f"checkpoints/step-{step:09d}")[0]["model.safetensors"]


def bits(folder):
    """Everything the newest checkpoint holds, its scores, and the exported models."""
    tensors, notes = read_checkpoint(checkpoint_paths(folder / "checkpoints")[0])
    found = {f"{file}:{name}": value for file, part in tensors.items() for name, value in part.items()}
    found |= {name: torch.tensor(score, dtype=torch.float64) for name, score in notes["scores"].items()}
    for file in ("model.safetensors", "best.safetensors"):
        found |= {f"exported {file}:{name}": value for name, value in load_file(folder / file).items()}
    return found


assert_same_bits = partial(torch.testing.assert_close, rtol=0, atol=0)
# In float64 only the order of summation differs. AdamW divides by the gradient's size, so rounding grows where a
# gradient is near zero. The bound is for weights of about 0.1 to 1 after 16 steps.
assert_close = partial(torch.testing.assert_close, rtol=0, atol=1e-9)


def use_float64(patch):
    torch.set_default_dtype(torch.float64)
    call, plain, normalised = Augment.__call__, Augment.plain, segmentation.normalised
    patch.setattr(Augment, "__call__", lambda *given: tuple(x.double() for x in call(*given)))
    patch.setattr(Augment, "plain", lambda *given: plain(*given).double())
    patch.setattr(segmentation, "normalised", lambda images: normalised(images).double())


@contextmanager
def in_float64():
    with pytest.MonkeyPatch.context() as patch:
        use_float64(patch)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)
