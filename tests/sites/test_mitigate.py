from functools import partial

import hf_zoo
import pytest
import torch
from hf_zoo import build
from tiny_models import encoder, images, left_alone, mitigated, tokens, vit
from torch import nn
from torch.distributed.fsdp import fully_shard

from acutance.errors import AcutanceError
from acutance.mitigations import FeatScale, Mitigation, NeuTRENO
from acutance.sites import mitigation_spec
from acutance.sites.mitigate import mitigate

LEARNT = "attnscale+neutreno:0.6,learn=head,start=0.3"
REMOVED = [
    *(("vit", spec) for spec in ("neutreno:0.6", "attnscale", f"{LEARNT}+featscale", "neutreno:0.4+eigen:negative")),
    *(("torch.nn", spec) for spec in (LEARNT, "neutreno:0.4+eigen:negative")),
    *((name, LEARNT) for name in ("bert", "gpt2", "llama", "t5_decoder", "gemma2")),
    *((name, "neutreno:0.4+eigen:negative") for name in ("bert", "gpt2", "gpt_neox")),
]


@pytest.mark.parametrize(("name", "spec"), REMOVED)
def test_removing_leaves_no_trace(name, spec):
    own = {"vit": (vit, images), "torch.nn": (partial(encoder, nested=True), tokens)}
    make, batch = own.get(name, (partial(build, name), partial(hf_zoo.batch, name)))
    model, batch = make(), batch()
    part = model if name in own else hf_zoo.part_of(name, model)

    def run():
        return model(batch) if name in own else hf_zoo.output(model, batch)

    with left_alone(model, run) as before:
        handle = mitigated(part, spec)
        assert not torch.equal(run(), before)
        for _ in range(2):  # a second time is harmless
            with torch.no_grad():  # in which torch would leave a buffer where a weight was made
                handle.remove()


@pytest.mark.parametrize("spec", ["neutreno:0.6,learn=head", "featscale", "featscale:doubled=true", "attnscale"])
def test_learnt_mitigations_change_nothing_at_step_zero(spec):
    model = vit()
    output = model(images())
    with mitigate(model, spec):
        assert torch.equal(model(images()), output)
        model(images()).square().sum().backward()
        added = [p.grad for n, p in model.named_parameters() if ".mitigation." in n]
        assert added
        assert all(gradient.any() for gradient in added)  # but they can learn


def test_only_the_layers_asked_for():
    patched = vit()
    handle = mitigate(patched, "neutreno:0.6", layers=[3, 2, 3])
    assert handle.layers == (2, 3)
    built = vit(mitigation="neutreno:0.6")(images())
    assert torch.equal(patched(images()), built)  # the first layer has no term anyway
    assert mitigate(vit(), "neutreno:0.6").layers == mitigate(vit(), "value_residual").layers == (2, 3)
    assert mitigate(vit(), "neutreno:0.6+featscale", layers=[1, 2]).layers == (1, 2)
    handle.remove()
    mitigate(patched, "neutreno:0.6", layers=[3])
    assert not torch.equal(patched(images()), built)
    assert torch.equal(patched(images()), vit(mitigation="neutreno:0.6", mitigation_layers=[3])(images()))


def test_the_handle_is_a_context_manager_and_prints_itself():
    model = vit()
    output = model(images())
    with mitigate(model, NeuTRENO(0.6) + FeatScale()) as handle:
        assert repr(handle) == "<neutreno:0.6+featscale in layers 1, 2, 3, active>"
        assert model.config.mitigation == mitigation_spec(model) == "neutreno:0.6+featscale"
    assert repr(handle).endswith("removed>")
    assert model.config.mitigation is mitigation_spec(model) is None
    with pytest.raises(RuntimeError, match="inside"), mitigate(model, "neutreno:0.6"):
        raise RuntimeError("inside")
    assert torch.equal(model(images()), output)


def test_parameters_follow_the_models_dtype_device_and_mode():
    model = vit()
    mitigate(model, "neutreno:0.6,learn=head+featscale")
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert not any(m.training for m in model.modules())
    shapes_only = vit().to("meta")
    mitigate(shapes_only, "featscale")
    assert {p.device.type for p in shapes_only.parameters()} == {"meta"}


def test_a_second_mitigation_is_refused():
    model = vit()
    handle = mitigate(model, "neutreno:0.6", layers=[3])
    output = model(images())
    with pytest.raises(AcutanceError, match=r"mitigated with 'neutreno:0\.6' already: call remove\(\)"):
        mitigate(model, "featscale", layers=[1])
    assert torch.equal(model(images()), output)
    handle.remove()
    mitigate(model, "featscale")
    with pytest.raises(AcutanceError, match="constructed with 'featscale' already: build the model without it"):
        mitigate(vit(mitigation="featscale"), "neutreno:0.6")


def test_models_already_wrapped_for_parallel_training_are_refused(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        with pytest.raises(AcutanceError, match="mitigate, then wrap"):
            mitigate(nn.parallel.DistributedDataParallel(vit()), "featscale")
        with pytest.raises(AcutanceError, match="mitigate, then fully_shard"):
            mitigate(fully_shard(vit()), "featscale")
    finally:
        torch.distributed.destroy_process_group()


class FailsInTheLastLayer(Mitigation):
    def build(self, shape):
        if shape.layer == 3:
            raise RuntimeError("no")


def test_a_failure_half_way_leaves_the_model_as_it_was():
    model = vit()
    with left_alone(model), pytest.raises(RuntimeError, match="no"):
        mitigate(model, FailsInTheLastLayer())


@pytest.mark.parametrize("how", ["wrapped", "in place", "a block"])
def test_a_compiled_model_is_refused(how):
    model = vit()
    if how == "wrapped":
        model = torch.compile(model, backend="eager")
    else:
        (model if how == "in place" else model.blocks[1]).compile(backend="eager")
    with pytest.raises(AcutanceError, match=r"mitigate, then torch\.compile"):
        mitigate(model, "neutreno:0.6")
