"""A ring of states in RAM, of which only proven ones are targets of a rollback."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stabilityguard.config import SnapshotPolicy
from stabilityguard.distributed.layout import Place
from stabilityguard.recover.catalogue import choose
from stabilityguard.recover.host import HostCopy
from stabilityguard.recover.state import SmallState

log = logging.getLogger("stabilityguard")


@dataclass(kw_only=True)
class Snapshot:
    """The training state at the end of one step."""

    step: int
    copy: HostCopy
    small: SmallState
    memory: Any
    """What the guard remembered at that step."""

    healthy_since: int = 0
    """Healthy steps that have followed."""

    restored: bool = False
    """Whether it has been gone back to."""

    @property
    def tensors(self) -> dict[Place, Tensor]:
        """Valid after ``copy.wait()``."""
        return self.copy.tensors


class SnapshotRing:
    """Holds up to ``policy.keep`` snapshots; their memory is allocated once and used again."""

    def __init__(self, policy: SnapshotPolicy) -> None:
        self.policy = policy
        self._snapshots: list[Snapshot] = []
        self._spare: list[HostCopy] = []

    @property
    def has_room(self) -> bool:
        """Whether one more can be taken: not while the slots hold the only target and the only one on its way."""
        return len(self._snapshots) < self.policy.keep or self._dispensable() is not None

    def take(
        self, step: int, live: Mapping[Place, Tensor], small: SmallState, memory: Any, *, proven: bool = False
    ) -> None:
        """Copies the ``live`` tensors to host memory. A ``proven`` snapshot is a target at once. Needs ``has_room``."""
        if len(self._snapshots) >= self.policy.keep:
            dispensable = self._dispensable()
            assert dispensable is not None
            self._release(dispensable)
        copy = self._spare.pop() if self._spare else HostCopy()
        copy.take(live)
        healthy_since = self.policy.quarantine if proven else 0
        self._snapshots.append(Snapshot(step=step, copy=copy, small=small, memory=memory, healthy_since=healthy_since))

    def fence(self) -> None:
        """Makes the device's coming work come after the copies that are being made."""
        for snapshot in list(self._snapshots):
            snapshot.copy.fence()
            if snapshot.copy.is_torn:
                log.warning("no snapshot of step %d: parameters were written to while it was made", snapshot.step)
                self._release(snapshot)

    def count_healthy_step(self) -> None:
        """Brings every snapshot one step nearer to being a target."""
        for snapshot in self._snapshots:
            snapshot.healthy_since += 1

    @property
    def targets(self) -> list[Snapshot]:
        """The proven ones, oldest first."""
        return [s for s in self._snapshots if s.healthy_since >= self.policy.quarantine]

    def target(self) -> Snapshot | None:
        """The one that a rollback should use; None without any."""
        return choose(self.targets)

    def drop_newer_than(self, step: int) -> None:
        """Gives up the snapshots of a future that was abandoned."""
        for snapshot in [s for s in self._snapshots if s.step > step]:
            self._release(snapshot)

    def clear(self) -> None:
        """Gives up all snapshots."""
        self.drop_newer_than(-1)

    def _dispensable(self) -> Snapshot | None:
        """The oldest target while there is a newer one, else the newest of several on probation."""
        proven = self.targets
        if len(proven) > 1 or len(self._snapshots) == 1:
            return proven[0]
        return self._snapshots[-1] if len(self._snapshots) - len(proven) > 1 else None

    def _release(self, snapshot: Snapshot) -> None:
        self._snapshots.remove(snapshot)
        self._spare.append(snapshot.copy)
