"""The guard in the ``Trainer`` of Lightning, as a callback; for ``lightning`` and for ``pytorch_lightning``."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from stabilityguard.errors import ConfigurationError
from stabilityguard.integrations.keywords import check_keywords, tracking
from stabilityguard.optimizer import STATE_KEY, GuardedOptimizer

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _callback_class() -> Any:
    """That of the package in use, or else of the one that is installed; both call callbacks alike."""
    for name in sorted(_PACKAGES, key=lambda name: name not in sys.modules):
        try:
            return import_module(name).Callback
        except ImportError:
            continue
    raise ImportError('stabilityguard.integrations.lightning needs lightning: pip install "stabilityguard[lightning]"')


class StabilityGuardCallback(_callback_class()):  # type: ignore[misc]
    """Guards every optimizer of a Lightning ``Trainer``: ``Trainer(…, callbacks=[StabilityGuardCallback()])``.

    From the start of ``fit`` to its end guards stand in the places of the optimizers. Each optimizer has a guard of its
    own, which judges and skips by itself; where there are several, reports go to ``optimizer_0``, … in ``log_dir``.
    Norms are from before the trainer's clipping. Learning-rate schedulers are tracked. The guards' memory is part of
    the trainer's checkpoints, and taken up again by ``fit(ckpt_path=…)``.

    Args:
        spike_threshold: ratio of norm to baseline that trips; greater than 1.
        options: further keywords of :class:`stabilityguard.GuardedOptimizer`, for all optimizers alike.

    Raises:
        ConfigurationError: here for unknown keywords, at the start of ``fit`` for values that cannot be used, and for
            strategies whose optimizers cannot be guarded (DeepSpeed).
    """

    guards: list[GuardedOptimizer]
    """Those of the present or the last ``fit``, in the order of the optimizers."""

    def __init__(self, spike_threshold: float = 10.0, **options: Any) -> None:
        self._options = check_keywords({"spike_threshold": spike_threshold, **options})
        self.guards = []
        self._memories: list[dict[str, Any]] = []
        self._losses: list[Tensor] = []
        self._is_fitting = False

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Puts a guard in the place of each optimizer. A collective call over the ranks."""
        if type(trainer.strategy).__name__ == "DeepSpeedStrategy":
            raise ConfigurationError(
                "with DeepSpeed the engine makes the updates; guard it instead: guard_engine(trainer.strategy.model) "
                "of stabilityguard.distributed.deepspeed"
            )
        bases = trainer.strategy.optimizers
        self._losses.clear()
        self.guards = [self._guard(trainer, base, index, len(bases)) for index, base in enumerate(bases)]
        trainer.strategy.optimizers = self.guards
        self._is_fitting = True
        self._take_up()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Takes note of a loss, which manual optimization does not give to ``step()``."""
        if not pl_module.automatic_optimization and getattr(trainer.precision_plugin, "scaler", None) is None:
            self._losses.append(loss.detach())

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Gives the optimizers back. Waits for checkpoints in the making."""
        self._end(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Gives the optimizers back."""
        self._end(trainer)

    def state_dict(self) -> dict[str, Any]:
        """The guards' memory, for the trainer's checkpoints."""
        return {"guards": [guard.state_dict()[STATE_KEY] for guard in self.guards]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes such a memory over, now or when ``fit`` starts."""
        self._memories = list(state_dict["guards"])
        if self._is_fitting:
            self._take_up()

    def _guard(self, trainer: Any, base: Optimizer, index: int, count: int) -> GuardedOptimizer:
        schedulers = {f"lr_scheduler_{i}": one.scheduler for i, one in enumerate(trainer.lr_scheduler_configs)}
        options = tracking(self._options, schedulers)
        options.setdefault("scaler", getattr(trainer.precision_plugin, "scaler", None))
        if count > 1:
            options["log_dir"] = os.path.join(options.get("log_dir", "./sg_logs"), f"optimizer_{index}")
        guard = _LightningsGuard(base, trainer.strategy.model, **options)
        guard.losses = self._losses
        return guard

    def _take_up(self) -> None:
        if self._memories and len(self._memories) != len(self.guards):
            raise ConfigurationError(
                f"the checkpoint holds the memory of {len(self._memories)} guards, and there are {len(self.guards)} "
                "optimizers; go on with as many optimizers as before"
            )
        for guard, memory in zip(self.guards, self._memories, strict=False):
            guard.load_state_dict({STATE_KEY: memory})
        self._memories = []

    def _end(self, trainer: Any) -> None:
        if self._is_fitting:
            self._is_fitting = False
            for guard in self.guards:
                guard.close()
            trainer.strategy.optimizers = [guard.base_optimizer for guard in self.guards]


class _LightningsGuard(GuardedOptimizer):
    """A guard that knows the losses of manual optimization."""

    losses: list[Tensor]
    """Those since the last step of any optimizer."""

    def step(self, closure: Any = None, *, loss: Any = None) -> Any:
        if loss is None and self.losses:
            loss = torch.stack([one.double().mean() for one in self.losses]).mean()
        self.losses.clear()
        return super().step(closure, loss=loss)
