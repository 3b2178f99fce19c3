"""Word-level text: WikiText-103 and WikiText-2 as token files, counted as the public code counts.

Each line, also an empty one, is split at white space and ends in <eos>. <eos> is number 0. The other words follow by
their frequency in the training file, as adaptive softmax needs them. Words found only in the other files come last.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from acutance.lab.data.source import Source, data_folder

CORPORA = ("wikitext-103", "wikitext-2")
END = "<eos>"


@dataclass(frozen=True)
class Corpus:
    """A text as numbers; `vocabulary[number]` is the word."""

    name: str
    train: Tensor  # int64, one dimension
    valid: Tensor
    test: Tensor
    vocabulary: tuple[str, ...]


def load_corpus(name: str, data_dir: Path | str | None) -> Corpus:
    """A corpus by its name, one of `CORPORA`, from the folder in which it has its usual layout."""
    vocabulary = {END: None}  # a dict keeps order and drops repetitions
    paths = corpus_files(name, data_dir)
    for path in paths:
        counts: Counter[str] = Counter()
        for words in _lines(path, name):
            counts.update(words)
        if not counts:
            raise _source(name).damaged(path, "it holds no words")
        vocabulary.update(dict.fromkeys(word for word, _ in counts.most_common()))  # ties in the order of appearance
    number = {word: i for i, word in enumerate(vocabulary)}
    numbers = ((number[word] for words in _lines(path, name) for word in (*words, END)) for path in paths)
    train, valid, test = (torch.from_numpy(np.fromiter(part, dtype=np.int64)) for part in numbers)
    return Corpus(name, train, valid, test, tuple(vocabulary))


def corpus_files(name: str, data_dir: Path | str | None) -> list[Path]:
    """The files of a corpus for training, validation and test. A missing one is refused."""
    source = _source(name)
    folder = source.folder(data_folder("corpus", name, CORPORA, data_dir) / name)
    paths = [folder / f"wiki.{part}.tokens" for part in ("train", "valid", "test")]
    for path in paths:
        if not path.is_file():
            raise source.missing(path)
    return paths


def _source(name: str) -> Source:
    layout = f"{name}/ with wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens"
    get = f"Get https://wikitext.smerity.com/{name}-v1.zip (the word-level files, not the raw ones) and unpack it there"
    return Source(name.replace("wikitext", "WikiText"), layout, get)


def _lines(path: Path, name: str) -> Iterator[list[str]]:
    """The words of each line. WikiText-103's training file is half a gigabyte, hence line by line."""
    # A carriage return does not end a line.
    with _source(name).reading(path, UnicodeDecodeError), path.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            yield line.split()
