"""The reference model on a GPU, at the sizes that kernels are made for; tests/parity has the small ones."""

import copy

import pytest
import torch
from small_models import images, seeded

from acutance.sites.mitigate import mitigate

pytestmark = pytest.mark.cuda

LEARNT = "neutreno:0.6,learn=head+featscale"


def gradients(model, images):
    model.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=images.is_cuda):
        scores = model(images)
    scores.double().square().mean().backward()
    return torch.cat([p.grad.flatten().double().cpu() for p in model.parameters()])


@pytest.mark.parametrize("mitigation", ["neutreno:0.6", LEARNT, "attnscale"])
@pytest.mark.parametrize(("size", "patch_size"), [(32, 4), (224, 16), (96, 4)], ids=["65", "197", "577"])
def test_at_its_true_sizes_it_learns_as_in_float64(size, patch_size, mitigation):
    """Heads 64 wide, as many tokens as ViT-Ti/4, as DeiT-Ti/16, and more than fit into one tile."""
    model = seeded("vit", mitigation, 0.02, image_size=size, patch_size=patch_size, dim=192, depth=2)
    batch = images(size, size, 2)
    expected, on_gpu = gradients(model, batch), copy.deepcopy(model).cuda().float()
    for checkpointing in (False, True):
        torch._dynamo.reset()
        on_gpu.set_grad_checkpointing(checkpointing)
        for run in (on_gpu, torch.compile(on_gpu, fullgraph=True)):
            assert (gradients(run, batch.cuda().float()) - expected).norm() < 0.03 * expected.norm()


def test_parameters_patched_in_live_where_the_model_does():
    model = seeded(dtype=torch.bfloat16).cuda()
    mitigate(model, LEARNT)
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("cuda", torch.bfloat16)}
    assert model(images(dtype=torch.bfloat16).cuda()).isfinite().all()
