"""Ways back: to the buffers of the last applied step, and to a proven snapshot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from stabilityguard.config import SnapshotPolicy
from stabilityguard.detect.detector import State
from stabilityguard.distributed.shards import local_part
from stabilityguard.recover.buffers import BufferKeeper, owned_buffers
from stabilityguard.recover.snapshots import Snapshot, SnapshotRing
from stabilityguard.recover.state import Stateful, TrainingState


@dataclass(frozen=True, kw_only=True)
class BufferTraces:
    """Buffers that the forward of a bad step had written to, by qualified name."""

    restored: tuple[str, ...] = ()
    """Put back to their values after the last applied step."""

    touched: tuple[str, ...] = ()
    """Left as they are, since there was no copy of them."""


class Recovery:
    """Keeps what is needed to undo a bad step, for the part of the model that one optimizer trains."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        optimizer: Optimizer,
        tracked: Mapping[str, Stateful],
        policy: SnapshotPolicy | None,
    ) -> None:
        self._slots = owned_buffers(model, parameters)
        self._state = TrainingState(parameters, self._slots, optimizer, tracked)
        self._ring = SnapshotRing(policy) if policy else None
        self._buffers: BufferKeeper | None = None
        self._parameters = parameters
        self._versions_at_begin: list[int] | None = None
        self._since_snapshot = 0

    @property
    def has_target(self) -> bool:
        """Whether a rollback can be made."""
        return self._ring is not None and self._ring.target() is not None

    @property
    def was_rewritten(self) -> bool:
        """Whether parameters were written to between ``begin()`` and now, with no step applied in between."""
        return self._versions_at_begin is not None and self._versions_at_begin != self._versions()

    def begin(self, step: int, memory: State, *, in_step: bool = False) -> None:
        """Copies the state that the user hands over, which counts as proven; earlier snapshots are given up.

        ``in_step`` says that a forward has written to the buffers since.
        """
        rewritten, self._versions_at_begin = self._versions_at_begin is not None, self._versions()
        self._since_snapshot = 0
        live = self._state.tensors()
        if (rewritten or in_step) and self._buffers is not None:
            live.update({("buffer", name, ""): copy for name, copy in self._buffers.copies.items()})
        else:
            self._buffers = BufferKeeper(self._slots)
        if self._ring is not None:
            self._ring.clear()
            self._ring.take(step, live, self._state.small(), memory, proven=True)

    def step_begins(self) -> None:
        """Takes the buffers, before a step's first forward, for what a skip of the step goes back to."""
        if self._buffers is not None and self._versions_at_begin is None:
            self._buffers.refresh()

    def applied(self, step: int, memory: State) -> None:
        """Takes note that ``step`` was healthy and its update was made; copies what is due."""
        assert self._buffers is not None
        self._versions_at_begin = None
        self._buffers.refresh()
        self._since_snapshot += 1
        if self._ring is not None:
            self._ring.count_healthy_step()
            if self._since_snapshot >= self._ring.policy.every and self._ring.has_room:
                self._ring.take(step, self._state.tensors(), self._state.small(), memory)
                self._since_snapshot = 0

    def remember(self) -> Callable[[], None]:
        """Copies the present state; the function returned puts it back."""
        tensors = {place: tensor.clone() for place, tensor in self._state.tensors().items()}
        small = self._state.small()

        def put_back() -> None:
            self._state.restore(tensors, small)
            self._adopt_present()

        return put_back

    def undo_forward(self) -> BufferTraces:
        """Puts back the buffers that the bad step's forward has written to."""
        assert self._buffers is not None
        restored, touched = self._buffers.restore()
        return BufferTraces(restored=tuple(restored), touched=tuple(touched))

    def roll_back(self) -> Snapshot:
        """Restores the target and returns it; newer snapshots are given up, and the next rollback goes further back."""
        assert self._ring is not None
        assert self._buffers is not None
        snapshot = self._ring.target()
        assert snapshot is not None
        self._state.restore(snapshot.tensors, snapshot.small)
        snapshot.restored = True
        self._since_snapshot = 0
        self._ring.drop_newer_than(snapshot.step)
        self._buffers.copy()
        self._adopt_present()
        return snapshot

    def _adopt_present(self) -> None:
        """Takes the present parameters for the ones handed over, if none was updated since: these writes are ours."""
        if self._versions_at_begin is not None:
            self._versions_at_begin = self._versions()

    def _versions(self) -> list[int]:
        return [local_part(parameter)._version for parameter in self._parameters]
