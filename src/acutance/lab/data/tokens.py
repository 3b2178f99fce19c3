"""Word-level text: WikiText-103, WikiText-2 and the Penn Treebank as token files, counted as the public code counts.

Each line is split at white space and ends in <eos>, empty lines too. <eos> is number 0; the other words follow by their
frequency in the training file, ties in the order of appearance, as adaptive softmax wants them; words that only the
other files have come last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from acutance.errors import AcutanceError
from acutance.lab.data.source import Source

END = "<eos>"


@dataclass(frozen=True)
class Corpus:
    """A text in numbers; a number's word is `vocabulary[number]`."""

    name: str
    train: Tensor  # int64, one dimension
    valid: Tensor
    test: Tensor
    vocabulary: tuple[str, ...]


@dataclass(frozen=True)
class _Files:
    folder: str
    train: str
    valid: str
    test: str
    source: Source


def _wikitext(number: int) -> _Files:
    folder = f"wikitext-{number}"
    layout = f"{folder}/ with wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens"
    get = (
        f"Get https://wikitext.smerity.com/{folder}-v1.zip (the word-level files, not the raw ones) and unpack it there"
    )
    return _Files(
        folder,
        "wiki.train.tokens",
        "wiki.valid.tokens",
        "wiki.test.tokens",
        Source(f"WikiText-{number}", layout, get),
    )


CORPORA: Mapping[str, _Files] = {
    "wikitext-103": _wikitext(103),
    "wikitext-2": _wikitext(2),
    "ptb": _Files(
        "ptb",
        "ptb.train.txt",
        "ptb.valid.txt",
        "ptb.test.txt",
        Source(
            "Penn Treebank",
            "ptb/ with ptb.train.txt, ptb.valid.txt and ptb.test.txt",
            "They are in simple-examples/data of https://www.fit.vut.cz/person/imikolov/public/rnnlm/simple-examples.tgz",
        ),
    ),
}


def load_corpus(name: str, data_dir: Path | str | None) -> Corpus:
    """A corpus by its name, one of `CORPORA`, from the folder in which it has its usual layout."""
    paths = corpus_files(name, data_dir)
    source = CORPORA[name].source
    vocabulary = _vocabulary(paths, source)
    number = {word: i for i, word in enumerate(vocabulary)}
    train, valid, test = (_encode(path, source, number) for path in paths)
    return Corpus(name, train, valid, test, tuple(vocabulary))


def corpus_files(name: str, data_dir: Path | str | None) -> list[Path]:
    """The files of a corpus for training, validation and test; all of them are there."""
    if name not in CORPORA:
        raise AcutanceError(f"no corpus {name!r}; there are {', '.join(sorted(CORPORA))}")
    if data_dir is None:
        raise AcutanceError(f"{name} is read from a folder: name it with --data-dir (data_dir=)")
    files = CORPORA[name]
    folder = files.source.folder(Path(data_dir) / files.folder)
    paths = [folder / file for file in (files.train, files.valid, files.test)]
    for path in paths:
        if not path.is_file():
            raise files.source.missing(path)
    return paths


def _vocabulary(paths: list[Path], source: Source) -> dict[str, None]:
    """All words in the order of their numbers; a dict, because it keeps order and drops repetitions."""
    vocabulary = {END: None}
    for path in paths:
        counts: Counter[str] = Counter()
        for words in _lines(path, source):
            counts.update(words)
        if not counts:
            raise source.damaged(path, "it holds no words")
        vocabulary.update(dict.fromkeys(word for word, _ in counts.most_common()))
    return vocabulary


def _encode(path: Path, source: Source, number: Mapping[str, int]) -> Tensor:
    numbers = (number[word] for words in _lines(path, source) for word in (*words, END))
    return torch.from_numpy(np.fromiter(numbers, dtype=np.int64))


def _lines(path: Path, source: Source) -> Iterator[list[str]]:
    """The words of each line. WikiText-103's training file is half a gigabyte, hence line by line."""
    try:
        # Only a line feed ends a line, as where bytes are counted: no carriage return does.
        with path.open(encoding="utf-8", newline="\n") as file:
            for line in file:
                yield line.split()
    except FileNotFoundError as error:
        raise source.missing(path) from error
    except (OSError, UnicodeDecodeError) as error:
        raise source.damaged(path, error) from error
