"""Settings, checked once at construction."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal, get_args

from stabilityguard.errors import ConfigurationError

NanAction = Literal["skip", "rollback", "raise"]
CheckpointFormat = Literal["dcp", "deepspeed"]
Moments = Literal["keep", "reset_trigger_layer"]


@dataclass(frozen=True, kw_only=True)
class SnapshotPolicy:
    """When states are copied to RAM, and which of the copies a rollback may use."""

    every: int = 100
    """Applied steps between two snapshots; at least 1."""

    keep: int = 3
    """Snapshots held at once; memory is ``keep`` times the training state. At least 2, so that a proven snapshot
    stays while a newer one is still on probation (1 is allowed with ``quarantine=0``)."""

    quarantine: int = 10
    """Healthy steps that must follow a snapshot before a rollback may use it; at least 0. The state that the user
    handed over, before the first step, is exempt."""

    def __post_init__(self) -> None:
        _require_integer("SnapshotPolicy.every", self.every, minimum=1)
        _require_integer("SnapshotPolicy.quarantine", self.quarantine, minimum=0)
        _require_integer("SnapshotPolicy.keep", self.keep, minimum=2 if self.quarantine else 1)


@dataclass(frozen=True, kw_only=True)
class CheckpointPolicy:
    """When states are written to disk, and which of the checkpoints count as clean."""

    directory: str = "./sg_checkpoints"
    """Where the checkpoints lie, one directory each; the same, shared one on every rank. Created when missing."""

    every: int = 1000
    """Applied steps between two checkpoints; at least 1."""

    keep: int = 3
    """Clean checkpoints kept on disk, the newest ones; at least 1. Those still on probation come on top."""

    quarantine: int = 10
    """Healthy steps that must follow a checkpoint before it counts as clean; at least 0."""

    asynchronous: bool = False
    """Whether files are written in the background, from a copy in host memory."""

    format: CheckpointFormat = "dcp"
    """``"dcp"``: files of torch.distributed.checkpoint; ``"deepspeed"``: besides them those of a DeepSpeed engine's own
    ``save_checkpoint``, which does not write in the background, for DeepSpeed's tools."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "directory", _path("CheckpointPolicy.directory", self.directory))
        _require_integer("CheckpointPolicy.every", self.every, minimum=1)
        _require_integer("CheckpointPolicy.keep", self.keep, minimum=1)
        _require_integer("CheckpointPolicy.quarantine", self.quarantine, minimum=0)
        _require_type("CheckpointPolicy.asynchronous", self.asynchronous, bool)
        _require_choice("CheckpointPolicy.format", self.format, get_args(CheckpointFormat))
        if self.format == "deepspeed" and self.asynchronous:
            raise ConfigurationError(
                "CheckpointPolicy.format='deepspeed' needs asynchronous=False, as the engine writes its files "
                "itself, from its live state"
            )


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How much trouble is tolerated before the ladder climbs: skip, then rollback, then raise."""

    consecutive_skips: int = 5
    """The trip in an unbroken row at which skipping ends; at least 1. A finite spike is then accepted as the new
    level; non-finite gradients cause a rollback where there is a target, else an error."""

    rollbacks: int = 3
    """Rollbacks allowed within ``window`` steps; one more raises. At least 0."""

    window: int = 1000
    """Length in steps of the window over which rollbacks are counted; at least 1."""

    def __post_init__(self) -> None:
        _require_integer("Budget.consecutive_skips", self.consecutive_skips, minimum=1)
        _require_integer("Budget.rollbacks", self.rollbacks, minimum=0)
        _require_integer("Budget.window", self.window, minimum=1)


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """What one guard was asked to do."""

    spike_threshold: float = 10.0
    """Ratio of a layer's gradient norm to its baseline above which the step trips; greater than 1."""

    nan_action: NanAction = "skip"
    """What a trip does: ``"skip"``, ``"rollback"`` or ``"raise"``."""

    log_every: int = 50
    """Steps between two summaries on the console; 0 turns them off."""

    log_dir: str = "./sg_logs"
    """Directory of the reports and the journal; created when first written to."""

    ema_alpha: float = 0.01
    """Weight of the newest norm in the moving average, in (0, 1]."""

    warmup_steps: int = 10
    """Healthy samples that a layer needs before spikes are judged; at least 0. NaN and Inf always trip."""

    verbose: bool = True
    """Whether alerts and summaries go to stdout; files are written either way."""

    max_grad_norm: float | None = None
    """Global L2 norm to clip to after a healthy verdict, or None not to clip; greater than 0."""

    snapshots: SnapshotPolicy | Literal[False] | None = None
    """Snapshots in RAM; None means ``SnapshotPolicy()`` where ``nan_action="rollback"``, and False none at all."""

    checkpoints: CheckpointPolicy | None = None
    """Checkpoints on disk."""

    moments: Moments = "keep"
    """Whether a rollback also clears the optimizer's state for the parameters of the layer that tripped."""

    replay_data: bool = False
    """Whether a rollback rewinds ``track["dataloader"]``, so that the same batches come again."""

    budget: Budget = field(default_factory=Budget)
    """Limits of the ladder."""

    drift_check_every: int = 0
    """Steps between two comparisons of replicated parameters over ranks; 0 turns them off."""

    def __post_init__(self) -> None:
        _require_number("spike_threshold", self.spike_threshold, above=1.0)
        _require_number("ema_alpha", self.ema_alpha, above=0.0, at_most=1.0)
        _require_integer("warmup_steps", self.warmup_steps, minimum=0)
        _require_integer("log_every", self.log_every, minimum=0)
        _require_integer("drift_check_every", self.drift_check_every, minimum=0)
        if self.max_grad_norm is not None:
            _require_number("max_grad_norm", self.max_grad_norm, above=0.0)
        _require_choice("nan_action", self.nan_action, get_args(NanAction))
        _require_type("verbose", self.verbose, bool)
        _require_type("budget", self.budget, Budget)
        object.__setattr__(self, "log_dir", _path("log_dir", self.log_dir))
        _require_choice("moments", self.moments, get_args(Moments))
        _require_type("replay_data", self.replay_data, bool)
        if self.snapshots is None and self.nan_action == "rollback":
            object.__setattr__(self, "snapshots", SnapshotPolicy())
        if self.snapshots is not None and self.snapshots is not False:
            _require_type("snapshots", self.snapshots, SnapshotPolicy)
        if self.checkpoints is not None:
            _require_type("checkpoints", self.checkpoints, CheckpointPolicy)


def _require_integer(name: str, value: Any, *, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < minimum:
        raise ConfigurationError(f"{name} must be an integer of at least {minimum}, but is {value!r}")


def _require_number(name: str, value: Any, *, above: float, at_most: float = sys.float_info.max) -> None:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not (is_number and above < value <= at_most):
        upper = "" if at_most == sys.float_info.max else f" and at most {at_most:g}"
        raise ConfigurationError(f"{name} must be a finite number greater than {above:g}{upper}, but is {value!r}")


def _require_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigurationError(f"{name} must be one of {', '.join(map(repr, choices))}, but is {value!r}")


def _require_type(name: str, value: Any, expected: type) -> None:
    if not isinstance(value, expected):
        remedy = "True or False" if expected is bool else f"{expected.__name__}(…)"
        raise ConfigurationError(f"{name} must be a {expected.__name__}, but is {value!r}; pass {remedy}")


def _path(name: str, value: Any) -> str:
    try:
        path = os.fsdecode(os.fspath(value))
    except TypeError:
        path = ""
    if not path:
        raise ConfigurationError(f"{name} must be a path, but is {value!r}")
    return path
