"""Which data a command reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from acutance.errors import AcutanceError
from acutance.io.loading.base import LoadedModel, OwnData
from acutance.io.loading.batches import Batches

BATCH = 64
OWN_SAMPLES = 1000  # of a run's test data, chosen at random, unless more or fewer are asked for


class TensorBatches(Batches):
    """Samples that are there already: the embedded digits, or what a run is tested on."""

    def make(self, samples: Sequence[Tensor]) -> Tensor:
        """They as one tensor."""
        return torch.stack(list(samples))


def batches_for(
    loaded: LoadedModel,
    *,
    text: Path | None = None,
    images: Path | None = None,
    tokens: int | None = None,
    batch: int | None = None,
    limit: int | None = None,
    data_dir: Path | None = None,
) -> Batches:
    """What the options of a command ask for; by default a run's own test data, and the embedded digits for others.

    Args:
        loaded: the model that is going to be fed.
        text: a text file or a folder of them.
        images: a folder of images.
        tokens: the length of a window of text.
        batch: samples per batch; each kind of data has its own default.
        limit: the most samples.
        data_dir: where a run's own data lies, if not where it was.
    """
    size = {} if batch is None else {"batch": batch}
    if text is not None and images is not None:
        raise AcutanceError("--text and --images cannot be read at once: choose one")
    if data_dir is not None and (loaded.own is None or (text, images) != (None, None)):
        raise AcutanceError(f"--data-dir says where a run's own data lies, which {loaded.name} is not to read")
    if text is not None:
        return loaded.text_batches(text, tokens=tokens, limit=limit, **size)
    if tokens is not None:
        raise AcutanceError("--tokens is the length of a window of text: it needs --text FILE")
    if images is not None:
        return loaded.image_batches(images, limit=limit, **size)
    dtype = next(loaded.model.parameters()).dtype
    if loaded.own is not None:
        return _own(loaded.own, data_dir, dtype, batch or BATCH, limit or OWN_SAMPLES)
    if loaded.on_digits:
        return _digits(dtype, batch or BATCH, limit)
    options = {"--text FILE": loaded.tokenizer, "--images DIR": loaded.preprocess}
    wanted = " or ".join(option for option, reads in options.items() if reads is not None)
    raise AcutanceError(
        f"{loaded.name} does not take the embedded digits: say what it shall read with {wanted or 'Python'}. "
        "From Python, ac.measure(model, batches) takes any data"
    )


def _own(data: OwnData, data_dir: Path | None, dtype: torch.dtype, batch: int, limit: int) -> TensorBatches:
    samples = data.read(limit, data_dir)
    if samples.is_floating_point():
        samples = samples.to(dtype)
    return TensorBatches(samples.unbind(), batch, f"{len(samples)} test samples of {data.name}, as the run has them")


def _digits(dtype: torch.dtype, batch: int, limit: int | None) -> TensorBatches:
    from acutance.lab.data import digits

    images = digits()[1].images[:limit].to(dtype)
    return TensorBatches(images.unbind(), batch, f"{len(images)} test images of the embedded digits")
