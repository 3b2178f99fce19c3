"""Our own models on disk, published weights, and position embeddings for other image sizes."""

import json
import os
import struct
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from acutance.errors import AcutanceError, ShapeError
from acutance.io.saving import load, load_checkpoint, save
from acutance.models import resize_position_embedding
from acutance.sites.mitigate import mitigate
from models.small_models import seeded
from sites.tiny_models import left_alone

TINY = {"image_size": 8, "patch_size": 4, "dim": 12, "depth": 2, "heads": 3, "num_classes": 5}
make = partial(seeded, dtype=torch.float32)


@pytest.mark.parametrize("layout", ["plain", "deit", "memory"])
def test_published_weights_load_and_are_left_alone(tmp_path, layout):
    source, target = make(image_size=16), make(spread=0.0)
    state = source.state_dict()
    torch.save({"model": state} if layout == "deit" else state, path := tmp_path / "weights.pth")
    load_checkpoint(target, {"model": state} if layout == "memory" else path)
    assert torch.equal(source.head.weight, target.head.weight)
    assert torch.equal(target.pos_embed, resize_position_embedding(state["pos_embed"], (2, 2), 1))
    assert state["pos_embed"].shape == (1, 17, 12)


class Malicious:
    def __reduce__(self):
        return (os.mkdir, ("trap",))


def test_a_pickle_that_runs_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"model": Malicious()}, "weights.pth")
    with pytest.raises(AcutanceError, match="unpickling could run code"):
        load_checkpoint(make(), "weights.pth")
    assert [path.name for path in tmp_path.iterdir()] == ["weights.pth"]


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pth"])
@pytest.mark.parametrize("damage", ["cut short", "noise", "bent header"])
def test_damaged_files_are_named(tmp_path, name, damage):
    path, model = tmp_path / name, make()
    if name.endswith("pth"):
        torch.save(model.state_dict(), path)
    else:
        save(model, path)
    whole = path.read_bytes()
    content = {"cut short": whole[:-100], "noise": np.random.default_rng(0).bytes(len(whole))}
    path.write_bytes(content.get(damage, struct.pack("<Q", 2**40) + whole[8:]))
    for read in (lambda: load_checkpoint(model, path), lambda: load(path)):
        with left_alone(model), pytest.raises(AcutanceError, match=rf"{name} cannot be read as weights"):
            read()


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (None, r"pass it as model=.*acutance\.io\.load_checkpoint"),
        ({"acutance.config": "{"}, "cannot be read"),
        ({"acutance.config": "[1]"}, "makes no ViT: "),
        ({"acutance.config": '{"wings": 2}'}, "wings"),
        ({"acutance.config": '{"depth": 2}'}, "heads"),
        ({"acutance.config": "{}", "acutance.model": "Bird"}, "holds a Bird"),
        # No machine holds these; whoever allocates them is told so by torch, in other words.
        ({"acutance.config": json.dumps(TINY | {"dim": 3_000_000})}, r"does not fit .*of another size: blocks"),
        ({"acutance.config": json.dumps(TINY | {"image_size": 10**7})}, r"pos_embed \(1, 5, 12\) for \(1, 62500"),
        ({"acutance.config": json.dumps(TINY | {"depth": 10**9})}, "1000000000 layers for"),
        ({"acutance.config": json.dumps(TINY | {"image_size": 10**10})}, "its configuration makes no ViT"),
    ],
)
def test_files_without_a_usable_configuration_are_named(tmp_path, metadata, message):
    save_file(make().state_dict(), path := tmp_path / "weights.safetensors", metadata=metadata)
    with pytest.raises(AcutanceError, match=message):
        load(path)


def test_every_misfit_is_listed_and_nothing_is_loaded(tmp_path):
    model = make()
    state = make(spread=0.0, num_classes=9).state_dict()
    state["blocks.0.attn.rotary"] = state.pop("norm.bias")
    torch.save([torch.zeros(2)], tmp_path / "list.pth")
    misfits = r"missing: norm\.bias; unexpected: blocks\.0\.attn\.rotary; .*head\.weight \(9, 12\) for \(5, 12\)"
    for target, source, message in (
        (model, state, misfits),
        (model, {**model.state_dict(), "epoch": 3}, "epoch are no tensors"),
        (model, tmp_path / "list.pth", "holds a list"),
        (make(mitigation="featscale"), model.state_dict(), r"mitigate\(model"),
    ):
        with left_alone(target), pytest.raises(AcutanceError, match=message):
            load_checkpoint(target, source)


def test_resizing_keeps_the_prefix_and_reproduces_what_it_can():
    pos = torch.randn(1, 2 + 16, 6)
    assert resize_position_embedding(pos, (4, 4), 2) is pos
    resized = resize_position_embedding(pos, (6, 3), 2)
    assert resized.shape == (1, 2 + 18, 6)
    assert torch.equal(resized[:, :2], pos[:, :2])
    half = resize_position_embedding(pos.bfloat16(), (5, 5), 2)  # rounded once
    assert torch.equal(half, resize_position_embedding(pos.bfloat16().float(), (5, 5), 2).bfloat16())
    for shape, prefix in (((1, 18, 6), 1), ((1, 1, 6), 1), ((16, 6), 0)):
        with pytest.raises(ShapeError, match="is no square grid"):
            resize_position_embedding(torch.zeros(shape), (4, 4), prefix)


def test_resizing_keeps_rows_and_columns_apart():
    rows = torch.arange(8.0).repeat_interleave(8)[None, :, None]  # the value is the row
    upscaled = resize_position_embedding(rows, (16, 16), 0)[0, :, 0].reshape(16, 16)
    torch.testing.assert_close(upscaled, upscaled[:, :1].expand(16, 16))
    torch.testing.assert_close(upscaled[4:12, 0], torch.arange(4, 12) / 2 - 0.25)  # cubic is exact on a ramp


def test_a_plain_model_of_ours_takes_what_a_mitigated_one_carries(tmp_path):
    """A mitigation without parameters was lost without a word."""
    for spec in ("neutreno:0.6", "neutreno:0.6,learn=head"):
        model = make(mitigation=spec)
        found = load(save(model, tmp_path / "model.safetensors"), make(spread=0.0))
        assert found.config == model.config
        torch.testing.assert_close(found.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_equal_models_are_equal_files(tmp_path):
    """The library writes metadata in the order of a hash table, another one each time."""
    other = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    mitigate(other, "neutreno:0.6")
    for model in (make(mitigation="neutreno:0.6"), other):
        assert len({save(model, tmp_path / "one.safetensors").read_bytes() for _ in range(5)}) == 1
