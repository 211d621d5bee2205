"""Checkpoints as the path of a step meets them: when they are copied, written, settled, and when the run ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stabilityguard.config import CheckpointPolicy
from stabilityguard.distributed.peers import Peers
from stabilityguard.recover.manifest import Exports
from stabilityguard.recover.stop import EXIT_CODE, StopRequest

if TYPE_CHECKING:
    from stabilityguard.recover.archive import Archive
    from stabilityguard.recover.disk import Disk


class Checkpoints:
    """What a guard does about checkpoints; without a policy, nothing.

    Args:
        policy: where and when.
        peers: the ranks. Constructing is a collective over them.
        exports: what else writes into a checkpoint.
    """

    def __init__(self, policy: CheckpointPolicy | None, peers: Peers, exports: Exports) -> None:
        self.archive: Archive | None = None
        self._disk: Disk | None = None
        self._stop: StopRequest | None = None
        if policy is not None:
            from stabilityguard.recover.archive import Archive  # noqa: PLC0415 (DCP takes a second to import)

            self.archive = Archive(policy, peers, exports)
            self._stop = StopRequest()

    def follow(self, disk: Disk | None) -> None:
        """From now on it is the state that ``disk`` reads which is kept."""
        self._disk = disk

    def ballot(self) -> dict[str, Any]:
        """What this rank tells the others of it in every step."""
        job = self.archive.job if self.archive is not None else None
        return {
            "written": job is not None and job.has_ended,
            "unwritten": job is not None and job.problem is not None,
            "signals": int(self._stop is not None and self._stop.has_come),
        }

    def settle(self, *, succeeded: bool) -> None:
        """Takes note that all ranks have ended writing in the background."""
        assert self.archive is not None
        self.archive.settle(succeeded=succeeded)

    def preserve(self, step: int, guard: Callable[[], dict[str, Any]], *, applied: bool, stop: bool) -> None:
        """Copies what is due at the end of a step, or always if the run is to ``stop``."""
        if self._disk is not None:
            self._disk.preserve(step, guard, applied=applied, stop=stop)

    def leave(self) -> None:
        """Writes the last checkpoint, and ends the run, if it was asked to stop. Collective calls, then.

        Raises:
            SystemExit: with the code 143.
        """
        if self._disk is not None and self._disk.is_stopping:
            assert self._stop is not None
            self._stop.has_come = False
            self._disk.write()
            self._disk.archive.peers.wait_for_gloo()
            raise SystemExit(EXIT_CODE)

    def write(self) -> None:
        """Writes what was copied at the end of the last step. Collective calls.

        Raises:
            SystemExit: the run was asked to stop, and this was its last checkpoint.
        """
        self.leave()
        if self._disk is not None:
            self._disk.write()

    def close(self) -> None:
        """Waits for what is being written in the background, and listens no more to the operating system.

        A request to stop that came too late to be heeded then ends the process, as it would have without a guard.
        """
        if self.archive is not None:
            self.archive.close()
        if self._stop is not None:
            self._stop.close()
            self._stop.pass_on()
