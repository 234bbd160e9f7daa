"""Ctrl-C that lets the current episode finish."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType, TracebackType


class FinishOnInterrupt:
    """While the block runs, the first Ctrl-C only sets `requested`; the second interrupts at once.

    Outside the main thread, where signals cannot be handled, Ctrl-C does what it always does.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: signal.Handlers | object = None

    def __enter__(self) -> FinishOnInterrupt:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        print("\nFinishing this episode, then saving. Press Ctrl-C again to stop at once.", file=sys.stderr)
