"""The keywords of ``GuardedOptimizer``, as the callbacks of trainers take them."""

from __future__ import annotations

import inspect
from typing import Any

from stabilityguard.errors import ConfigurationError
from stabilityguard.optimizer import GuardedOptimizer

KEYWORDS = tuple(inspect.signature(GuardedOptimizer).parameters)[2:]
"""All but the optimizer and the model, which the trainer makes."""


def check_keywords(given: dict[str, Any]) -> dict[str, Any]:
    """``given`` as it is; raises ConfigurationError for a name that ``GuardedOptimizer`` does not know."""
    unknown = [name for name in given if name not in KEYWORDS]
    if unknown:
        raise ConfigurationError(
            f"StabilityGuardCallback takes no {', '.join(unknown)}; it takes what GuardedOptimizer does: "
            + ", ".join(KEYWORDS)
        )
    return given


def tracking(given: dict[str, Any], schedulers: dict[str, Any]) -> dict[str, Any]:
    """``given`` with the trainer's learning-rate schedulers tracked, too; those of the user's own names win."""
    found = {name: one for name, one in schedulers.items() if hasattr(one, "load_state_dict")}
    return {**given, "track": {**found, **(given.get("track") or {})}}
