"""Tiny runs on real digits, and what is compared of them."""

import io

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

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
    """Two epochs with all that has a state: AdamW, a mean of the weights, dropout, a learning rate that moves."""
    config = Config(
        task=ClassificationConfig(dataset="digits", model=MODEL, fraction=0.1, **task),
        optim=OptimConfig(lr=1e-2, clip=1.0),
        schedule=ScheduleConfig(warmup=0.5),
        loop=LoopConfig(epochs=2, batch_size=16, ema=0.9, checkpoint_every=5, log_every=3, evaluate_every=1),
    )
    return override(config, changes)


def fit(config, folder, **options):
    """Train quietly in this process; gives the result and all that was printed."""
    output = io.StringIO()
    console = Console(file=output, width=200)
    result = train(config, folder, device="cpu", console=console, **options)
    return result, output.getvalue()


def bits(folder):
    """Everything the newest checkpoint holds, and the exported models."""
    tensors, _ = read_checkpoint(checkpoint_paths(folder / "checkpoints")[0])
    found = {f"{file}:{name}": value for file, part in tensors.items() for name, value in part.items()}
    for file in ("model.safetensors", "best.safetensors"):
        found |= {f"exported {file}:{name}": value for name, value in load_file(folder / file).items()}
    return found


def assert_same_bits(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


class DiedError(Exception):
    """As good as a crash: nothing runs afterwards that could save anything."""


def die_in(step, config, folder):
    """Train until death in the middle of a step, when nothing of it has reached the weights."""
    real = Loop._step

    def dying(self, now, parts):
        if now == step:
            raise DiedError
        return real(self, now, parts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "_step", dying)
        with pytest.raises(DiedError):
            fit(config, folder)
