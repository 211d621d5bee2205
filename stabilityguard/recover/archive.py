"""The disk tier: checkpoints in a directory that all ranks share, written whole or not at all."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

from stabilityguard.config import CheckpointPolicy
from stabilityguard.distributed.checkpoint import Contents, together
from stabilityguard.distributed.peers import Peers
from stabilityguard.errors import CheckpointError, ConfigurationError
from stabilityguard.recover.catalogue import Catalogue, Entry
from stabilityguard.recover.manifest import Exports, Manifest, find, path_of, step_of
from stabilityguard.recover.writing import Job, remove, sweep, write_checkpoint

log = logging.getLogger("stabilityguard")

T = TypeVar("T")


class Archive:
    """Writes, proves, keeps and finds checkpoints. All ranks make the same calls in the same order.

    Args:
        policy: where, when and how.
        peers: the ranks. Background threads speak over a group of their own, made by a collective call.
        exports: what else writes into a checkpoint.

    Raises:
        ConfigurationError: the directory cannot be written to, or the ranks do not share it.
    """

    def __init__(self, policy: CheckpointPolicy, peers: Peers, exports: Exports) -> None:
        self.policy, self.peers, self.exports = policy, peers, exports
        self._writers = peers.apart() if policy.asynchronous else peers
        self.directory = Path(policy.directory).absolute()
        self.job: Job | None = None
        self._is_first = peers.place == 0
        self._unwritten: list[Entry] = []
        self._surplus: list[Entry] = []
        self._has_warned = False
        self._resumed_at: int | None = None
        self._check_directory()
        self.catalogue = Catalogue(policy.keep, policy.quarantine, self._list())
        self.catalogue.put_out_of_reach()
        self._is_own = not self.catalogue.entries

    # Writing ------------------------------------------------------------------------------------------------------

    def submit(self, step: int, make: Callable[[], Contents], *, stopped: bool = False) -> None:
        """Writes what ``make`` returns, unless ``stopped`` in the background if so told. Collective calls."""
        assert self.job is None
        self._on_first(partial(sweep, self.directory))
        job = Job(step, make, stopped)
        if self.policy.asynchronous and not stopped:
            job.thread = threading.Thread(
                target=self._run, args=(job, self._writers), name=f"checkpoint of step {step}"
            )
            job.thread.start()
            self.job = job
        else:
            self._run(job, self.peers)
            self._close(job, succeeded=job.problem is None)

    def settle(self, *, succeeded: bool) -> None:
        """Closes the books on a job that has ended on all ranks; ``succeeded`` says whether it did so on all."""
        assert self.job is not None
        job, self.job = self.job, None
        self._close(job, succeeded=succeeded)

    def _close(self, job: Job, *, succeeded: bool) -> None:
        if not succeeded:
            problem = job.problem or "on another rank"
            self._warn("the checkpoint of step %d failed, and the earlier ones stay: %s", job.step, problem)
        elif job.abandoned:
            self._remove(job.step)
        else:
            entry = Entry(
                step=job.step, healthy_steps=job.healthy_steps, stopped=job.stopped, reachable=not job.outdated
            )
            self.catalogue.add(entry)
            self._record([entry] if entry.clean else [])

    def warn_late(self, step: int) -> None:
        """Tells that no checkpoint was made at ``step``."""
        assert self.job is not None
        self._warn("no checkpoint of step %d: that of step %d is still being written", step, self.job.step)

    def wait(self) -> None:
        """Waits for a background job of this rank."""
        if self.job is not None and self.job.thread is not None:
            self.job.thread.join()

    def close(self) -> None:
        """Waits for a background job of this rank, and closes its books. Not a collective."""
        self.wait()
        if self.policy.asynchronous:
            self._writers.wait_for_gloo()
        if self.job is not None:
            self.settle(succeeded=self.job.problem is None)

    def _run(self, job: Job, peers: Peers) -> None:
        try:
            write_checkpoint(job, self.directory, peers, self.exports)
        except Exception as error:  # the group's own errors included: the next all-reduce meets a lost rank, too
            job.problem = str(error)

    # Keeping ------------------------------------------------------------------------------------------------------

    def count_healthy_step(self) -> None:
        """Promotes what has proved to be clean, and removes what is no longer needed. Not a collective."""
        if self.job is not None:
            self.job.healthy_steps += 1
        self._record(self.catalogue.count_healthy_step())

    def _record(self, clean: Sequence[Entry]) -> None:
        """Writes down on the first rank what has become clean; what that makes dispensable goes only afterwards."""
        self._unwritten += clean
        self._surplus += self.catalogue.surplus() if clean else []
        if self._unwritten and (not self._is_first or self._write_down()):
            for entry in self._surplus:
                self._remove(entry.step)
            self._unwritten, self._surplus = [], []

    def _write_down(self) -> bool:
        """Whether all manifests tell what is clean; else it is tried again after the next healthy step."""
        failed = [entry for entry in self._unwritten if not self._mark_clean(entry)]
        self._unwritten = [entry for entry in failed if self.path(entry.step).exists()]
        self._has_warned = bool(self._unwritten)
        return not failed  # what one removed by hand was to replace stays

    def _mark_clean(self, entry: Entry) -> bool:
        path = self.path(entry.step)
        try:
            replace(Manifest.read(path), state="clean").write(path)
        except (OSError, CheckpointError) as error:
            if not self._has_warned:
                self._warn("the checkpoint of step %d could not be marked clean: %s", entry.step, error)
            return False
        return True

    def abandon_newer_than(self, step: int) -> None:
        """Removes the unproven checkpoints of a future that was given up."""
        if self.job is not None and self.job.step > step:
            self.job.abandoned = True
        for entry in self.catalogue.abandon_newer_than(step):
            self._remove(entry.step)

    def begin(self, step: int) -> None:
        """The user has put a state in place, reached at ``step``; no rollback goes back beyond that.

        Raises:
            ConfigurationError: on all ranks, if there are checkpoints of later steps, and they are of another run.
        """
        if self.catalogue.newest > step and not self._is_own:
            raise ConfigurationError(
                f"{self.directory} holds a checkpoint of step {self.catalogue.newest}, and this run is at step {step}; "
                "call resume() before the first step to go on from it, or choose another directory"
            )
        self._leave_behind(step)
        if step != self._resumed_at:
            self.catalogue.put_out_of_reach()
            if self.job is not None:
                self.job.outdated = True

    def resumed(self, step: int) -> None:
        """The run goes on from the checkpoint of ``step``, or from 0 without any; what was newer is given up."""
        self._resumed_at, self._is_own = step, True
        self.catalogue.put_within_reach()
        self._leave_behind(step)

    def _leave_behind(self, step: int) -> None:
        """Makes way for new checkpoints after ``step``: unproven ones go, others are put aside."""
        self.abandon_newer_than(step)
        for entry in self.catalogue.take_newer_than(step):
            aside = self.directory / f"aside_{self.path(entry.step).name}_{uuid4().hex[:6]}"
            self._warn(
                "the checkpoint of step %d is put aside, as the run goes on from %d: %s", entry.step, step, aside
            )
            self._on_first(partial(self.path(entry.step).rename, aside))

    def _remove(self, step: int) -> None:
        self._on_first(lambda: remove(self.path(step)))

    def _on_first(self, work: Callable[[], object]) -> None:
        """Does it on the first rank, where a failure is a warning."""
        if self._is_first:
            try:
                work()
            except OSError as error:
                self._warn("a checkpoint could not be removed: %s", error)

    # Finding ------------------------------------------------------------------------------------------------------

    def load(self, entry: Entry, read: Callable[[Path, Manifest], T]) -> T | None:
        """What ``read`` makes of a checkpoint on this rank, or None where that fails on any. Collective calls."""
        path, found = self.path(entry.step), []
        try:
            together(self.peers, "checking the files", lambda: self._check(path))
            together(self.peers, "reading a checkpoint", lambda: found.append(read(path, Manifest.read(path))))
        except CheckpointError as error:
            self.give_up(entry, error)
            return None
        return found[0]

    def give_up(self, entry: Entry, error: CheckpointError) -> None:
        """Takes note, on all ranks, that a checkpoint is of no use."""
        entry.broken = True
        self._warn("the checkpoint of step %d cannot be used: %s", entry.step, error)

    def path(self, step: int) -> Path:
        """Where the checkpoint of ``step`` lies."""
        return path_of(self.directory, step)

    def _check(self, path: Path) -> None:
        """Digests this rank's share of the files."""
        manifest = Manifest.read(path)
        mine = sorted(manifest.files)[self.peers.place :: len(self.peers)]
        if problems := list(manifest.problems(path, mine)):
            raise CheckpointError("; ".join(problems))

    def _list(self) -> list[Entry]:
        """What the first rank finds in the directory. A collective."""
        found = [_entry_of(*one) for one in find(self.directory)] if self._is_first else []
        listed: list[Entry] = self.peers.gather(found, "listing checkpoints")[0]
        return listed

    def _check_directory(self) -> None:
        mark = self.directory / f".shared-{uuid4().hex[:12]}"

        def put() -> str:
            if self._is_first:
                self.directory.mkdir(parents=True, exist_ok=True)
                mark.touch()
            return mark.name

        try:
            name = together(self.peers, f"making {self.policy.directory}", put)[0]
            seen = together(self.peers, "looking for the mark", (self.directory / name).exists)
        except CheckpointError as error:
            raise ConfigurationError(f"CheckpointPolicy.directory: {error}") from error
        finally:
            with contextlib.suppress(OSError):
                mark.unlink()
        blind = [rank for rank, sees in zip(self.peers.ranks, seen, strict=True) if not sees]
        if blind:
            raise ConfigurationError(
                f"CheckpointPolicy.directory {self.policy.directory!r} of ranks {blind} is not that of rank "
                f"{self.peers.ranks[0]}; checkpoints need a directory that all ranks share"
            )

    def _warn(self, message: str, *values: object) -> None:
        if self._is_first:
            log.warning(message, *values)


def _entry_of(path: Path, manifest: Manifest | CheckpointError) -> Entry:
    if isinstance(manifest, CheckpointError):
        return Entry(step=step_of(path), broken=True)
    return Entry(step=manifest.step, clean=manifest.state == "clean", stopped=manifest.stopped)
