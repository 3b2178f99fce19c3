"""mitigate: into a model and out of it again."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrize

from acutance.errors import AcutanceError, AcutanceWarning
from acutance.mitigations import FeatScale, Mitigation, NeuTRENO
from acutance.models import ViT
from acutance.sites.mitigate import mitigate

TINY = {"image_size": 8, "patch_size": 4, "dim": 12, "depth": 3, "heads": 3, "num_classes": 5}
ALL = ["neutreno:0.6", "attnscale", "neutreno:0.6,learn=head,start=0.3+featscale"]


def make(**options):
    torch.manual_seed(0)
    return ViT(**TINY, **options).eval()


def images(dtype=torch.float32):
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)).to(dtype)


def shake_mitigation(model):
    for name, parameter in model.named_parameters():
        if ".mitigation." in name:
            parameter.data += 0.5


@pytest.mark.parametrize("spec", ALL)
def test_removing_restores_outputs_and_keys_exactly(spec):
    model = make()
    keys, output = list(model.state_dict()), model(images())
    handle = mitigate(model, spec)
    shake_mitigation(model)
    assert not torch.equal(model(images()), output)
    handle.remove()
    assert torch.equal(model(images()), output)
    assert list(model.state_dict()) == keys
    handle.remove()  # a second time is harmless
    assert torch.equal(model(images()), output)


@pytest.mark.parametrize("spec", ["neutreno:0.6,learn=head", "featscale:doubled=true", "attnscale"])
def test_learnt_mitigations_change_nothing_at_step_zero(spec):
    model = make()
    output = model(images())
    with mitigate(model, spec):
        assert torch.equal(model(images()), output)
        model(images()).square().sum().backward()
        added = [p.grad for n, p in model.named_parameters() if ".mitigation." in n]
        assert added
        assert all(gradient.any() for gradient in added)  # but they can learn


def test_only_the_layers_asked_for():
    patched = make()
    handle = mitigate(patched, "neutreno:0.6", layers=[3, 2, 3])
    assert handle.layers == (2, 3)
    built = make(mitigation="neutreno:0.6")(images())
    assert torch.equal(patched(images()), built)  # the first layer has no term anyway
    handle.remove()
    mitigate(patched, "neutreno:0.6", layers=[3])
    assert not torch.equal(patched(images()), built)
    assert torch.equal(patched(images()), make(mitigation="neutreno:0.6", mitigation_layers=[3])(images()))


def test_the_handle_is_a_context_manager_and_prints_itself():
    model = make()
    output = model(images())
    with mitigate(model, NeuTRENO(0.6) + FeatScale()) as handle:
        assert repr(handle) == "<neutreno:0.6+featscale in layers 1, 2, 3, active>"
        assert model.config.mitigation == "neutreno:0.6+featscale"
    assert repr(handle).endswith("removed>")
    assert model.config.mitigation is None
    with pytest.raises(RuntimeError, match="inside"), mitigate(model, "neutreno:0.6"):
        raise RuntimeError("inside")
    assert torch.equal(model(images()), output)


def test_parameters_follow_the_models_dtype_device_and_mode():
    model = make().double()
    mitigate(model, "neutreno:0.6,learn=head+featscale")
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert not any(m.training for m in model.modules())
    with torch.device("meta"):
        shapes_only = ViT(**TINY)
    mitigate(shapes_only, "featscale")
    assert {p.device.type for p in shapes_only.parameters()} == {"meta"}


def test_a_second_mitigation_is_refused():
    model = make()
    handle = mitigate(model, "neutreno:0.6", layers=[3])
    output = model(images())
    with pytest.raises(AcutanceError, match=r"mitigated with 'neutreno:0\.6' already: call remove\(\)"):
        mitigate(model, "featscale", layers=[1])
    assert torch.equal(model(images()), output)
    handle.remove()
    mitigate(model, "featscale")
    with pytest.raises(AcutanceError, match="constructed with 'featscale' already: build the model without it"):
        mitigate(make(mitigation="featscale"), "neutreno:0.6")


def test_models_already_wrapped_for_parallel_training_are_refused(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        with pytest.raises(AcutanceError, match="mitigate, then wrap"):
            mitigate(nn.parallel.DistributedDataParallel(make()), "featscale")
        with pytest.raises(AcutanceError, match="mitigate, then fully_shard"):
            mitigate(fully_shard(make()), "featscale")
    finally:
        torch.distributed.destroy_process_group()


class FailsInTheLastLayer(Mitigation):
    def build(self, shape):
        if shape.layer == 3:
            raise RuntimeError("no")


def test_a_failure_half_way_leaves_the_model_as_it_was():
    model = make()
    with pytest.raises(RuntimeError, match="no"):
        mitigate(model, FailsInTheLastLayer())
    assert model.config.mitigation is None


class Negated(nn.Module):
    def forward(self, weight):
        return -weight


class NegatedProjection(Mitigation):
    """A mitigation of the weights."""

    def parametrise(self, value, output):
        parametrize.register_parametrization(output.module, "weight", Negated())

    def unparametrise(self, value, output):
        parametrize.remove_parametrizations(output.module, "weight", leave_parametrized=False)


@pytest.mark.parametrize("mitigation", [NegatedProjection(), NegatedProjection() + NeuTRENO(0.0)])
def test_mitigations_of_the_weights_come_and_go(mitigation):
    model, negated = make(), make()
    keys, output = set(model.state_dict()), model(images())
    for block in negated.blocks:
        block.attn.proj.weight.data.neg_()
    with mitigate(model, mitigation):
        assert torch.equal(model(images()), negated(images()))
    assert torch.equal(model(images()), output)
    assert set(model.state_dict()) == keys


@pytest.mark.parametrize("how", ["wrapped", "in place", "a block"])
def test_a_compiled_model_is_refused(how):
    model = make()
    if how == "wrapped":
        model = torch.compile(model, backend="eager")
    elif how == "in place":
        model.compile(backend="eager")
    else:
        model.blocks[1].compile(backend="eager")
    with pytest.raises(AcutanceError, match=r"mitigate, then torch\.compile"):
        mitigate(model, "neutreno:0.6")


def test_neutreno_in_the_first_layer_alone_is_warned_of(recwarn):
    model = make()
    before = model(images())
    for spec in ("neutreno:0.6", "neutreno:0.6+attnscale"):
        with pytest.warns(AcutanceWarning, match=r"in layer 1 alone.*changes nothing"):
            handle = mitigate(model, spec, layers=[1])
        assert torch.equal(model(images()), before)
        handle.remove()
    recwarn.clear()
    for spec, layers in (("neutreno:0.6", None), ("neutreno:0.6", [1, 2]), ("attnscale", [1])):
        mitigate(model, spec, layers=layers).remove()
    assert not recwarn.list
