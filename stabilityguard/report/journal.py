"""The files under ``log_dir``: one JSON report for every trip, and a bounded journal of all steps."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import weakref
from typing import Any

from stabilityguard.report import channel
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
        self._lines = _LineFile(self._path, max_bytes)
        weakref.finalize(self, self._lines.close)  # for guards that nobody closes
        self._broken = False
        self._warned = False

    def on_record(self, record: StepRecord) -> None:
        """Appends one line, in one write; after a failure nothing more until the next trip."""
        if not self._broken:
            try:
                self._lines.append(dumps(_line(record)) + "\n")
                channel.note_journal(self._path)
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
        self._lines.close()

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

    def _give_up(self, error: OSError) -> None:
        self._broken = True
        self.close()
        if not self._warned:
            self._warned = True
            log.warning("cannot write to log_dir %r (%s); training goes on without these files", self._directory, error)


class _LineFile:
    """A file of lines that is moved aside when it is full. Each line is one write, so that others can append, too.

    It is opened anew where another writer has moved it aside, or somebody has removed it.
    """

    def __init__(self, path: str, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._descriptor: int | None = None
        self._identity: tuple[int, int] | None = None

    def append(self, line: str) -> None:
        """Writes ``line``, which ends in a newline and is ASCII. Raises OSError."""
        descriptor = self._present()
        rest = line.encode("ascii")
        while rest:
            rest = rest[os.write(descriptor, rest) :]

    def close(self) -> None:
        """Lets go of the file; the next line opens it again."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _present(self) -> int:
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            found = None
        if found is None or (found.st_dev, found.st_ino) != self._identity:
            self.close()
        elif found.st_size > self._max_bytes:
            self.close()
            os.replace(self._path, f"{self._path.removesuffix('.jsonl')}.1.jsonl")
        return self._open() if self._descriptor is None else self._descriptor

    def _open(self) -> int:
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        has_stump = _ends_in_a_stump(self._path)
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        opened = os.fstat(self._descriptor)
        self._identity = opened.st_dev, opened.st_ino
        if has_stump:
            os.write(self._descriptor, b"\n")
        return self._descriptor


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
        "reason": record.reason,
        "global_norm": record.global_norm,
        "ratio": record.ratio,
        "trigger_layer": record.trigger_layer,
        "loss": record.loss,
        "lr": record.lr,
        "overhead_ms": None if record.overhead_ms is None else round(record.overhead_ms, 3),
        "restored_step": record.restored_step,
        "bad_ranks": list(record.bad_ranks) if len(record.rank_losses) > 1 and record.bad_ranks else None,
    }
    return {key: value for key, value in line.items() if value is not None}
