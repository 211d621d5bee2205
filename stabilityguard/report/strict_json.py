"""JSON that every strict parser reads: numbers that JSON lacks become strings."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def dumps(value: Any, *, indent: int | None = None) -> str:
    """``value`` as ASCII JSON.

    NaN and infinities become ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``; what JSON has no form for, its ``str``.
    """
    return json.dumps(plain(value), indent=indent, allow_nan=False)


def plain(value: Any) -> Any:
    """``value`` made of dictionaries, lists, strings, finite numbers, booleans and None alone."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else _word(value)
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(entry) for entry in value]
    if hasattr(value, "item") and getattr(value, "numel", lambda: 1)() == 1:
        return plain(value.item())
    return str(value)


def _word(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"
