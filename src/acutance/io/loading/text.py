"""Text files, cut into windows of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from acutance.errors import AcutanceError
from acutance.io.loading.batches import Batches

PIECE = 1 << 20  # characters tokenised at once, to the end of the line: a large file does not fill the memory
SHORTEST = 2  # tokens of text in a window; a single one has nothing to be compared with

Window = NDArray[np.int64]


class TextBatches(Batches):
    """Windows of text as `input_ids` and masks."""

    def __init__(
        self,
        windows: Sequence[Window],
        batch: int,
        description: str,
        *,
        special: tuple[Window, Window],
        pad: int,
        decoder_start: int | None,
    ) -> None:
        super().__init__(windows, batch, description)
        self._special, self._pad, self._decoder_start = special, pad, decoder_start

    def make(self, samples: Sequence[Window]) -> dict[str, Tensor]:
        """Special tokens around every window, then padding on the right."""
        before, after = self._special
        ids = _padded([np.concatenate([before, text, after]) for text in samples], self._pad)
        mask = _padded([np.ones(len(before) + len(text) + len(after), dtype=np.int64) for text in samples], 0)
        special = [np.r_[np.ones_like(before), np.zeros_like(text), np.ones_like(after)] for text in samples]
        batch = {"input_ids": ids, "attention_mask": mask, "special_tokens_mask": _padded(special, 1)}
        if self._decoder_start is not None:  # the decoder reads the same text, shifted by one, as in training
            first = torch.full_like(ids[:, :1], self._decoder_start)
            batch["decoder_input_ids"] = torch.cat([first, ids[:, :-1]], dim=1)
            batch["decoder_attention_mask"] = mask
        return batch


def text_batches(
    path: str | Path,
    tokenizer: Any,
    *,
    tokens: int,
    batch: int = 8,
    limit: int | None = None,
    decoder_start: int | None = None,
) -> TextBatches:
    """Cut text into windows of `tokens` tokens, special tokens included, and batch them.

    Windows never cross from one file into the next. The rest at a file's end makes a shorter window; where lengths in
    a batch differ, the shorter ones are padded on the right and masked.

    Args:
        path: a UTF-8 text file, or a folder searched for `.txt` files, which are taken in the order of their paths.
        tokenizer: of transformers.
        tokens: the length of a window.
        batch: windows per batch.
        limit: stop after this many windows.
        decoder_start: the token that a decoder starts from; then `decoder_input_ids` are made too.
    """
    files = text_files(Path(path))
    special = _special_tokens(tokenizer)
    room = tokens - sum(map(len, special))
    if room < SHORTEST:
        added = tokens - room
        raise AcutanceError(
            f"windows of {tokens} tokens hold {max(room, 0)} of text beside {added} special tokens, and {SHORTEST} are "
            f"the fewest that can be compared: take --tokens {SHORTEST + added} or more"
        )
    cut = (window for file in files for window in _windows(_token_pieces(file, tokenizer), room))
    windows = list(islice(cut, limit))
    if not windows:
        raise AcutanceError(f"{path} holds no text to read")
    name = Path(path).resolve().name
    description = f"{len(windows)} windows of {tokens} tokens from {name}"
    pad = tokenizer.pad_token_id or 0
    return TextBatches(windows, batch, description, special=special, pad=pad, decoder_start=decoder_start)


def text_files(path: Path) -> list[Path]:
    """The file itself, or the `.txt` files of a folder and its subfolders, in the order of their paths."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise AcutanceError(f"there is no text file or folder {path}")
    found = sorted(file for file in path.rglob("*.txt") if file.is_file())
    if not found:
        raise AcutanceError(f"there is no .txt file in {path} or its subfolders")
    return found


def _token_pieces(file: Path, tokenizer: Any) -> Iterator[Window]:
    try:
        with file.open(encoding="utf-8") as text:
            while lines := text.readlines(PIECE):
                ids = tokenizer("".join(lines), add_special_tokens=False, verbose=False)["input_ids"]
                yield np.asarray(ids, dtype=np.int64)
    except (OSError, UnicodeDecodeError) as error:
        raise AcutanceError(f"{file} cannot be read as UTF-8 text: {error}") from error


def _windows(pieces: Iterator[Window], room: int) -> Iterator[Window]:
    rest = np.empty(0, dtype=np.int64)
    for piece in pieces:
        ids = np.concatenate([rest, piece])
        whole = len(ids) // room * room
        yield from ids[:whole].reshape(-1, room)
        rest = ids[whole:]
    if len(rest) >= SHORTEST:
        yield rest


def _padded(rows: Sequence[Window], value: int) -> Tensor:
    return pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True, padding_value=value)


def _special_tokens(tokenizer: Any) -> tuple[Window, Window]:
    """What the tokenizer puts before and after a text."""
    plain = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    full = list(tokenizer("a")["input_ids"])
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            before, after = full[:start], full[start + len(plain) :]
            return np.array(before, dtype=np.int64), np.array(after, dtype=np.int64)
    raise AcutanceError(f"{type(tokenizer).__name__} changes the text when it adds its special tokens")
