"""What the guard raises.

StabilityGuardError
├── ConfigurationError   bad arguments, found at construction (also a ValueError)
├── GradientSpikeError   a trip that the policy answers by raising
├── CheckpointError      a checkpoint that could not be written or read
└── DisagreementError    ranks that are not in one state
    └── ReplicaDriftError   replicas of parameters that are no longer alike
"""

from __future__ import annotations

import copyreg
from typing import Any


class StabilityGuardError(Exception):
    """Base of every error that StabilityGuard raises by itself."""


class ConfigurationError(StabilityGuardError, ValueError):
    """An argument cannot be used; the message names what was seen, what was expected and what to do."""


class GradientSpikeError(StabilityGuardError, RuntimeError):
    """A step's gradients were judged bad and the policy is to stop.

    Parameters, optimizer state and the offending gradients are left as they were, for inspection.

    Attributes:
        step: 1-based count of ``step()`` calls.
        kind: ``"spike"``, ``"nan"``, ``"inf"``, ``"overflow"`` or ``"scaler_overflow"``.
        layer: qualified name of the trigger layer, or None where no layer is to blame (only the loss is not
            finite, or only the GradScaler saw the overflow).
        norm: L2 norm of that layer's gradient, NaN or infinite for non-finite gradients.
        baseline: what was expected, or None while the layer has no baseline.
        ratio: ``norm / baseline``, or None without a baseline.
        report_path: the JSON report, or None if it could not be written, or is another rank's.
        ranks: global ranks on which the fault arose; empty if that cannot be told.
    """

    def __init__(
        self,
        message: str,
        *,
        step: int,
        kind: str,
        layer: str | None,
        norm: float | None,
        baseline: float | None,
        ratio: float | None,
        report_path: str | None,
        ranks: tuple[int, ...] = (),
    ) -> None:
        super().__init__(message)
        self.step = step
        self.kind = kind
        self.layer = layer
        self.norm = norm
        self.baseline = baseline
        self.ratio = ratio
        self.report_path = report_path
        self.ranks = ranks

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions pickle by calling the class with their positional arguments, and the keywords have no defaults.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class CheckpointError(StabilityGuardError, RuntimeError):
    """A checkpoint could not be written, or none could be read; raised on all ranks alike, with nothing changed."""


class DisagreementError(StabilityGuardError, RuntimeError):
    """Ranks no longer agree on what was decided, or on what they remember; raised on all of them at the same step.

    Attributes:
        step: 1-based count of ``step()`` calls; nothing was applied in it.
        ranks: global ranks that differ from the majority; all of them where there is none.
    """

    def __init__(self, message: str, *, step: int, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.step, self.ranks = step, ranks

    def __reduce__(self) -> tuple[Any, ...]:
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class ReplicaDriftError(DisagreementError):
    """Copies of a parameter that should be the same bits on several ranks are not; raised on all ranks alike."""
