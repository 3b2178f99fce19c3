import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import nn

import acutance as ac
from acutance.errors import AcutanceError
from acutance.lab.tasks import BatchSlice
from acutance.lab.tasks.language import LanguageTask, LanguageTaskConfig, sliding_loss, sliding_loss_one_by_one
from tiny_tasks import CUTOFFS, LANGUAGE, language


@pytest.fixture
def task(folder):
    return LanguageTask(language(folder, length=7, val_stride=7), seed=0, device=torch.device("cpu"))


def test_the_model_has_the_texts_words_only_cutoffs_among_them_and_its_mitigation(folder, task):
    config = language(folder, replace(LANGUAGE, mitigation="neutreno:0.4", mitigation_layers=(2,)))
    model = LanguageTask(config, seed=0, device=torch.device("cpu")).build_model()
    assert (model.config.vocabulary, model.config.cutoffs) == (17, CUTOFFS)
    assert (model.config.mitigation, model.config.mitigation_layers) == ("neutreno:0.4", (2,))


def test_batches_read_columns_of_the_text_from_top_to_bottom(task):
    text, columns = task._text, 4
    height, steps = len(text) // columns, task.steps_per_epoch(columns)
    assert steps == (height - 1) // 7
    made = task.batches(columns, 0, BatchSlice())
    seen = [next(made) for _ in range(steps)]
    for column in range(columns):
        for ahead in (0, 1):  # the words, and those that follow
            start = column * height + ahead
            read = torch.cat([batch[ahead][column] for batch in seen])
            assert torch.equal(read, text[start : start + 7 * steps])
    assert torch.equal(next(made)[0], seen[0][0])  # the next epoch begins where the first did


def test_the_loss_is_the_mean_over_words(task, model):
    tokens, targets = next(task.batches(4, 1, BatchSlice()))
    expected = -model.log_probabilities(tokens).gather(-1, targets[..., None]).mean()
    torch.testing.assert_close(task.loss(model, (tokens, targets)), expected)
    assert task.units(4) == 28
    assert torch.equal(task.probe().flatten(), task._corpus.valid[:98])


@pytest.mark.parametrize("stride", [1, 3, 7])
@pytest.mark.parametrize("batch_size", [1, 5, 64])
def test_many_windows_at_a_time_give_the_same_number_as_one_by_one(task, model, stride, batch_size):
    ac.mitigate(model, "neutreno:0.4")
    text = task._corpus.valid[:60]
    calls = []
    model.register_forward_hook(lambda _m, _a, out: calls.append(out.requires_grad))
    for kind, close in ((model, 1e-6), (model.double(), 1e-12)):
        slow = sliding_loss_one_by_one(kind, text, window=7, stride=stride)
        fast = sliding_loss(kind, text, window=7, stride=stride, batch_size=batch_size)
        assert math.isclose(fast, slow, rel_tol=close)
    assert calls
    assert not any(calls)  # evaluation makes no graph


class Counting(nn.Module):
    """−log p that tells which word was predicted, and from how many words."""

    def forward(self, tokens, targets):
        length = tokens.shape[1]
        seen = torch.arange(length - targets.shape[1], length).double() + 1
        return targets.double() + 1e-4 * seen  # words are numbered by their place


@pytest.mark.parametrize("loss", [sliding_loss, sliding_loss_one_by_one])
def test_every_word_but_the_first_counts_once_and_the_first_window_whole(loss):
    for words, stride in product((2, 9, 11, 12, 50, 53), (1, 4, 10)):
        found = loss(Counting(), torch.arange(words), window=10, stride=stride) * (words - 1)
        assert math.floor(found) == words * (words - 1) // 2
    first = sum(word + 1e-4 * word for word in range(1, 11))  # word k is predicted from the k words before it
    others = sum(word + 1e-4 * 10 for word in range(11, 50))  # always from ten
    assert math.isclose(loss(Counting(), torch.arange(50), window=10), (first + others) / 49, rel_tol=1e-12)


def test_evaluation_reads_val_quickly_and_test_as_the_paper_does(task, model):
    val, test = task.evaluate(model.train()), task.evaluate(model, split="test")
    assert not model.training
    assert (val["stride"], test["stride"]) == (7.0, 1.0)
    expected = sliding_loss_one_by_one(model, task._corpus.test, window=7, stride=1)
    assert math.isclose(test["perplexity"], math.exp(expected), rel_tol=1e-6)
    assert math.isclose(test["loss"], expected, rel_tol=1e-6)


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda task: task.evaluate(None, split="dev"), "no split 'dev'; there are train, val, test"),
        (lambda task: sliding_loss(Counting(), torch.arange(1)), "a text of 1 words"),
        (lambda task: task.steps_per_epoch(400), r"too few for 400 columns.*lower loop\.batch_size or task\.length"),
        (lambda task: LanguageTaskConfig(length=0), "must be 1 or more"),
        (lambda task: LanguageTaskConfig(length=8, test_stride=9, val_stride=8), "leave words out"),
    ],
)
def test_what_cannot_be_read_is_refused(task, act, words):
    with pytest.raises(AcutanceError, match=words):
        act(task)
