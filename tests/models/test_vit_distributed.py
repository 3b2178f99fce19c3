"""Data-parallel training in two processes."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from acutance.models import ViT
from together import in_two_processes


def build():
    torch.manual_seed(0)
    sizes = {"image_size": 8, "patch_size": 4, "dim": 12, "depth": 3, "heads": 3, "num_classes": 5}
    return ViT(**sizes, mitigation="neutreno:0.6,learn=head").double()


def batch():
    return torch.randn(4, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def two_steps(model, images):
    """Gradients of a second step: an unused parameter in the first makes the second fail under DDP."""
    for _ in range(2):
        model.zero_grad()
        model(images).square().mean().backward()
    return {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}


def worker(rank, folder):
    gradients = two_steps(DistributedDataParallel(build()), batch()[2 * rank : 2 * rank + 2])
    torch.save(gradients, f"{folder}/{rank}.pt")


@pytest.mark.slow
def test_learnt_strength_trains_in_two_processes_as_in_one(tmp_path):
    in_two_processes(worker, tmp_path)
    expected = two_steps(build(), batch())
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-14, msg=lambda m, n=name: f"{n}: {m}")
