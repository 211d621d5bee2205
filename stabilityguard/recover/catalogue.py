"""Which checkpoints there are, what they have proved, and which of them to keep or to go back to. Pure policy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar


class Target(Protocol):
    """Anything a rollback could go back to."""

    step: int
    restored: bool


T = TypeVar("T", bound=Target)


def choose(proven: Iterable[T]) -> T | None:
    """The newest target not gone back to before, else the oldest; None without any."""
    by_step = sorted(proven, key=lambda target: target.step)
    unused = [target for target in by_step if not target.restored]
    return unused[-1] if unused else by_step[0] if by_step else None


@dataclass(kw_only=True, eq=False)
class Entry:
    """One checkpoint as every rank knows it."""

    step: int
    clean: bool = False
    healthy_steps: int = 0
    """Healthy steps that have followed in this run."""

    restored: bool = False
    """Whether it has been gone back to."""

    stopped: bool = False
    """Whether it was written because the run was asked to stop."""

    broken: bool = False
    """Whether it could not be read."""

    reachable: bool = True
    """Whether a rollback may use it: not those of a state that the user has replaced since."""


@dataclass
class Catalogue:
    """The checkpoints of one directory, the same on every rank.

    Args:
        keep: clean ones to keep.
        quarantine: healthy steps that make one clean.
    """

    keep: int
    quarantine: int
    entries: list[Entry] = field(default_factory=list)

    @property
    def targets(self) -> list[Entry]:
        """What a rollback may use."""
        return [entry for entry in self.entries if entry.clean and entry.reachable and not entry.broken]

    @property
    def newest(self) -> int:
        """Step of the newest one, 0 without any."""
        return max((entry.step for entry in self.entries), default=0)

    def resumable(self) -> Entry | None:
        """The newest that a new run may go on from: clean, or written when the last one was stopped."""
        whole = [entry for entry in self.entries if (entry.clean or entry.stopped) and not entry.broken]
        return max(whole, key=lambda entry: entry.step, default=None)

    def add(self, entry: Entry) -> None:
        """Takes in a new one; an older one of the same step has been replaced."""
        self.entries = [*(e for e in self.entries if e.step != entry.step), entry]
        self._promote()

    def count_healthy_step(self) -> list[Entry]:
        """Brings all one step nearer to being clean; returns those that have become so."""
        for entry in self.entries:
            entry.healthy_steps += 1
        return self._promote()

    def _promote(self) -> list[Entry]:
        on_probation = [e for e in self.entries if e.reachable and not (e.clean or e.broken)]
        proven = [entry for entry in on_probation if entry.healthy_steps >= self.quarantine]
        for entry in proven:
            entry.clean = True
        return proven

    def surplus(self) -> list[Entry]:
        """Takes out what retention removes: clean ones beyond the newest ``keep``, and what will never become clean."""
        clean = sorted((e for e in self.entries if e.clean and not e.broken), key=lambda entry: entry.step)
        stale = [e for e in self.entries if not (e.clean or e.reachable) and clean and e.step < clean[-1].step]
        return self._take(clean[: -self.keep] + stale)

    def abandon_newer_than(self, step: int) -> list[Entry]:
        """Takes out the unproven ones of a future that was given up."""
        return self._take([e for e in self.entries if e.step > step and not e.clean])

    def put_out_of_reach(self) -> None:
        """No rollback may use what there is: the user has put another state in place."""
        for entry in self.entries:
            entry.reachable = False

    def put_within_reach(self) -> None:
        """Rollbacks may use what there is: the run goes on from it."""
        for entry in self.entries:
            entry.reachable = True

    def take_newer_than(self, step: int) -> list[Entry]:
        """Takes out all that are newer."""
        return self._take([entry for entry in self.entries if entry.step > step])

    def _take(self, entries: list[Entry]) -> list[Entry]:
        self.entries = [entry for entry in self.entries if entry not in entries]
        return entries
