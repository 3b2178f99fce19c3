"""Evaluation shared by two processes, on sharded models: the numbers of one process, and nobody waits for ever."""

import json
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from acutance.lab.tasks.language import sliding_loss
from acutance.lab.tasks.windows import MULTI, WindowConfig, segmented
from acutance.models import LanguageModel, Segmenter
from together import in_two_processes

WINDOWS = WindowConfig(short_side=8, size=8, stride=6, at_once=2)
SIZES = [(8, 8), (8, 20), (15, 9)]  # of different numbers of windows, and no multiple of two images


def language():
    torch.manual_seed(0)
    sizes = {"vocabulary": 20, "dim": 8, "depth": 2, "heads": 2, "hidden": 12, "cutoffs": (5, 11)}
    return LanguageModel(**sizes, mitigation="neutreno:0.4").double().eval()


def segmenter():
    torch.manual_seed(0)
    sizes = {"num_classes": 4, "image_size": 8, "patch_size": 4, "dim": 8, "depth": 2, "heads": 2, "decoder_heads": 2}
    return Segmenter(**sizes, mitigation="neutreno:0.6").double().eval()


def images():
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(3, *size, dtype=torch.float64, generator=draw) for size in SIZES]


def text():
    return torch.randint(20, (45,), generator=torch.Generator().manual_seed(2))


def losses(model):
    return [sliding_loss(model, text(), window=6, stride=stride, batch_size=4) for stride in (1, 4, 6)]


def pixels(model):
    found = segmented(model, images().__getitem__, len(SIZES), MULTI, WINDOWS)
    return {str(index): classes.flatten().bincount(minlength=4).tolist() for index, classes in found}


def sharded(model):
    for module in [*model.modules()]:
        for block in getattr(module, "blocks", []):
            fully_shard(block)
    return fully_shard(model)


def worker(rank, folder):
    found = {"losses": losses(sharded(language())), "pixels": pixels(sharded(segmenter()))}
    Path(folder, f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")


@pytest.mark.slow
def test_two_processes_with_sharded_models_find_what_one_finds(tmp_path):
    in_two_processes(worker, tmp_path)
    found = [json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
    assert found[0]["losses"] == found[1]["losses"]
    assert found[0]["losses"] == pytest.approx(losses(language()), rel=1e-12)
    assert found[0]["pixels"].keys() == {"0", "2"}
    assert found[1]["pixels"].keys() == {"1"}
    assert {**found[0]["pixels"], **found[1]["pixels"]} == pixels(segmenter())
