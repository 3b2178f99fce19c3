"""Every table and figure is there, what it needs exists, and it runs from its trainings to its page."""

import json
import math
from unittest.mock import Mock

import pytest
import torch

import acutance as ac
import standins
from acutance.errors import AcutanceError
from acutance.io.loading import load_model
from acutance.lab.evaluate.evaluate import read_evaluation
from acutance.lab.reproduce import TARGETS, Row, Target, Training, find, measure
from acutance.lab.reproduce.measure import COSINE
from acutance.lab.reproduce.neutreno import steered
from acutance.lab.robustness import RobustnessTable
from acutance.lab.train import Run

COUNTS = {"neutreno-table": 8, "neutreno-fig": 6, "oversmoothing-table": 3, "oversmoothing-fig": 5}
EXPECTED = {f"{name}{i}" for name, count in COUNTS.items() for i in range(1, count + 1)}
EXPECTED |= {"neutreno-robustness", "neutreno-robustness-imagenet", "oversmoothing-attacks"}
PICTURES = {"neutreno-fig4", "oversmoothing-fig4", "oversmoothing-fig5"}
SECOND_SHEETS = {"lambda", "robustness", "table3"}  # of some rows only, or with rows as columns


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Runs are shared, as a user's are: each is trained by the first target that needs it."""
    return tmp_path_factory.mktemp("reproduce")


@pytest.fixture
def no_hub(monkeypatch):
    """Pretrained models are not loaded."""
    monkeypatch.setattr("acutance.io.loading.load_model", Mock(side_effect=AcutanceError("it is not here")))


def written(session):
    result = session.run()
    session.write(result)
    return result


@pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))
def test_a_target_end_to_end(session, out, no_hub, target):
    if target.measure is None:
        assert target.notes
        return
    assert target.needs
    made = session(target, out)
    result = written(made)
    assert not result.pending
    body = json.loads((made.folder / "result.json").read_text())
    assert {"versions", "hardware", "command", "runs"} <= body.keys()
    assert "Not finished" not in (made.folder / "result.md").read_text()
    assert bool(list(made.folder.glob("*.png"))) == (target.name in PICTURES)
    for sheet in result.sheets:
        assert sheet.columns or target.name in PICTURES
        for line in sheet.lines:
            assert line.note or line.measured.keys() >= set(sheet.columns) - {"memory"}
            assert all(math.isfinite(value) for values in line.measured.values() for value in values.values())
            assert set(line.published) <= set(sheet.columns)
    if target.rows:
        whole = any(word in target.name for word in SECOND_SHEETS)
        for sheet in result.sheets[: 1 if whole else None]:
            assert [line.label for line in sheet.lines] == [row.label for row in target.rows]
            for row, line in zip(target.rows, sheet.lines, strict=True):
                assert (row.training is None) == ("is not here" in line.note)


def test_no_table_and_no_figure_is_missing_and_figures_are_the_papers(command):
    """Restated from the papers."""
    printed = command("reproduce", "--list")
    assert TARGETS.keys() >= EXPECTED
    assert all(name in printed for name in TARGETS)
    assert "93 s on an H200" in " ".join(printed.split())
    for name, words in (("neutreno-tabel1", r"did you mean neutreno-table1\?"), ("neutreno-fig2", "nothing to run")):
        with pytest.raises(AcutanceError, match=words):
            command("reproduce", name)
    rows = {row.label: row.published for row in find("neutreno-table1").rows}
    assert rows["NeuTRENO DeiT + FeatScale"] == {"top-1": 73.23, "top-5": 91.73}
    assert find("oversmoothing-table2").rows[-1].published == {"top-1": (33.99, 0.4)}
    assert find("oversmoothing-table3").rows[2].published["5"] == (40.07, 0.2)
    shares = [row.published["μ = 1 dominates"] for row in find("oversmoothing-table1").rows]
    assert shares == [100.0, 70.27, 57.82, 98.92, 100.0, 0.0]


