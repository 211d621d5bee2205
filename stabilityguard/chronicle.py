"""What is told of steps and trips: kept for those who ask, and handed to the sinks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from stabilityguard.case import Case, Outcome
from stabilityguard.config import GuardConfig
from stabilityguard.distributed.peers import Peers
from stabilityguard.report.console import Console
from stabilityguard.report.journal import Journal
from stabilityguard.report.records import SpikeReport, StepRecord
from stabilityguard.report.sinks import Publisher, Sink
from stabilityguard.report.spike import TRAJECTORY, describe_ranks, describe_spike, tripped_layers

KEPT_REPORTS = 100
"""Reports held in memory, the newest ones."""


class Chronicle:
    """The newest records and reports of one guard; of several ranks, the first tells for all, to ``sinks`` also."""

    def __init__(self, sinks: Sequence[Sink], config: GuardConfig, peers: Peers) -> None:
        self.records: deque[StepRecord] = deque(maxlen=TRAJECTORY)
        self.reports: deque[SpikeReport] = deque(maxlen=KEPT_REPORTS)
        self._config, self._peers = config, peers
        console = [Console(config.log_every)] if config.verbose else []
        ours: list[Sink] = [Journal(config.log_dir), *console] if peers.place == 0 else []
        self._publisher = Publisher([*ours, *sinks], is_silent=peers.place != 0)

    def report(
        self, case: Case, outcome: Outcome[Any], record: StepRecord, *, optimizer: str, groups: Sequence[dict[str, Any]]
    ) -> SpikeReport:
        """Tells of a trip, before its step is noted; ``optimizer`` is a class, ``groups`` its hyperparameters then."""
        statistics = case.statistics
        evidence = statistics.evidence or ()
        tripped = tripped_layers(record, statistics.findings, case.verdict.spikes.nonzero().flatten().tolist())
        details = describe_spike(
            record,
            tripped=tripped,
            findings=statistics.findings,
            history=list(self.records),
            optimizer={"class": optimizer, "param_groups": groups},
            context={
                "batches": evidence[self._peers.place].batches,
                "ranks": describe_ranks(self._peers.ranks, statistics, record, tripped),
                "buffers": asdict(outcome.buffers),
                "loss_scale": statistics.scale,
                "config": asdict(self._config),
            },
        )
        report = SpikeReport(record=record, details=details)
        self.reports.append(report)
        self._publisher.report(report)
        return report

    def note(self, record: StepRecord) -> None:
        """Tells of a step."""
        self.records.append(record)
        self._publisher.record(record)

    def close(self) -> None:
        """Closes the sinks."""
        self._publisher.close()
