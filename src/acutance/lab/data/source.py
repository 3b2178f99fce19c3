"""What to say when data is missing or damaged: one line with the place, what belongs there, and how to get it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from acutance.errors import AcutanceError


@dataclass(frozen=True)
class Source:
    """Where a data set comes from, and how its folder looks."""

    name: str
    layout: str  # what is expected within the data folder
    get: str  # how to get it

    def missing(self, path: Path | str) -> AcutanceError:
        """The error for a file or folder that is not there."""
        return AcutanceError(f"{self.name}: looked for {path}, which is not there; expected {self.layout}. {self.get}")

    def damaged(self, path: Path | str, why: object) -> AcutanceError:
        """The error for a file that is not what it should be; `why` is put on one line."""
        reason = " ".join(str(why).split())
        return AcutanceError(f"{self.name}: {path} is damaged ({reason}); expected {self.layout}. {self.get}")

    def folder(self, path: Path) -> Path:
        """The folder itself, if it is there."""
        if not path.is_dir():
            raise self.missing(path)
        return path

    def bytes(self, path: Path) -> bytes:
        """What a file holds, if it is there and can be read."""
        try:
            return path.read_bytes()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise self.missing(path) from error
        except OSError as error:
            raise self.damaged(path, error) from error
