"""A small training run whose outcome depends on everything that a monitor could disturb."""

import random
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from acutance.models import ViT

CLASSES = 5


class Net(nn.Module):
    """A ViT with dropout and stochastic depth after a batch norm with running statistics; with labels, also a loss."""

    def __init__(self, depth=2):
        super().__init__()
        self.bn = nn.BatchNorm2d(1)
        sizes = {"image_size": 8, "patch_size": 4, "in_chans": 1, "dim": 12, "heads": 3, "num_classes": CLASSES}
        self.vit = ViT(depth=depth, **sizes, dropout=0.2, drop_path=0.2)

    def forward(self, images, labels=None):
        logits = self.vit(self.bn(images))
        return logits if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


def build(seed=0, depth=2):
    torch.manual_seed(seed)
    return Net(depth)


def probe(samples=4):
    return torch.randn(samples, 1, 8, 8, generator=torch.Generator().manual_seed(7))


def data(samples=16):
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(samples, 1, 8, 8, generator=generator)
    return images, torch.randint(CLASSES, (samples,), generator=generator)


def draws(device="cpu", seed=None):
    """Numbers from every global generator, after seeding if asked. They are equal only if nothing else drew."""
    if seed is not None:
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        torch.manual_seed(seed)
    return [random.random(), float(np.random.rand()), float(torch.rand(())), float(torch.rand((), device=device))]  # noqa: NPY002


def train(model, steps=6, after_step=lambda _: None, amid=lambda: None, autocast=False, run=None, rank=None):
    """A plain loop, two batches a step, with augmentation from all generators; returns the outcome."""
    run, device = model if run is None else run, next(model.parameters()).device
    images, labels = (x.to(device) if rank is None else x[8 * rank :][:8] for x in data())
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    draws(seed=rank or 3)
    model.train()
    for step in range(1, steps + 1):
        optimiser.zero_grad()
        for is_last in (False, True):
            waits = getattr(run, "no_sync", nullcontext) if not is_last else nullcontext
            with waits(), torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                amid()
                gain = 1 + random.random() + np.random.rand()  # noqa: NPY002
                F.cross_entropy(run(gain * images + torch.randn(images.shape, device=device)), labels).backward()
        amid()
        optimiser.step()
        after_step(step)
    return outcome(model, optimiser)


def outcome(model, optimiser):
    """Everything a training leaves behind, by name."""
    found = {f"state {k}": v for k, v in model.state_dict().items()}
    found |= {f"gradient {k}": p.grad for k, p in model.named_parameters() if p.grad is not None}
    for index, slots in optimiser.state_dict()["state"].items():
        found |= {f"optimiser {index} {name}": torch.as_tensor(value) for name, value in slots.items()}
    found |= {f"mode {k}": torch.tensor(m.training) for k, m in model.named_modules()}
    drawn = draws(next(model.parameters()).device)
    found |= {f"generator {i}": torch.tensor(x, dtype=torch.float64) for i, x in enumerate(drawn)}
    return {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in found.items()}


assert_same = partial(torch.testing.assert_close, rtol=0, atol=0)  # bitwise, every name