def test_the_text_of_table_3_is_read_word_by_word(session, out):
    """The column asks for a stride of its own, and its evaluation is kept under it."""
    made = session("neutreno-table3", out)
    made.run()
    folder = made.plan[0].run.folder
    every = read_evaluation(folder, "val", settings=("task.val_stride=1",)).scores["perplexity"]
    assert written(made).sheets[0].lines[0].measured["valid perplexity"] == {0: every}
    assert read_evaluation(folder, "val") is None


def test_robustness_has_a_sheet_by_corruption_and_a_file_that_all_targets_share(session, out):
    result = session("neutreno-robustness", out).run()
    table, single = result.sheets
    assert [line.label for line in single.lines] == ["gaussian_noise", "contrast"]
    assert list(single.columns) == [row.label for row in result.target.rows]
    cells = RobustnessTable.load(out / "runs" / "cifar100-neutreno-0.6-seed0" / "robustness.json")
    assert single.lines[1].measured[table.lines[1].label] == {0: cells.mean(corruption="contrast")}
    assert table.lines[1].measured["severity 4"] == {0: cells.mean(severity=4)}
    before = (out / "runs" / "cifar100-seed0" / "robustness.json").read_bytes()
    session("oversmoothing-attacks", out).run()
    assert (out / "runs" / "cifar100-seed0" / "robustness.json").read_bytes() == before


def test_runs_carry_what_their_training_says(session, out):
    made = session("neutreno-table1", out)
    made.run()
    specs = {planned.label: ac.load(planned.run.model_path).config.mitigation for planned in made.plan}
    steered = {"neutreno": "neutreno:0.6", "adaptation": "neutreno:0.6", "featscale": "featscale"}
    steered |= {"neutreno-featscale": "neutreno:0.6+featscale"}
    assert specs == {"deit-tiny-seed0": None, **{f"deit-tiny-{name}-seed0": spec for name, spec in steered.items()}}
    adapted = Run(out / "runs" / "deit-tiny-adaptation-seed0").config()
    assert adapted.task.weights == str(out / "runs" / "deit-tiny-seed0" / "model.safetensors")


def test_one_scale_or_several(session, out, command):
    made = session("neutreno-table2", out)
    made.run()
    folder = made.plan[1].run.folder
    for option, setting, expected in (("--single-scale", "false", False), ("--multi-scale", "true", True)):
        command("evaluate", folder, "--device", "cpu", option)
        found = read_evaluation(folder, "test", settings=(f"task.multi_scale={setting}",))
        assert ("miou_ms" in found.scores) == expected


def test_seeds_have_a_mean_and_a_spread_and_changes_are_said(session, out, no_hub):
    result = session("oversmoothing-fig2", out, seeds=2, changes=("loop.log_every=7",)).run()
    line = result.sheets[0].lines[0]
    mean, spread = line.mean_and_spread("layer 1")
    first, second = line.measured["layer 1"].values()
    assert first != second
    assert (mean, spread) == pytest.approx(((first + second) / 2, abs(first - second) / math.sqrt(2)))
    page = result.to_markdown()
    assert f"{mean:.4f} ± {spread:.4f}" in page
    assert "Changed in every run that has the field: loop.log_every=7." in page


def pretrained(*models):
    rows = tuple(Row(f"model {number}", model=str(model)) for number, model in enumerate(models))
    return Target("neutreno-x", "Figure", measure.table(measure.by_layer("token_cosine")), rows)


