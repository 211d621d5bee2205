"""Closures: every gradient that they evaluate is judged before an update is made from it."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from stabilityguard.case import BadEvaluation
from stabilityguard.errors import StabilityGuardError
from stabilityguard.guard import Guard
from stabilityguard.measure.loss import scalar_loss
from stabilityguard.measure.window import LossScale

log = logging.getLogger("stabilityguard")


class GuardedClosure:
    """The closure that the base optimizer is given; its first evaluation was made, and judged, before.

    Args:
        closure: the user's; clears gradients, runs forward and backward, returns the loss.
        guard: measures what an evaluation leaves.
        scale: how the gradients are scaled.
        evaluate: whether to make the first evaluation now; False where the gradients to judge are there already.
    """

    def __init__(self, closure: Callable[[], Any], guard: Guard, scale: LossScale, *, evaluate: bool) -> None:
        self._closure, self._guard, self._scale = closure, guard, scale
        self.first = self._evaluate() if evaluate else None
        self._reusable = self._marks() if evaluate else None

    def __call__(self) -> Any:
        """The loss. Raises BadEvaluation if a further evaluation's gradients or loss are not finite."""
        reusable, self._reusable = self._reusable, None
        if reusable is not None and reusable == self._marks():
            return self.first
        value = self._evaluate()
        statistics = self._guard.measure(scalar_loss(value), self._scale)
        if statistics.findings or not math.isfinite(statistics.loss or 0.0):
            raise BadEvaluation(statistics)
        return value

    def run(self, base: Optimizer) -> Any:
        """Lets ``base`` take its step with this closure.

        Raises:
            BadEvaluation: a further evaluation is not finite; the state from before the step is back in place.
            StabilityGuardError: the same, but the optimizer did not look as if it evaluated more than once, so that no
                copy of the state was made.
        """
        if evaluates_repeatedly(base):
            return self._guard.attempt(lambda: base.step(self))
        try:
            return base.step(self)
        except BadEvaluation as fault:
            raise StabilityGuardError(
                f"{type(base).__name__} evaluated its closure again and got non-finite gradients after it had moved "
                "parameters, which cannot be undone; give its step() a closure without default to say so"
            ) from fault

    def _evaluate(self) -> Any:
        with torch.enable_grad():
            return self._closure()

    def _marks(self) -> list[tuple[int, int, int | None]]:
        """What changes when parameters move or gradients are cleared: identities hold while the base steps."""
        parameters = self._guard.window.table.parameters
        return [(p._version, id(p.grad), None if p.grad is None else p.grad._version) for p in parameters]


def evaluates_repeatedly(optimizer: Optimizer) -> bool:
    """Whether ``step`` may call its closure more than once, and so move parameters before it has seen all gradients.

    True for those that cannot do without a closure (LBFGS and its kind) and those that climb first (SAM).
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    required = closure is not None and closure.default is inspect.Parameter.empty
    return required or climbs_first(optimizer)


def climbs_first(optimizer: Optimizer) -> bool:
    """Whether the optimizer takes two steps for each (SAM): it may want gradients before its ``step(closure)``."""
    return hasattr(optimizer, "first_step")


def advise_on_climbing(optimizer: Optimizer) -> None:
    """Warns that such an optimizer's two steps by themselves are not guarded."""
    if climbs_first(optimizer):
        log.warning("%s.first_step() and second_step() are not guarded; use step(closure)", type(optimizer).__name__)
