"""The models of a row: a run for each seed, or a pretrained one with data of its own kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from acutance.errors import AcutanceError, NonFiniteError
from acutance.lab.reproduce.target import Row

if TYPE_CHECKING:
    from acutance.io.loading import LoadedModel
    from acutance.lab.reproduce.session import Session

T = TypeVar("T")
Inputs = Iterable[Any] | None
TEXTS = ("wikitext-103/wiki.test.tokens", "wikitext-2/wiki.test.tokens")  # the first that is there


def read_models(
    session: Session, row: Row, split: str | None, read: Callable[[nn.Module, Inputs], T]
) -> tuple[dict[int, T], str]:
    """What `read` finds in each of a row's models, by seed (a pretrained model's is 0), and why some are missing.

    Args:
        session: the target's.
        row: the row.
        split: where samples are taken from; None takes none.
        read: called with a model and its samples.
    """
    if row.model is None:
        seeds = session.ready(row)
        inputs = session.inputs(row, split) if seeds and split is not None else None
        found, notes = {}, [words] if (words := session.why_missing(row)) else []
        for seed in seeds:
            try:
                found[seed] = read(session.model(row, seed), inputs)
            except NonFiniteError:  # a loss on training data that is a number promises none on others
                notes.append(f"seed {seed} cannot be read: its tokens hold NaN or infinity")
        return found, ", ".join(notes)
    if session.scale == "tiny":
        return {}, "pretrained models are left out at this scale"
    from acutance.io.loading import load_model

    try:
        loaded = load_model(row.model, device=session.device)
        return {0: read(loaded.model, None if split is None else _inputs(session, loaded))}, ""
    except AcutanceError as error:  # a library, a download or data that is missing costs one line, not the table
        return {}, str(error)


def _inputs(session: Session, loaded: LoadedModel) -> Iterable[Any]:
    """The first images of ImageNet's val/, or windows of WikiText's test text."""
    if session.data_dir is None:
        raise AcutanceError("images and text are read from a folder: name it with --data-dir")
    if loaded.tokenizer is not None:
        return loaded.text_batches(_text(session.data_dir), limit=session.samples)
    within = session.data_dir / "imagenet"
    root = within if within.is_dir() else session.data_dir
    return loaded.image_batches(root / "val", limit=session.samples)


def _text(data_dir: Path) -> Path:
    for name in TEXTS:
        if (data_dir / name).is_file():
            return data_dir / name
    raise AcutanceError(f"text is read from {' or '.join(TEXTS)} in {data_dir}; neither is there")
