"""What holds for every task: its name on disk, a run to a model that loads, evaluation shared by two processes."""

import json
from dataclasses import replace
from io import StringIO
from itertools import islice

import pytest
import torch
from rich.console import Console
from torch.distributed.fsdp import fully_shard

import acutance as ac
import standins
from acutance.lab import recipes
from acutance.lab.data.augment import AugmentConfig
from acutance.lab.tasks import TASKS, BatchSlice, config_class, task_class
from acutance.lab.tasks.classification import ClassificationConfig
from acutance.lab.tasks.imagenet import ImageNetConfig
from acutance.lab.tasks.language import sliding_loss
from acutance.lab.tasks.segmentation import MULTI, segmented
from acutance.lab.train import Config, LoopConfig, OptimConfig, train
from acutance.lab.train.log import read_log
from acutance.models import LanguageModel, Segmenter, ViTConfig
from tiny_tasks import LANGUAGE, SEGMENTER, WINDOWS, language, segmentation
from together import in_two_processes

VIT = ViTConfig(image_size=8, patch_size=4, in_chans=1, dim=8, depth=1, heads=2, num_classes=10)


@pytest.mark.parametrize("kind", TASKS)
def test_the_kind_leads_to_its_classes(kind):
    assert config_class(kind).kind == kind
    assert kind in {recipes.load(name).task.kind for name in recipes.names()}
    assert task_class(kind).headline


def classification(folder):
    augment = AugmentConfig(crop_pad=1, flip=0.5, rand_layers=1, erase=0.5, mixup=0.8, cutmix=1.0, smoothing=0.1)
    return ClassificationConfig("digits", VIT, augment=augment, repeats=3)


def imagenet(folder):
    where = {"data_dir": str(standins.imagenet(folder)), "held_out_every": standins.HELD_OUT_EVERY}
    model = replace(VIT, image_size=16, patch_size=8, in_chans=3, num_classes=standins.CLASSES)
    return ImageNetConfig(model=model, **where, workers=0, repeats=3)


@pytest.mark.parametrize("make", [classification, imagenet, language, segmentation])
def test_a_batch_is_a_function_of_seed_and_step_and_slices_are_its_rows(make, tmp_path):
    config = make(tmp_path)
    task, other = (task_class(config.kind)(config, seed=seed, device=torch.device("cpu")) for seed in (0, 1))
    late = task.steps_per_epoch(8) + 1  # beyond the first epoch
    straight = list(islice(task.batches(8, 0, BatchSlice()), late + 1))
    for step in (0, 1, late):
        parts = [next(task.batches(8, step, BatchSlice(index, 4))) for index in range(4)]
        for entry, expected in enumerate(straight[step]):
            assert torch.equal(next(task.batches(8, step, BatchSlice()))[entry], expected)
            assert torch.equal(torch.cat([part[entry] for part in parts]), expected)
    if make is not language:  # whose epochs all read the text from its beginning
        assert not torch.equal(next(other.batches(8, 0, BatchSlice()))[0], straight[0][0])
        assert not torch.equal(straight[0][0], straight[late - 1][0])


@pytest.mark.parametrize(("make", "model"), [(language, LANGUAGE), (segmentation, SEGMENTER)])
def test_a_run_ends_with_scores_and_a_model_that_loads(make, model, tmp_path):
    task = make(tmp_path, replace(model, mitigation="neutreno:0.4"))
    loop = LoopConfig(epochs=2, batch_size=4, checkpoint_every=100, monitor_every=1)
    config = Config(task=task, optim=OptimConfig(lr=1e-2, clip=0.25), loop=loop)
    result = train(config, tmp_path / "run", device="cpu", console=Console(file=StringIO()))
    assert ac.load(tmp_path / "run" / "model.safetensors").config.mitigation == "neutreno:0.4"
    assert (tmp_path / "run" / "monitor.jsonl").read_text(encoding="utf-8").count("\n") > 2
    first, last = read_log(tmp_path / "run")
    assert last["loss"] < first["loss"]
    scores = [line[f"val/{result['headline']}"] for line in (first, last)]
    assert result["scores"][result["headline"]] == scores[-1]
    assert result["best"]["score"] == (max if make is segmentation else min)(scores)


def text_losses(shard):
    torch.manual_seed(0)
    model = shard(
        LanguageModel(**replace(LANGUAGE, vocabulary=20, cutoffs=(5, 11), mitigation="neutreno:0.4").to_dict())
    )
    text = torch.randint(20, (45,), generator=torch.Generator().manual_seed(2))
    return [sliding_loss(model, text, window=6, stride=stride, batch_size=4) for stride in (1, 4, 6)]


def pixels(shard):
    """Images of different numbers of windows, and no multiple of two images."""
    torch.manual_seed(0)
    model = shard(Segmenter(**replace(SEGMENTER, mitigation="neutreno:0.6").to_dict()))
    images = [torch.randn(3, *size, dtype=torch.float64) for size in ((16, 16), (16, 40), (30, 18))]
    found = segmented(model, images.__getitem__, len(images), MULTI, WINDOWS)
    return {str(index): classes.flatten().bincount(minlength=11).tolist() for index, classes in found}


def sharded(model):
    model = model.double().eval()
    for module in [*model.modules()]:
        for block in getattr(module, "blocks", []):
            fully_shard(block)
    return fully_shard(model)


def worker(rank, folder):
    (folder / f"{rank}.json").write_text(json.dumps([text_losses(sharded), pixels(sharded)]), encoding="utf-8")


def test_two_processes_with_sharded_models_find_what_one_finds(tmp_path):
    """And nobody waits for ever."""
    in_two_processes(worker, tmp_path)
    (losses, first), (same, second) = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    alone = lambda model: model.double().eval()  # noqa: E731
    assert losses == same == pytest.approx(text_losses(alone), rel=1e-12)
    assert (first.keys(), second.keys()) == ({"0", "2"}, {"1"})
    assert {**first, **second} == pixels(alone)
