"""Which data a command reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from acutance.errors import AcutanceError
from acutance.loading.base import LoadedModel
from acutance.loading.batches import Batches

DIGITS_BATCH = 64


class DigitBatches(Batches):
    """The embedded test digits."""

    def make(self, samples: Sequence[Tensor]) -> Tensor:
        """The images as one tensor."""
        return torch.stack(list(samples))


def batches_for(
    loaded: LoadedModel,
    *,
    text: Path | None = None,
    images: Path | None = None,
    tokens: int | None = None,
    batch: int | None = None,
    limit: int | None = None,
) -> Batches:
    """What the options of a command ask for; by default the embedded digits, for models that take them.

    Args:
        loaded: the model that is going to be fed.
        text: a text file or a folder of them.
        images: a folder of images.
        tokens: the length of a window of text.
        batch: samples per batch; each kind of data has its own default.
        limit: the most samples.
    """
    size = {} if batch is None else {"batch": batch}
    if text is not None and images is not None:
        raise AcutanceError("--text and --images cannot be read at once: choose one")
    if text is not None:
        return loaded.text_batches(text, tokens=tokens, limit=limit, **size)
    if tokens is not None:
        raise AcutanceError("--tokens is the length of a window of text: it needs --text FILE")
    if images is not None:
        return loaded.image_batches(images, limit=limit, **size)
    if loaded.on_digits:
        return _digits(next(loaded.model.parameters()).dtype, batch or DIGITS_BATCH, limit)
    options = {"--text FILE": loaded.tokenizer, "--images DIR": loaded.preprocess}
    wanted = " or ".join(option for option, reads in options.items() if reads is not None)
    raise AcutanceError(
        f"{loaded.name} does not take the embedded digits: say what it shall read with {wanted or 'Python'}. "
        "From Python, ac.measure(model, batches) takes any data"
    )


def _digits(dtype: torch.dtype, batch: int, limit: int | None) -> DigitBatches:
    from acutance.data import digits

    images = digits()[1].images[:limit].to(dtype)
    return DigitBatches(images.unbind(), batch, f"{len(images)} test images of the embedded digits")
