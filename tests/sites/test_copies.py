"""Copies of patched models: each is a model of its own, with a handle of its own."""

import copy
import io
import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

import acutance as ac


def ours():
    return ac.models.vit_digits(), torch.randn(2, 1, 8, 8)


def torch_nn():
    layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), torch.randn(2, 9, 16)


def llama():
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, intermediate_size=24, vocab_size=50, return_dict=False)
    return transformers.LlamaModel(config), torch.randint(5, 45, (2, 9))


def by_torch_save(holder):
    file = io.BytesIO()
    torch.save(holder, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda held: pickle.loads(pickle.dumps(held)),
    "torch.save": by_torch_save,
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("make", [ours, torch_nn, llama])
@torch.no_grad()
def test_the_handle_of_a_copy_restores_the_copy(make, copied):
    model, x = make()
    held = SimpleNamespace(model=model.eval())

    def output(model):
        y = model(x)
        return y if isinstance(y, torch.Tensor) else y[0]

    plain = output(model)
    held.handle = ac.mitigate(model, "neutreno:0.4")
    mitigated = output(model)
    other = copied(held)
    assert torch.equal(output(other.model), mitigated)
    assert not torch.equal(mitigated, plain)
    other.handle.remove()
    assert torch.equal(output(other.model), plain)
    assert torch.equal(output(model), mitigated)


def test_a_pickled_transformers_model_works_in_another_process(tmp_path):
    model, x = llama()
    ac.mitigate(model.eval(), "neutreno:0.4")
    torch.save((model, x, model(x)[0]), tmp_path / "model.pt")
    program = "import sys, torch; m, x, y = torch.load(sys.argv[1], weights_only=False); assert torch.equal(m(x)[0], y)"
    subprocess.run([sys.executable, "-c", program, tmp_path / "model.pt"], check=True)
