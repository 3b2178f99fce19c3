"""The reference model on a GPU."""

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


def on_both(mitigation):
    torch.manual_seed(0)
    model = ViT(**TINY, mitigation=mitigation).double()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model, copy.deepcopy(model).cuda().float()


def gradients(model, images, dtype=None):
    model.zero_grad()
    with torch.autocast(images.device.type, dtype=dtype, enabled=dtype is not None):
        scores = model(images)
    scores.double().square().mean().backward()
    return torch.cat([p.grad.flatten().double().cpu() for p in model.parameters()])


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(None, 1e-3), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("mitigation", MITIGATIONS)
def test_gradients_equal_float64_on_the_cpu(mitigation, dtype, bound, checkpointing):
    model, on_gpu = on_both(mitigation)
    images = torch.randn(4, 3, 16, 16, dtype=torch.float64)
    expected = gradients(model, images)
    on_gpu.set_grad_checkpointing(checkpointing)
    found = gradients(on_gpu, images.cuda().float(), dtype)
    assert (found - expected).norm() < bound * expected.norm()


def test_a_compiled_model_has_the_same_gradients_in_bfloat16():
    model, on_gpu = on_both("neutreno:0.6")
    images = torch.randn(4, 3, 16, 16, dtype=torch.float64)
    expected = gradients(model, images)
    torch._dynamo.reset()
    compiled = torch.compile(on_gpu, fullgraph=True)
    found = gradients(compiled, images.cuda().float(), torch.bfloat16)
    assert (found - expected).norm() < 0.03 * expected.norm()


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
    torch._dynamo.reset()
    compiled = torch.compile(on_gpu, fullgraph=True)
    for run in (on_gpu, compiled):
        assert (gradients(run, images, torch.bfloat16) - expected).norm() < 0.03 * expected.norm()
    torch._dynamo.reset()
    on_gpu.set_grad_checkpointing()
    for run in (on_gpu, torch.compile(on_gpu, fullgraph=True)):
        assert (gradients(run, images, torch.bfloat16) - expected).norm() < 0.03 * expected.norm()


def test_parameters_patched_in_live_where_the_model_does():
    model = ViT(**TINY).cuda().bfloat16()
    mitigate(model, "neutreno:0.6,learn=head+featscale")
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("cuda", torch.bfloat16)}
    assert model(torch.randn(2, 3, 16, 16, device="cuda", dtype=torch.bfloat16)).isfinite().all()
