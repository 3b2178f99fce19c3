"""A monitor in Lightning and in Hugging Face's Trainer."""

import sys
import warnings

import pytest
import torch
from monitor_worlds import assert_same, build, data, outcome, probe
from torch.utils.data import DataLoader, TensorDataset

import acutance as ac
from acutance.errors import AcutanceError
from acutance.measure.monitor import History

VOCABULARY, LENGTH = 30, 8


class Lightning:
    """A Net in a LightningModule."""

    mixed, autocast_seen = {"precision": "bf16-mixed"}, None

    def __init__(self):
        self.library = pytest.importorskip("lightning.pytorch")

    def model(self):
        class Module(self.library.LightningModule):
            def __init__(self):
                super().__init__()
                self.net = build()

            def training_step(self, batch, _):
                return self.net(*batch)["loss"]

            def configure_optimizers(self):
                return torch.optim.AdamW(self.net.parameters(), lr=1e-2)

        return Module()

    def watched(self, module, **options):
        monitor = ac.Monitor(module.net, probe(), **{"every": 3, "metrics": "all", **options})
        return monitor, monitor.for_lightning()

    def fit(self, folder, module, *callbacks, steps=7, resume=None, save_at=None, **options):
        self.library.seed_everything(5, verbose=False)
        off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        options |= {"accelerator": "cpu", "accumulate_grad_batches": 2, "default_root_dir": folder}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Lightning recommends more workers
            trainer = self.library.Trainer(
                callbacks=list(callbacks), max_steps=save_at or steps, **dict.fromkeys(off, False), **options
            )
            loader = DataLoader(TensorDataset(*data()), batch_size=2, shuffle=True)
            trainer.fit(module, loader, ckpt_path=None if resume is None else folder / "last.ckpt")
        trainer.save_checkpoint(folder / "last.ckpt")
        return outcome(module.net, trainer.optimizers[0])


class Trainer:
    """A BERT; its dropout draws from torch's generator in every layer."""

    mixed, autocast_seen = {"bf16": True}, "bfloat16"  # Accelerate puts autocast into the forward

    def __init__(self):
        pytest.importorskip("accelerate", reason="Trainer needs accelerate")
        self.library = pytest.importorskip("transformers")

    def model(self):
        torch.manual_seed(0)
        sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 24}
        config = self.library.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **sizes)
        return self.library.BertForMaskedLM(config)

    def watched(self, model, **options):
        monitor = ac.Monitor(model, sentences(4, seed=7), **{"every": 3, "metrics": "all", **options})
        return monitor, monitor.for_trainer()

    def fit(self, folder, model, *callbacks, steps=7, resume=None, save_at=None, **options):
        options |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-2}
        options |= {"save_strategy": "no" if save_at is None else "steps", "save_steps": save_at or 500}
        options |= {"use_cpu": True, "report_to": [], "disable_tqdm": True, "seed": 5, "max_steps": steps}
        whole = sentences(16, seed=1)
        dataset = [{**{k: v[i] for k, v in whole.items()}, "labels": whole["input_ids"][i]} for i in range(16)]
        arguments = self.library.TrainingArguments(str(folder), **options)
        trainer = self.library.Trainer(model, arguments, train_dataset=dataset, callbacks=list(callbacks))
        trainer.train(resume_from_checkpoint=None if resume is None else str(folder / f"checkpoint-{resume}"))
        return outcome(model, trainer.optimizer)


def sentences(samples, seed):
    ids = torch.randint(VOCABULARY, (samples, LENGTH), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[::2, -3:] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture(params=[Lightning, Trainer])
def framework(request):
    return request.param()


def test_training_gives_the_same_bits_with_and_without(framework, tmp_path):
    expected = framework.fit(tmp_path, framework.model(), **framework.mixed)
    model = framework.model()
    monitor, callback = framework.watched(model)
    assert_same(framework.fit(tmp_path, model, callback, **framework.mixed), expected)
    assert list(monitor.history) == [0, 3, 6, 7], "optimiser steps, not batches; the first and the last too"
    assert {profile.context["autocast"] for profile in monitor.history.values()} == {framework.autocast_seen}


def test_a_resumed_training_continues_the_file(framework, tmp_path):
    path = tmp_path / "monitor.jsonl"
    model = framework.model()
    framework.fit(tmp_path, model, framework.watched(model, jsonl=path)[1], steps=6, save_at=4)
    before = list(History.load(path))
    model = framework.model()
    monitor, callback = framework.watched(model, jsonl=path)
    assert list(monitor.history) == before
    framework.fit(tmp_path, model, callback, resume=4, steps=9)
    assert list(monitor.history) == [0, 3, 4, 6, 9]
    assert dict(History.load(path)) == dict(monitor.history)


def test_another_model_than_the_one_watched_is_refused(framework, tmp_path):
    with pytest.raises(AcutanceError, match="give both the same object"):
        framework.fit(tmp_path, framework.model(), framework.watched(framework.model())[1])


@pytest.mark.parametrize(("call", "library"), [("for_trainer", "transformers"), ("for_lightning", "lightning.pytorch")])
def test_a_missing_framework_is_told_with_its_remedy(monkeypatch, call, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(AcutanceError, match="pip install"):
        getattr(ac.Monitor(build(), probe()), call)()
