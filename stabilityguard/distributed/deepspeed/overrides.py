"""Attributes of single objects, replaced for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ABSENT = object()


@contextmanager
def overridden(*replacements: tuple[Any, str, Any]) -> Iterator[None]:
    """Within it, each object has the given value in place of its own attribute or its class's."""
    former = [(of, name, vars(of).get(name, _ABSENT)) for of, name, _ in replacements]
    for of, name, value in replacements:
        vars(of)[name] = value
    try:
        yield
    finally:
        for of, name, value in reversed(former):
            if value is _ABSENT:
                del vars(of)[name]
            else:
                vars(of)[name] = value
