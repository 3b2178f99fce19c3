"""Every target from its runs to its table, on stand-ins."""

import json
import math

import pytest
import torch
from typer.testing import CliRunner

import acutance as ac
from acutance.cli import app
from acutance.io.loading import load_model
from acutance.lab.evaluate.evaluate import read_evaluation
from acutance.lab.reproduce import TARGETS, Row, Target, find, standins
from acutance.lab.reproduce.session import Session, reproduce
from acutance.lab.reproduce.trainings import training
from acutance.lab.robustness import RobustnessTable
from acutance.lab.train import Run

RUNNABLE = [name for name, target in TARGETS.items() if target.measure]
PICTURES = {"maps", "spectra", "norms"}


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Runs are shared, as a user's are: each is trained by the first target that needs it."""
    return tmp_path_factory.mktemp("reproduce")


@pytest.mark.parametrize("name", RUNNABLE)
def test_a_target_end_to_end(out, name):
    target = find(name)
    result = reproduce(target, out, scale="tiny")
    assert not result.pending
    folder = out / "tiny" / name
    body = json.loads((folder / "result.json").read_text())
    assert body["scale"] == "tiny"
    assert {"versions", "hardware", "command", "runs"} <= body.keys()
    words = (folder / "result.md").read_text()
    assert "stand-ins" in words
    assert "Not finished" not in words
    if target.measure in PICTURES:
        assert list(folder.glob("*.png"))
    for sheet in result.sheets:
        for line in sheet.lines:
            assert line.note or line.measured
            for values in line.measured.values():
                assert all(math.isfinite(value) for value in values.values())
    if target.rows:
        # Further sheets are of some rows only, or have them as columns.
        for sheet in result.sheets[: 1 if target.measure in ("ablation", "robustness") else None]:
            assert [line.label for line in sheet.lines] == [row.label for row in target.rows]
    if target.measure in ("scores", "robustness"):
        cells = [line.measured[column] for line in result.sheets[0].lines for column in target.columns]
        assert all(list(cell) == [0] for cell in cells)


def test_robustness_has_a_sheet_by_corruption_and_a_file_that_all_targets_share(out):
    result = reproduce(find("neutreno-robustness"), out, scale="tiny")
    table, single = result.sheets
    assert [line.label for line in single.lines] == ["gaussian_noise", "contrast"]
    assert list(single.columns) == [row.label for row in result.target.rows]
    file = out / "tiny" / "runs" / "cifar100-neutreno-0.6-seed0" / "robustness.json"
    cells = RobustnessTable.load(file)
    assert single.lines[1].measured[table.lines[1].label] == {0: cells.mean(corruption="contrast")}
    assert table.lines[1].measured["severity 4"] == {0: cells.mean(severity=4)}
    before = (out / "tiny" / "runs" / "cifar100-seed0" / "robustness.json").read_bytes()
    reproduce(find("oversmoothing-attacks"), out, scale="tiny")
    assert (out / "tiny" / "runs" / "cifar100-seed0" / "robustness.json").read_bytes() == before


def test_runs_carry_what_their_training_says(out):
    """After the targets above: the mitigation is in the trained model, and a start from another run was one."""
    session = Session(find("neutreno-table1"), out, scale="tiny")
    session.run()
    for planned in session.plan:
        wanted = [change.partition("=")[2] for change in training(planned.name).changes if "mitigation" in change]
        spec = ac.load(planned.run.model_path).config.mitigation
        assert spec == (wanted[0] if wanted else planned.config.task.model.mitigation)
    adapted = Run(out / "tiny" / "runs" / "deit-tiny-adaptation-seed0").config()
    assert adapted.task.weights == str(out / "tiny" / "runs" / "deit-tiny-seed0" / "model.safetensors")
    assert adapted.task.model.mitigation == "neutreno:0.6"


def test_one_scale_or_several(out):
    session = Session(find("neutreno-table2"), out, scale="tiny")
    session.run()
    folder = session.plan[1].run.folder
    for option, setting, expected in (("--single-scale", "false", False), ("--multi-scale", "true", True)):
        done = CliRunner().invoke(app, ["evaluate", str(folder), "--device", "cpu", option])
        assert done.exit_code == 0, done.output
        found = read_evaluation(folder, "test", settings=(f"task.multi_scale={setting}",))
        assert ("miou_ms" in found.scores) == expected


def pretrained(*models, **target):
    rows = tuple(Row(f"model {number}", model=str(model)) for number, model in enumerate(models))
    return Target("pretrained", "Figure", "0000.00000", "layers", rows, {"cosine": "test/token_cosine@block"}, **target)


def test_pretrained_models_are_read_on_their_own_data_at_full_scale(tmp_path):
    """A model of ours stands for one of timm: named by its path, fed with the images in val/."""
    model = ac.models.ViT(image_size=16, patch_size=8, dim=12, depth=2, heads=3, num_classes=3)
    path = ac.save(model, tmp_path / "model.safetensors")
    data_dir = standins.imagenet(tmp_path / "data").parent
    options = {"data_dir": data_dir, "device": "cpu", "seeds": 1, "samples": 6}
    result = reproduce(pretrained(path, tmp_path / "missing"), tmp_path / "out", **options)
    found, missing = result.sheets[0].lines
    images = load_model(str(path)).image_batches(data_dir / "imagenet" / "val", limit=6)
    expected = ac.measure(model, images, metrics=["token_cosine"], progress=False)["token_cosine"]
    assert [next(iter(values.values())) for values in found.measured.values()] == pytest.approx(expected.tolist())
    assert "no checkpoint at" in missing.note
    assert not missing.measured
    bare = reproduce(pretrained(path), tmp_path / "out", device="cpu")
    assert "name it with --data-dir" in bare.sheets[0].lines[0].note


def test_pretrained_language_models_are_read_on_wikitext(tmp_path, monkeypatch):
    model = ac.models.LanguageModel(vocabulary=20, dim=6, depth=1, heads=1, hidden=8, cutoffs=())
    asked = []

    class Loaded:
        tokenizer = object()

        def text_batches(self, path, *, limit):
            asked.append((path, limit))
            return [torch.arange(12).view(2, 6)]

    Loaded.model = model
    monkeypatch.setattr("acutance.io.loading.load_model", lambda name, device: Loaded())
    (tmp_path / "wikitext-2").mkdir()
    text = tmp_path / "wikitext-2" / "wiki.test.tokens"
    text.touch()
    result = reproduce(pretrained("hf:some"), tmp_path / "out", data_dir=tmp_path, device="cpu", samples=5)
    assert asked == [(text, 5)]
    assert list(result.sheets[0].lines[0].measured) == ["layer 0", "layer 1"]


def test_what_was_changed_is_said(out):
    changed = reproduce(find("oversmoothing-fig4"), out, scale="tiny", changes=("optim.lr=1",))
    assert "Changed in every run that has the field: optim.lr=1." in changed.to_markdown()


def test_seeds_have_a_mean_and_a_spread(out):
    result = reproduce(find("oversmoothing-fig2"), out, scale="tiny", seeds=2)
    line = result.sheets[0].lines[0]
    mean, spread = line.mean_and_spread("layer 1")
    first, second = line.measured["layer 1"].values()
    assert first != second
    assert mean == pytest.approx((first + second) / 2)
    assert spread == pytest.approx(abs(first - second) / math.sqrt(2))
    assert f"{mean:.4f} ± {spread:.4f}" in result.to_markdown()
