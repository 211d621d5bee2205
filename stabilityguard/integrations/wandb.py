"""Weights & Biases: norms, ratios, trips and actions in the user's own run."""

from __future__ import annotations

import sys
import time
from collections.abc import Hashable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from stabilityguard.integrations import require
from stabilityguard.integrations.bridge import Bridge, log
from stabilityguard.integrations.files import files_of_run
from stabilityguard.integrations.metrics import PREFIX, STEP, TRIP, merge
from stabilityguard.report.console import alert_lines
from stabilityguard.report.records import SpikeReport, StepRecord

require("wandb", extra="wandb")

ALERT_SECONDS = 60.0
"""Between two alerts of one kind of trip."""


class WandBBridge(Bridge):
    """Writes ``sg/…`` into the run that is open, or that will be; the journal and reports become its artifact.

    Everything is added to the row that the user's next ``log()`` completes, and brought together in between: it never
    passes a step, begins a row, or opens or ends a run. Does not wait for W&B.

    Args:
        log_every: steps between two rows of layers' norms, those of trips apart; 0 for those of trips alone.
        layers: qualified names of layers whose norms are wanted besides the worst one's.
        alerts: whether a trip sends an alert, at most one a minute for each kind of trip.

    Raises:
        ConfigurationError: an argument cannot be used.
    """

    def __init__(self, *, log_every: int = 50, layers: Sequence[str] = (), alerts: bool = True) -> None:
        super().__init__(log_every=log_every, layers=layers)
        self._alerts = alerts
        self._alerted: dict[str, float] = {}
        self._target: Any = None
        self._pending: dict[str, float] = {}
        self._row: int | None = None

    def _find_run(self) -> Hashable | None:
        run = getattr(sys.modules.get("wandb"), "run", None)
        run = None if run is None or has_ended(run) else run
        if run is self._target:
            return self._run
        self._depart()
        self._target = run
        return None if run is None else str(run.id)

    def _enter(self) -> None:
        self._target.define_metric(STEP, hidden=True)
        self._target.define_metric(f"{PREFIX}*", step_metric=STEP)
        if not self._target.disabled:
            self._leave_when_the_run_ends()

    def _write(self, record: StepRecord, numbers: dict[str, float]) -> None:
        if self._target is not None:
            row = row_of(self._target)
            if self._row not in (None, row):
                self._pending = {}
            self._row = row
        self._pending = merge(self._pending, numbers)
        if self._target is not None:
            self._target.log(self._pending, commit=False)
            if numbers[TRIP]:
                self._tell()  # should the process be killed

    def _write_report(self, report: SpikeReport) -> None:
        kind, now = report.record.kind or "fault", time.monotonic()
        if not self._alerts or self._target is None or now - self._alerted.get(kind, -ALERT_SECONDS) < ALERT_SECONDS:
            return
        self._alerted[kind] = now
        title = f"StabilityGuard: {kind} at step {report.record.step}"
        level = "ERROR" if report.record.action == "raise" else "WARN"
        self._target.alert(title=title[:63], text="\n".join(alert_lines(report)), level=level)

    def _leave(self) -> None:
        run, tally = self._target, self.tally
        if run is not None and not has_ended(run):
            self._tell(left_out=dict(self._left_out))
            run.tags = (*(tag for tag in run.tags or () if not tag.startswith("sg:")), f"sg:{tally.verdict}")
            self._upload(run)
        self._alerted, self._pending, self._row, self._target = {}, {}, None, None

    def _tell(self, **more: Any) -> None:
        self._target.summary.update({PREFIX + name: value for name, value in (self.tally.summary | more).items()})

    def _upload(self, run: Any) -> None:
        files = files_of_run(self._reports)
        if files:
            artifact = sys.modules["wandb"].Artifact(f"stabilityguard-{run.id}", type="stabilityguard")
            for name, path in files.items():
                artifact.add_file(path, name=name)
            run.log_artifact(artifact)

    def _leave_when_the_run_ends(self) -> None:
        """W&B has no public word for that; without it the artifact is lost where the user ends the run himself."""
        try:
            inner = import_module("wandb.sdk.wandb_run")
            leave = partial(self._run_ends, self._target)
            self._target._teardown_hooks.append(inner.TeardownHook(leave, inner.TeardownStage.EARLY))
        except (ImportError, AttributeError):
            log.warning("WandBBridge: this version of wandb does not tell of the end of a run; call close() before it")

    def _run_ends(self, run: Any) -> None:
        if run is self._target:
            self._attempt(self._depart)


def row_of(run: Any) -> int:
    """The number of the row that W&B fills now; asks W&B's own process, which takes milliseconds, only if it must."""
    row = getattr(run, "_local_step", None)
    return int(run.step if row is None else row)


def has_ended(run: Any) -> bool:
    """Whether nothing more can be written to it."""
    return bool(getattr(run, "_is_finished", False))
