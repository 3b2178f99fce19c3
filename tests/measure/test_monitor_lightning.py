"""A monitor in Lightning."""

import warnings

import pytest
import torch
from monitor_worlds import assert_same, build, data, outcome, probe
from torch.utils.data import DataLoader, TensorDataset

import acutance as ac
from acutance.errors import AcutanceError
from acutance.measure.monitor import History

lightning = pytest.importorskip("lightning.pytorch")


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = build()

    def training_step(self, batch, _):
        return self.net(*batch)["loss"]

    def configure_optimizers(self):
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2)


def fit(folder, module, callbacks=(), checkpoint=None, **options):
    lightning.seed_everything(5, verbose=False)
    defaults = {
        "accelerator": "cpu",
        "accumulate_grad_batches": 2,
        "max_steps": 7,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning recommends more workers
        trainer = lightning.Trainer(callbacks=list(callbacks), **defaults | options)
        loader = DataLoader(TensorDataset(*data()), batch_size=2, shuffle=True)
        trainer.fit(module, loader, ckpt_path=checkpoint)
    trainer.save_checkpoint(folder / "last.ckpt")
    return outcome(module.net, trainer.optimizers[0])


def watched(module, **options):
    return ac.Monitor(module.net, probe(), **{"every": 3, "metrics": "all", **options})


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_training_gives_the_same_bits_with_and_without(tmp_path, precision):
    expected = fit(tmp_path, Module(), precision=precision)
    module = Module()
    monitor = watched(module)
    assert_same(fit(tmp_path, module, [monitor.for_lightning()], precision=precision), expected)
    assert list(monitor.history) == [0, 3, 6, 7], "optimiser steps, not batches; the first and the last too"
    assert monitor.history[3].context["autocast"] is None


def test_a_probe_follows_the_weights_into_half_precision(tmp_path):
    module = Module()
    monitor = watched(module)
    fit(tmp_path, module, [monitor.for_lightning()], precision="bf16-true", max_steps=3)
    assert monitor.history[3].context["dtype"] == "bfloat16"


def test_a_resumed_training_continues_the_file(tmp_path):
    path = tmp_path / "monitor.jsonl"
    module = Module()
    fit(tmp_path, module, [watched(module, jsonl=path).for_lightning()], max_steps=4)
    module = Module()
    monitor = watched(module, jsonl=path)
    assert list(monitor.history) == [0, 3, 4]
    fit(tmp_path, module, [monitor.for_lightning()], checkpoint=tmp_path / "last.ckpt", max_steps=6)
    assert list(monitor.history) == [0, 3, 4, 6]
    assert dict(History.load(path)) == dict(monitor.history)


def test_another_model_than_the_one_watched_is_refused(tmp_path):
    with pytest.raises(AcutanceError, match="give both the same object"):
        fit(tmp_path, Module(), [watched(Module()).for_lightning()])
