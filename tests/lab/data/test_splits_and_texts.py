import itertools

import pytest
import torch
from tiny_data_sets import write_wikitext2

from acutance.errors import AcutanceError
from acutance.lab.data import CORPORA, fraction, held_out, load_corpus
from acutance.lab.data.seeds import generator, mixed_seed

LABELS = torch.randint(7, (400,), generator=torch.Generator().manual_seed(0))
BY_CLASS = [(label == LABELS).nonzero()[:, 0] for label in range(7)]


def test_the_held_out_slice_is_every_tenth_of_each_class():
    for of_class in BY_CLASS:
        assert of_class[9::10].tolist() == of_class[held_out(LABELS)[of_class]].tolist()


def test_fractions_are_balanced_nested_and_the_first_of_each_class():
    parts = {share: fraction(LABELS, share) for share in (0.1, 0.5, 1.0)}
    assert parts[1.0].tolist() == list(range(400))
    assert set(parts[0.1].tolist()) < set(parts[0.5].tolist())
    for share, indices in parts.items():
        for label, of_class in enumerate(BY_CLASS):
            size = -(-len(of_class) * round(10 * share) // 10)
            assert indices[LABELS[indices] == label].tolist() == of_class[:size].tolist()
    # 0.1 as a binary number is a little over a tenth: its ceiling would be one too many.
    assert len(fraction(torch.zeros(500, dtype=torch.long), 0.1)) == 50
    for impossible in (0.0, -0.5, 1.5):
        with pytest.raises(AcutanceError, match=r"\(0, 1\]"):
            fraction(LABELS, impossible)


def test_seeds_are_a_function_of_all_the_numbers_and_their_order():
    numbers = [part for length in range(4) for part in itertools.product((-1, 0, 1, 2**40), repeat=length)]
    seeds = {mixed_seed(*part) for part in numbers}
    assert len(seeds) == len(numbers)
    assert mixed_seed(3, 4) == mixed_seed(3, 4)
    assert all(0 <= seed < 2**63 for seed in seeds)
    first, same, other = (torch.rand(5, generator=generator("cpu", 7, step)) for step in (100, 100, 101))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("name", CORPORA)
def test_words_are_counted_as_the_public_code_counts(tmp_path, name):
    write_wikitext2(tmp_path).rename(tmp_path / name)
    corpus = load_corpus(name, tmp_path)
    # By frequency in train, ties as they appear; what only valid has comes last.
    assert corpus.vocabulary == ("<eos>", "a", "=", "b", "A", "title", "<unk>", "new")
    train, valid, test = (
        [corpus.vocabulary[i] for i in part.tolist()] for part in (corpus.train, corpus.valid, corpus.test)
    )
    assert train == ["<eos>", "=", "A", "title", "=", "<eos>", "<eos>", "a", "b", "a", "<unk>", "b", "a", "<eos>"]
    assert valid == ["a", "b", "<eos>", "new", "<eos>"]
    assert test == ["b", "<eos>"]
