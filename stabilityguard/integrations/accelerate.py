"""DeepSpeed engines that Accelerate has prepared, by itself or for the ``Trainer`` of Transformers."""

from __future__ import annotations

import gc
from typing import Any

from stabilityguard.distributed.deepspeed import EngineGuard, guard_engine
from stabilityguard.errors import ConfigurationError


def guard_accelerator(accelerator: Any, **options: Any) -> EngineGuard:
    """Guards the engine in which an ``Accelerator`` with DeepSpeed has prepared model and optimizer. A collective.

    ``accelerator.optimizer_step_was_skipped``, and with it a prepared schedule, then knows of the guard's skips.

    Args:
        accelerator: after its ``prepare()``.
        options: as for :func:`stabilityguard.distributed.deepspeed.guard_engine`.

    Raises:
        ConfigurationError: it has prepared no engine, or the engine cannot be guarded.
    """
    wrapped = getattr(accelerator, "deepspeed_engine_wrapped", None)
    if wrapped is None:
        raise ConfigurationError(
            "guard_accelerator takes an Accelerator whose prepare() has made a DeepSpeed engine; without DeepSpeed, "
            "guard the optimizer: GuardedOptimizer(accelerator.prepare(optimizer), model)"
        )
    guard = guard_engine(wrapped.engine, **options)
    for optimizer in accelerator._optimizers:
        ask_for_overflow(optimizer)
    return guard


def ask_for_overflow(prepared: Any) -> None:
    """Has a prepared optimizer look for skips; it does not where the engine's own had no ``overflow`` at first."""
    prepared.__has_overflow__ = True


def engine_of(prepared: Any) -> Any:
    """The DeepSpeed engine whose optimizer a prepared one holds; it has no reference to it.

    Raises:
        ConfigurationError: there is none in this process.
    """
    for found in gc.get_objects():
        is_engine = any(base.__name__ == "DeepSpeedEngine" for base in type(found).__mro__)
        if is_engine and found.optimizer is prepared.optimizer:
            return found
    raise ConfigurationError("there is no DeepSpeed engine with this optimizer; guard it by guard_engine(engine)")
