"""The reference model on a GPU, at the sizes that kernels are made for; tests/parity has the small ones."""

import copy

import pytest
import torch

from acutance.models import ViT
from acutance.sites.mitigate import mitigate

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TINY = {"image_size": 16, "patch_size": 4, "dim": 48, "depth": 4, "heads": 3, "num_classes": 5}
MITIGATIONS = ["neutreno:0.6", "neutreno:0.6,learn=head+featscale", "attnscale"]


def gradients(model, images):
    model.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=images.is_cuda):
        scores = model(images)
    scores.double().square().mean().backward()
    return torch.cat([p.grad.flatten().double().cpu() for p in model.parameters()])


@pytest.mark.parametrize("mitigation", MITIGATIONS)
@pytest.mark.parametrize(("image_size", "patch_size"), [(32, 4), (224, 16), (96, 4)], ids=["65", "197", "577"])
def test_at_its_true_sizes_it_learns_as_in_float64(image_size, patch_size, mitigation):
    """Heads 64 wide, as many tokens as ViT-Ti/4, as DeiT-Ti/16, and more than fit into one tile."""
    torch.manual_seed(0)
    sizes = {"image_size": image_size, "patch_size": patch_size, "dim": 192, "depth": 2, "heads": 3, "num_classes": 5}
    model = ViT(**sizes, mitigation=mitigation).double()
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    images = torch.randn(2, 3, image_size, image_size, dtype=torch.float64)
    expected, on_gpu = gradients(model, images), copy.deepcopy(model).cuda().float()
    images = images.cuda().float()
    for checkpointing in (False, True):
        torch._dynamo.reset()
        on_gpu.set_grad_checkpointing(checkpointing)
        for run in (on_gpu, torch.compile(on_gpu, fullgraph=True)):
            assert (gradients(run, images) - expected).norm() < 0.03 * expected.norm()


def test_parameters_patched_in_live_where_the_model_does():
    model = ViT(**TINY).cuda().bfloat16()
    mitigate(model, "neutreno:0.6,learn=head+featscale")
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("cuda", torch.bfloat16)}
    assert model(torch.randn(2, 3, 16, 16, device="cuda", dtype=torch.bfloat16)).isfinite().all()
