"""The optimizer that Accelerate's ``prepare()`` puts in front: it accumulates, scales, and tells of skipped steps."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from stabilityguard.errors import ConfigurationError

_HOME = "accelerate.optimizer"

_NOT_WITH_DEEPSPEED = (
    "with DeepSpeed the update is made inside accelerator.backward(), and this optimizer's step() does nothing; guard "
    "the engine instead: guard_engine(engine) of stabilityguard.distributed.deepspeed, after accelerator.prepare()"
)


class Prepared:
    """What a guard has to know of the prepared optimizer in front of it; of none, nothing.

    A guard that is prepared finds its front when that calls ``step()``.

    Args:
        guarded: the guard.
    """

    def __init__(self, guarded: Optimizer) -> None:
        self._guarded = guarded
        self._front: Any | None = None

    def come_behind(self, front: Any | None) -> None:
        """Takes the place of the optimizer in ``front``, a prepared one that was given to the guard."""
        self._front = front
        self.hold(self._guarded)

    def hold(self, optimizer: Optimizer) -> None:
        """Has the prepared optimizer step ``optimizer``."""
        if self._front is not None:
            self._front.__setstate__({"optimizer": optimizer})  # renews the methods that it keeps for a scaler, too

    @property
    def accumulates(self) -> bool:
        """Whether gradients are still being accumulated, so that ``step()`` and ``zero_grad()`` have to do nothing."""
        return self._front is not None and not self._front.gradient_state.sync_gradients

    @property
    def scales(self) -> bool:
        """Whether the step has to go by the scaler first, which then calls ``step()`` again."""
        return self._front is not None and self._front.scaler is not None and "found_inf" not in vars(self._guarded)

    def scaled_step(self, closure: Callable[[], Any] | None, loss: Tensor | float | None) -> Any:
        """Steps by way of the scaler, as the prepared optimizer would."""
        assert self._front is not None
        stepped = self._front.optimizer  # no longer the guard, once that was closed
        arguments = () if closure is None else (closure,)
        keywords = {"loss": loss} if stepped is self._guarded and loss is not None else {}
        result = self._front.scaler.step(stepped, *arguments, **keywords)
        self._front.scaler.update()
        return result

    def tell(self, *, skipped: bool) -> None:
        """Lets ``accelerator.optimizer_step_was_skipped`` say what was done."""
        if self._front is None and "accelerate" in sys.modules:
            self._front = _caller(self._guarded)
        if self._front is not None:
            self._front._is_overflow = skipped
            self._front._accelerate_step_called = not skipped  # read after the scaler's step


def base_of(optimizer: Any) -> tuple[Any, Any | None]:
    """The optimizer that a prepared one holds, and the prepared one; any other as it is, and None.

    Raises:
        ConfigurationError: DeepSpeed makes the updates.
    """
    if _uses_deepspeed() or any(one.__name__ == "DeepSpeedOptimizerWrapper" for one in type(optimizer).__mro__):
        raise ConfigurationError(_NOT_WITH_DEEPSPEED)
    is_prepared = any(one.__module__ == _HOME for one in type(optimizer).__mro__)
    return (optimizer.optimizer, optimizer) if is_prepared else (optimizer, None)


def _uses_deepspeed() -> bool:
    """Whether this process has an Accelerator that hands its training over to DeepSpeed."""
    module = sys.modules.get("accelerate.state")
    states = () if module is None else (module.AcceleratorState._shared_state, module.PartialState._shared_state)
    return any(str(state.get("distributed_type", "")).endswith("DEEPSPEED") for state in states)


def _caller(guarded: Optimizer) -> Any | None:
    """The prepared optimizer by which ``guarded.step()`` was called."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _HOME:
            caller = frame.f_locals.get("self")
            if caller is not None and vars(caller).get("optimizer") is guarded:
                return caller
        frame = frame.f_back
    return None
