"""A monitor in Hugging Face's Trainer."""

import pytest
import torch
from monitor_worlds import assert_same, outcome

import acutance as ac
from acutance.errors import AcutanceError
from acutance.measure.monitor import History

pytest.importorskip("accelerate", reason="Trainer needs accelerate")
transformers = pytest.importorskip("transformers")


VOCABULARY, LENGTH = 30, 8


def bert():
    """Dropout is at its default: training draws from torch's generator in every layer."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 24}
    config = transformers.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **sizes)
    return transformers.BertForMaskedLM(config)


def sentences(samples, seed):
    ids = torch.randint(VOCABULARY, (samples, LENGTH), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[::2, -3:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def dataset():
    whole = sentences(16, seed=1)
    return [{**{k: v[i] for k, v in whole.items()}, "labels": whole["input_ids"][i]} for i in range(16)]


def fit(folder, model, callbacks=(), resume=None, **options):
    defaults = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 7,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 5,
    }
    arguments = transformers.TrainingArguments(**defaults | options)
    trainer = transformers.Trainer(model, arguments, train_dataset=dataset(), callbacks=list(callbacks))
    trainer.train(resume_from_checkpoint=resume)
    return outcome(model, trainer.optimizer)


def watched(model, **options):
    return ac.Monitor(model, sentences(4, seed=7), **{"every": 3, "metrics": "all", **options})


@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "bf16"])
def test_training_gives_the_same_bits_with_and_without(tmp_path, mixed):
    expected = fit(tmp_path, bert(), bf16=mixed)
    model = bert()
    monitor = watched(model)
    assert_same(fit(tmp_path, model, [monitor.for_trainer()], bf16=mixed), expected)
    assert list(monitor.history) == [0, 3, 6, 7], "optimiser steps, not batches; the first and the last too"
    # Accelerate puts autocast into the forward of the model it prepares.
    assert {profile.context["autocast"] for profile in monitor.history.values()} == {"bfloat16" if mixed else None}


def test_a_resumed_training_continues_the_file(tmp_path):
    path = tmp_path / "monitor.jsonl"
    model = bert()
    fit(tmp_path, model, [watched(model, jsonl=path).for_trainer()], save_strategy="steps", save_steps=4, max_steps=6)
    model = bert()
    monitor = watched(model, jsonl=path)
    assert list(monitor.history) == [0, 3, 6]
    fit(tmp_path, model, [monitor.for_trainer()], resume=str(tmp_path / "checkpoint-4"), max_steps=9)
    assert list(monitor.history) == [0, 3, 4, 6, 9]
    assert dict(History.load(path)) == dict(monitor.history)


def test_another_model_than_the_one_watched_is_refused(tmp_path):
    with pytest.raises(AcutanceError, match="give both the same object"):
        fit(tmp_path, bert(), [watched(bert()).for_trainer()])


def test_a_part_of_the_model_can_be_watched(tmp_path):
    model = bert()
    monitor = watched(torch.compile(model.bert, backend="eager"))
    fit(tmp_path, model, [monitor.for_trainer()])
    assert list(monitor.history) == [0, 3, 6, 7]
