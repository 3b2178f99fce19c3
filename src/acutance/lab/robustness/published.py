"""The published files of CIFAR-10-C and CIFAR-100-C, for those who have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from acutance.errors import AcutanceError
from acutance.lab.data.images import Images
from acutance.lab.robustness.corruptions import AT_ONCE, SEVERITIES


class Published:
    """A folder with `<corruption>.npy` (5 · n, height, width, channels), severity after severity, and `labels.npy`.

    Args:
        folder: where the files are; they are mapped, not read into memory, and nothing is unpickled.
        images: the clean test set, in its own order; the first images of it will do.
    """

    def __init__(self, folder: Path, images: Images) -> None:
        self.folder, self._images = folder, images
        labels = self._open("labels")[: len(images)]
        if not np.array_equal(labels, images.labels.cpu().numpy()):
            raise AcutanceError(
                f"{folder}/labels.npy does not begin with the labels of {images.name}: these are corruptions of other "
                "images, or of the test set in another order"
            )

    @property
    def description(self) -> str:
        """What goes into the table."""
        return f"the files in {self.folder.name}"

    def part(self, name: str, severity: int, part: int) -> Tensor:
        """Images `part` · AT_ONCE and following."""
        array = self._open(name)
        count = len(array) // len(SEVERITIES)
        if array.dtype != np.uint8 or array.ndim != 4 or len(array) % len(SEVERITIES) or count < len(self._images):
            raise AcutanceError(
                f"{self.folder}/{name}.npy holds {array.shape} {array.dtype}; expected are bytes (5 · n, height, "
                f"width, channels) with n at least {len(self._images)}"
            )
        first = (severity - 1) * count
        rows = slice(first + part * AT_ONCE, first + min((part + 1) * AT_ONCE, len(self._images)))
        chosen = torch.from_numpy(np.array(array[rows])).permute(0, 3, 1, 2)
        if chosen.shape[1:] != self._images.images.shape[1:]:
            raise AcutanceError(
                f"{self.folder}/{name}.npy has images of {tuple(chosen.shape[1:])}, {self._images.name} of "
                f"{tuple(self._images.images.shape[1:])}"
            )
        return chosen.to(self._images.images.device)

    def _open(self, name: str) -> NDArray[Any]:
        path = self.folder / f"{name}.npy"
        if not path.is_file():
            raise AcutanceError(
                f"there is no {path}; expected is an unpacked CIFAR-10-C (https://zenodo.org/records/2535967) or "
                "CIFAR-100-C (https://zenodo.org/records/3555552)"
            )
        try:
            array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            raise AcutanceError(f"{path} is damaged or no plain array: {error}") from error
        return array
