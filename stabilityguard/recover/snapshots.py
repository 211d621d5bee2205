"""A ring of states in RAM, of which only proven ones are targets of a rollback."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from stabilityguard.config import SnapshotPolicy
from stabilityguard.detect.detector import State
from stabilityguard.recover.state import Place, SmallState


@dataclass(kw_only=True)
class Snapshot:
    """The training state at the end of one step."""

    step: int
    tensors: dict[Place, Tensor]
    small: SmallState
    memory: State
    """The detector's memory at that step."""

    healthy_since: int = 0
    """Healthy steps that have followed."""

    restored: bool = False
    """Whether it has been gone back to."""


class SnapshotRing:
    """Holds up to ``policy.keep`` snapshots; their memory is allocated once and used again."""

    def __init__(self, policy: SnapshotPolicy) -> None:
        self.policy = policy
        self._snapshots: list[Snapshot] = []
        self._spare: list[dict[Place, Tensor]] = []

    @property
    def has_room(self) -> bool:
        """Whether one more can be taken: not while the slots hold the only target and the only one on its way."""
        return len(self._snapshots) < self.policy.keep or self._dispensable() is not None

    def take(
        self, step: int, live: Mapping[Place, Tensor], small: SmallState, memory: State, *, proven: bool = False
    ) -> None:
        """Copies the ``live`` tensors to host memory and waits for the copies. A ``proven`` one is a target at once.

        Needs ``has_room``.
        """
        if len(self._snapshots) >= self.policy.keep:
            dispensable = self._dispensable()
            assert dispensable is not None
            self._release(dispensable)
        storage = self._spare.pop() if self._spare else {}
        tensors = {place: _storage_for(tensor, storage.get(place)) for place, tensor in live.items()}
        _copy(list(live.values()), list(tensors.values()))
        healthy_since = self.policy.quarantine if proven else 0
        self._snapshots.append(
            Snapshot(step=step, tensors=tensors, small=small, memory=memory, healthy_since=healthy_since)
        )

    def count_healthy_step(self) -> None:
        """Brings every snapshot one step nearer to being a target."""
        for snapshot in self._snapshots:
            snapshot.healthy_since += 1

    def target(self) -> Snapshot | None:
        """The newest proven snapshot not gone back to before, else the oldest proven one; None without any."""
        proven = self._proven()
        unused = [snapshot for snapshot in proven if not snapshot.restored]
        return unused[-1] if unused else proven[0] if proven else None

    def drop_newer_than(self, step: int) -> None:
        """Gives up the snapshots of a future that was abandoned."""
        for snapshot in [s for s in self._snapshots if s.step > step]:
            self._release(snapshot)

    def clear(self) -> None:
        """Gives up all snapshots."""
        self.drop_newer_than(-1)

    def _proven(self) -> list[Snapshot]:
        return [s for s in self._snapshots if s.healthy_since >= self.policy.quarantine]

    def _dispensable(self) -> Snapshot | None:
        """The oldest target while there is a newer one, else the newest of several on probation."""
        proven = self._proven()
        if len(proven) > 1 or len(self._snapshots) == 1:
            return proven[0]
        return self._snapshots[-1] if len(self._snapshots) - len(proven) > 1 else None

    def _release(self, snapshot: Snapshot) -> None:
        self._snapshots.remove(snapshot)
        self._spare.append(snapshot.tensors)


def _storage_for(tensor: Tensor, spare: Tensor | None) -> Tensor:
    if spare is not None and (spare.shape, spare.dtype) == (tensor.shape, tensor.dtype):
        return spare
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)


def _copy(live: list[Tensor], stored: list[Tensor]) -> None:
    torch._foreach_copy_(stored, live, non_blocking=True)
    for device in {tensor.device for tensor in live if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
