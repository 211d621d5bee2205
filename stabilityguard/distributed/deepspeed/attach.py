"""Which engines can be guarded, and why others cannot."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from stabilityguard.distributed.deepspeed.partition import Partition
from stabilityguard.distributed.deepspeed.partitioned import Bf16Optimizer, ZeroOneTwo, ZeroThree
from stabilityguard.distributed.deepspeed.replicated import LowPrecisionOptimizer, PlainOptimizer
from stabilityguard.errors import ConfigurationError

KINDS: dict[str, type[Partition]] = {
    "FP16_Optimizer": LowPrecisionOptimizer,
    "FP16_UnfusedOptimizer": LowPrecisionOptimizer,
    "BF16_Optimizer": Bf16Optimizer,
    "DeepSpeedZeroOptimizer": ZeroOneTwo,
    "DeepSpeedZeroOptimizer_Stage3": ZeroThree,
}
"""By the name of the class of ``engine.optimizer``; subclasses update in ways of their own."""

ENGINE_NEEDS = (
    "_take_model_step",
    "step",
    "module",
    "basic_optimizer",
    "param_names",
    "lr_scheduler",
    "global_steps",
    "global_samples",
    "skipped_steps",
    "was_step_applied",
    "clip_fp32_gradients",
    "fp16_enabled",
)
"""Attributes of the engine without which it cannot be guarded."""

ELSEWHERE = ("Onebit", "ZeroOneAdam", "Muon")
"""Parts of the names of optimizers that do not update from averaged gradients."""


def find_partition(engine: Any) -> Partition:
    """The way in which this engine's optimizer splits the parameters.

    Raises:
        ConfigurationError: it is no engine that can be guarded; names what is missing, or the feature that is at odds.
    """
    if not hasattr(engine, "_take_model_step"):
        raise ConfigurationError(
            f"guard_engine takes what deepspeed.initialize returns first, a DeepSpeedEngine, but got {type(engine)!r}"
        )
    require(engine, "the engine", ENGINE_NEEDS)
    optimizer = engine.optimizer
    _refuse(engine, optimizer)
    kind = KINDS.get(type(optimizer).__name__, PlainOptimizer if isinstance(optimizer, Optimizer) else None)
    if kind is None:
        raise ConfigurationError(
            f"{type(optimizer).__name__} cannot be guarded; guard_engine knows torch's optimizers, {', '.join(KINDS)}"
        )
    require(optimizer, type(optimizer).__name__, kind.needs)
    return kind(engine)


def require(owner: object, called: str, names: Iterable[str]) -> None:
    """Raises ConfigurationError where ``owner``, as it is ``called``, lacks one of the attributes."""
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        raise ConfigurationError(
            f"{called} of this version of DeepSpeed has no {', '.join(missing)}, which guarding it needs; "
            "install deepspeed>=0.19,<0.20"
        )


def _refuse(engine: Any, optimizer: Any) -> None:
    base = type(getattr(engine, "basic_optimizer", None) or optimizer).__name__
    reasons = {
        "ZenFlow updates weights outside the engine's step": bool(getattr(engine, "zenflow", False)),
        "without an optimizer nothing is updated": optimizer is None or base == "DummyOptim",
        f"{base} does not update from averaged gradients": any(part in base for part in ELSEWHERE),
        "optimizer state on NVMe cannot be read where it is": bool(getattr(optimizer, "swap_optimizer", False)),
        "float16 under torch_autocast keeps a loss scale that never recovers; use bfloat16": _autocasts_half(
            engine, optimizer
        ),
        "tensor parallelism inside the engine is not supported": _tensor_parallel_size(engine) > 1,
        "the engine is guarded already; guard it once": "_take_model_step" in vars(engine),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ConfigurationError(f"this DeepSpeed engine cannot be guarded: {reason}")


def _autocasts_half(engine: Any, optimizer: Any) -> bool:
    scalers = (
        getattr(engine, "torch_autocast_z0_gradscaler", None),
        getattr(optimizer, "torch_autocast_gradscaler", None),
    )
    return any(scaler is not None for scaler in scalers)


def _tensor_parallel_size(engine: Any) -> int:
    mpu = getattr(engine, "mpu", None)
    size = getattr(mpu, "get_tensor_model_parallel_world_size", None) or getattr(
        mpu, "get_model_parallel_world_size", None
    )
    return int(size()) if size is not None else 1
