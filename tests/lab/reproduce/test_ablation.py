"""The ablation of λ̃: both ends are results, and neither stops the sweep."""

import json

import pytest
import torch

import acutance as ac
from acutance.lab.reproduce import find
from acutance.lab.reproduce.ablation import COLUMNS
from acutance.lab.reproduce.session import Session
from acutance.lab.reproduce.target import Row, Target, Training
from acutance.lab.reproduce.trainings import LEARNT, STRENGTHS, TRAININGS

BESIDE = "top-1 beside λ̃ = 0"
COSINE = "token cosine, last layer"
ROWS = (Row("λ̃ = 0", "digits"), Row("λ̃ = 1e39", "too-much"), Row("learnt per head", "digits-neutreno-head"))
SWEEP = Target("sweep", "Ablation", "0000.00000", "ablation", ROWS, COLUMNS, "digits", "seconds")


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    monkeypatch.setitem(TRAININGS, "too-much", Training("digits", ("task.model.mitigation=neutreno:1e39",)))
    return Session(SWEEP, tmp_path, scale="tiny")


def test_a_run_that_truly_diverges_is_a_line_and_the_others_go_on(sweep):
    """λ̃ = 1e39 overflows in the first step, in real training: nothing is put in place of it."""
    result = sweep.run()
    sweep.write(result)
    assert not result.pending
    plain, diverged, learnt = result.sheets[0].lines
    assert diverged.note == "seed 0 diverged"
    assert not any(diverged.measured.values())
    assert "the loss became nan in step 1" in sweep.planned(ROWS[1], 0).divergence
    for line in (plain, learnt):
        assert not line.note
        assert all(line.measured[column].keys() == {0} for column in (*COLUMNS, BESIDE))
    body = json.loads((sweep.folder / "result.json").read_text())
    assert body["runs"] == {
        "digits-seed0": "finished",
        "too-much-seed0": "diverged",
        "digits-neutreno-head-seed0": "finished",
    }
    assert "| λ̃ = 1e39 | – | – | – | – | seed 0 diverged |" in (sweep.folder / "result.md").read_text()


def test_differences_are_to_the_first_row_at_the_same_seed_and_learnt_strengths_are_the_models(sweep):
    table, strengths = sweep.run().sheets
    plain, _, learnt = table.lines
    assert plain.measured[BESIDE] == {0: 0.0}
    assert learnt.measured[BESIDE] == {0: learnt.measured["top-1"][0] - plain.measured["top-1"][0]}
    model = ac.load(sweep.planned(ROWS[2], 0).run.model_path)
    expected = float(model.blocks[1].attn.mitigation.learnt_strength.detach().mean())
    assert [line.label for line in strengths.lines] == ["learnt per head"]
    assert strengths.lines[0].measured == {"layer 2": {0: expected}}


def test_a_trained_model_that_overflows_on_other_data_costs_a_cell(sweep):
    sweep.run()
    path = sweep.planned(ROWS[0], 0).run.model_path
    model = ac.load(path)
    with torch.no_grad():
        model.blocks[0].mlp.fc1.weight.mul_(1e20)
        model.blocks[0].mlp.fc2.weight.mul_(1e20)
    ac.save(model, path)
    result = sweep.run()
    sweep.write(result)
    plain, _, learnt = result.sheets[0].lines
    assert plain.note == "seed 0 cannot be read: its tokens hold NaN or infinity"
    assert plain.measured[COSINE] == {}
    assert learnt.measured[COSINE].keys() == {0}


@pytest.mark.parametrize(("name", "recipe"), [("neutreno-lambda", "cifar100"), ("neutreno-lambda-digits", "digits")])
def test_both_ablations_span_orders_of_magnitude_constant_and_learnt(name, recipe):
    assert max(STRENGTHS) / min(STRENGTHS) >= 1e4
    target = find(name)
    specs = [change for row in target.rows for change in TRAININGS[row.training].changes if "mitigation" in change]
    assert len(target.rows) == 1 + len(STRENGTHS) + len(LEARNT)
    assert {TRAININGS[row.training].recipe for row in target.rows} == {recipe}
    assert specs == [
        *(f"task.model.mitigation=neutreno:{strength:g}" for strength in STRENGTHS),
        *(f"task.model.mitigation=neutreno:0.6,learn={learn}" for learn in LEARNT),
    ]
