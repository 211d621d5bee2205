"""A request to stop: SIGTERM, as schedulers and spot machines send it."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

EXIT_CODE = 128 + signal.SIGTERM
"""With which a run leaves that was asked to stop and has written its checkpoint: 143, as a shell would report it."""


class StopRequest:
    """Remembers that SIGTERM has come; whatever handled it before is called as well.

    Listens from construction to ``close()``; signals reach only the main thread, so elsewhere it hears nothing.
    """

    def __init__(self) -> None:
        self.has_come = False
        self._before: Any = None
        self._listens = threading.current_thread() is threading.main_thread()
        if self._listens:
            self._before = signal.signal(signal.SIGTERM, self._note)

    def close(self) -> None:
        """Puts the former handler back, unless somebody has put another one in place since."""
        if self._listens and signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, self._before if self._before is not None else signal.SIG_DFL)
        self._listens = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.has_come = True
        if callable(self._before):
            self._before(number, frame)
