import re
import sys
import warnings

import pytest
import torch
from monitor_worlds import assert_same, build, data, outcome, probe
from torch.utils.data import DataLoader, TensorDataset

import acutance as ac
from acutance.errors import AcutanceError, MissingExtraError
from acutance.measure.monitor import History


class Lightning:
    mixed, autocast_seen = {"precision": "bf16-mixed"}, None

    def __init__(self):
        self.library = pytest.importorskip("lightning.pytorch")

    def fit(self, folder, net, *callbacks, steps=7, resume=None, save_at=None, **options):
        class Module(self.library.LightningModule):
            def __init__(self):
                super().__init__()
                self.net = net

            def training_step(self, batch, _):
                return self.net(*batch)["loss"]

            def configure_optimizers(self):
                return torch.optim.AdamW(self.net.parameters(), lr=1e-2)

        self.library.seed_everything(5, verbose=False)
        off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        options |= {"accelerator": "cpu", "accumulate_grad_batches": 2, "default_root_dir": folder}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Lightning recommends more workers
            trainer = self.library.Trainer(
                callbacks=list(callbacks), max_steps=save_at or steps, **dict.fromkeys(off, False), **options
            )
            loader = DataLoader(TensorDataset(*data()), batch_size=2, shuffle=True)
            trainer.fit(Module(), loader, ckpt_path=None if resume is None else folder / "last.ckpt")
        trainer.save_checkpoint(folder / "last.ckpt")
        return outcome(net, trainer.optimizers[0])


class Trainer:
    """Accelerate puts autocast into the forward."""

    mixed, autocast_seen = {"bf16": True}, "bfloat16"

    def __init__(self):
        pytest.importorskip("accelerate", reason="Trainer needs accelerate")
        self.library = pytest.importorskip("transformers")

    def fit(self, folder, net, *callbacks, steps=7, resume=None, save_at=None, **options):
        options |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-2}
        options |= {"save_strategy": "no" if save_at is None else "steps", "save_steps": save_at or 500}
        options |= {"use_cpu": True, "report_to": [], "disable_tqdm": True, "seed": 5, "max_steps": steps}
        dataset = [{"images": image, "labels": label} for image, label in zip(*data(), strict=True)]
        arguments = self.library.TrainingArguments(str(folder), **options)
        trainer = self.library.Trainer(net, arguments, train_dataset=dataset, callbacks=list(callbacks))
        trainer.train(resume_from_checkpoint=None if resume is None else str(folder / f"checkpoint-{resume}"))
        return outcome(net, trainer.optimizer)


@pytest.fixture(params=[Lightning, Trainer])
def framework(request):
    return request.param()


def watched(net, **options):
    return ac.Monitor(net, probe(), **{"every": 3, "metrics": "all", **options})


def test_training_gives_the_same_bits_with_and_without(framework, tmp_path, capsys):
    expected = framework.fit(tmp_path, build(), **framework.mixed)
    net = build()
    monitor = watched(net)
    assert_same(framework.fit(tmp_path, net, monitor, **framework.mixed), expected)
    assert re.search("From step 0 to 7 training .* after layer 2: token_cosine .* → .*[.]", capsys.readouterr().err)
    assert list(monitor.history) == [0, 3, 6, 7], "optimiser steps, not batches; the first and the last too"
    assert {profile.context["autocast"] for profile in monitor.history.values()} == {framework.autocast_seen}


def test_a_resumed_training_continues_the_file(framework, tmp_path):
    path, net = tmp_path / "monitor.jsonl", build()
    framework.fit(tmp_path, net, watched(net, jsonl=path), steps=6, save_at=4)
    before, net = list(History.load(path)), build()
    monitor = watched(net, jsonl=path)
    assert list(monitor.history) == before
    framework.fit(tmp_path, net, monitor, resume=4, steps=9)
    assert list(monitor.history) == [0, 3, 4, 6, 9]
    assert dict(History.load(path)) == dict(monitor.history)


def test_another_model_than_the_one_watched_is_refused(framework, tmp_path):
    with pytest.raises(AcutanceError, match="give both the same object"):
        framework.fit(tmp_path, build(), watched(build()))


def test_one_monitor_serves_both_libraries_and_the_older_names(tmp_path):
    net = build()
    monitor = watched(net, metrics="token_cosine")
    Trainer().fit(tmp_path, net, monitor, steps=3)
    Lightning().fit(tmp_path, net, monitor, steps=3)
    assert monitor.for_trainer() is monitor.for_lightning() is monitor
    assert list(monitor.history) == [0, 3]
    with pytest.raises(AttributeError, match="no attribute 'beginning'"):
        monitor.beginning()


@pytest.mark.parametrize(
    ("library", "use", "remedy"),
    [
        ("lightning.pytorch", ac.Monitor.for_lightning, "lightning"),
        (
            "torch.utils.tensorboard.writer",
            lambda m: ac.Monitor(m.model, probe(), tensorboard="x"),
            r"acutance\[monitor\]",
        ),
    ],
)
def test_a_missing_library_is_told_with_its_remedy(monkeypatch, library, use, remedy):
    monitor = ac.Monitor(build(), probe())
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingExtraError, match=f"pip install.*{remedy}"):
        use(monitor)
