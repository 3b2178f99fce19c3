"""Ctrl-C as a wish, not as an accident: the loop ends at a step, not in the middle of one."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

from acutance.errors import AcutanceError


class StoppedError(AcutanceError):
    """Training was stopped on request; the message says how to go on."""


class Interrupt:
    """Inside, the first SIGINT or SIGTERM sets `wanted`; a second SIGINT is an ordinary KeyboardInterrupt."""

    def __init__(self) -> None:
        self.wanted = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type] # what signal.signal itself handed out

    def _ask(self, number: int, frame: FrameType | None) -> None:
        # torchrun passes a Ctrl-C on as SIGTERM, after the terminal sent SIGINT: only a second SIGINT is impatience.
        if self.wanted and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.wanted = True
