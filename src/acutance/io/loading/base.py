"""A loaded model, seen the same way whatever library it comes from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from torch import Tensor, nn

from acutance.errors import AcutanceError
from acutance.io.loading.images import ImageBatches, image_batches
from acutance.io.loading.text import TextBatches, text_batches

if TYPE_CHECKING:
    from PIL import Image

DEFAULT_TOKENS = 512  # the window where the model's context would allow more: long contexts are for who asks for them

Preprocess = Callable[[Sequence["Image.Image"]], Any]  # images to a batch that the model takes


class OwnData(NamedTuple):
    """What a model is tested on: its name, and so many samples in the form the model takes, from where it lies now."""

    name: str
    read: Callable[[int, Path | None], Tensor]


@dataclass(frozen=True)
class LoadedModel:
    """A model with what is needed to feed it; tokenizer and preprocessing are read when they are first asked for."""

    name: str  # as the user wrote it
    model: nn.Module
    tokenizer: Callable[[], Any] | None = None  # None: it does not read text
    preprocess: Callable[[], Preprocess] | None = None  # None: it does not read images
    context: int | None = None  # the most tokens it takes; None: not limited
    decoder_start: int | None = None  # the token a decoder starts from, in models with an encoder and a decoder
    on_digits: bool = False  # it takes the embedded digits
    own: OwnData | None = None  # of a run: the test data of what it was trained on

    def text_batches(
        self, path: str | Path, *, tokens: int | None = None, batch: int = 8, limit: int | None = None
    ) -> TextBatches:
        """Windows of a text file, or of a folder of them, in batches.

        Args:
            path: a UTF-8 text file, or a folder searched for `.txt` files.
            tokens: the length of a window, special tokens included; the model's context by default, 512 at most.
            batch: windows per batch.
            limit: stop after this many windows.
        """
        if self.tokenizer is None:
            raise AcutanceError(f"{self.name} does not read text: give it images (--images DIR)")
        if tokens is not None and self.context is not None and tokens > self.context:
            raise AcutanceError(f"windows of {tokens} tokens are longer than {self.name} takes: {self.context} at most")
        tokenizer = self.tokenizer()
        if tokens is None:
            tokens = min(DEFAULT_TOKENS, self.context or DEFAULT_TOKENS, tokenizer.model_max_length)
        return text_batches(path, tokenizer, tokens=tokens, batch=batch, limit=limit, decoder_start=self.decoder_start)

    def image_batches(self, folder: str | Path, *, batch: int = 32, limit: int | None = None) -> ImageBatches:
        """The images of a folder tree, prepared as the model was trained to see them, in batches.

        Args:
            folder: searched with all its subfolders; images are taken in the order of their paths.
            batch: images per batch.
            limit: stop after this many images.
        """
        if self.preprocess is None:
            raise AcutanceError(f"{self.name} does not read images: give it text (--text FILE)")
        dtype = next(self.model.parameters()).dtype
        return image_batches(folder, self.preprocess(), batch=batch, limit=limit, dtype=dtype)

    def save_inputs(self, folder: Path, *, text: bool) -> None:
        """Write the tokenizer, or the image processor, beside a model of transformers saved there."""
        maker = self.tokenizer if text else self.preprocess
        if maker is not None:
            cast(Any, maker()).save_pretrained(folder)
