"""The ladder of answers to a trip: skip, then rollback, then raise, within budgets."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stabilityguard.config import Budget, NanAction
from stabilityguard.report.records import Action

SCALER_PATIENCE = 20
"""Overflows in a row that a GradScaler is left alone with: enough to bring its scale from 65536 below 1."""


@dataclass(frozen=True, kw_only=True)
class BreakerState:
    """What the breaker remembers from step to step."""

    trips: int = 0
    """Trips since the last applied step."""

    overflows: int = 0
    """Overflows under a GradScaler since the last applied step."""

    rollbacks: tuple[int, ...] = ()
    """Steps of the rollbacks that still count, oldest first."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do about one step, and why."""

    action: Action
    reason: str
    state: BreakerState
    accept_level: bool = False
    """Whether the spiking layers' norms become their new baselines; the step is then applied."""

    is_trip: bool = True
    """Whether it counts as trouble; False for healthy steps, vetoes, and overflows that are left to a GradScaler."""


@dataclass(frozen=True, kw_only=True)
class Breaker:
    """Pure policy: no I/O, no clock, no rank."""

    nan_action: NanAction
    budget: Budget

    def decide(self, state: BreakerState, *, step: int, kind: str | None, has_target: bool) -> Decision:
        """The answer to a step judged ``kind`` (None: healthy); ``has_target`` says whether a rollback can be made."""
        if kind is None:
            healthy = replace(state, trips=0, overflows=0)
            return Decision(action="step", reason="healthy", state=healthy, is_trip=False)
        if kind == "veto":
            return Decision(action="skip", reason="a veto was cast", state=state, is_trip=False)
        if kind == "scaler_overflow" and state.overflows < SCALER_PATIENCE:
            overflowed = replace(state, overflows=state.overflows + 1)
            return Decision(
                action="skip",
                reason="the gradients overflowed, which is left to the GradScaler",
                state=overflowed,
                is_trip=False,
            )
        return self._trip(replace(state, trips=state.trips + 1), step=step, kind=kind, has_target=has_target)

    def _trip(self, state: BreakerState, *, step: int, kind: str, has_target: bool) -> Decision:
        if self.nan_action == "raise":
            return Decision(action="raise", reason='nan_action is "raise"', state=state)
        if self.nan_action == "rollback" and has_target:
            return self._roll_back(state, step=step, reason='nan_action is "rollback"')
        if state.trips < self.budget.consecutive_skips:
            return Decision(action="skip", reason=self._count(state), state=state)
        return self._climb(state, step=step, kind=kind, has_target=has_target)

    def _climb(self, state: BreakerState, *, step: int, kind: str, has_target: bool) -> Decision:
        spent = f"{self._count(state)}, which ends skipping"
        if kind == "spike":
            accepted = replace(state, trips=0, overflows=0)
            return Decision(action="step", reason=f"{spent}: the level is new", state=accepted, accept_level=True)
        if has_target:
            return self._roll_back(state, step=step, reason=spent)
        return Decision(action="raise", reason=f"{spent}, and there is no snapshot to go back to", state=state)

    def _roll_back(self, state: BreakerState, *, step: int, reason: str) -> Decision:
        recent = tuple(s for s in state.rollbacks if step - s < self.budget.window)
        if len(recent) >= self.budget.rollbacks:
            spent = f"{len(recent)} rollbacks within {self.budget.window} steps are all that the budget allows"
            return Decision(action="raise", reason=f"{reason}, but {spent}", state=replace(state, rollbacks=recent))
        rolled = replace(state, trips=0, overflows=0, rollbacks=(*recent, step))
        return Decision(action="rollback", reason=reason, state=rolled)

    def _count(self, state: BreakerState) -> str:
        return f"trip {state.trips} of {self.budget.consecutive_skips} in a row"
