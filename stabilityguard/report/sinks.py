"""Where records and reports go, and what happens when that place fails."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from stabilityguard.report import channel
from stabilityguard.report.records import SpikeReport, StepRecord

log = logging.getLogger("stabilityguard")


@runtime_checkable
class Sink(Protocol):
    """A consumer of what the guard tells. Calls come in step order, from the thread that calls ``step()``."""

    def on_record(self, record: StepRecord) -> None:
        """Takes the record of every step."""

    def on_report(self, report: SpikeReport) -> None:
        """Takes the report of a trip, before the record of its step."""

    def close(self) -> None:
        """Writes out what is pending; called once."""


class Publisher:
    """Hands records and reports to sinks; one that raises is muted with one warning, and training goes on.

    Besides its own it tells those that listen to the whole process, and leaves it to others to close them.
    A silent one only closes its own: of several ranks, the first speaks for all.
    """

    def __init__(self, sinks: Sequence[Sink], *, is_silent: bool = False) -> None:
        self._sinks = list(sinks)
        self._is_silent = is_silent

    def record(self, record: StepRecord) -> None:
        """Tells every sink and listener of a step."""
        for sink in self._listening():
            self._tell(sink, "on_record", record)

    def report(self, report: SpikeReport) -> None:
        """Tells every sink and listener of a trip."""
        for sink in self._listening():
            self._tell(sink, "on_report", report)

    def close(self) -> None:
        """Closes every sink that still works."""
        for sink in list(self._sinks):
            self._tell(sink, "close")
        self._sinks = []

    def _listening(self) -> list[Sink]:
        return [] if self._is_silent else [*self._sinks, *channel.listeners(beside=self._sinks)]

    def _tell(self, sink: Sink, method: str, *arguments: object) -> None:
        try:
            getattr(sink, method)(*arguments)
        except Exception as error:
            self._sinks = [other for other in self._sinks if other is not sink]
            channel.leave(sink)
            name = type(sink).__name__
            log.warning("%s.%s failed and is muted from now on: %s: %s", name, method, type(error).__name__, error)
