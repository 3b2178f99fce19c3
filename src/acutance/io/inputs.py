"""A loaded model, and the batches of text and images that it is fed with."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module
from torch.nn.utils.rnn import pad_sequence

from acutance.errors import AcutanceError, import_extra
from acutance.measure.walk import map_tensors

DEFAULT_TOKENS = 512  # a window of text, where the model's context would allow more
SHORTEST = 2  # tokens of text in a window; a single one has nothing to be compared with
PIECE = 1 << 20  # characters tokenised at once, to the end of the line: large files do not fill the memory
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # whatever a file is called; EPS would run Ghostscript
LONGEST = 1000  # times as long as wide; with a short side of 256 that is as much as Pillow reads without a warning

Preprocess = Callable[[Sequence[Any]], Any]  # images of Pillow to a batch that the model takes
Window = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Batches(Sequence[Any]):
    """Samples in batches: counted beforehand, made one at a time, always the same."""

    samples: Sequence[Any]
    batch: int
    description: str  # what a profile says it was read on
    make: Callable[[Any], Any]
    mask_token: int | None = None  # what a masked language model reads in place of a token

    def __len__(self) -> int:
        return -(-len(self.samples) // self.batch)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1:  # made one at a time, too
                samples = self.samples[start * self.batch : stop * self.batch]
                return replace(self, samples=samples, description=f"{len(samples)} of {self.description}")
            return [self[i] for i in range(start, stop, step)]
        start = range(len(self))[index] * self.batch
        return self.make(self.samples[start : start + self.batch])


@dataclass(frozen=True)
class LoadedModel:
    """A model with what is needed to feed it; tokenizer and preprocessing are read when they are first asked for."""

    name: str  # as the user wrote it
    model: Module
    tokenizer: Callable[[], Any] | None = None  # None: it does not read text
    preprocess: Preprocess | None = None  # None: it does not read images
    save_inputs: Callable[[Path, bool], None] | None = None  # writes the tokenizer, or the image processor, to a folder
    context: int | None = None  # the most tokens it takes; None: not limited
    decoder_start: int | None = None  # the token a decoder starts from, in models with an encoder and a decoder
    # "own", of a run: the test data of what it was trained on. "digits": the embedded ones, if it takes them. Both are
    # functions of limit, data_dir and batch.
    data: Mapping[str, Callable[..., Batches]] = field(default_factory=dict)

    def text_batches(self, path: str | Path, *, tokens: int | None = None, **how: Any) -> Batches:
        """`text_batches` of a file or folder. Windows have the model's context by default, 512 tokens at most."""
        if self.tokenizer is None:
            raise AcutanceError(f"{self.name} does not read text: give it images (--images DIR)")
        if tokens is not None and self.context is not None and tokens > self.context:
            raise AcutanceError(f"windows of {tokens} tokens are longer than {self.name} takes: {self.context} at most")
        tokenizer = self.tokenizer()
        if tokens is None:
            tokens = min(DEFAULT_TOKENS, self.context or DEFAULT_TOKENS, tokenizer.model_max_length)
        return text_batches(path, tokenizer, tokens=tokens, decoder_start=self.decoder_start, **how)

    def image_batches(self, folder: str | Path, **how: Any) -> Batches:
        """`image_batches` of a folder, prepared as the model was trained to see them."""
        if self.preprocess is None:
            raise AcutanceError(f"{self.name} does not read images: give it text (--text FILE)")
        return image_batches(folder, self.preprocess, dtype=next(self.model.parameters()).dtype, **how)


def text_batches(
    path: str | Path,
    tokenizer: Any,
    *,
    tokens: int,
    batch: int = 8,
    limit: int | None = None,
    decoder_start: int | None = None,
) -> Batches:
    """Cut text into windows of `tokens` tokens, special tokens included, and batch them.

    Windows do not cross files. A file's last window may be shorter; it is padded on the right and masked. The path is
    a UTF-8 file, or a folder whose `.txt` files are read in the order of their paths. With `decoder_start`, the token
    that a decoder starts from, `decoder_input_ids` are made too.
    """
    before, after = _special_tokens(tokenizer)
    room, least = tokens - len(before) - len(after), SHORTEST + len(before) + len(after)
    if room < SHORTEST:
        held = f"hold {max(room, 0)} of text beside {least - SHORTEST} special tokens"
        raise AcutanceError(f"windows of {tokens} tokens {held}, too few to compare: take --tokens {least} or more")
    files = _files(Path(path), (".txt",))
    windows = list(islice((window for file in files for window in _windows(file, tokenizer, room)), limit))
    if not windows:
        raise AcutanceError(f"{path} holds no text to read")

    def make(samples: Sequence[Window]) -> dict[str, Tensor]:
        rows = [torch.from_numpy(np.r_[before, text, after]) for text in samples]
        ids = pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id or 0)
        place, ends = torch.arange(ids.shape[1]), torch.tensor([[len(row)] for row in rows])
        mask, special = (place < ends).long(), ((place < len(before)) | (place >= ends - len(after))).long()
        made = {"input_ids": ids, "attention_mask": mask, "special_tokens_mask": special}
        if decoder_start is not None:  # the decoder reads the same text, shifted by one, as in training
            shifted = torch.cat([torch.full_like(ids[:, :1], decoder_start), ids[:, :-1]], dim=1)
            made |= {"decoder_input_ids": shifted, "decoder_attention_mask": mask}
        return made

    description = f"{len(windows)} windows of {tokens} tokens from {Path(path).resolve().name}"
    return Batches(windows, batch, description, make, getattr(tokenizer, "mask_token_id", None))


