"""Copies of patched models: each is a model of its own, with a handle of its own."""

import copy
import io
import pickle
import subprocess
import sys
from types import SimpleNamespace

import hf_zoo
import pytest
import torch
from tiny_models import encoder, ids, images, tokens, vit

import acutance as ac
from acutance.sites import tokens_out

MODELS = {"vit": (vit, images()), "torch.nn": (encoder, tokens()), "llama": (lambda: hf_zoo.build("llama"), ids())}


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
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_the_handle_of_a_copy_restores_the_copy(name, copied):
    make, x = MODELS[name]
    held = SimpleNamespace(model=make().eval())
    plain = tokens_out(held.model(x))
    held.handle = ac.mitigate(held.model, "neutreno:0.4")
    mitigated, other = tokens_out(held.model(x)), copied(held)
    assert torch.equal(tokens_out(other.model(x)), mitigated)
    assert not torch.equal(mitigated, plain)
    other.handle.remove()
    assert torch.equal(tokens_out(other.model(x)), plain)
    assert torch.equal(tokens_out(held.model(x)), mitigated)


def test_a_pickled_transformers_model_works_in_another_process(tmp_path):
    model = hf_zoo.build("llama")
    ac.mitigate(model, "neutreno:0.4")
    torch.save((model, ids(), model(ids())[0]), tmp_path / "model.pt")
    program = "import sys, torch; m, x, y = torch.load(sys.argv[1], weights_only=False); assert torch.equal(m(x)[0], y)"
    subprocess.run([sys.executable, "-c", program, tmp_path / "model.pt"], check=True)
