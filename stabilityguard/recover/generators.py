"""States of the random number generators that a training loop may draw from."""

from __future__ import annotations

import contextlib
import random
import sys
from importlib import import_module
from typing import Any

import torch

_DEVICES = ("cuda", "xpu")


def read_generators() -> dict[str, Any]:
    """The states of Python's, NumPy's (if loaded) and torch's global generators, devices in use included."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    for name in _DEVICES:
        device = getattr(torch, name)
        if device.is_available() and device.is_initialized():
            states[name] = device.get_rng_state_all()
    return states


def write_generators(states: dict[str, Any]) -> None:
    """Puts states back that ``read_generators`` gave, as far as there are such generators here."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        with contextlib.suppress(ImportError):  # it was loaded then, and will be again
            import_module("numpy").random.set_state(states["numpy"])
    for name in _DEVICES:
        device = getattr(torch, name)
        if name in states and device.is_available():
            for index, state in enumerate(states[name][: device.device_count()]):
                device.set_rng_state(state, index)
