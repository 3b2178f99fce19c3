"""The table: its numbers against plain loops, going on after a stop, the published files, and the command."""

import json
import pickle
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

import standins
from acutance.errors import AcutanceError, NonFiniteError, ShapeError
from acutance.lab import recipes
from acutance.lab.data import Images, load_images
from acutance.lab.data.augment import normalise
from acutance.lab.data.imagenet import IMAGENET_MEAN, ImageFolder, centre_crop
from acutance.lab.evaluate.evaluate import evaluate_run
from acutance.lab.robustness import FGSM, PGD, RobustnessTable, corrupt, draw_once, evaluate, images_of
from acutance.lab.robustness.corruptions import AT_ONCE
from acutance.lab.train import Run, override

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
normalised = partial(normalise, mean=torch.tensor(MEAN), std=torch.tensor(STD))
module = sys.modules["acutance.lab.robustness.evaluate"]  # the function hides it


def classifier():
    """Dropout, so that a forgotten evaluation mode shows."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(3 * 64, 4))


def data(count=AT_ONCE + 20, model=None):
    """Images labelled at random, or most of them as a model would."""
    source = torch.Generator().manual_seed(3)
    images = torch.randint(0, 256, (count, 3, 8, 8), generator=source).byte()
    labels = torch.randint(4, (count,), generator=source)
    if model is not None:
        with torch.no_grad():
            found = model.eval()(normalised(images)).argmax(-1)
        labels = torch.where(torch.arange(count) % 5 == 0, labels, found)
    return Images("squares", images, labels, tuple("abcd"), MEAN, STD)


def accuracy(model, images, labels):
    with torch.no_grad():
        return pytest.approx(100 * float((model.eval()(normalised(images)).argmax(-1) == labels).double().mean()))


def test_every_cell_is_the_accuracy_on_those_images():
    model, names = classifier(), ["contrast", "gaussian_noise"]
    images = data(model=model)
    model.train()
    settings = {"corruptions": names, "severities": [1, 4], "attacks": ["fgsm:2"], "seed": 5}
    table = evaluate(model, images, **settings, context={"name": "mine"})
    assert model[1].training
    assert list(table.cells) == ["clean", "contrast:1", "contrast:4", "gaussian_noise:1", "gaussian_noise:4", "fgsm:2"]
    assert table["clean"] == accuracy(model, images.images, images.labels)
    for name in names:
        for severity in (1, 4):
            changed = corrupt(images.images, name, severity, seed=5)
            assert table[f"{name}:{severity}"] == accuracy(model, changed, images.labels)
    assert table["gaussian_noise:4"] < table["gaussian_noise:1"] < table["clean"]
    context = {key: table.context[key] for key in ("data", "seed", "corruptions", "name")}
    drawn = "drawn, at CIFAR-C's severities"
    assert context == {"data": "squares", "seed": 5, "corruptions": drawn, "name": "mine"}
    assert table.context["versions"]["torch"] == torch.__version__


def test_the_attack_sees_the_model_with_its_normalisation():
    model = classifier()
    images = data(60, model)
    table = evaluate(model, images, corruptions=[], attacks=[FGSM(4)])
    levels = images.images.float() / 255
    scores = model.eval()(normalised(images.images)).softmax(-1) - nn.functional.one_hot(images.labels, 4)
    gradient = (scores @ model[2].weight.detach()).view_as(levels) / torch.tensor(STD)[:, None, None]
    changed = (levels + 4 / 255 * gradient.sign()).clamp(0, 1)
    assert table["fgsm:4"] == accuracy(model, 255 * changed, images.labels)
    assert table["fgsm:4"] < table["clean"]


def test_it_goes_on_where_it_stopped(tmp_path, monkeypatch):
    model, images, path = classifier(), data(40), tmp_path / "table.json"
    settings = {"corruptions": ["fog", "contrast"], "severities": [1, 2], "attacks": [PGD(2, 2)], "seed": 1}
    whole = evaluate(model, images, **settings)
    accuracy, before = module._accuracy, [*whole.cells.values()][:3]
    monkeypatch.setattr(module, "_accuracy", Mock(side_effect=[*before, KeyboardInterrupt]))
    with pytest.raises(KeyboardInterrupt):
        evaluate(model, images, **settings, path=path)
    assert list(RobustnessTable.load(path).cells) == ["clean", "fog:1", "fog:2"]
    monkeypatch.setattr(module, "_accuracy", rest := Mock(wraps=accuracy))
    resumed = evaluate(model, images, **settings, path=path)
    assert rest.call_count == 3
    assert resumed == whole == RobustnessTable.load(path)
    assert [file.name for file in tmp_path.iterdir()] == ["table.json"]
    more = evaluate(model, images, **{**settings, "attacks": ["fgsm:1"]}, path=path)
    assert set(more.cells) == {*whole.cells, "fgsm:1"}


def test_a_table_of_something_else_is_not_gone_on_with_and_some_models_cannot_be_judged(tmp_path):
    model, images = classifier(), data(10)
    settings = {"corruptions": [], "attacks": [], "path": tmp_path / "table.json"}
    evaluate(model, images, **settings)

    def refused(error, words, model=model, images=images, **options):
        with pytest.raises(error, match=words):
            evaluate(model, images, **settings | options)

    refused(AcutanceError, "seed: there 0, here 1", seed=1)
    refused(AcutanceError, "images: there 10, here 5", images=images.subset(torch.arange(5)))
    nn.init.ones_(model[2].bias)
    refused(AcutanceError, "weights: there")
    settings["path"].write_text("{")
    refused(AcutanceError, "is not of the format")
    three = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 3))
    refused(ShapeError, r"\(10, 3\) for 10 images of 4 classes", model=three, path=None)
    nn.init.constant_(model[2].bias, torch.nan)
    refused(NonFiniteError, "not finite", path=None)


def publish(folder, images):
    folder.mkdir()
    rows = images.images.permute(0, 2, 3, 1).numpy()
    np.save(folder / "fog.npy", np.concatenate([rows // severity for severity in range(1, 6)]))
    np.save(folder / "labels.npy", np.tile(images.labels.numpy(), 5))
    return {"attacks": [], "corrupted_dir": folder}


def test_published_files_are_read_severity_by_severity(tmp_path):
    model = classifier()
    images = data(model=model)
    settings = publish(tmp_path / "CIFAR-9-C", images)
    for some in (images, images.subset(torch.arange(AT_ONCE + 3))):
        table = evaluate(model, some, corruptions=["fog"], **settings)
        for severity in range(1, 6):
            assert table[f"fog:{severity}"] == accuracy(model, some.images // severity, some.labels)
    assert table.context["corruptions"] == "the files in CIFAR-9-C"


def test_corruptions_that_are_drawn_once_are_those_that_each_model_would_draw(tmp_path):
    images, some = data(model=classifier()), {"corruptions": ["fog", "gaussian_noise"], "attacks": []}
    folder = draw_once(images, tmp_path / "drawn", seed=5)
    written = (folder / "fog.npy").stat().st_mtime_ns
    assert draw_once(images, folder, seed=5) == folder
    assert (folder / "fog.npy").stat().st_mtime_ns == written
    shared = evaluate(classifier(), images, corrupted_dir=folder, **some)
    assert shared.cells == evaluate(classifier(), images, seed=5, **some).cells


def test_published_files_that_do_not_fit_are_refused(tmp_path):
    class Payload:
        def __reduce__(self):
            return Path.touch, (tmp_path / "run",)

    images, folder = data(20), tmp_path / "c"
    settings = publish(folder, images)

    def refused(name, words, images=images):
        with pytest.raises(AcutanceError, match=words):
            evaluate(classifier(), images, corruptions=[name], **settings)

    refused("snow", r"no .*snow\.npy; expected an unpacked CIFAR-10-C")
    refused("fog", "does not begin with the labels of squares", images.subset(torch.arange(19, -1, -1)))
    np.save(folder / "snow.npy", np.zeros((5 * 20, 3, 8, 8), np.uint8))
    refused("snow", r"images of \(8, 3, 8\), squares of \(3, 8, 8\)")
    np.save(folder / "frost.npy", np.zeros((5 * 19, 8, 8, 3), np.uint8))
    refused("frost", "n at least 20")
    np.save(folder / "contrast.npy", np.array([Payload()], dtype=object), allow_pickle=True)
    refused("contrast", "damaged or not a plain array")
    (folder / "contrast.npy").write_bytes(pickle.dumps(Payload()))
    refused("contrast", "damaged or not a plain array")
    assert not (tmp_path / "run").exists()
    whole = (folder / "fog.npy").read_bytes()
    (folder / "fog.npy").write_bytes(whole[: len(whole) // 2])
    refused("fog", "damaged")


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
    title, _, *lines = table.markdown().splitlines()
    assert title == "**mine**"
    assert lines[:6] == [
        "| accuracy in %, by severity | 1 | mean |",
        "| --- | ---: | ---: |",
        "| clean |  | 90.12 |",
        "| pgd:1:20:0.125 |  | 5.00 |",
        "| fog | 80.00 | 80.00 |",
        "| mean of corruptions | 80.00 | 80.00 |",
    ]
    assert lines[-1].endswith("; seed: 4")
    assert "mean of corruptions" in str(table)
    assert RobustnessTable({"clean": 1.0}).rows() == [{"accuracy in %, by severity": "clean", "all": "1.00"}]


@pytest.fixture
def robustness(copy, command):
    """The command on a run, with these options."""
    return partial(command, "robustness", copy, "--device", "cpu")


def test_the_command_measures_a_run_and_goes_on(copy, tmp_path, robustness):
    options, page = ["--limit", 60, "--severities", "1,5"], tmp_path / "t.md"
    robustness("--corruptions", "fog,saturate", "--attacks", "fgsm:8", *options, "--markdown", page)
    table = RobustnessTable.load(copy / "robustness.json")
    assert list(table.cells) == ["clean", "fog:1", "fog:5", "saturate:1", "saturate:5", "fgsm:8"]
    assert table["saturate:5"] == table["clean"]  # grey has no saturation
    assert table.context["images"] == 60
    assert page.read_text() == table.markdown()
    nothing = ["--corruptions", "none", "--attacks", "none"]
    robustness(*nothing, *options)
    assert RobustnessTable.load(copy / "robustness.json") == table
    robustness(*nothing, "--json", tmp_path / "whole.json")
    expected = pytest.approx(evaluate_run(copy, device="cpu").scores["top1"])
    assert RobustnessTable.load(tmp_path / "whole.json").cells == {"clean": expected}


def test_wrong_options_are_named(copy, tmp_path, robustness):
    wrong = {"--severities=1,x": "takes numbers", "--weights=worst": "last or best", "--attacks=cw": "no attack 'cw'"}
    wrong |= {"--corruptions=fog,smoke": "no corruption smoke", "--split=val": "would flatter it"}
    Run(copy).begin(override(recipes.load("digits"), ["task.train_on=all"]), "digits", 1)
    for option, words in wrong.items():
        with pytest.raises(AcutanceError, match=words):
            robustness("--json", tmp_path / "t.json", option)
        assert not (tmp_path / "t.json").exists()


def test_images_of_imagenet_are_what_evaluation_cuts_out_and_some_are_some_of_each_class(tmp_path):
    task = standins.shrink(recipes.load("deit_tiny"), tmp_path).task
    whole, folder = images_of(task, "test"), ImageFolder(task.data_dir, "test")
    assert whole.labels.equal(folder.labels)
    for index in (0, 7, 14):
        expected = np.asarray(centre_crop(folder.read(index), 16)).transpose(2, 0, 1)
        assert np.array_equal(whole.images[index].numpy(), expected)
    assert (whole.mean, whole.classes) == (IMAGENET_MEAN, folder.classes)
    some = images_of(replace(task, data_dir="/nowhere"), "test", data_dir=task.data_dir, limit=6)
    assert some.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert some.images.equal(whole.images[[0, 2, 5, 7, 10, 12]])
    assert len(images_of(task, "test", limit=99)) == len(whole) == standins.CLASSES * 5
    digits = images_of(recipes.load("digits").task, "test", limit=9)
    assert digits.images.equal(load_images("digits", None, "test").images[:9])
    with pytest.raises(AcutanceError, match="a run of language is no classifier of images"):
        images_of(recipes.load("wikitext2").task, "test")
    with pytest.raises(AcutanceError, match="no split 'both'"):
        images_of(task, "both")
