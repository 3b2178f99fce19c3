"""Projections with an adapter such as LoRA's around them are read as what they do, or refused."""

import copy

import hf_zoo
import numpy as np
import pytest
import torch
from tiny_models import images, vit
from torch import nn

import acutance as ac
from acutance import sites
from acutance.errors import AcutanceError, NoSitesError
from acutance.lab.studies import kernel_assumptions
from acutance.mitigations.projection import Projection

PROJECTIONS = ("proj", "c_attn", "query", "key", "value", "qkv", "attention.output.dense")


class Lora(nn.Module):
    """W + BA, with dropout in training, as users write it."""

    def __init__(self, base, rank=2):
        super().__init__()
        columns, rows = base.weight.shape[::-1] if isinstance(base, nn.Linear) else base.weight.shape
        self.base_layer = base
        options = {"bias": False, "dtype": base.weight.dtype}
        self.lora_A, self.lora_B = nn.Linear(columns, rank, **options), nn.Linear(rank, rows, **options)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(self.dropout(x)))

    def merged(self):
        """The same as a layer of the kind that is inside."""
        layer, added = copy.deepcopy(self.base_layer), self.lora_B.weight @ self.lora_A.weight
        layer.weight.data += added if isinstance(layer, nn.Linear) else added.T
        return layer


class PeftLike(Lora):
    """With the attributes that peft's layers have: those of the layer inside."""

    weight = property(lambda self: self.base_layer.weight)
    bias = property(lambda self: self.base_layer.bias)
    in_features = property(lambda self: self.lora_A.in_features)
    out_features = property(lambda self: self.lora_B.out_features)


class Gated(Lora):
    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x).relu())


def adapted(model, kind, names=PROJECTIONS):
    """The model with adapters, and the same with them merged."""
    torch.manual_seed(1)
    kinds = (nn.Linear, hf_zoo.library().pytorch_utils.Conv1D)
    found = [path for path, m in model.named_modules() if path.endswith(names) and isinstance(m, kinds)]
    assert found
    for path in found:
        model.set_submodule(path, kind(model.get_submodule(path)))
    merged = copy.deepcopy(model)
    for path in found:
        merged.set_submodule(path, merged.get_submodule(path).merged())
    return model, merged


def spectrum_of(layer):
    return np.sort(np.abs(layer.heads))


@pytest.mark.parametrize(("name", "kind"), [("own", Lora), ("gpt2", Lora), ("bert", Lora), ("vit", PeftLike)])
def test_adapters_count(name, kind):
    def build():
        return vit() if name == "own" else hf_zoo.build(name)

    batch = images() if name == "own" else hf_zoo.batch(name, padded=False)
    model, merged = adapted(build(), kind)
    ours, theirs, plain = (ac.explain(one, [batch], progress=False).layers for one in (model, merged, build()))
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(spectrum_of(one), spectrum_of(other), rtol=1e-6, atol=1e-9)
    assert not np.allclose(spectrum_of(ours[0]), spectrum_of(plain[0]))
    ours, theirs = (kernel_assumptions(one, [batch]).weights_asymmetry for one in (model, merged))
    np.testing.assert_allclose(ours, theirs, atol=1e-6)
    read = {"metrics": ["token_cosine", "nonlocal_energy"], "tap": "attention", "progress": False}
    ours, theirs = (ac.measure(one, [batch], **read) for one in (model, merged))
    assert [r.mean for r in ours.readings] == pytest.approx([r.mean for r in theirs.readings], rel=1e-5)
    assert [site.shape() for site in sites.find(model)] == [site.shape() for site in sites.find(merged)]


def test_the_matrix_is_that_of_evaluation_and_training_is_left_on():
    layer = Lora(nn.Linear(6, 4).double()).train()
    torch.testing.assert_close(Projection(layer).matrix(), layer.merged().weight, rtol=0, atol=1e-12)
    assert Projection(layer).shape() == (4, 6)
    assert all(module.training for module in layer.modules())


def test_a_method_replaced_in_place_is_noticed():
    layer, added = nn.Linear(6, 4).double(), torch.randn(4, 6, dtype=torch.float64)
    plain = layer.forward
    layer.forward = lambda x: plain(x) + x @ added.T
    torch.testing.assert_close(Projection(layer).matrix(), layer.weight + added, rtol=0, atol=1e-12)


def test_what_has_no_matrix_is_refused():
    model, _ = adapted(hf_zoo.build("llama"), Gated, ("v_proj",))
    with pytest.raises(AcutanceError, match=r"is a Gated, and what it does to tokens is not linear.*merge"):
        ac.explain(model, progress=False)
    for module, match in (
        (nn.ReLU(), "no linear layer is inside it"),
        (nn.Sequential(nn.Linear(6, 4), nn.Linear(6, 4)), "does not take tokens of shape"),
    ):
        with pytest.raises(NoSitesError, match=match):
            Projection(module).matrix()
