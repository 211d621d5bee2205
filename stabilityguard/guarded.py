"""What a user asks of a guard, whatever it stands before."""

from __future__ import annotations

from typing import TypeVar

from stabilityguard.errors import ConfigurationError
from stabilityguard.guard import Guard
from stabilityguard.recover.state import Resumed
from stabilityguard.report.records import SpikeReport, StepRecord

Self = TypeVar("Self", bound="Guarded")


class Guarded:
    """Shared by all that puts a guard in front of an update; it ends with ``close()``, or a ``with`` block."""

    _guard: Guard

    @property
    def last_record(self) -> StepRecord | None:
        """The record of the last step; None before the first."""
        return self._guard.chronicle.records[-1] if self._guard.chronicle.records else None

    @property
    def reports(self) -> list[SpikeReport]:
        """Reports so far, oldest first; the newest hundred."""
        return list(self._guard.chronicle.reports)

    def veto(self, reason: str) -> None:
        """Asks every rank to skip the coming step; it counts towards no budget. Not a collective."""
        self._guard.veto(reason)

    def resume(self) -> Resumed | None:
        """Goes on from the newest clean checkpoint, or from the one that a stopped run has left; None without any.

        Restores parameters, buffers, optimizer state, tracked objects, the guard's memory and, on as many ranks as
        before, random generators. Call it on every rank, before the first step. Collective calls.

        Raises:
            ConfigurationError: there is no ``checkpoints=``.
            CheckpointError: on all ranks, if there are checkpoints and none can be read; nothing was changed.
        """
        if self._guard.config.checkpoints is not None:
            return self._guard.resume()
        raise ConfigurationError("resume() needs checkpoints=CheckpointPolicy(directory=…)")

    def close(self) -> None:
        """Ends the guarding. Waits for a checkpoint in the making. Not a collective."""
        raise NotImplementedError

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
