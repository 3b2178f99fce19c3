"""The language and segmentation tasks in the training loop: a run from its first step to a model that loads."""

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console
from test_language_task import MODEL as LANGUAGE
from test_language_task import write_corpus
from test_segmentation_task import MODEL as SEGMENTER
from test_segmentation_task import WINDOWS, write_camvid

import acutance as ac
from acutance.lab.tasks.language import LanguageTaskConfig
from acutance.lab.tasks.segmentation import SegmentationConfig
from acutance.lab.train.config import Config, LoopConfig, OptimConfig
from acutance.lab.train.start import train

pytest.importorskip("lightning")


def language(folder):
    write_corpus(folder)
    model = replace(LANGUAGE, mitigation="neutreno:0.4", dropout=0.0)
    return LanguageTaskConfig(corpus="wikitext-2", data_dir=str(folder), model=model, length=7, val_stride=7)


def segmentation(folder):
    write_camvid(folder)
    model = replace(SEGMENTER, mitigation="neutreno:0.6", decoder_dropout=0.0)
    return SegmentationConfig(dataset="camvid", data_dir=str(folder), model=model, windows=WINDOWS)


def run(task, folder, **options):
    loop = LoopConfig(epochs=2, batch_size=4, checkpoint_every=100, **options)
    config = Config(task=task, optim=OptimConfig(lr=1e-3, clip=0.25), loop=loop)
    return train(config, folder, device="cpu", console=Console(file=StringIO()))


@pytest.mark.parametrize("make", [language, segmentation])
def test_a_run_ends_with_scores_and_a_model_that_loads(make, tmp_path):
    task = make(tmp_path)
    result = run(task, tmp_path / "run", monitor_every=1)
    assert result["scores"][result["headline"]] == result["best"]["score"]
    model = ac.load(tmp_path / "run" / "model.safetensors")
    assert model.config.mitigation == task.model.mitigation
    assert (tmp_path / "run" / "monitor.jsonl").read_text(encoding="utf-8").count("\n") > 2


def test_accumulated_parts_of_a_batch_train_alike(tmp_path):
    task = language(tmp_path)
    whole, parts = run(task, tmp_path / "whole"), run(task, tmp_path / "parts", accumulate=2)
    assert parts["scores"]["loss"] == pytest.approx(whole["scores"]["loss"], rel=1e-5)
