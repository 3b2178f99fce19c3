"""Deep random networks: what the study measures, keeps and writes; and the commands."""

import json

import pandas as pd
import pytest
import torch

from acutance import metrics, sites
from acutance.errors import AcutanceError
from acutance.explain import explain
from acutance.lab.data import digits
from acutance.lab.studies import DepthConfig, depth_study
from acutance.lab.studies import depth as room
from acutance.lab.studies.depth import VARIANTS, random_network

TOY = DepthConfig(depths=(1, 3), dim=12, samples=4)


def test_the_command_writes_what_a_direct_computation_gives(tmp_path, command):
    words = ["lab", "depth", "--depths", "1,3", "--seeds", "2", "--dim", "12", "--out", str(tmp_path)]
    command(*words)
    table = pd.read_csv(tmp_path / "depth.csv")
    assert set(table["variant"]) == set(VARIANTS)
    assert len(table) == 2 * len(VARIANTS) * 2 * 4  # inits, variants, seeds, layers 0 to 3
    config = DepthConfig(depths=(1, 3), dim=12)
    model = random_network(config, "Post-LN", "xavier", seed=1).eval()
    streams = []
    model.blocks[2].register_forward_hook(lambda *args: streams.append(args[-1][0]))
    _, test = digits()
    with torch.no_grad():
        model(test.images[:: len(test) // 32][:32])
    both = table.query("variant == 'Post-LN' and init == 'xavier' and layer == 3").set_index("seed")
    for name in room.METRICS:
        expected = metrics.TOKEN_METRICS[name](streams[0], None).double().mean().item()
        assert both.loc[1, name] == pytest.approx(expected, rel=1e-4)
    body = json.loads((tmp_path / "depth.json").read_text())
    assert body["seeds"] == [0, 1]
    assert body["command"] == ["acutance", *words]
    row = next(r for r in body["summary"] if (r["init"], r["variant"], r["depth"]) == ("xavier", "Post-LN", 3))
    assert row["token_cosine"]["mean"] == pytest.approx(both["token_cosine"].mean(), rel=1e-4)
    assert row["token_cosine"]["spread"] == pytest.approx(both["token_cosine"].std(), rel=1e-2)
    assert {path.suffix for path in tmp_path.glob("depth.*")} == {".csv", ".json", ".png", ".svg"}


def test_finished_networks_are_reused_and_others_are_not(tmp_path, monkeypatch):
    first = depth_study(TOY, seeds=1, folder=tmp_path)
    monkeypatch.setattr(room, "random_network", lambda *_: pytest.fail("built again"))
    assert depth_study(TOY, seeds=1, folder=tmp_path).summary() == first.summary()
    with pytest.raises(pytest.fail.Exception):
        depth_study(DepthConfig(depths=(1, 2), dim=12, samples=4), seeds=1, folder=tmp_path)
    next((tmp_path / "profiles").iterdir()).write_text("{")  # damaged
    with pytest.raises(pytest.fail.Exception):
        depth_study(TOY, seeds=1, folder=tmp_path)


def test_variants_share_their_first_weights():
    plain, neutreno, minus = (random_network(TOY, name, "xavier", 0) for name in ("Pre-LN (plain)", "NeuTRENO", "ViT⁻"))
    assert torch.equal(plain.blocks[1].attn.qkv.weight, neutreno.blocks[1].attn.qkv.weight)
    assert torch.equal(plain.blocks[1].mlp.fc1.weight, minus.blocks[1].mlp.fc1.weight)
    for layer in (1, 3):
        assert (explain(minus)[layer].eigenvalues.real < 0).all()
        found = [sites.find(model)[layer - 1] for model in (plain, minus)]
        before, after = (torch.linalg.matrix_norm(site.projection_weight() @ site.value_weight()) for site in found)
        assert before.item() == pytest.approx(after.item(), rel=1e-3)


def test_wrong_options_are_named(command):
    for make, words in (
        (lambda: command("lab", "depth", "--depths", "12,many"), "--depths takes numbers"),
        (lambda: DepthConfig(depths=(0,)), "depths"),
        (lambda: DepthConfig(inits=("he",)), "unknown init he"),
        (lambda: depth_study(TOY, seeds=0), "at least one seed"),
    ):
        with pytest.raises(AcutanceError, match=words):
            make()
