"""Which images of a run are corrupted and attacked."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import standins
from acutance.cli import app
from acutance.errors import AcutanceError
from acutance.lab import recipes
from acutance.lab.data import load_images
from acutance.lab.data.decoding import centre_crop
from acutance.lab.data.folder import IMAGENET_MEAN, ImageFolder
from acutance.lab.evaluate.evaluate import evaluate_run
from acutance.lab.robustness import RobustnessTable
from acutance.lab.robustness.images import images_of
from acutance.lab.train import override, train


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return standins.shrink(recipes.load("deit_tiny"), tmp_path_factory.mktemp("stand-ins"))


def test_images_of_imagenet_are_what_evaluation_cuts_out(config):
    found = images_of(config.task, "test")
    folder = ImageFolder(config.task.data_dir, "test")
    assert found.labels.equal(folder.labels)
    for index in (0, 7, 14):
        expected = np.asarray(centre_crop(folder.read(index), 16)).transpose(2, 0, 1)
        assert np.array_equal(found.images[index].numpy(), expected)
    assert found.mean == IMAGENET_MEAN
    assert found.classes == folder.classes


def test_some_of_imagenet_are_some_of_each_class(config):
    whole, some = images_of(config.task, "test"), images_of(config.task, "test", limit=6)
    assert some.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert some.images.equal(whole.images[[0, 2, 5, 7, 10, 12]])
    assert len(images_of(config.task, "test", limit=99)) == len(whole) == standins.CLASSES * 5
    assert len(images_of(config.task, "val")) == standins.CLASSES * standins.PER_CLASS // standins.HELD_OUT_EVERY


def test_of_other_sets_the_first_are_taken():
    task = recipes.load("digits").task
    assert images_of(task, "test", limit=9).images.equal(load_images("digits", None, "test").images[:9])


def test_data_that_moved_is_found(config, tmp_path):
    moved = replace(config.task, data_dir="/nowhere")
    there = images_of(moved, "test", data_dir=config.task.data_dir)
    assert torch.equal(there.images, images_of(config.task, "test").images)


def test_what_is_no_classifier_or_no_split_is_refused(config):
    with pytest.raises(AcutanceError, match="a run of language is no classifier of images"):
        images_of(recipes.load("wikitext2").task, "test")
    with pytest.raises(AcutanceError, match="no split 'both'; there are train, val, all, test"):
        images_of(config.task, "both")


def test_the_command_takes_a_run_on_imagenet(config, tmp_path):
    train(override(config, ["task.train_on=all"]), tmp_path / "run", device="cpu")
    options = ["--corruptions", "contrast", "--severities", "5", "--attacks", "fgsm:8", "--device", "cpu"]
    done = CliRunner().invoke(app, ["robustness", str(tmp_path / "run"), *options])
    assert done.exit_code == 0, done.output
    table = RobustnessTable.load(tmp_path / "run" / "robustness.json")
    assert list(table.cells) == ["clean", "contrast:5", "fgsm:8"]
    expected = evaluate_run(tmp_path / "run", device="cpu").scores["top1"]
    assert table["clean"] == pytest.approx(expected)
    seen = CliRunner().invoke(app, ["robustness", str(tmp_path / "run"), *options, "--split", "val"])
    assert "would flatter it" in str(seen.exception)
