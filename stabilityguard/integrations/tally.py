"""What a run has come to, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from stabilityguard.report.records import StepRecord


@dataclass(frozen=True, kw_only=True)
class Tally:
    """Counts over the steps of a run."""

    steps: int = 0

    trips: int = 0

    skipped: int = 0
    """Steps that were not applied, trips and others, without those rolled back."""

    rollbacks: int = 0

    has_raised: bool = False

    blamed: Mapping[str, int] = field(default_factory=dict)
    """Trips by the layer that was to blame."""

    largest: tuple[str, float] | None = None
    """The layer with the largest ratio so far, and the ratio."""

    def after(self, record: StepRecord, *, tripped: bool) -> Tally:
        """The same with one step more."""
        blamed, layer = self.blamed, record.trigger_layer
        if tripped and layer is not None:
            blamed = {**blamed, layer: blamed.get(layer, 0) + 1}
        return replace(
            self,
            steps=self.steps + 1,
            trips=self.trips + tripped,
            skipped=self.skipped + (record.action == "skip"),
            rollbacks=self.rollbacks + (record.action == "rollback"),
            has_raised=self.has_raised or record.action == "raise",
            blamed=blamed,
            largest=self._larger(record),
        )

    @property
    def verdict(self) -> str:
        """``"healthy"`` without a trip, ``"stopped"`` if the guard has raised, else ``"recovered"``."""
        if self.has_raised:
            return "stopped"
        return "recovered" if self.trips else "healthy"

    @property
    def summary(self) -> dict[str, str | int]:
        """Verdict, trips and, if one is known, the worst layer, by name."""
        told: dict[str, str | int] = {"verdict": self.verdict, "trips": self.trips}
        return told if self.worst_layer is None else {**told, "worst_layer": self.worst_layer}

    @property
    def worst_layer(self) -> str | None:
        """The layer with the most trips; without any, that with the largest ratio so far."""
        if self.blamed:
            return max(self.blamed, key=lambda layer: self.blamed[layer])
        return self.largest[0] if self.largest else None

    def _larger(self, record: StepRecord) -> tuple[str, float] | None:
        worst = record.worst_layer
        return worst if worst and (self.largest is None or worst[1] > self.largest[1]) else self.largest
