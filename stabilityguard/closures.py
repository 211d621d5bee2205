"""Closures: every gradient that they evaluate is judged before an update is made from it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from stabilityguard.detect.statistics import Statistics
from stabilityguard.guard import BadEvaluation


class GuardedClosure:
    """The closure that the base optimizer is given; its first evaluation was made, and judged, before.

    Args:
        closure: the user's; clears gradients, runs forward and backward, returns the loss.
        measure: takes the statistics of the gradients that an evaluation left.
    """

    def __init__(self, closure: Callable[[], Any], measure: Callable[[], Statistics]) -> None:
        self._closure = closure
        self._measure = measure
        self._pending = True
        self.first = self._evaluate()

    def __call__(self) -> Any:
        """The loss. Raises BadEvaluation if a further evaluation's gradients or loss are not finite."""
        if self._pending:
            self._pending = False
            return self.first
        value = self._evaluate()
        statistics = self._measure()
        if statistics.findings or not torch.isfinite(torch.as_tensor(statistics.loss or 0.0)):
            raise BadEvaluation(statistics)
        return value

    def _evaluate(self) -> Any:
        with torch.enable_grad():
            return self._closure()


def evaluates_repeatedly(optimizer: Optimizer) -> bool:
    """Whether ``step`` may call its closure more than once, and so move parameters before it has seen all gradients.

    True for those that cannot do without a closure (LBFGS and its kind) and those that climb first (SAM).
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    required = closure is not None and closure.default is inspect.Parameter.empty
    return required or hasattr(optimizer, "first_step")


def scalar_loss(value: object) -> Tensor | None:
    """``value`` as a detached 0-dim tensor where it is a number or a one-element tensor, else None."""
    if isinstance(value, Tensor):
        return value.detach().reshape(()) if value.numel() == 1 and not value.is_complex() else None
    return torch.tensor(float(value)) if isinstance(value, (int, float)) else None
