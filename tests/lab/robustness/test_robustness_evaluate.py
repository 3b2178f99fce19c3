"""The table: its numbers against plain loops, going on after a stop, and the published files."""

import json
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from acutance.cli import app
from acutance.errors import AcutanceError, NonFiniteError, ShapeError
from acutance.lab.data import Images
from acutance.lab.robustness import FGSM, PGD, RobustnessTable, corrupt, evaluate
from acutance.lab.robustness.corruptions import AT_ONCE

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
module = sys.modules["acutance.lab.robustness.evaluate"]  # the function hides it


class Classifier(nn.Module):
    """Dropout, so that a forgotten evaluation mode shows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(3 * 64, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def _data(count: int = AT_ONCE + 20) -> Images:
    source = torch.Generator().manual_seed(3)
    images = torch.randint(0, 256, (count, 3, 8, 8), generator=source).byte()
    return Images("squares", images, torch.randint(4, (count,), generator=source), tuple("abcd"), MEAN, STD)


def _labelled_by(model: nn.Module, data: Images) -> Images:
    """The same images with the labels that the model gives most of them."""
    with torch.no_grad():
        found = model.eval()(_normalised(data.images)).argmax(-1)
    found[::5] = data.labels[::5]
    return Images(data.name, data.images, found, data.classes, data.mean, data.std)


def _normalised(images: torch.Tensor) -> torch.Tensor:
    mean, std = (torch.tensor(x)[:, None, None] for x in (MEAN, STD))
    return (images / 255 - mean) / std


def _accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    with torch.no_grad():
        return 100 * float((model.eval()(_normalised(images)).argmax(-1) == labels).double().mean())


def test_every_cell_is_the_accuracy_on_those_images():
    model = Classifier()
    data = _labelled_by(model, _data())
    model.train()
    names = ["contrast", "gaussian_noise"]
    table = evaluate(model, data, corruptions=names, severities=[1, 4], attacks=["fgsm:2"], seed=5)
    assert model.training
    assert model.layers[1].training
    assert list(table.cells) == ["clean", "contrast:1", "contrast:4", "gaussian_noise:1", "gaussian_noise:4", "fgsm:2"]
    assert table["clean"] == pytest.approx(_accuracy(model, data.images, data.labels))
    for name in names:
        for severity in (1, 4):
            expected = _accuracy(model, corrupt(data.images, name, severity, seed=5), data.labels)
            assert table[f"{name}:{severity}"] == pytest.approx(expected)
    assert table["gaussian_noise:4"] < table["gaussian_noise:1"] < table["clean"]


def test_the_attack_sees_the_model_with_its_normalisation():
    model = Classifier().eval()
    data = _labelled_by(model, _data(60))
    table = evaluate(model, data, corruptions=[], attacks=[FGSM(4)])
    weight = model.layers[2].weight.detach()
    images = data.images.float() / 255
    scores = model(_normalised(data.images)).softmax(-1) - nn.functional.one_hot(data.labels, 4)
    gradient = (scores @ weight).view_as(images) / torch.tensor(STD)[:, None, None]
    changed = (images + 4 / 255 * gradient.sign()).clamp(0, 1)
    assert table["fgsm:4"] == pytest.approx(_accuracy(model, 255 * changed, data.labels))
    assert table["fgsm:4"] < table["clean"]


def test_it_goes_on_where_it_stopped(tmp_path, monkeypatch):
    model, data, path = Classifier(), _data(40), tmp_path / "table.json"
    settings = {"corruptions": ["fog", "contrast"], "severities": [1, 2], "attacks": [PGD(2, 2)], "seed": 1}
    whole = evaluate(model, data, **settings)
    measured: list[int] = []
    real = module._accuracy

    def stopping(*arguments):
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append(1)
        return real(*arguments)

    monkeypatch.setattr(module, "_accuracy", stopping)
    with pytest.raises(KeyboardInterrupt):
        evaluate(model, data, **settings, path=path)
    assert list(RobustnessTable.load(path).cells) == ["clean", "fog:1", "fog:2"]
    monkeypatch.setattr(module, "_accuracy", lambda *arguments: measured.append(1) or real(*arguments))
    resumed = evaluate(model, data, **settings, path=path)
    assert len(measured) == len(whole.cells) == 6
    assert resumed == whole == RobustnessTable.load(path)
    assert [file.name for file in tmp_path.iterdir()] == ["table.json"]
    more = evaluate(model, data, **{**settings, "attacks": ["fgsm:1"]}, path=path)
    assert set(more.cells) == {*whole.cells, "fgsm:1"}


def test_a_table_of_something_else_is_not_gone_on_with(tmp_path):
    model, data, path = Classifier(), _data(10), tmp_path / "table.json"
    settings = {"corruptions": [], "attacks": [], "path": path}
    evaluate(model, data, **settings)
    with pytest.raises(AcutanceError, match="seed: there 0, here 1"):
        evaluate(model, data, **settings, seed=1)
    with pytest.raises(AcutanceError, match="images: there 10, here 5"):
        evaluate(model, data.subset(torch.arange(5)), **settings)
    with torch.no_grad():
        model.layers[2].bias[0] += 1
    with pytest.raises(AcutanceError, match="weights: there"):
        evaluate(model, data, **settings)
    path.write_text("{")
    with pytest.raises(AcutanceError, match="not a file of the format"):
        evaluate(model, data, **settings)


def test_what_the_numbers_depend_on_is_kept():
    context = evaluate(Classifier(), _data(10), corruptions=[], attacks=[], context={"name": "mine"}).context
    assert context["data"] == "squares"
    assert context["seed"] == 0
    assert context["versions"]["torch"] == torch.__version__
    assert context["corruptions"] == "drawn, at ImageNet-C's severities"
    assert context["name"] == "mine"


def test_models_that_cannot_be_judged_are_refused():
    class Constant(nn.Module):
        def __init__(self, scores: torch.Tensor) -> None:
            super().__init__()
            self.scores = scores

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scores.expand(len(x), -1)

    with pytest.raises(ShapeError, match=r"\(10, 3\) for 10 images of 4 classes"):
        evaluate(Constant(torch.zeros(3)), _data(10))
    with pytest.raises(NonFiniteError, match="not finite"):
        evaluate(Constant(torch.full((4,), torch.nan)), _data(10))
    with pytest.raises(AcutanceError, match="no corruption smoke"):
        evaluate(Classifier(), _data(10), corruptions=["smoke"])


def _publish(folder, data, names=("fog",), labels=None):
    folder.mkdir()
    rows = data.images.permute(0, 2, 3, 1).numpy()
    for name in names:
        np.save(folder / f"{name}.npy", np.concatenate([rows // severity for severity in range(1, 6)]))
    np.save(folder / "labels.npy", np.tile(data.labels.numpy() if labels is None else labels, 5))
    return folder


def test_published_files_are_read_severity_by_severity(tmp_path):
    model = Classifier()
    data = _labelled_by(model, _data())
    folder = _publish(tmp_path / "CIFAR-9-C", data)
    settings = {"corruptions": ["fog"], "attacks": [], "corrupted_dir": folder}
    table = evaluate(model, data, **settings)
    for severity in range(1, 6):
        assert table[f"fog:{severity}"] == pytest.approx(_accuracy(model, data.images // severity, data.labels))
    assert table.context["corruptions"] == "the files in CIFAR-9-C"
    first = data.subset(torch.arange(AT_ONCE + 3))
    part = evaluate(model, first, **settings)
    assert part["fog:3"] == pytest.approx(_accuracy(model, first.images // 3, first.labels))


def test_published_files_that_do_not_fit_are_refused(tmp_path):
    data = _data(20)
    folder = _publish(tmp_path / "c", data)
    settings = {"attacks": [], "corrupted_dir": folder}
    with pytest.raises(AcutanceError, match=r"no .*snow\.npy; expected is an unpacked CIFAR-10-C"):
        evaluate(Classifier(), data, corruptions=["snow"], **settings)
    with pytest.raises(AcutanceError, match="does not begin with the labels of squares"):
        evaluate(Classifier(), data.subset(torch.arange(19, -1, -1)), corruptions=["fog"], **settings)
    np.save(folder / "snow.npy", np.zeros((5 * 20, 3, 8, 8), np.uint8))
    with pytest.raises(AcutanceError, match=r"images of \(8, 3, 8\), squares of \(3, 8, 8\)"):
        evaluate(Classifier(), data, corruptions=["snow"], **settings)
    np.save(folder / "frost.npy", np.zeros((5 * 19, 8, 8, 3), np.uint8))
    with pytest.raises(AcutanceError, match="n at least 20"):
        evaluate(Classifier(), data, corruptions=["frost"], **settings)
    np.save(folder / "contrast.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(AcutanceError, match="damaged or no plain array"):
        evaluate(Classifier(), data, corruptions=["contrast"], **settings)
    whole = (folder / "fog.npy").read_bytes()
    (folder / "fog.npy").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(AcutanceError, match="damaged"):
        evaluate(Classifier(), data, corruptions=["fog"], **settings)


def test_a_pickle_in_place_of_an_array_is_refused_and_not_run(tmp_path):
    class Payload:
        def __reduce__(self):
            return Path.touch, (tmp_path / "run",)

    data = _data(20)
    folder = _publish(tmp_path / "c", data)
    (folder / "snow.npy").write_bytes(pickle.dumps(Payload()))
    with pytest.raises(AcutanceError, match="damaged or no plain array"):
        evaluate(Classifier(), data, corruptions=["snow"], attacks=[], corrupted_dir=folder)
    assert not (tmp_path / "run").exists()


def test_means_are_plain_and_only_of_what_is_complete():
    cells = {"clean": 90.0, "fog:1": 80.0, "fog:2": 60.0, "snow:1": 70.0, "fgsm:1": 10.0}
    table = RobustnessTable(cells)
    assert table.corruptions == ["snow", "fog"]
    assert table.severities == [1, 2]
    assert table.attacks == {"fgsm:1": 10.0}
    assert table.mean(severity=1) == 75.0
    assert table.mean(corruption="fog") == 70.0
    assert table.mean(severity=2) is table.mean(corruption="snow") is table.mean() is None
    assert RobustnessTable({**cells, "snow:2": 30.0}).mean() == 60.0
    with pytest.raises(KeyError, match="no cell 'fog:3'"):
        table["fog:3"]


def test_tables_are_saved_and_shown(tmp_path):
    table = RobustnessTable({"clean": 90.123, "fog:1": 80.0, "pgd:1:20:0.125": 5.0}, {"name": "mine", "seed": 4})
    assert RobustnessTable.load(table.save(tmp_path / "t.json")) == table
    assert json.loads((tmp_path / "t.json").read_text())["format"] == "acutance-robustness/1"
    assert table.markdown().splitlines() == [
        "**mine**",
        "",
        "| accuracy in %, by severity | 1 | mean |",
        "| --- | ---: | ---: |",
        "| clean |  | 90.12 |",
        "| pgd:1:20:0.125 |  | 5.00 |",
        "| fog | 80.00 | 80.00 |",
        "| mean of corruptions | 80.00 | 80.00 |",
        "",
        "top-1 accuracy; attacks are L∞, ε in levels of 255; seed: 4",
    ]
    assert "mean of corruptions" in str(table)
    assert RobustnessTable({"clean": 1.0}).rows() == [["accuracy in %, by severity", "all"], ["clean", "1.00"]]


def invoke(*arguments):
    return CliRunner().invoke(app, ["robustness", *map(str, arguments)])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    from acutance.lab import recipes
    from acutance.lab.train import override, train

    folder = tmp_path_factory.mktemp("runs") / "short"
    settings = ["loop.epochs=1", "task.model.depth=1", "loop.monitor_every=none", "task.model.mitigation=neutreno:0.6"]
    train(override(recipes.load("digits"), settings), folder, device="cpu")
    return folder


def test_the_command_measures_a_run_and_goes_on(run, tmp_path):
    options, page = ["--limit", 60, "--device", "cpu", "--severities", "1,5"], tmp_path / "t.md"
    done = invoke(run, "--corruptions", "fog,saturate", "--attacks", "fgsm:8", *options, "--markdown", page)
    assert done.exit_code == 0, done.output
    table = RobustnessTable.load(run / "robustness.json")
    assert list(table.cells) == ["clean", "fog:1", "fog:5", "saturate:1", "saturate:5", "fgsm:8"]
    assert table["saturate:5"] == table["clean"]  # grey has no saturation
    assert table.context["images"] == 60
    assert page.read_text() == table.markdown()
    again = invoke(run, "--corruptions", "none", "--attacks", "none", *options)
    assert again.exit_code == 0, again.output
    assert RobustnessTable.load(run / "robustness.json") == table


def test_the_commands_clean_accuracy_is_evaluates(run, tmp_path):
    from acutance.lab.evaluate.evaluate import evaluate_run

    done = invoke(run, "--corruptions", "none", "--attacks", "none", "--device", "cpu", "--json", tmp_path / "t.json")
    assert done.exit_code == 0, done.output
    expected = evaluate_run(run, device="cpu").scores["top1"]
    assert RobustnessTable.load(tmp_path / "t.json")["clean"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--severities", "1,x"], "takes numbers with commas"),
        (["--weights", "worst"], "last or best"),
        (["--corruptions", "fog,smoke"], "no corruption smoke"),
        (["--attacks", "cw"], "no attack 'cw'"),
    ],
)
def test_wrong_options_are_named(run, tmp_path, options, words):
    done = invoke(run, "--device", "cpu", "--json", tmp_path / "t.json", *options)
    assert isinstance(done.exception, AcutanceError)
    assert words in str(done.exception)
    assert not (tmp_path / "t.json").exists()


def test_a_folder_that_is_no_run_is_named(tmp_path):
    assert "is no run" in str(invoke(tmp_path).exception)
