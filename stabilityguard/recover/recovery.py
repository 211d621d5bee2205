"""Ways back: to the buffers of the last applied step, to a proven snapshot in RAM, and to a clean one on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from stabilityguard.config import GuardConfig
from stabilityguard.distributed.layout import Layout
from stabilityguard.errors import CheckpointError
from stabilityguard.recover.buffers import BufferKeeper, BufferSlot
from stabilityguard.recover.catalogue import Entry, choose
from stabilityguard.recover.snapshots import Snapshot, SnapshotRing
from stabilityguard.recover.state import DATA_LOADER, TrainingState

if TYPE_CHECKING:
    from stabilityguard.recover.archive import Archive
    from stabilityguard.recover.codec import Loaded
    from stabilityguard.recover.disk import Disk


@dataclass(frozen=True, kw_only=True)
class BufferTraces:
    """Buffers that the forward of a bad step had written to, by qualified name."""

    restored: tuple[str, ...] = ()
    """Put back to their values after the last applied step."""

    touched: tuple[str, ...] = ()
    """Left as they are, since there was no copy of them."""


class Recovery:
    """Keeps what is needed to undo a bad step.

    Args:
        state: reads and writes what is restored.
        slots: the buffers of the part of the model that is trained, by name.
        config: what was asked for.
        archive: of checkpoints on disk, if there are any.
        layout: names the tensors of ``state``.
    """

    def __init__(
        self,
        state: TrainingState,
        slots: dict[str, BufferSlot],
        config: GuardConfig,
        archive: Archive | None,
        layout: Layout,
    ) -> None:
        self._state, self._slots = state, slots
        self._ring = SnapshotRing(config.snapshots) if config.snapshots else None
        self.disk = _disk(archive, self._state, layout)
        self._left_alone = () if config.replay_data else (DATA_LOADER,)
        self._buffers: BufferKeeper | None = None
        self._versions_at_begin: list[int] | None = None
        self._since_snapshot = 0

    @property
    def has_target(self) -> bool:
        """Whether a rollback can be made."""
        return bool(self._targets)

    @property
    def _targets(self) -> list[Snapshot | Entry]:
        """In RAM, and on disk where RAM has not the same."""
        steps = {target.step for target in self._in_ram}
        return [*self._in_ram, *(entry for entry in self._on_disk if entry.step not in steps)]

    @property
    def _in_ram(self) -> list[Snapshot | Entry]:
        return [*self._ring.targets] if self._ring is not None else []

    @property
    def _on_disk(self) -> list[Snapshot | Entry]:
        return [*self.disk.archive.catalogue.targets] if self.disk is not None else []

    @property
    def was_rewritten(self) -> bool:
        """Whether parameters were written to between ``begin()`` and now, with no step applied in between."""
        return self._versions_at_begin is not None and self._versions_at_begin != self._state.versions()

    def begin(self, step: int, memory: Callable[[], Any], *, in_step: bool = False) -> None:
        """Copies the state that the user hands over, which counts as proven; earlier snapshots are given up.

        ``memory`` is called for what the guard remembers.
        ``in_step`` says that a forward has written to the buffers since.
        """
        rewritten, self._versions_at_begin = self._versions_at_begin is not None, self._state.versions()
        self._since_snapshot = 0
        live = self._state.tensors()
        if (rewritten or in_step) and self._buffers is not None:
            live.update({("buffer", name, ""): copy for name, copy in self._buffers.copies.items()})
        else:
            self._buffers = BufferKeeper(self._slots)
        if self._ring is not None:
            self._ring.clear()
            self._ring.take(step, live, self._state.small(), memory(), proven=True)
        if self.disk is not None:
            self.disk.begin(step)

    def step_begins(self) -> None:
        """Takes the buffers, before a step's first forward, for what a skip of the step goes back to."""
        if self.disk is not None:
            self.disk.next_step_begins()
        if self._buffers is not None and self._versions_at_begin is None:
            self._buffers.refresh()

    def applied(self, step: int, memory: Callable[[], Any]) -> None:
        """Takes note that ``step`` was healthy and its update was made; copies what is due."""
        assert self._buffers is not None
        self._versions_at_begin = None
        self._buffers.refresh()
        self._since_snapshot += 1
        if self._ring is not None:
            self._ring.count_healthy_step()
        if self.disk is not None:
            self.disk.archive.count_healthy_step()
        if self._ring is not None and self._since_snapshot >= self._ring.policy.every and self._ring.has_room:
            self._ring.take(step, self._state.tensors(), self._state.small(), memory())
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

    def fence(self) -> None:
        """Makes the device's coming work, an update say, come after the copies that are being made."""
        if self._ring is not None:
            self._ring.fence()
        if self.disk is not None:
            self.disk.fence()

    def roll_back(self) -> tuple[int, Any]:
        """Restores the target, and returns its step and what the guard remembered then.

        What is newer is given up, and the next rollback goes further back. With a target on disk, collective calls:
        where it cannot be read on one rank, all go on to the next.

        Raises:
            CheckpointError: on all ranks, if none of the targets can be read; nothing was changed.
        """
        assert self._buffers is not None
        while (target := choose(self._targets)) is not None:
            restored = self._restore(target)
            if restored is not None:
                self._mark_restored(target.step)
                self._buffers.copy()
                self._adopt_present()
                return target.step, restored
        raise CheckpointError("none of the checkpoints can be read")

    def _restore(self, target: Snapshot | Entry) -> Any | None:
        if isinstance(target, Snapshot):
            target.copy.wait()
            self._state.restore(target.tensors, target.small, without=self._left_alone)
            return target.memory
        assert self.disk is not None
        loaded = self.disk.restore(target, without=self._left_alone)
        return None if loaded is None else loaded.guard

    def _mark_restored(self, step: int) -> None:
        for target in (*self._in_ram, *self._on_disk):
            target.restored = target.restored or target.step == step
        self._since_snapshot = 0
        if self._ring is not None:
            self._ring.drop_newer_than(step)
        if self.disk is not None:
            self.disk.abandon_newer_than(step)

    def resume(self) -> Loaded | None:
        """Restores the newest checkpoint that a new run may go on from; None without any. Collective calls.

        Raises:
            CheckpointError: on all ranks, if there are checkpoints and none can be read; nothing was changed.
        """
        assert self.disk is not None
        catalogue = self.disk.archive.catalogue
        while (entry := catalogue.resumable()) is not None:
            loaded = self.disk.restore(entry, resuming=True)
            if loaded is not None:
                self.disk.abandon_newer_than(entry.step)
                self.disk.archive.resumed(entry.step)
                return loaded
        if any(entry.broken for entry in catalogue.entries):
            raise CheckpointError(f"none of the checkpoints in {self.disk.archive.directory} can be read")
        self.disk.archive.resumed(0)
        return None

    def forget_moments(self, parameters: Iterable[Tensor]) -> None:
        """Lets the optimizer start anew with these parameters."""
        self._state.forget_moments(parameters)

    def _adopt_present(self) -> None:
        """Takes the present parameters for the ones handed over, if none was updated since: these writes are ours."""
        if self._versions_at_begin is not None:
            self._versions_at_begin = self._state.versions()


def _disk(archive: Archive | None, state: TrainingState, layout: Layout) -> Disk | None:
    if archive is None:
        return None
    from stabilityguard.recover.disk import Disk  # noqa: PLC0415 (DCP takes a second to import)

    return Disk(archive, state, layout)
