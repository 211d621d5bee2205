"""MLflow: norms, ratios, trips and actions in the user's own run."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from itertools import chain, groupby
from typing import Any

from stabilityguard.errors import ConfigurationError
from stabilityguard.integrations import require
from stabilityguard.integrations.bridge import Bridge, log
from stabilityguard.integrations.courier import Courier, RefusedError
from stabilityguard.integrations.files import files_of_run
from stabilityguard.integrations.metrics import TRIP
from stabilityguard.report.records import SpikeReport, StepRecord

require("mlflow", extra="mlflow")

FOLDER = "stabilityguard"
"""Of the run's artifacts, where journal and reports go."""

CAPACITY = 10_000
"""Messages (about one a step) that wait for a server."""

MOST_METRICS, LONGEST_NAME = 1000, 250
"""In one call, and in characters: MLflow's own limits."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """What goes to one run: numbers of a step, tags, a file, or several of these."""

    run: Target
    step: int = 0
    milliseconds: int = 0
    numbers: dict[str, float] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    file: str | None = None


@dataclass(frozen=True, kw_only=True)
class Target:
    """A run, and the server that has it; None for the one that MLflow finds by itself."""

    run_id: str
    uri: str | None = None


class MLflowBridge(Bridge):
    """Writes ``sg/…`` to the run that is active, or that will be; the journal and reports become its artifacts.

    All is sent by a thread of its own, in batches. While the server is out of reach 10,000 steps wait, and the oldest
    are dropped beyond that; the end waits ``exit_seconds`` at most. Begins and ends no run.

    Args:
        run_id: the run to write to, active or not; by default the one that is active in the thread that trains.
        tracking_uri: the server of ``run_id``; by default the one that MLflow is set to.
        log_every: steps between two rows of layers' norms, those of trips apart; 0 for those of trips alone.
        layers: qualified names of layers whose norms are wanted besides the worst one's.
        exit_seconds: how long ``close()`` waits for the server at most.

    Raises:
        ConfigurationError: an argument cannot be used.
    """

    def __init__(
        self,
        run_id: str | None = None,
        *,
        tracking_uri: str | None = None,
        log_every: int = 50,
        layers: Sequence[str] = (),
        exit_seconds: float = 10.0,
    ) -> None:
        if tracking_uri is not None and run_id is None:
            raise ConfigurationError("tracking_uri is that of run_id=, which is missing")
        if isinstance(exit_seconds, bool) or not isinstance(exit_seconds, (int, float)) or not exit_seconds >= 0:
            raise ConfigurationError(f"exit_seconds must be a number of at least 0, but is {exit_seconds!r}")
        super().__init__(log_every=log_every, layers=layers)
        self._given = None if run_id is None else Target(run_id=run_id, uri=tracking_uri)
        self._exit_seconds = exit_seconds
        self._courier = Courier(type(self).__name__, send, capacity=CAPACITY, batch=100)
        self._early: list[tuple[int, int, dict[str, float]]] = []
        self._missed = 0

    def _find_run(self) -> Hashable | None:
        if self._given is not None:
            return self._given
        mlflow = sys.modules.get("mlflow")
        active = getattr(mlflow, "active_run", lambda: None)()
        if active is None:
            return None
        same = isinstance(self._run, Target) and self._run.run_id == active.info.run_id
        return self._run if same else Target(run_id=active.info.run_id, uri=mlflow.get_tracking_uri())  # type: ignore[union-attr]

    def _enter(self) -> None:
        for step, milliseconds, numbers in self._early:
            self._put(step=step, milliseconds=milliseconds, numbers=numbers)
        self._early, self._missed = [], 0

    def _write(self, record: StepRecord, numbers: dict[str, float]) -> None:
        now = int(time.time() * 1000)
        if self._run is not None:
            self._put(step=record.step, milliseconds=now, numbers=numbers)
            if numbers[TRIP]:
                self._tell()  # should the process be killed
        elif len(self._early) < CAPACITY:
            self._early.append((record.step, now, numbers))
        else:
            self._missed += 1

    def _write_report(self, report: SpikeReport) -> None:
        if self._run is not None and report.path is not None:
            self._put(file=self._reports[-1])

    def _leave(self) -> None:
        for path in files_of_run([]).values():
            self._put(file=path)
        left_out = ", ".join(f"{name} {times}" for name, times in self._left_out.items()) or "none"
        self._tell(left_out=left_out, dropped=self._courier.dropped)

    def _end(self) -> None:
        super()._end()
        steps = len(self._early) + self._missed
        if steps:
            log.warning("MLflowBridge: no run was active during %d steps; they are not in MLflow", steps)
        self._courier.close(self._exit_seconds)

    def _tell(self, **more: Any) -> None:
        self._put(tags={f"sg.{name}": str(value) for name, value in (self.tally.summary | more).items()})

    def _put(self, **content: Any) -> None:
        assert isinstance(self._run, Target)
        self._courier.put(Message(run=self._run, **content))


def send(messages: Sequence[Message]) -> None:
    """Delivers messages to their runs. Raises RefusedError for what MLflow refuses, else what it raises."""
    for run, group in groupby(messages, key=lambda message: message.run):
        of_run = list(group)
        try:
            deliver(client_of(run.uri), run.run_id, of_run)
        except Exception as error:
            if is_lasting(error):
                raise RefusedError(f"{type(error).__name__}: {error}") from error
            raise


def deliver(client: Any, run_id: str, messages: Sequence[Message]) -> None:
    """Writes numbers, tags and files, in this order; the same twice is as good as once."""
    entities = import_module("mlflow.entities")
    metrics = [
        entities.Metric(key=allowed(name), value=value, timestamp=message.milliseconds, step=message.step)
        for message in messages
        for name, value in message.numbers.items()
    ]
    for start in range(0, len(metrics), MOST_METRICS):
        client.log_batch(run_id, metrics=metrics[start : start + MOST_METRICS])
    tags = dict(chain.from_iterable(message.tags.items() for message in messages))
    if tags:
        client.log_batch(run_id, tags=[entities.RunTag(key, value) for key, value in tags.items()])
    for path in (message.file for message in messages if message.file is not None):
        client.log_artifact(run_id, path, FOLDER)


@lru_cache(maxsize=8)
def client_of(uri: str | None) -> Any:
    """The client of a server."""
    return import_module("mlflow").MlflowClient(tracking_uri=uri)


@lru_cache(maxsize=4096)
def allowed(name: str) -> str:
    """``name`` in the characters that MLflow takes, its beginning and its end where it is too long."""
    plain = re.sub(r"[^\w\-. /:]", "_", name, flags=re.ASCII)
    return plain if len(plain) <= LONGEST_NAME else f"{plain[:20]}__{plain[22 - LONGEST_NAME :]}"


def is_lasting(error: Exception) -> bool:
    """Whether it would fail again: not where a server cannot be reached, or is in trouble itself."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if hasattr(error, "get_http_status_code"):
        status = error.get_http_status_code()
    if status is not None:
        return bool(400 <= status < 500 and status not in (408, 429))
    return not isinstance(error, import_module("requests").RequestException)
