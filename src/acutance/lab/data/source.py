"""Reading a data set's files; errors name the file that is missing or damaged, the layout, and where to get it."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import numpy as np
import numpy.typing as npt

from acutance.errors import AcutanceError
from acutance.io.inputs import pillow
from acutance.lab.data.subsets import SplitName

if TYPE_CHECKING:
    from PIL.Image import Image

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Source:
    """Where a data set comes from, and how its folder looks."""

    name: str
    layout: str  # what is expected within the data folder
    get: str  # how to get it

    def missing(self, path: Path | str) -> AcutanceError:
        return AcutanceError(f"{self.name}: looked for {path}, which is not there; expected {self.layout}. {self.get}")

    def damaged(self, path: Path | str, why: object) -> AcutanceError:
        reason = " ".join(str(why).split())  # on one line
        return AcutanceError(f"{self.name}: {path} is damaged ({reason}); expected {self.layout}. {self.get}")

    def folder(self, path: Path) -> Path:
        """The path itself, if it is a folder."""
        if not path.is_dir():
            raise self.missing(path)
        return path

    def read(self, path: Path) -> bytes:
        """What a file holds."""
        try:
            return path.read_bytes()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise self.missing(path) from error
        except OSError as error:
            raise self.damaged(path, error) from error

    def image(self, content: Path | bytes, place: Path | str = "", *, colour: bool = True) -> Image:
        """An image from a file, or from bytes out of some place, as RGB unless `colour` is false."""
        place = content if isinstance(content, Path) else place
        try:
            with pillow().open(io.BytesIO(content) if isinstance(content, bytes) else content) as image:
                image.load()
                result: Image = image.convert("RGB") if colour else image.copy()
                return result
        except FileNotFoundError as error:
            raise self.missing(place) from error
        # Pillow raises SyntaxError for broken PNGs and ValueError or its own errors for absurd sizes.
        except (OSError, SyntaxError, ValueError, pillow().DecompressionBombError) as error:
            raise self.damaged(place, error) from error


def channels_first(image: Image) -> Bytes:
    """The pixels as (channels, height, width)."""
    return np.ascontiguousarray(np.asarray(image, dtype=np.uint8).transpose(2, 0, 1))


def data_folder(kind: str, name: str, known: Iterable[str], data_dir: Path | str | None, split: str = "all") -> Path:
    """The data folder, after refusing an unknown name or split, or no folder."""
    if name not in known:
        raise AcutanceError(f"no {kind} {name!r}; there are {', '.join(sorted(known))}")
    if split not in get_args(SplitName):
        raise AcutanceError(f"no split {split!r}; there are train, val, all (train and val) and test")
    if data_dir is None:
        raise AcutanceError(f"{name} is read from a folder: name it with --data-dir (data_dir=)")
    return Path(data_dir)
