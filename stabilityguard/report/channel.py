"""Listeners of the whole process: sinks that hear every guard in it, whoever built the guard."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stabilityguard.report.sinks import Sink

_listeners: list[Sink] = []
_journals: dict[str, None] = {}


def join(sink: Sink) -> None:
    """From now on ``sink`` hears what every guard in this process publishes. It is closed by whoever built it."""
    if not _is_among(sink, _listeners):
        _listeners.append(sink)


def leave(sink: Sink) -> None:
    """From now on ``sink`` hears nothing more; one that does not listen may leave, too."""
    _listeners[:] = [other for other in _listeners if other is not sink]
    if not _listeners:
        _journals.clear()


def listeners(*, beside: list[Sink]) -> list[Sink]:
    """Those that listen now, in the order in which they joined, without those in ``beside``."""
    return [sink for sink in _listeners if not _is_among(sink, beside)]


def note_journal(path: str) -> None:
    """A guard has written to the journal at ``path``; it is remembered while anybody listens."""
    if _listeners:
        _journals[os.path.abspath(path)] = None


def journals() -> list[str]:
    """Absolute paths of the journals that guards have written to while somebody listened."""
    return list(_journals)


def _is_among(sink: Sink, sinks: list[Sink]) -> bool:
    return any(sink is other for other in sinks)
