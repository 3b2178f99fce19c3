from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_data_sets import write_ptb, write_wikitext2

from acutance.errors import AcutanceError
from acutance.lab.data import CORPORA, load_corpus

WRITERS: dict[str, Callable[[Path], Path]] = {"wikitext-2": write_wikitext2, "ptb": write_ptb}


def test_words_are_counted_as_the_public_code_counts(tmp_path: Path) -> None:
    write_wikitext2(tmp_path)
    corpus = load_corpus("wikitext-2", tmp_path)
    # By frequency in train, ties as they appear; what only valid has comes last.
    assert corpus.vocabulary == ("<eos>", "a", "=", "b", "A", "title", "<unk>", "new")
    words = [corpus.vocabulary[i] for i in corpus.train.tolist()]
    assert words == ["<eos>", "=", "A", "title", "=", "<eos>", "<eos>", "a", "b", "a", "<unk>", "b", "a", "<eos>"]
    assert [corpus.vocabulary[i] for i in corpus.valid.tolist()] == ["a", "b", "<eos>", "new", "<eos>"]
    assert [corpus.vocabulary[i] for i in corpus.test.tolist()] == ["b", "<eos>"]


def test_ptb_is_read(tmp_path: Path) -> None:
    write_ptb(tmp_path)
    corpus = load_corpus("ptb", tmp_path)
    assert corpus.vocabulary == ("<eos>", "the", "cat", "sat", "N")
    assert corpus.train.tolist() == [1, 2, 3, 0, 1, 4, 0]


def test_wikitext_103_has_the_same_layout(tmp_path: Path) -> None:
    write_wikitext2(tmp_path).rename(tmp_path / "wikitext-103")
    assert len(load_corpus("wikitext-103", tmp_path).train) == 14


@pytest.mark.parametrize("name", CORPORA)
def test_missing_folders_say_where_what_and_how(name: str, tmp_path: Path) -> None:
    with pytest.raises(AcutanceError, match=r"looked for .*; expected .*https://") as caught:
        load_corpus(name, tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("harm", [None, b"", b"\xff\xfe broken"])
def test_missing_and_damaged_files_are_named(name: str, harm: bytes | None, tmp_path: Path) -> None:
    path = sorted(WRITERS[name](tmp_path).iterdir())[-1]
    path.unlink()
    if harm is not None:
        path.write_bytes(harm)
    with pytest.raises(AcutanceError, match="not there" if harm is None else "is damaged") as caught:
        load_corpus(name, tmp_path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_corpora_list_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(AcutanceError, match="ptb, wikitext-103, wikitext-2"):
        load_corpus("text8", tmp_path)
    with pytest.raises(AcutanceError, match="--data-dir"):
        load_corpus("ptb", None)
