"""A monitor on a GPU: the probe is moved there, and the device's generator is left alone."""

import pytest
import torch
from monitor_worlds import assert_same, build, data, outcome, probe, seed_everything
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import acutance as ac

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def fit(model, after_step=lambda: None):
    """Dropout draws from the device's generator; the math back-end gives the same bits each time."""
    images, labels = (x.cuda() for x in data())
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seed_everything()
    with sdpa_kernel(SDPBackend.MATH):
        for _ in range(6):
            optimiser.zero_grad()
            noisy = images + torch.randn(images.shape, device="cuda")
            F.cross_entropy(model(noisy), labels).backward()
            optimiser.step()
            after_step()
    drawn = {"device generator": torch.rand(4, device="cuda")}
    return {name: value.cpu() for name, value in (outcome(model, optimiser) | drawn).items()}


def test_training_gives_the_same_bits_with_and_without():
    expected = fit(build().cuda())
    assert_same(fit(build().cuda()), expected)
    model = build()
    monitor = ac.Monitor(model, probe(), every=2, metrics="all", autocast=torch.bfloat16)
    assert_same(fit(model.cuda(), monitor.step), expected)
    assert list(monitor.history) == [2, 4, 6]
    assert monitor.history[2].context["autocast"] == "bfloat16"
