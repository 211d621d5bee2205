"""What the bridges to trackers have in common: whom they hear, which run they write to, and how they fail."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Sequence

import torch.distributed as dist

from stabilityguard.errors import ConfigurationError
from stabilityguard.integrations.metrics import layer_numbers, numbers_of, split
from stabilityguard.integrations.tally import Tally
from stabilityguard.report import channel
from stabilityguard.report.records import SpikeReport, StepRecord

log = logging.getLogger("stabilityguard")


class Bridge(ABC):
    """Hears every guard of the process from construction on, and writes to the run that is open in a tracker.

    Built on a rank other than the first, or copied into another process by a fork, it does nothing. One that fails is
    muted with one warning.

    Args:
        log_every: steps between two rows of layers' norms, those of trips apart; 0 for those of trips alone.
        layers: qualified names of layers whose norms are wanted besides the worst one's.

    Raises:
        ConfigurationError: an argument cannot be used.
    """

    def __init__(self, *, log_every: int, layers: Sequence[str]) -> None:
        self._log_every, self._layers = check_log_every(log_every), check_layers(layers)
        self._run: Hashable | None = None
        self._tallies: dict[Hashable, Tally] = {None: Tally()}
        self._left_out: Counter[str] = Counter()
        self._reported: list[StepRecord] = []
        self._reports: list[str] = []
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._is_open = is_first_rank()
        if self._is_open:
            channel.join(self)
            self._close_at_exit()

    # What a tracker has to say -------------------------------------------------------------------------------------

    @abstractmethod
    def _find_run(self) -> Hashable | None:
        """The identity of the run that is open now; asked for at every step."""

    @abstractmethod
    def _enter(self) -> None:
        """``self._run`` is a run from now on."""

    @abstractmethod
    def _write(self, record: StepRecord, numbers: dict[str, float]) -> None:
        """Takes the finite numbers of a step; ``self._run`` may be None."""

    @abstractmethod
    def _write_report(self, report: SpikeReport) -> None:
        """Takes the report of a trip; ``self._run`` may be None."""

    @abstractmethod
    def _leave(self) -> None:
        """``self._run`` is about to be left, and is still there unless its tracker says nothing of its end."""

    # What the guards say --------------------------------------------------------------------------------------------

    def on_report(self, report: SpikeReport) -> None:
        """Passes on a trip."""
        self._attempt(lambda: self._hear_report(report))

    def on_record(self, record: StepRecord) -> None:
        """Passes on a step."""
        self._attempt(lambda: self._hear_record(record))

    def close(self) -> None:
        """Hears nothing more, and writes out what is pending. Runs at exit by itself; the run is not ended."""
        self._attempt(self._end)
        self._stop()

    @property
    def tally(self) -> Tally:
        """What the present run has come to, or the steps before the first."""
        return self._tallies[self._run]

    def _hear_report(self, report: SpikeReport) -> None:
        self._follow()
        self._reported.append(report.record)
        if report.path is not None:
            self._reports.append(os.path.abspath(report.path))
        self._write_report(report)

    def _hear_record(self, record: StepRecord) -> None:
        self._follow()
        tripped = any(record is other for other in self._reported)
        self._reported = [other for other in self._reported if other is not record]
        tally = self._tallies[self._run] = self.tally.after(record, tripped=tripped)
        numbers = numbers_of(record, tally, tripped=tripped)
        if tripped or (self._log_every and record.step % self._log_every == 0):
            self._look_for_layers(record)
            numbers |= layer_numbers(record, self._layers)
        finite, left_out = split(numbers)
        self._left_out.update(left_out)
        self._write(record, finite)

    def _look_for_layers(self, record: StepRecord) -> None:
        """Tells once of those that were asked for and are not there."""
        unknown = [name for name in self._layers if name not in record.layers.places]
        if unknown:
            log.warning(
                "%s: no layer of this optimizer is called %s; there are %s, …",
                *(type(self).__name__, ", ".join(map(repr, unknown)), ", ".join(record.layers.names[:3])),
            )
        self._layers = tuple(name for name in self._layers if name not in unknown)

    def _follow(self) -> None:
        run = self._find_run()
        if run == self._run:
            return
        self._depart()
        if run is not None:
            self._tallies.setdefault(run, self._tallies[None])
            self._tallies[None] = Tally()
        self._run = run
        if run is not None:
            self._enter()
            self._close_at_exit()  # anew: before the tracker, which came later, closes itself

    def _depart(self) -> None:
        if self._run is not None:
            self._leave()
            self._run = None
            self._left_out, self._reports = Counter(), []

    def _end(self) -> None:
        """Nothing more will come."""
        self._depart()

    # Failing ----------------------------------------------------------------------------------------------------------

    def _attempt(self, work: Callable[[], None]) -> None:
        if os.getpid() != self._process:  # before the lock, which a fork may have copied as it was held
            return
        with self._lock:
            if not self._is_open:
                return
            try:
                work()
            except Exception as error:
                self._stop()
                name = type(self).__name__
                log.warning("%s failed and is muted from now on: %s: %s", name, type(error).__name__, error)

    def _close_at_exit(self) -> None:
        atexit.unregister(self.close)
        atexit.register(self.close)

    def _stop(self) -> None:
        self._is_open = False
        channel.leave(self)
        atexit.unregister(self.close)


def is_first_rank() -> bool:
    """Whether this process is rank zero, by torch.distributed or, before that is set up, by what a launcher says."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"


def check_log_every(log_every: object) -> int:
    """``log_every`` as it is; raises ConfigurationError unless it is an int of at least 0."""
    if isinstance(log_every, int) and not isinstance(log_every, bool) and log_every >= 0:
        return log_every
    raise ConfigurationError(f"log_every must be an int of at least 0, but is {log_every!r}")


def check_layers(layers: object) -> tuple[str, ...]:
    """``layers`` as a tuple; raises ConfigurationError unless they are names in a list or tuple."""
    if isinstance(layers, (list, tuple)) and all(isinstance(name, str) for name in layers):
        return tuple(layers)
    raise ConfigurationError(f"layers must be a list of qualified layer names, but is {layers!r}")
