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
        self._broken = False
        self._warned = False

    def on_record(self, record: StepRecord) -> None:
        """Appends one line, in one write; after a failure nothing more until the next trip."""
        if self._broken:
            return
        try:
            file = self._present_file()
            file.write(dumps(_line(record)) + "\n")
        except OSError as error:
            self._give_up(error)

    def on_report(self, report: SpikeReport) -> None:
        """Writes ``spike_step<N>.json`` under a name that no earlier run has taken, and notes it in ``report.path``."""
        content = dumps_by_line(report.details) + "\n"
        try:
            os.makedirs(self._directory, exist_ok=True)
            report.path = self._write_new(f"spike_step{report.record.step}", content)
            self._broken = False
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Closes the journal."""
        file, self._file = self._file, None
        with contextlib.suppress(OSError):  # lines are written as they come; a close has nothing to lose
            if file is not None:
                file.close()

    def _write_new(self, name: str, content: str) -> str:
        for number in itertools.count(1):
            suffix = "" if number == 1 else f"-{number}"
            path = os.path.join(self._directory, f"{name}{suffix}.json")
            with contextlib.suppress(FileExistsError):
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
                break
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(content)
        except BaseException:
            os.unlink(path)
            raise
        return path

    def _present_file(self) -> IO[str]:
        """The open journal; opened anew where another guard has moved it on, or somebody has removed it."""
        if self._file is not None:
            mine = os.fstat(self._file.fileno())
            if not _is_at(self._path, mine):
                self.close()
            elif mine.st_size > self._max_bytes:
                self.close()
                os.replace(self._path, os.path.join(self._directory, "journal.1.jsonl"))
        return self._file or self._open()

    def _open(self) -> IO[str]:
        os.makedirs(self._directory, exist_ok=True)
        # Line by line, so that guards that share the directory do not cut each other's lines.
        self._file = open(self._path, "a", encoding="ascii", buffering=1)  # noqa: SIM115 (held while training)
        weakref.finalize(self, self._file.close)  # for guards that nobody closes
        if _ends_in_a_stump(self._path):
            self._file.write("\n")
        return self._file

    def _give_up(self, error: OSError) -> None:
        self._broken = True
        self.close()
        if not self._warned:
            self._warned = True
            log.warning("cannot write to log_dir %r (%s); training goes on without these files", self._directory, error)


def _is_at(path: str, file: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(path), file)
    except FileNotFoundError:
        return False


def _ends_in_a_stump(path: str) -> bool:
    """Whether a run that was killed, or a disk that was full, has cut the last line."""
    if not os.path.isfile(path) or os.path.getsize(path) == 0:
        return False
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


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
