"""A circuit breaker for PyTorch training. The public names are imported when they are first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

_HOMES = {
    "Budget": "config",
    "CheckpointError": "errors",
    "CheckpointPolicy": "config",
    "ConfigurationError": "errors",
    "DisagreementError": "errors",
    "GradientSpikeError": "errors",
    "GuardedOptimizer": "optimizer",
    "ReplicaDriftError": "errors",
    "SnapshotPolicy": "config",
    "SpikeReport": "report.records",
    "StabilityGuardError": "errors",
    "StepRecord": "report.records",
}

__all__ = [
    "Budget",
    "CheckpointError",
    "CheckpointPolicy",
    "ConfigurationError",
    "DisagreementError",
    "GradientSpikeError",
    "GuardedOptimizer",
    "ReplicaDriftError",
    "SnapshotPolicy",
    "SpikeReport",
    "StabilityGuardError",
    "StepRecord",
]

if TYPE_CHECKING:
    from stabilityguard.config import Budget, CheckpointPolicy, SnapshotPolicy
    from stabilityguard.errors import (
        CheckpointError,
        ConfigurationError,
        DisagreementError,
        GradientSpikeError,
        ReplicaDriftError,
        StabilityGuardError,
    )
    from stabilityguard.optimizer import GuardedOptimizer
    from stabilityguard.report.records import SpikeReport, StepRecord


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
