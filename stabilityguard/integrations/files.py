"""The guards' own files, as trackers keep them."""

from __future__ import annotations

import os
from collections.abc import Iterable

from stabilityguard.report import channel


def files_of_run(reports: Iterable[str]) -> dict[str, str]:
    """Paths of ``reports`` and of every journal, earlier parts included, by names that are unique among them."""
    journals = [path for journal in channel.journals() for path in (journal, earlier_part(journal))]
    named: dict[str, str] = {}
    for path in filter(os.path.isfile, dict.fromkeys([*journals, *reports])):
        folder, name = os.path.split(path)
        while name in named:
            folder, parent = os.path.split(folder)
            name = f"{parent or '_'}/{name}"
        named[name] = path
    return named


def earlier_part(journal: str) -> str:
    """Where the lines of a journal are that had grown too long."""
    return f"{journal.removesuffix('.jsonl')}.1.jsonl"
