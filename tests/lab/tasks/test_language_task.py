"""Language modelling: what a batch is, and perplexity counted one window at a time and many at a time."""

import json
import math

import pytest
import torch
from torch import nn

import acutance as ac
from acutance.errors import AcutanceError
from acutance.lab.tasks import BatchSlice, config_class, task_class
from acutance.lab.tasks.language import (
    WIKITEXT_2,
    WIKITEXT_103,
    LanguageTask,
    LanguageTaskConfig,
    sliding_loss,
    sliding_loss_one_by_one,
)
from acutance.lab.train.config import Config
from acutance.models import LanguageConfig

WORDS = [f"w{i}" for i in range(30)]
MODEL = LanguageConfig(dim=8, depth=2, heads=2, hidden=12, cutoffs=(5, 12, 20_000), dropout=0.2)


def write_corpus(folder, lines=40):
    """WikiText-2's layout, with lines of ten words, some words more frequent than others."""
    draw = torch.Generator().manual_seed(0)
    place = folder / "wikitext-2"
    place.mkdir()
    for name, count in (("train", lines), ("valid", lines // 4), ("test", lines // 4)):
        ranks = (30 * torch.rand(count, 10, generator=draw) ** 2).long()
        text = "".join(" " + " ".join(WORDS[rank] for rank in line) + " \n" for line in ranks.tolist())
        (place / f"wiki.{name}.tokens").write_text(text, encoding="utf-8")


@pytest.fixture
def task(tmp_path):
    write_corpus(tmp_path)
    config = LanguageTaskConfig(
        corpus="wikitext-2", data_dir=str(tmp_path), model=MODEL, length=7, val_stride=7, windows=5
    )
    return LanguageTask(config, seed=0, device=torch.device("cpu"))


def spread(model):
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data += 0.4 * torch.randn_like(parameter)
    return model


def test_it_is_registered_and_its_configuration_survives_json():
    assert task_class("language") is LanguageTask
    assert config_class("language") is LanguageTaskConfig
    for task in (WIKITEXT_103, WIKITEXT_2):
        config = Config(task=task)
        assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_the_paper_is_the_default():
    assert WIKITEXT_103.model == LanguageConfig()
    assert (WIKITEXT_103.corpus, WIKITEXT_103.length, WIKITEXT_103.test_stride) == ("wikitext-103", 256, 1)


def test_the_model_has_the_texts_words_and_only_cutoffs_among_them(task):
    model = task.build_model()
    assert model.config.vocabulary == len(task._corpus.vocabulary) <= 31
    assert model.config.cutoffs == (5, 12)


def test_a_mitigation_is_installed(task, tmp_path):
    config = LanguageTaskConfig(
        corpus="wikitext-2",
        data_dir=str(tmp_path),
        model=LanguageConfig(**{**MODEL.to_dict(), "mitigation": "neutreno:0.4", "mitigation_layers": (2,)}),
    )
    model = LanguageTask(config, seed=0, device=torch.device("cpu")).build_model()
    assert (model.config.mitigation, model.config.mitigation_layers) == ("neutreno:0.4", (2,))


def test_batches_read_columns_of_the_text_from_top_to_bottom(task):
    text, columns = task._text, 4
    height = len(text) // columns
    steps = task.steps_per_epoch(columns)
    assert steps == (height - 1) // 7
    made = task.batches(columns, 0, BatchSlice())
    seen = [next(made) for _ in range(steps)]
    for column in range(columns):
        read = torch.cat([tokens[column] for tokens, _ in seen])
        assert torch.equal(read, text[column * height : column * height + 7 * steps])
        ahead = torch.cat([targets[column] for _, targets in seen])
        assert torch.equal(ahead, text[column * height + 1 : column * height + 1 + 7 * steps])
    again = next(made)
    assert torch.equal(again[0], seen[0][0])  # the next epoch begins where the first did


def test_a_batch_depends_on_its_step_alone_and_shares_make_up_the_whole(task):
    made = task.batches(4, 0, BatchSlice())
    first = [next(made) for _ in range(9)]
    for step in (0, 3, 8):
        for entry in (0, 1):
            assert torch.equal(next(task.batches(4, step, BatchSlice()))[entry], first[step][entry])
            parts = [next(task.batches(4, step, BatchSlice(i, 2)))[entry] for i in range(2)]
            assert torch.equal(torch.cat(parts), first[step][entry])


def test_the_loss_is_the_mean_over_words(task):
    model = task.build_model().eval()
    tokens, targets = next(task.batches(4, 1, BatchSlice()))
    expected = -model.log_probabilities(tokens).gather(-1, targets[..., None]).mean()
    torch.testing.assert_close(task.loss(model, (tokens, targets)), expected)
    assert task.units(4) == 28


@pytest.mark.parametrize("stride", [1, 3, 7])
@pytest.mark.parametrize("batch_size", [1, 5, 64])
def test_many_windows_at_a_time_give_the_same_number_as_one_by_one(task, stride, batch_size):
    model = spread(task.build_model()).eval()
    ac.mitigate(model, "neutreno:0.4")
    text = task._corpus.valid[:60]
    slow = sliding_loss_one_by_one(model, text, window=7, stride=stride)
    fast = sliding_loss(model, text, window=7, stride=stride, batch_size=batch_size)
    assert math.isclose(fast, slow, rel_tol=1e-6)
    exact = sliding_loss(model.double(), text, window=7, stride=stride, batch_size=batch_size)
    assert math.isclose(exact, sliding_loss_one_by_one(model, text, window=7, stride=stride), rel_tol=1e-12)


class Counting(nn.Module):
    """−log p that tells which word was predicted, and from how many words."""

    def forward(self, tokens, targets):
        length = tokens.shape[1]
        seen = torch.arange(length - targets.shape[1], length).double() + 1
        return targets.double() + 1e-4 * seen  # words are numbered by their place


@pytest.mark.parametrize("loss", [sliding_loss, sliding_loss_one_by_one])
def test_the_first_window_counts_whole_and_then_the_last_word_only(loss):
    text = torch.arange(50)
    first = sum(word + 1e-4 * word for word in range(1, 11))  # word k is predicted from the k words before it
    others = sum(word + 1e-4 * 10 for word in range(11, 50))  # always from ten
    assert math.isclose(loss(Counting(), text, window=10), (first + others) / 49, rel_tol=1e-12)


@pytest.mark.parametrize("loss", [sliding_loss, sliding_loss_one_by_one])
@pytest.mark.parametrize("words", [2, 9, 11, 12, 50, 53])
@pytest.mark.parametrize("stride", [1, 4, 10])
def test_every_word_but_the_first_counts_once(loss, words, stride):
    found = loss(Counting(), torch.arange(words), window=10, stride=stride) * (words - 1)
    assert math.floor(found) == words * (words - 1) // 2


def test_a_text_without_a_word_to_predict_is_refused():
    with pytest.raises(AcutanceError, match="a text of 1 words"):
        sliding_loss(Counting(), torch.arange(1))


def test_evaluation_reads_val_quickly_and_test_as_the_paper_does(task):
    model = spread(task.build_model())
    val, test = task.evaluate(model), task.evaluate(model, split="test")
    assert not model.training
    assert (val["stride"], test["stride"]) == (7.0, 1.0)
    expected = sliding_loss_one_by_one(model, task._corpus.test, window=7, stride=1)
    assert math.isclose(test["perplexity"], math.exp(expected), rel_tol=1e-6)
    assert math.isclose(test["loss"], expected, rel_tol=1e-6)
    with pytest.raises(AcutanceError, match="no split 'dev'; there are train, val, test"):
        task.evaluate(model, split="dev")


def test_the_probe_is_what_the_model_takes(task):
    assert task.build_model()(task.probe()).shape == (15, 7, 8)


def test_evaluation_makes_no_graph(task):
    model = task.build_model().eval()
    model.requires_grad_(True)
    calls = []
    model.register_forward_hook(lambda _m, _a, out: calls.append(out.requires_grad))
    sliding_loss(model, task._corpus.valid[:40], window=7)
    sliding_loss_one_by_one(model, task._corpus.valid[:40], window=7)
    assert calls
    assert not any(calls)


def test_too_little_text_is_refused(task):
    with pytest.raises(AcutanceError, match=r"too few for 400 columns.*lower loop\.batch_size or task\.length"):
        task.steps_per_epoch(400)


@pytest.mark.parametrize("options", [{"length": 0}, {"windows": 0}, {"length": 8, "test_stride": 9, "val_stride": 8}])
def test_impossible_readings_are_refused(options):
    with pytest.raises(AcutanceError, match=r"must be 1 or more|leave words out"):
        LanguageTaskConfig(**options)


def test_a_few_steps_lower_the_loss(task):
    torch.manual_seed(0)
    model = task.build_model()
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    before = task.evaluate(model)["perplexity"]
    model.train()
    batches = task.batches(4, 0, BatchSlice())
    for _ in range(30):
        optimiser.zero_grad()
        task.loss(model, next(batches)).backward()
        optimiser.step()
    assert task.evaluate(model)["perplexity"] < 0.9 * before
