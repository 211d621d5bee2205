"""A thread that carries things to a server, so that training never waits for one."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

log = logging.getLogger("stabilityguard")

T = TypeVar("T")

GATHERING = 1.0
"""Seconds in which things gather that go at once: a request takes milliseconds from training, however much is in it."""

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds between two tries to reach a server; each pause is twice the one before."""


class RefusedError(Exception):
    """The server wants none of it: trying again is of no use."""


class Courier(Generic[T]):
    """Hands things in order to ``send``, on a daemon thread; those that fail wait and are tried again.

    Args:
        name: who speaks in warnings.
        send: delivers the things given, all of them; raises RefusedError for what will never be taken. Told twice of
            the same things if it failed the first time.
        capacity: things that wait at most; the oldest are dropped beyond that.
        batch: things handed over at once at most.
    """

    def __init__(self, name: str, send: Callable[[Sequence[T]], None], *, capacity: int, batch: int) -> None:
        self._name, self._send, self._capacity, self._batch = name, send, capacity, batch
        self._waiting: deque[T] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._warned = False
        self._in_hand = 0
        self.dropped = 0
        """Things that were not delivered, and will not be."""

    def put(self, thing: T) -> None:
        """Leaves ``thing`` to be carried; returns at once."""
        with self._changed:
            self._waiting.append(thing)
            if len(self._waiting) > self._capacity:
                self._waiting.popleft()
                self.dropped += 1
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=f"{self._name} courier", daemon=True)
                self._thread.start()

    def close(self, seconds: float) -> None:
        """Waits until all is delivered, that many seconds at most; tells of what was dropped in all."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
            self._changed.wait_for(lambda: not self._waiting and not self._in_hand, seconds)
            self.dropped += len(self._waiting) + self._in_hand
            self._waiting.clear()
        if self.dropped:
            log.warning("%s: %d messages did not reach the server and are lost", self._name, self.dropped)

    def _work(self) -> None:
        while (things := self._take()) is not None:
            self._deliver(things)
            with self._changed:
                self._in_hand = 0
                self._changed.notify()

    def _take(self) -> list[T] | None:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._waiting) or self._is_closing)
            self._changed.wait_for(lambda: len(self._waiting) >= self._batch or self._is_closing, GATHERING)
            things = [self._waiting.popleft() for _ in range(min(self._batch, len(self._waiting)))]
            self._in_hand = len(things)
        return things or None

    def _deliver(self, things: list[T]) -> None:
        pause = FIRST_PAUSE
        while True:
            try:
                return self._send(things)
            except Exception as error:
                self._warn(error)
                if isinstance(error, RefusedError) or not self._pause(pause):
                    return self._drop(things)
                pause = min(2 * pause, LONGEST_PAUSE)

    def _pause(self, seconds: float) -> bool:
        """Waits before another try; False if there shall be none, as the end has come."""
        end = time.monotonic() + seconds
        with self._changed:
            if self._is_closing:
                return False
            while not self._is_closing and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)
        return True

    def _drop(self, things: list[T]) -> None:
        with self._changed:
            self.dropped += len(things)
            self._in_hand = 0

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            log.warning("%s: the server is out of reach or refuses; training goes on. %s", self._name, reason)
