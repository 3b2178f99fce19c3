import pytest
from tiny_data_sets import refused, write_wikitext2

from acutance.lab.data import CORPORA, load_corpus


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


@pytest.mark.parametrize("harm", [None, b"", b"\xff\xfe broken"])
def test_missing_and_damaged_files_are_named(harm, tmp_path):
    path = sorted(write_wikitext2(tmp_path).iterdir())[-1]
    path.unlink()
    if harm is not None:
        path.write_bytes(harm)
    with refused("not there" if harm is None else "is damaged", path):
        load_corpus("wikitext-2", tmp_path)


def test_unknown_corpora_and_missing_folders_say_what_to_do(tmp_path):
    with refused(r"looked for .*; expected .*https://", tmp_path):
        load_corpus("wikitext-103", tmp_path)
    with refused("wikitext-103, wikitext-2"):
        load_corpus("text8", tmp_path)
    with refused("--data-dir"):
        load_corpus("wikitext-2", None)