def test_pretrained_models_are_read_on_their_own_data(session, tmp_path):
    """A model of ours stands for one of timm: named by its path, fed with the images in val/."""
    model = ac.models.ViT(image_size=16, patch_size=8, dim=12, depth=2, heads=3, num_classes=3)
    path = ac.save(model, tmp_path / "model.safetensors")
    data_dir = standins.imagenet(tmp_path / "data").parent
    result = session(pretrained(path, tmp_path / "missing"), data_dir=data_dir, samples=6).run()
    found, missing = result.sheets[0].lines
    images = load_model(str(path)).image_batches(data_dir / "imagenet" / "val", limit=6)
    expected = ac.measure(model, images, metrics=["token_cosine"], progress=False)["token_cosine"]
    assert [next(iter(values.values())) for values in found.measured.values()] == pytest.approx(expected.tolist())
    assert "no checkpoint at" in missing.note
    assert not missing.measured
    assert "name it with --data-dir" in session(pretrained(path)).run().sheets[0].lines[0].note


def test_pretrained_language_models_are_read_on_wikitext(session, tmp_path, monkeypatch):
    loaded = Mock(model=ac.models.LanguageModel(vocabulary=20, dim=6, depth=1, heads=1, hidden=8, cutoffs=()))
    loaded.text_batches.return_value = [torch.arange(12).view(2, 6)]
    monkeypatch.setattr("acutance.io.loading.load_model", lambda name, device: loaded)
    (tmp_path / "wikitext-2").mkdir()
    text = tmp_path / "wikitext-2" / "wiki.test.tokens"
    text.touch()
    result = session(pretrained("hf:some"), data_dir=tmp_path, samples=5).run()
    loaded.text_batches.assert_called_once_with(text, limit=5)
    assert list(result.sheets[0].lines[0].measured) == ["layer 0", "layer 1"]


DIGITS = Training("digits-held", "digits")
PLAIN, HEAD = Row("λ̃ = 0", DIGITS), Row("learnt per head", steered(DIGITS, "head", "0.6,learn=head"))
TOO_MUCH = Row("λ̃ = 1e39", Training("too-much", "digits", ("task.model.mitigation=neutreno:1e39",)))
SWEEP = Target("neutreno-sweep", "Ablation", measure.ablation, (PLAIN, TOO_MUCH, HEAD))


def test_a_sweep_outlives_a_run_that_truly_diverges_and_a_model_that_overflows(session):
    """λ̃ = 1e39 overflows in the first step, in real training: nothing is put in place of it."""
    sweep = session(SWEEP)
    result = written(sweep)
    assert not result.pending
    (plain, diverged, learnt), (strengths,) = (sheet.lines for sheet in result.sheets)
    assert diverged.note == "seed 0 diverged"
    assert not any(diverged.measured.values())
    assert "the loss became nan in step 1" in sweep.plan[1].divergence
    beside = "top-1 beside λ̃ = 0"
    for line in (plain, learnt):
        assert not line.note
        assert all(line.measured[column].keys() == {0} for column in ("top-1", "loss", COSINE, beside))
    assert plain.measured[beside] == {0: 0.0}
    assert learnt.measured[beside] == {0: learnt.measured["top-1"][0] - plain.measured["top-1"][0]}
    model = ac.load(sweep.plan[2].run.model_path)
    expected = float(model.blocks[1].attn.mitigation.learnt_strength.detach().mean())
    assert (strengths.label, strengths.measured) == ("learnt per head", {"layer 2": {0: expected}})
    assert json.loads((sweep.folder / "result.json").read_text())["runs"]["too-much-seed0"] == "diverged"
    assert "| λ̃ = 1e39 | – | – | – | – | seed 0 diverged |" in (sweep.folder / "result.md").read_text()

    path = sweep.plan[0].run.model_path
    model = ac.load(path)
    with torch.no_grad():
        model.blocks[0].mlp.fc1.weight.mul_(1e20)
        model.blocks[0].mlp.fc2.weight.mul_(1e20)
    ac.save(model, path)
    plain, _, learnt = written(session(SWEEP)).sheets[0].lines
    assert plain.note == "seed 0 cannot be read: its tokens hold NaN or infinity"
    assert COSINE not in plain.measured
    assert learnt.measured[COSINE].keys() == {0}
