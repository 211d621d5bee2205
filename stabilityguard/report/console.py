"""The alert box and the summaries on stdout."""

from __future__ import annotations

import itertools
import math
import os
import sys
import unicodedata
from collections.abc import Sequence
from typing import Any, TextIO

from stabilityguard.report.records import SpikeReport, StepRecord

NARROWEST = 62
"""Columns between the box's edges; it widens to what it holds."""

WIDEST = 116
"""Columns beyond which a line is cut in its middle."""

_FRAME = "╔╗╚╝╠╣═║…"

_ASCII = str.maketrans(dict.fromkeys("╔╗╚╝╠╣", "+") | {"═": "=", "║": "|", "⚠": "!", "—": "-", "…": "~", "→": ">"})

_NO_LAYER = {"scaler_overflow": "(seen by the GradScaler alone)"}

_TITLES = {"spike": "SPIKE", "nan": "NAN", "inf": "INF", "overflow": "OVERFLOW", "scaler_overflow": "OVERFLOW"}


class Console:
    """A sink that prints: the alert of a trip at once, a summary every ``every`` steps (0: never)."""

    def __init__(self, every: int, stream: TextIO | None = None) -> None:
        self._every = every
        self._stream = stream
        self._trips = 0
        self._skipped = 0
        self._rolled_back = 0
        self._reported = 0

    def on_report(self, report: SpikeReport) -> None:
        """Prints the alert box, and where the report is."""
        where = f"stabilityguard.log written → {report.path}" if report.path else "stabilityguard.log not written"
        texts = [_printable(text) for text in (alert_title(report.record), *alert_lines(report))]
        if not _encodes("".join([*texts, _FRAME]), self._out):
            texts = [_ascii(text) for text in texts]  # before the box is drawn: a wide letter becomes a narrow one
        self._reported = report.record.step
        self._trips += 1
        self._print([*_box(texts), where], alarming=True)

    def on_record(self, record: StepRecord) -> None:
        """Counts, and prints what is due."""
        self._skipped += record.action == "skip"
        self._rolled_back += record.action == "rollback"
        if record.kind is not None and record.step != self._reported:
            reason = _printable(record.reason or "")
            self._print([f"stabilityguard | step {record.step} | optimizer.step() skipped | {reason}"])
        if self._every and record.step % self._every == 0:
            self._print([self._summary(record)])

    def close(self) -> None:
        """Nothing is pending."""

    def _summary(self, record: StepRecord) -> str:
        parts = [f"stabilityguard | step {record.step}"]
        parts += [f"loss {number(record.loss)}"] if record.loss is not None else []
        parts += [f"grad norm {number(record.global_norm)}"]
        worst = record.worst_layer
        parts += [f"worst {_printable(worst[0])} ({number(worst[1])}x)"] if worst else []
        counts = f"trips {self._trips}, skipped {self._skipped}"
        counts += f", rolled back {self._rolled_back}" if self._rolled_back else ""
        return " | ".join([*parts, counts])

    def _print(self, lines: Sequence[str], *, alarming: bool = False) -> None:
        text = "\n".join(line if _encodes(line, self._out) else _ascii(line) for line in lines)
        print(f"\x1b[31m{text}\x1b[0m" if alarming and _has_colour(self._out) else text, file=self._out, flush=True)

    @property
    def _out(self) -> TextIO:
        """Looked up at each print, so that a redirected ``sys.stdout`` is followed."""
        return self._stream or sys.stdout


def alert_title(record: StepRecord) -> str:
    """The box's first line."""
    return f"⚠ STABILITYGUARD — {_TITLES.get(record.kind or '', 'FAULT')} DETECTED @ step {record.step}"


def alert_lines(report: SpikeReport) -> list[str]:
    """The box's body."""
    record = report.record
    nobody = _NO_LAYER.get(record.kind or "", "(the loss; every gradient is finite)")
    lines = [f"Trigger layer  : {record.trigger_layer or nobody}"]
    if record.trigger_layer is not None:
        trigger = report.details["trigger"]
        lines.append(f"Grad norm      : {number(float(trigger['norm']))}  ({'; '.join(_expectation(trigger))})")
    if len(record.rank_losses) > 1:
        lines.append(f"Bad ranks      : {', '.join(map(str, record.bad_ranks)) or '(cannot be told)'}")
    lines.append(f"Action taken   : {_action(record)}")
    if record.action != "skip":
        lines.append(f"Reason         : {record.reason}")
    if record.loss is not None:
        lines.append(f"{'Loss (pre-skip)' if record.action == 'skip' else 'Loss           '}: {number(record.loss, 2)}")
    return lines


def number(value: float | None, decimals: int = 1) -> str:
    """A number in a few characters: ``decimals`` from 1 up to a million, three significant digits elsewhere."""
    if value is None:
        return "-"
    return f"{value:.{decimals}f}" if 1 <= abs(value) < 1e6 else f"{value:.3g}"


def _expectation(trigger: dict[str, Any]) -> list[str]:
    parts = [f"baseline: {number(trigger['baseline'])}" if trigger["baseline"] is not None else "no baseline yet"]
    ratio = trigger["ratio"]
    if ratio is not None and math.isfinite(float(ratio)):
        parts[0] += f", ratio: {number(float(ratio))}x"
    if trigger["kind"] == "overflow":
        parts.append("every element is finite")
    counts = [
        f"{trigger[key]} {word}" for key, word in (("nan_elements", "NaN"), ("inf_elements", "Inf")) if trigger[key]
    ]
    if counts:
        parts.append(f"{', '.join(counts)} of {trigger['elements']} elements")
    return parts


def _action(record: StepRecord) -> str:
    return {
        "skip": "optimizer.step() SKIPPED",
        "rollback": f"ROLLED BACK to the end of step {record.restored_step}",
        "raise": "RAISED GradientSpikeError",
        "step": "optimizer.step() APPLIED, the new level ACCEPTED as baseline",
    }[record.action]


def _box(texts: Sequence[str]) -> list[str]:
    """The frame around a title and the body's lines, as wide as it needs to be."""
    lines = [_fitted(text, WIDEST - 4) for text in texts]
    width = max(NARROWEST, *(_columns(line) + 4 for line in lines))
    rows = [f"║  {line}{' ' * (width - 2 - _columns(line))}║" for line in lines]
    edge = "═" * width
    return [f"╔{edge}╗", rows[0], f"╠{edge}╣", *rows[1:], f"╚{edge}╝"]


def _fitted(line: str, columns: int) -> str:
    """``line`` without control characters, its middle cut out where it is wider than ``columns``."""
    line = _printable(line)
    if _columns(line) <= columns:
        return line
    head = _start(line, columns // 2)
    return f"{head}…{_start(line[::-1], columns - 1 - columns // 2)[::-1]}"


def _printable(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def _start(text: str, columns: int) -> str:
    """The longest beginning of ``text`` that fits in ``columns``."""
    ends = itertools.takewhile(lambda end: _columns(text[:end]) <= columns, range(len(text) + 1))
    return text[: max(ends)]


def _columns(text: str) -> int:
    """Columns that a terminal gives to ``text``: two for wide characters, none for marks on others."""
    return len(text) if text.isascii() else sum(map(_width, text))


def _width(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _encodes(text: str, stream: TextIO) -> bool:
    """Whether the stream's encoding has every character."""
    try:
        text.encode(getattr(stream, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _ascii(text: str) -> str:
    return text.translate(_ASCII).encode("ascii", "replace").decode("ascii")


def _has_colour(stream: TextIO) -> bool:
    wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return wanted and hasattr(stream, "isatty") and stream.isatty()
