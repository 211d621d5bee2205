"""What a guard remembers from step to step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from stabilityguard.case import Case
from stabilityguard.detect.detector import Detector, State, realign
from stabilityguard.distributed.digest import digest_of, digest_of_tensors
from stabilityguard.recover.breaker import BreakerState
from stabilityguard.report.records import StepRecord


class Memory:
    """The count of steps, and the states of detector and breaker.

    Args:
        detector: learns from the norms.
        names: the layers.
    """

    def __init__(self, detector: Detector, names: Sequence[str]) -> None:
        self._detector, self._names = detector, tuple(names)
        self.steps = 0
        self.norms: State = detector.initial(len(names))
        self.breaker = BreakerState()
        self._decided: object = None

    def learn(self, case: Case) -> None:
        """Takes in the norms of a step that was applied."""
        if case.decision.accept_level:
            self.norms = self._detector.rebase(self.norms, case.statistics.norms, case.verdict.spikes)
        self.norms = self._detector.absorb(self.norms, case.statistics.norms)

    def note(self, record: StepRecord) -> None:
        """Takes note of what was decided."""
        self._decided = record.step, record.action, record.kind, record.trigger_layer, record.restored_step

    def digest_of_decision(self) -> int:
        """Of the last decision and the breaker's state: equal on ranks that have done the same."""
        return digest_of((self._decided, self.breaker))

    def digest(self) -> int:
        """Of the detector's state: equal on ranks that judge alike."""
        return digest_of_tensors(self.norms)

    def follow(self, names: Sequence[str]) -> None:
        """Goes over to other layers; those that stay keep their history."""
        self.norms = realign(self.norms, self._names, self._detector.initial(len(names)), tuple(names))
        self._names = tuple(names)

    def state_dict(self) -> dict[str, Any]:
        """What a later run needs to go on judging alike: tensors and plain values."""
        return {
            "steps": self.steps,
            "layers": list(self._names),
            "memory": dict(self.norms),
            "breaker": asdict(self.breaker),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over such a state, layer by name."""
        self.steps = int(state["steps"])
        self.recall(state)
        breaker = state["breaker"]
        self.breaker = BreakerState(**{**breaker, "rollbacks": tuple(breaker["rollbacks"])})

    def recall(self, state: Mapping[str, Any]) -> None:
        """Takes over the detector's part of such a state."""
        fresh = self._detector.initial(len(self._names))
        self.norms = realign(state["memory"], tuple(state["layers"]), fresh, self._names)
