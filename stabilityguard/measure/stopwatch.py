"""How long the guard itself takes, on this rank's host."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager


class Stopwatch:
    """Adds up wall time while it runs; what is nested goes by the innermost block."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None
        """When it was last looked at; None while it stands."""

    def take(self) -> float:
        """Milliseconds so far; it starts anew from zero."""
        self._look(goes_on=self._since is not None)
        seconds, self._seconds = self._seconds, 0.0
        return 1000.0 * seconds

    def running(self) -> AbstractContextManager[None]:
        """Counts what is done within."""
        return self._within(counts=True)

    def paused(self) -> AbstractContextManager[None]:
        """Leaves out what is done within."""
        return self._within(counts=False)

    @contextmanager
    def _within(self, *, counts: bool) -> Iterator[None]:
        was_running = self._look(goes_on=counts)
        try:
            yield
        finally:
            self._look(goes_on=was_running)

    def _look(self, *, goes_on: bool) -> bool:
        """Adds the time since the last look, if it ran, and tells whether it did."""
        now, since = time.perf_counter(), self._since
        if since is not None:
            self._seconds += now - since
        self._since = now if goes_on else None
        return since is not None
