"""The files under ``log_dir``: one JSON report for every trip, and a bounded journal of all steps."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import weakref
from typing import IO, Any

from stabilityguard.report.records import SpikeReport, StepRecord
from stabilityguard.report.sinks import log
from stabilityguard.report.strict_json import dumps, dumps_by_line

JOURNAL_BYTES = 16 << 20
"""Size at which the journal is moved to ``journal.1.jsonl`` (replacing it) and begun anew."""


class Journal:
    """A sink that writes to a directory. What cannot be written costs one warning, never the run."""

    def __init__(self, directory: str, *, max_bytes: int = JOURNAL_BYTES) -> None:
        self._directory = directory
        self._path = os.path.join(directory, "journal.jsonl")
        self._max_bytes = max_bytes
        self._file: IO[str] | None = None
        self._size = 0
        self._broken = False
        self._warned = False

    def on_record(self, record: StepRecord) -> None:
        """Appends one line, in one write; after a failure nothing more until the next trip."""
        if self._broken:
            return
        try:
            file = self._file or self._open()
            self._size += file.write(dumps(_line(record)) + "\n")
            if self._size > self._max_bytes:
                self._rotate()
        except OSError as error:
            self._give_up(error)

    def on_report(self, report: SpikeReport) -> None:
        """Writes ``spike_step<N>.json`` under a name that no earlier run has taken, and notes it in ``report.path``."""
        try:
            os.makedirs(self._directory, exist_ok=True)
            if self._broken or not os.path.exists(self._path):
                self.close()
                self._broken = False
            report.path = self._write_new(report)
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Closes the journal."""
        file, self._file = self._file, None
        with contextlib.suppress(OSError):  # lines are written as they come; a close has nothing to lose
            if file is not None:
                file.close()

    def _write_new(self, report: SpikeReport) -> str:
        for number in itertools.count(1):
            suffix = "" if number == 1 else f"-{number}"
            path = os.path.join(self._directory, f"spike_step{report.record.step}{suffix}.json")
            with contextlib.suppress(FileExistsError):
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
                break
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(dumps_by_line(report.details) + "\n")
        except OSError:
            os.unlink(path)
            raise
        return path

    def _open(self) -> IO[str]:
        os.makedirs(self._directory, exist_ok=True)
        # Line by line, so that guards that share the directory do not cut each other's lines.
        self._file = open(self._path, "a", encoding="ascii", buffering=1)  # noqa: SIM115 (held while training)
        self._size = self._file.tell()
        weakref.finalize(self, self._file.close)  # for guards that nobody closes
        return self._file

    def _rotate(self) -> None:
        self.close()
        os.replace(self._path, os.path.join(self._directory, "journal.1.jsonl"))

    def _give_up(self, error: OSError) -> None:
        self._broken = True
        self.close()
        if not self._warned:
            self._warned = True
            log.warning("cannot write to log_dir %r (%s); training goes on without these files", self._directory, error)


def _line(record: StepRecord) -> dict[str, Any]:
    line = {
        "step": record.step,
        "time": round(time.time(), 3),
        "action": record.action,
        "kind": record.kind,
        "global_norm": record.global_norm,
        "ratio": record.ratio,
        "trigger_layer": record.trigger_layer,
        "loss": record.loss,
        "lr": record.lr,
        "restored_step": record.restored_step,
    }
    return {key: value for key, value in line.items() if value is not None}
