"""A request to stop: SIGTERM, as schedulers and spot machines send it."""

from __future__ import annotations

import contextlib
import os
import signal
import weakref
from types import FrameType
from typing import Any

EXIT_CODE = 128 + signal.SIGTERM
"""With which a run leaves that was asked to stop and has written its checkpoint: 143, as a shell would report it."""


class _Handler:
    """Tells all requests of this process, and calls what handled the signal before."""

    def __init__(self) -> None:
        self._requests: weakref.WeakSet[StopRequest] = weakref.WeakSet()
        self._before: Any = None
        self._process = 0
        self._is_noting = False

    def add(self, request: StopRequest) -> None:
        """Begins to listen for ``request``; only the main thread can."""
        if signal.getsignal(signal.SIGTERM) != self.note:
            with contextlib.suppress(ValueError):
                self._before, self._process = signal.signal(signal.SIGTERM, self.note), os.getpid()
        self._requests.add(request)

    def remove(self, request: StopRequest) -> None:
        """Puts the former handler back after the last one, unless somebody has put another one in place since."""
        self._requests.discard(request)
        if not self._requests and signal.getsignal(signal.SIGTERM) == self.note:
            self._put_back()

    def note(self, number: int, frame: FrameType | None) -> None:
        """Hears the signal; a forked process, and one that has closed all guards, does what it would do without."""
        listens = bool(self._requests) and os.getpid() == self._process
        for request in self._requests if listens else ():
            request.has_come = True
        if callable(self._before) and not self._is_noting:  # one put in place since may have called this one
            self._is_noting = True
            try:
                self._before(number, frame)
            finally:
                self._is_noting = False
        elif not listens:
            self.repeat()

    def repeat(self) -> None:
        """Has the signal do what it does without us."""
        if not callable(self._before):
            self._put_back()
            os.kill(os.getpid(), signal.SIGTERM)

    def _put_back(self) -> None:
        with contextlib.suppress(ValueError):  # beside the main thread it stays, and passes on what it hears
            signal.signal(signal.SIGTERM, self._before if self._before is not None else signal.SIG_DFL)


_handler = _Handler()


class StopRequest:
    """Remembers that SIGTERM has come; whatever handled it before is called as well.

    Listens from construction to ``close()``; constructed beside the main thread, it may hear nothing.
    """

    def __init__(self) -> None:
        self.has_come = False
        _handler.add(self)

    def close(self) -> None:
        """Listens no more."""
        _handler.remove(self)

    def pass_on(self) -> None:
        """Has a request that has come, and was not heeded, do what it would have done without us."""
        if self.has_come:
            self.has_come = False
            _handler.repeat()
