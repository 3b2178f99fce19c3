"""History: a Profile per recorded step, in memory and as lines of JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from acutance.errors import AcutanceError
from acutance.files import read_bytes
from acutance.profile import FORMAT, Profile

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


class History(Mapping[int, Profile]):
    """Optimiser step to Profile, in order. `History.load(path)` reads a Monitor's file, while it grows too."""

    def __init__(self) -> None:
        self._profiles: dict[int, Profile] = {}

    def __getitem__(self, step: int) -> Profile:
        return self._profiles[step]

    def __iter__(self) -> Iterator[int]:
        return iter(self._profiles)

    def __len__(self) -> int:
        return len(self._profiles)

    def __repr__(self) -> str:
        return f"History(steps {', '.join(map(str, self))})" if self else "History(empty)"

    def add(self, step: int, profile: Profile) -> None:
        """Add a reading. A run resumed from an earlier step takes the place of what was read from there on."""
        kept = {earlier: value for earlier, value in self._profiles.items() if earlier < step}
        self._profiles = {**kept, step: profile}

    def to_frame(self) -> pd.DataFrame:
        """One row per step and reading, as a pandas DataFrame."""
        frames = [profile.to_frame().assign(step=step) for step, profile in self.items()]
        import pandas as pd  # found: to_frame would have said what to install

        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()

    def picture(self) -> Figure:
        """Every metric over the training steps, a curve per layer, as a matplotlib figure."""
        from acutance.monitor.picture import history_picture

        return history_picture(self)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, missing_ok: bool = False) -> History:
        """Read the lines a Monitor wrote; a last line cut off by a crash is left out.

        Args:
            path: the file.
            missing_ok: a file that is not there is an empty history.
        """
        history = cls()
        if missing_ok and not Path(path).exists():
            return history
        *lines, _unfinished = read_bytes(path).split(b"\n")
        for number, line in enumerate(lines, 1):
            history.add(*parse_line(line, f"{path}, line {number}"))
        return history


def to_line(step: int, profile: Profile) -> bytes:
    """One reading as a line: the profile's own JSON and the step."""
    return json.dumps({"step": step, **profile.to_dict()}, allow_nan=False).encode() + b"\n"


def parse_line(line: bytes, where: str) -> tuple[int, Profile]:
    """Step and profile of one line."""
    try:
        body = json.loads(line)
        if body["format"] != FORMAT:
            raise AcutanceError(f"{where}: format {body['format']!r}, this version reads {FORMAT!r}")
        return body["step"], Profile.from_dict(body)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise AcutanceError(f"{where} is not a Monitor's: {error!r}; name another file") from error
