"""Guarding a DeepSpeed engine: ``guard_engine(engine)``."""

from stabilityguard.distributed.deepspeed.engine import EngineGuard, guard_engine

__all__ = ["EngineGuard", "guard_engine"]
