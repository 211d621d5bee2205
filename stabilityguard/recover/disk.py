"""The tier on disk: when the live training state goes into a checkpoint, and when it comes back."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from stabilityguard.distributed.checkpoint import Contents, together
from stabilityguard.distributed.layout import Layout
from stabilityguard.errors import CheckpointError
from stabilityguard.recover.archive import Archive
from stabilityguard.recover.catalogue import Entry
from stabilityguard.recover.codec import Loaded, StateCodec
from stabilityguard.recover.host import HostCopy
from stabilityguard.recover.state import SmallState, TrainingState


@dataclass(kw_only=True)
class Draft:
    """A checkpoint whose tensors are copied, and which waits for the lines that follow the user's ``step()``."""

    step: int
    at_end: SmallState | Exception
    """As ``step()`` ended: a rollback goes back to this, and the user's next lines then run once more."""

    at_next: SmallState | Exception | None = None
    """As the next step began: a new run goes on from this, as those lines have run already."""

    guard: dict[str, Any]
    """What the guard knew."""

    stopped: bool


class Disk:
    """Copies this rank's state for checkpoints, and restores it from them.

    Args:
        archive: where they go.
        state: the live state.
        layout: names its tensors.
    """

    def __init__(self, archive: Archive, state: TrainingState, layout: Layout) -> None:
        self.archive = archive
        self._state, self._codec = state, StateCodec(state, layout, archive.peers)
        self._copy = HostCopy()
        self._draft: Draft | None = None
        self._since = 0

    @property
    def is_stopping(self) -> bool:
        """Whether the run ends as soon as the draft is written."""
        return self._draft is not None and self._draft.stopped

    def preserve(self, step: int, guard: Callable[[], dict[str, Any]], *, applied: bool, stop: bool) -> None:
        """Copies what is due at the end of a step; ``stop`` makes it due, and waits for a checkpoint in the making."""
        self._since += applied
        if stop:
            self._finish_job()
        elif self._since < self.archive.policy.every:
            return
        elif self.archive.job is not None:
            self.archive.warn_late(step)
            self._since = 0
            return
        self._copy.take(self._state.tensors())
        self._draft = Draft(step=step, at_end=self._small(), guard=guard(), stopped=stop)
        self._since = 0

    def begin(self, step: int) -> None:
        """The user has put a state in place; what was copied of the former one is given up. See ``Archive.begin``."""
        self.archive.begin(step)
        if not self.is_stopping:
            self._draft = None

    def next_step_begins(self) -> None:
        """Takes note of what the user's lines after ``step()`` have changed."""
        if self._draft is not None and self._draft.at_next is None:
            self._draft.at_next = self._small()

    def _small(self) -> SmallState | Exception:
        """The small state, or what went wrong on this rank alone: the others have to be told when it is written."""
        try:
            return self._state.small()
        except Exception as error:
            return error

    def write(self) -> None:
        """Writes the draft, if there is one. Collective calls; a background job is only started."""
        self.next_step_begins()
        draft, self._draft = self._draft, None
        if draft is None:
            return
        with self._buffers_as_copied() if self.archive.exports else nullcontext():
            self.archive.submit(draft.step, lambda: self._contents(draft), stopped=draft.stopped)

    def _buffers_as_copied(self) -> AbstractContextManager[None]:
        """What is exported is the live state, whose buffers the forward of the next step has written to."""
        self._copy.wait()
        return self._state.with_buffers_of(self._copy.tensors)

    def fence(self) -> None:
        """Makes the device's coming work come after the copies that are being made."""
        self._copy.fence()

    def abandon_newer_than(self, step: int) -> None:
        """Gives up what was made of a future that was given up."""
        if self._draft is not None and self._draft.step > step and not self._draft.stopped:
            self._draft = None
        self.archive.abandon_newer_than(step)
        self._since = 0

    def restore(self, entry: Entry, *, resuming: bool = False, without: Collection[str] = ()) -> Loaded | None:
        """Puts a checkpoint back, as its ``step()`` ended, or ``resuming`` as the next step began. Collective calls.

        None on all ranks, with the live state as it was, where that fails on one. ``without`` names tracked objects to
        leave alone.
        """
        loaded = self.archive.load(entry, self._codec.decode)
        if loaded is None:
            return None
        small, before = loaded.at_next if resuming else loaded.at_end, self._state.small()
        try:
            self._restore_settings(small, without)
        except CheckpointError as error:
            self._state.restore_settings(before)
            self.archive.give_up(entry, error)
            return None
        self._state.restore_tensors(loaded.tensors, small)
        return loaded

    def _restore_settings(self, small: SmallState, without: Collection[str]) -> None:
        restore = partial(self._state.restore_settings, small, without=without)
        together(self.archive.peers, "loading tracked objects", restore)

    def _finish_job(self) -> None:
        job = self.archive.job
        if job is not None:
            self.archive.wait()
            outcomes = self.archive.peers.gather(job.problem is None, "finishing a checkpoint")
            self.archive.settle(succeeded=all(outcomes))

    def _contents(self, draft: Draft) -> Contents:
        self._copy.wait()
        if self._copy.is_torn:
            raise CheckpointError("parameters were written to while they were copied")
        return self._codec.encode(self._copy.tensors, _copied(draft.at_end), _copied(draft.at_next), draft.guard)


def _copied(small: SmallState | Exception | None) -> SmallState:
    if isinstance(small, SmallState):
        return small
    raise CheckpointError(f"a tracked object cannot be copied: {small}") from small
