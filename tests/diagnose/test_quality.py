"""Quality against formulas written out token by token, in float64, and its intervals against scipy's."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn import functional as F

import acutance as ac
from acutance.diagnose.quality import Quality, labels_of, masked, measure_quality, objective_of
from acutance.errors import AcutanceError, NonFiniteError
from acutance.io import load_model
from acutance.measure.intervals import student
from tiny_folders import DECLARATION, save_bert, tiny

RANDOM = np.random.default_rng(0)


def quality(values, weights=None, name="loss", higher=False):
    return Quality(name, higher, tuple(map(float, values)), tuple(map(float, weights or np.ones(len(values)))))


@pytest.mark.parametrize("freedom", [1, 2, 3, 10, 63, 1000, 50_000])
@pytest.mark.parametrize("level", [0.95, 1 - 0.05 / 20])
def test_students_interval_is_scipys(level, freedom):
    assert student(freedom, level) == pytest.approx(stats.t.ppf((1 + level) / 2, freedom), rel=1e-4)


def test_intervals_are_students_and_paired_ones_are_narrower():
    before, after = RANDOM.normal(3, 1, 40), None
    after = before + RANDOM.normal(0.2, 0.1, 40)
    first, second = quality(before), quality(after)
    expected = stats.t.interval(0.95, 39, before.mean(), stats.sem(before))
    assert first.interval() == pytest.approx(expected, rel=1e-4)
    change, differences = first.change(second), after - before
    assert (change.low, change.high) == pytest.approx(
        stats.t.interval(0.95, 39, differences.mean(), stats.sem(differences)), rel=1e-4
    )
    assert change.high - change.low < 0.3 * (expected[1] - expected[0])
    assert (change.verdict, second.change(first).verdict, first.change(first).verdict) == (
        "worse", "better", "no clear change",
    )  # fmt: skip
    assert quality(before, higher=True).change(quality(after, higher=True)).verdict == "better"
    assert math.isnan(quality([1.0]).interval()[0])
    assert quality([1.0]).change(quality([2.0])).verdict == "no clear change"
    with pytest.raises(AcutanceError, match=r"loss of 40 samples and loss of 39 samples are not paired"):
        first.change(quality(after[1:]))


def test_the_interval_of_a_weighted_mean_holds_the_truth_in_95_percent():
    held = 0
    for _ in range(1000):  # long samples are easier here: the weights matter
        weights = RANDOM.integers(5, 60, 30).astype(float)
        values = 4 - weights / 60 + RANDOM.normal(0, 1, 30)
        low, high = quality(values, [*weights]).interval()
        lengths = np.arange(5, 60)
        held += low < 4 - (lengths**2).sum() / lengths.sum() / 60 < high
    assert 925 <= held <= 970


def test_hits_are_counted_as_agresti_says():
    right, wrong = quality([100] * 9 + [0], name="accuracy", higher=True), None
    low, high = right.interval()
    p, z = 11 / 14, stats.t.ppf(0.975, 9) * math.sqrt(10 / 9)
    assert (low, high) == pytest.approx([100 * (p + s * z * math.sqrt(p * (1 - p) / 14)) for s in (-1, 1)], rel=1e-4)
    low, high = quality([100] * 36, name="accuracy", higher=True).interval()
    assert low < 95 < 100  # not 100 ± 0
    wrong = quality([0] * 3 + [100] * 7, name="accuracy", higher=True)
    change, n = right.change(wrong), 12  # three for the worse, one for the better, half a one added to each kind
    middle, error = (1.5 - 3.5) / n, math.sqrt((1.5 + 3.5) / n - ((1.5 - 3.5) / n) ** 2) / math.sqrt(n)
    assert change.value == -20
    expected = [100 * (middle + sign * z * error) for sign in (-1, 1)]
    assert (change.low, change.high) == pytest.approx(expected, rel=1e-4)


def test_perplexity_is_the_exponential_of_the_mean_and_changes_by_a_factor():
    first, second = (quality(x, [2, 3], "perplexity") for x in ([1, 2], [2, 4]))
    assert first.mean == pytest.approx(math.exp(8 / 5))
    assert first.change(second).value == pytest.approx(second.mean / first.mean)
    assert "perplexity 4.953 → 24.53, ×4.953" in first.to(second)
    assert quality([800], name="perplexity").mean == math.inf


def next_token_losses(logits, ids, counts):
    """(sum, number) of −log p per sample, token by token; `counts[b][t]` says whether token t is one to predict."""
    found = []
    for scores, tokens, wanted in zip(logits.double(), ids, counts, strict=True):
        losses = [-(scores[t - 1] - scores[t - 1].exp().sum().log())[tokens[t]].item()
                  for t in range(1, len(tokens)) if wanted[t]]  # fmt: skip
        found.append((sum(losses), len(losses)))
    return found


@pytest.mark.parametrize("side", ["left", "right", "labels"])
def test_perplexity_counts_tokens_that_follow_text(side):
    model = tiny("llama", "AutoModelForCausalLM", vocab_size=40)
    ids = torch.randint(0, 40, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    mask[2, 3:] = 0
    mask = mask.flip(1) if side == "left" else mask
    batch, counts = {"input_ids": ids, "attention_mask": mask}, mask.bool() & mask.roll(1, 1).bool()
    if side == "labels":
        batch["labels"] = ids.masked_fill((ids % 5 == 0) | (mask == 0), -100)
        counts &= ids % 5 != 0
    with torch.no_grad():
        expected = next_token_losses(model(input_ids=ids, attention_mask=mask).logits, ids, counts.tolist())
    perplexity, loss = measure_quality(model, [batch, batch])
    assert perplexity.values == loss.values == pytest.approx([s / n for s, n in expected] * 2, rel=1e-5)
    assert perplexity.weights == tuple(n for _, n in expected) * 2
    total = sum(s for s, _ in expected) / sum(n for _, n in expected)
    assert (perplexity.mean, loss.mean) == pytest.approx((math.exp(total), total), rel=1e-5)
    assert not perplexity.higher_is_better


class Bigram(nn.Module):
    """A language model as people write them; it may see the future."""

    def __init__(self, words=11, future=False):
        super().__init__()
        self.embed, self.future = nn.Embedding(words, words), future

    def forward(self, ids):
        scores = self.embed(ids)
        return scores + scores.mean(1, keepdim=True) if self.future else scores


class Worded(nn.Module):
    """A model as transformers has them: arguments by name, scores by name."""

    def __init__(self, inside):
        super().__init__()
        self.inside = Worded.inside = inside

    def forward(self, input_ids, labels=None):
        return SimpleNamespace(logits=self.inside(input_ids))


def test_what_sees_the_future_has_no_perplexity():
    ids = torch.randint(0, 11, (2, 6))
    scores = Bigram()
    assert measure_quality(scores, [ids])[0].values == pytest.approx(
        [s / n for s, n in next_token_losses(scores(ids).detach(), ids, [[True] * 6] * 2)], rel=1e-5
    )
    assert measure_quality(Bigram(future=True), [ids]) == []
    assert measure_quality(nn.Sequential(nn.Embedding(11, 4)), [ids]) == []  # features are no scores


def test_our_language_model_and_its_own_loss_agree():
    torch.manual_seed(0)
    sizes = {"vocabulary": 50, "dim": 8, "depth": 2, "heads": 2, "hidden": 8, "cutoffs": (10, 20)}
    model, words = ac.models.LanguageModel(**sizes).eval(), torch.randint(0, 50, (3, 7))
    with torch.no_grad():
        logits = model.log_probabilities(words[:, :-1])
    expected = [s / n for s, n in next_token_losses(logits, words, [[True] * 7] * 3)]
    assert measure_quality(model, [words])[0].values == pytest.approx(expected, rel=1e-5)


def test_masked_tokens_are_few_seeded_and_text(tmp_path):
    save_bert(tmp_path)
    loaded = load_model(f"hf:{tmp_path}", head=True)
    batches = loaded.text_batches(DECLARATION, tokens=30, batch=4, limit=10)
    assert measure_quality(loaded.model, batches) == []  # nobody knows its mask token
    batches = type(batches)(batches.samples, 4, "", batches.make, mask_token=1)
    (found,) = measure_quality(loaded.model, batches)
    assert (found.name, len(found.values)) == ("masked-token loss", 10)
    assert found == measure_quality(loaded.model, batches)[0]
    expected = []
    for number, batch in enumerate(batches[1:]):
        ids, content = batch["input_ids"], batch["attention_mask"].bool() & ~batch["special_tokens_mask"].bool()
        chosen = masked(content, number + 1)
        assert not (chosen & ~content).any()
        assert chosen.sum(1).tolist() == [round(0.15 * int(n)) for n in content.sum(1)]
        assert not torch.equal(chosen, masked(content, number))
        with torch.no_grad():
            logits = loaded.model(torch.where(chosen, 1, ids), batch["attention_mask"]).logits.double()
        expected += [
            F.cross_entropy(scores[at], row[at]).item() for scores, row, at in zip(logits, ids, chosen, strict=True)
        ]
    assert found.values[4:] == pytest.approx(expected, rel=1e-5)
    assert masked(torch.tensor([[True, True], [False, False]]), 0).sum(1).tolist() == [1, 0]


def test_classes_of_images_and_of_pixels():
    torch.manual_seed(0)
    images, labels = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    classifier = nn.Linear(4, 3)
    accuracy, entropy = measure_quality(classifier, [(images[:3], labels[:3]), [images[3:], labels[3:]]])
    log = classifier(images).double().log_softmax(1)
    assert accuracy.values == tuple(100.0 * (log.argmax(1) == labels))
    assert entropy.values == pytest.approx([-log[i, label].item() for i, label in enumerate(labels)], rel=1e-5)
    assert (accuracy.higher_is_better, entropy.higher_is_better) == (True, False)
    assert objective_of(classifier, [(images, labels)], "cross-entropy").names == ("cross-entropy", "accuracy")
    pixels = torch.randint(0, 3, (2, 5, 5))
    pixels[0, :4] = -100
    accuracy, _ = measure_quality(nn.Conv2d(1, 3, 1), [(torch.randn(2, 1, 5, 5), pixels)])
    assert accuracy.weights == (5.0, 25.0)  # pixels that count
    words = {"input_ids": torch.randint(0, 11, (2, 6)), "labels": torch.tensor([[0, -100, 1, 2, 10, 1]] * 2)}
    accuracy, entropy = measure_quality(Worded(Bigram(future=True)), [words])  # each token has a label of its own
    log = Bigram.forward(Worded.inside, words["input_ids"]).double().log_softmax(2)
    right = [0, 2, 3, 4, 5]
    assert accuracy.weights == (5.0, 5.0)
    assert entropy.values == pytest.approx(
        [-log[b, right].gather(1, words["labels"][b, right, None]).mean().item() for b in (0, 1)], rel=1e-5
    )
    assert measure_quality(nn.Linear(4, 2), [(images, labels)]) == []  # a label that the model does not have
    assert measure_quality(classifier, [images]) == []
    assert labels_of((images, torch.rand(5))) is None
    with pytest.raises(NonFiniteError, match="cross-entropy is not finite"):
        measure_quality(classifier, [(images * math.nan, labels)])


def small(model, batch):
    """Minus the largest output of each sample."""
    return -model(batch[0]).amax(1)


def test_a_users_function_and_the_models_own_loss():
    images, model = torch.randn(6, 4), nn.Linear(4, 3)
    (found,) = measure_quality(model, [(images,)], small)
    assert (found.name, found.higher_is_better, len(found.values)) == ("small", True, 6)
    small.higher_is_better = False
    assert not measure_quality(model, [(images,)], small)[0].higher_is_better

    class Own(nn.Linear):
        def forward(self, x):
            return SimpleNamespace(loss=super().forward(x).square().mean())

    (own,) = measure_quality(Own(4, 3), [images[:4], images[4:]])
    assert (own.name, len(own.values)) == ("loss", 2)
    for name, said in {
        "no.such:thing": "is no module:function",
        "bleu": "'bleu' cannot be measured here: none can",
    }.items():
        with pytest.raises(AcutanceError, match=said):
            measure_quality(model, [(images,)], name)


def test_a_comparison_of_models_says_how_their_quality_differs():
    data = [(torch.randn(6, 3, 8, 8), torch.randint(5, (6,))) for _ in range(2)]
    torch.manual_seed(0)
    sizes = {"image_size": 8, "patch_size": 4, "dim": 12, "depth": 2, "heads": 3, "num_classes": 5}
    one, other = (ac.models.ViT(**sizes).eval() for _ in range(2))
    how = {"metrics": ["token_cosine"], "progress": False}
    found = ac.compare(one, other, batches=data, **how)
    pairs = zip(*(measure_quality(model, data) for model in (one, other)), strict=True)
    lines = [f"ViT (2): {a.to(b)}: {a.change(b).verdict}" for a, b in pairs]
    assert found.context["quality"] == lines
    assert all(line in found.headline for line in lines)
    unlabelled = ac.compare(
        one, other, batches=[images for images, _ in data], metrics=["token_cosine"], progress=False
    )
    assert "quality not measured" in unlabelled.headline
