"""JSON that every strict parser reads: numbers that JSON lacks become strings."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

LARGEST_ARRAY = 64
"""Elements up to which arrays and tensors are written out."""


_encode = json.JSONEncoder(allow_nan=False).encode


def dumps(value: Any) -> str:
    """``value`` as ASCII JSON on one line.

    NaN and infinities become ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``; what JSON has no form for, its ``str``.
    """
    try:
        return _encode(value)  # nearly always, and several times faster
    except (TypeError, ValueError):
        return _encode(plain(value))


def dumps_by_line(entries: Mapping[str, Any]) -> str:
    """The same with a line for each entry, and for each element of a list of objects: to be read by people, too."""
    lines = [f"{json.dumps(str(key))}: {_dumps_list(value)}" for key, value in entries.items()]
    return "{\n" + ",\n".join(lines) + "\n}"


def _dumps_list(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(element, Mapping) for element in value):
        return "[\n " + ",\n ".join(map(dumps, value)) + "\n]"
    return dumps(value)


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
    if hasattr(value, "tolist") and _elements(value) <= LARGEST_ARRAY:
        return plain(value.tolist())
    return str(value)


def _elements(array: Any) -> int:
    return math.prod(array.shape) if hasattr(array, "shape") else len(array)


def _word(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"
