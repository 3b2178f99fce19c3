"""Every remedy on a GPU: in float32 as on the CPU in float64, gradients too, and in bfloat16 near enough."""

import pytest
import torch

from mitigations.test_family import CASES, REFUSED, batch, mitigated, run
from sites.hf_zoo import in_float64
from sites.tiny_models import with_gradients

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def off(found, wanted):
    return ((found.double().cpu() - wanted).norm() / wanted.norm().clamp_min(1e-9)).item()


@pytest.mark.parametrize("spec", CASES)
@pytest.mark.parametrize("name", ["vit", "llama"])
def test_a_remedy_on_a_gpu(name, spec, monkeypatch):
    if spec.partition(":")[0] in REFUSED.get(name, ()):
        pytest.skip("refused here")
    with in_float64():
        model = mitigated(name, spec)
        wanted = with_gradients(run(name, model), model.named_parameters())
    on_gpu = {key: x.float().cuda() if x.is_floating_point() else x.cuda() for key, x in batch(name).items()}
    monkeypatch.setattr("mitigations.test_family.batch", lambda _: on_gpu)
    model = model.float().cuda()
    found = with_gradients(run(name, model), model.named_parameters())
    largest = max(value.norm() for path, value in wanted.items() if path != "output")
    for path, right in wanted.items():
        if right.norm() > 1e-3 * largest:
            assert off(found[path], right) < 1e-3, path
    with torch.autocast("cuda", torch.bfloat16):
        half = run(name, model)
    assert off(half, wanted["output"]) < 0.1