def image_batches(
    folder: str | Path,
    preprocess: Preprocess,
    *,
    batch: int = 32,
    limit: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Batches:
    """The images of a folder and its subfolders in batches, in the order of their paths.

    `preprocess` makes what the model takes from a list of RGB images, e.g. `centre_crop(…)`.
    """
    pillow()
    found = _files(Path(folder), SUFFIXES)[:limit]
    description = f"{len(found)} images from {Path(folder).resolve().name}"
    return Batches(found, batch, description, lambda files: of_dtype(preprocess([*map(decode, files)]), dtype))


def of_dtype(made: Any, dtype: torch.dtype) -> Any:
    """A tensor, or those of a mapping, in this dtype unless they hold integers."""
    return map_tensors(made, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def centre_crop(
    size: tuple[int, int], mean: Sequence[float], std: Sequence[float], *, fraction: float = 1.0
) -> Preprocess:
    """Evaluation's preprocessing without torchvision: resize bicubically, crop the middle to `size`, normalise.

    The crop keeps `fraction` of the resized image's side. A mean of one channel makes grey images.
    """
    resampling, (height, width) = pillow().Resampling.BICUBIC, size
    shift, scale = (torch.tensor(list(numbers)).view(-1, 1, 1) for numbers in (mean, std))

    def prepare(image: Any) -> Tensor:
        image = image.convert("RGB" if len(mean) == 3 else "L")
        growth = max(Fraction(math.floor(a / fraction), b) for a, b in ((width, image.width), (height, image.height)))
        image = image.resize((int(growth * image.width), int(growth * image.height)), resampling)
        left, top = round((image.width - width) / 2), round((image.height - height) / 2)
        image = image.crop((left, top, left + width, top + height))
        pixels = torch.from_numpy(np.array(image, dtype=np.float32) / 255).reshape(height, width, len(mean))
        return (pixels.permute(2, 0, 1) - shift) / scale

    return lambda images: torch.stack([prepare(image) for image in images])


def pillow() -> Any:
    """Pillow's `Image` module, or how to get it."""
    return import_extra("PIL.Image", "images are read by Pillow: pip install pillow")


def _files(root: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """The file itself, or the files of a folder and its subfolders, in the order of their paths."""
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise AcutanceError(f"there is no file or folder {root}")
    named = (path for path in root.rglob("*") if path.suffix.lower() in suffixes)
    found = sorted(path for path in named if path.is_file() or not path.exists())  # lost links are refused when read
    if not found:
        raise AcutanceError(f"there is no file to read in {root} or its subfolders; looked for {', '.join(suffixes)}")
    return found


def decode(content: Path | bytes, *, place: Path | str | None = None, colour: bool = True) -> Any:
    """An image from a file, or from bytes out of some place, as RGB unless `colour` is false."""
    library = pillow()
    try:
        with library.open(BytesIO(content) if isinstance(content, bytes) else content, formats=FORMATS) as image:
            if max(image.size) > LONGEST * min(image.size):
                raise ValueError(f"{image.width} × {image.height} pixels are over {LONGEST}:1: cut it into parts")
            image.load()
            return image.convert("RGB") if colour else image.copy()
    # Pillow raises SyntaxError for broken PNGs and ValueError or its own errors for absurd sizes.
    except (OSError, ValueError, SyntaxError, library.DecompressionBombError) as error:
        raise AcutanceError(f"{place or content!s} cannot be read as an image: {error}") from error


def _windows(file: Path, tokenizer: Any, room: int) -> Iterator[Window]:
    rest = np.empty(0, dtype=np.int64)
    try:
        with file.open(encoding="utf-8") as text:
            while lines := text.readlines(PIECE):
                piece = tokenizer("".join(lines), add_special_tokens=False, verbose=False)["input_ids"]
                ids = np.concatenate([rest, np.asarray(piece, dtype=np.int64)])
                whole = len(ids) // room * room
                yield from ids[:whole].reshape(-1, room)
                rest = ids[whole:]
    except (OSError, UnicodeDecodeError) as error:
        raise AcutanceError(f"{file} cannot be read as UTF-8 text: {error}") from error
    if len(rest) >= SHORTEST:
        yield rest


def _special_tokens(tokenizer: Any) -> tuple[Window, Window]:
    """The tokens that the tokenizer puts before and after a text."""
    plain, full = (np.array(tokenizer("a", add_special_tokens=each)["input_ids"], np.int64) for each in (False, True))
    for start in range(len(full) - len(plain) + 1):
        end = start + len(plain)
        if np.array_equal(full[start:end], plain):
            return full[:start], full[end:]
    raise AcutanceError(f"{type(tokenizer).__name__} changes the text when it adds its special tokens")
