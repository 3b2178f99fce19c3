"""Where a Monitor writes: lines of JSON, TensorBoard."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from acutance.errors import MissingExtraError
from acutance.monitor.history import to_line
from acutance.profile import Profile

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter


class JsonLines:
    """Appends a line per reading. The file is open only meanwhile, so that an interruption finds it whole."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._begun = False

    def write(self, step: int, profile: Profile) -> None:
        """Append the line and close, so that nothing waits in a buffer."""
        if not self._begun:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _drop_unfinished_line(self.path)
            self._begun = True
        with self.path.open("ab") as file:
            file.write(to_line(step, profile))


class TensorBoard:
    """A scalar per metric, tap and layer, and a chart per metric and tap in the tab "Custom Scalars"."""

    def __init__(self, target: str | os.PathLike[str] | SummaryWriter) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            raise MissingExtraError("TensorBoard is not installed: pip install 'acutance[monitor]'") from error
        self._kind = SummaryWriter
        self._target = target
        self._writer: SummaryWriter | None = None

    def write(self, step: int, profile: Profile) -> None:
        """Add the means, and have them on disk."""
        writer = self._writer or self._open(profile)
        for reading in profile.readings:
            tag = f"{_group(reading.metric, reading.tap)}/layer {reading.layer:02d}"
            writer.add_scalar(tag, reading.mean, step)
        writer.flush()

    def _open(self, profile: Profile) -> SummaryWriter:
        """Only once something is written: ranks that do not write leave no empty files."""
        target = self._target
        self._writer = writer = self._kind(str(target)) if isinstance(target, (str, os.PathLike)) else target
        layout: dict[str, dict[str, list[object]]] = {}
        for metric, tap in dict.fromkeys((r.metric, r.tap) for r in profile.readings):
            group = _group(metric, tap)
            layout.setdefault(metric, {})[tap] = ["Multiline", [f"^{group}/layer .*"]]
        writer.add_custom_scalars(layout)
        return writer


def _group(metric: str, tap: str) -> str:
    return f"{metric} {tap}"


def _drop_unfinished_line(path: Path) -> None:
    """What a crash left behind the last whole line would spoil the next one."""
    content = path.read_bytes() if path.exists() else b""
    if not content.endswith(b"\n") and content:
        os.truncate(path, content.rfind(b"\n") + 1)
