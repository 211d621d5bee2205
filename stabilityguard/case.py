"""One step as it was judged, and the record and the error that tell of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from stabilityguard.detect.blame import blame
from stabilityguard.detect.detector import Verdict
from stabilityguard.detect.diagnosis import Diagnosis
from stabilityguard.detect.statistics import Statistics
from stabilityguard.distributed.digest import named_ranks
from stabilityguard.errors import GradientSpikeError
from stabilityguard.measure.layers import LayerTable
from stabilityguard.recover.breaker import Decision
from stabilityguard.recover.recovery import BufferTraces
from stabilityguard.report.records import LayerReadings, SpikeReport, StepRecord

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Case:
    """All that led to the decision about one step."""

    step: int
    statistics: Statistics
    verdict: Verdict
    diagnosis: Diagnosis | None
    decision: Decision
    lr: float | None

    def ending_in(self, error: Exception) -> Case:
        """The same case, raised because ``error`` keeps the decision from being carried out."""
        reason = f"{self.decision.reason}, but {error}"
        return replace(self, decision=replace(self.decision, action="raise", reason=reason))


class BadEvaluation(Exception):
    """Raised inside an update whose closure found non-finite gradients."""

    def __init__(self, statistics: Statistics) -> None:
        super().__init__("a closure's gradients are not finite")
        self.statistics = statistics


@dataclass(frozen=True, kw_only=True)
class Outcome(Generic[T]):
    """What came of acting on a case."""

    result: T | None = None
    restored_step: int | None = None
    buffers: BufferTraces = field(default_factory=BufferTraces)


def make_record(
    case: Case, table: LayerTable, ranks: Sequence[int], *, restored_step: int | None, overhead_ms: float
) -> StepRecord:
    """The record of a case that was acted on; ``ranks`` are the peers' global ones."""
    diagnosis, statistics, verdict = case.diagnosis, case.statistics, case.verdict
    readings = LayerReadings(
        places=table.places,
        norms=statistics.norms,
        baselines=verdict.baselines,
        ratios=verdict.ratios,
        present=statistics.present,
        nan=tuple(i for i, finding in statistics.findings.items() if finding.kind == "nan"),
        inf=tuple(i for i, finding in statistics.findings.items() if finding.kind == "inf"),
    )
    blamed = diagnosis.layer if diagnosis else None
    ratio = readings.largest_ratio if blamed is None else float(verdict.ratios[blamed])
    return StepRecord(
        step=case.step,
        action=case.decision.action,
        kind=diagnosis.kind if diagnosis else None,
        reason=_reason(case, ranks) if diagnosis else None,
        trigger_layer=None if blamed is None else readings.names[blamed],
        ratio=None if ratio is None or math.isnan(ratio) else ratio,
        global_norm=statistics.global_norm,
        loss=statistics.loss,
        rank_losses=statistics.rank_losses,
        bad_ranks=_bad_ranks(case, table, ranks),
        restored_step=restored_step,
        lr=case.lr,
        overhead_ms=overhead_ms,
        layers=readings,
    )


def _bad_ranks(case: Case, table: LayerTable, ranks: Sequence[int]) -> tuple[int, ...]:
    diagnosis, statistics = case.diagnosis, case.statistics
    if diagnosis is None:
        return ()
    replicated = diagnosis.layer is not None and table.census.replicated[diagnosis.layer]
    to_blame = blame(
        diagnosis.kind, diagnosis.layer, statistics.rank_losses, statistics.evidence or (), replicated=replicated
    )
    return tuple(ranks[place] for place in to_blame)


def _reason(case: Case, ranks: Sequence[int]) -> str:
    """The decision's, or who cast a veto and why."""
    if case.diagnosis is None or case.diagnosis.kind != "veto":
        return case.decision.reason
    vetoes = {rank: e.veto for rank, e in zip(ranks, case.statistics.evidence or (), strict=True) if e.veto is not None}
    if len(ranks) == 1:
        return f"veto: {vetoes[ranks[0]]}"
    return "; ".join(f"veto of rank {rank}: {veto}" for rank, veto in vetoes.items())


def make_error(report: SpikeReport, *, place: int) -> GradientSpikeError:
    """The error that ends a step whose action is to raise, on the given rank."""
    record, trigger = report.record, report.details["trigger"] or {}
    blamed = f"layer {record.trigger_layer}" if record.trigger_layer else "no layer"
    if record.loss is not None and not math.isfinite(record.loss):
        blamed = "the loss" if record.trigger_layer is None else f"{blamed} and in the loss"
    if len(record.rank_losses) > 1 and record.bad_ranks:
        blamed = f"{blamed} on {named_ranks(record.bad_ranks)}"
    where = report.path or ("not written" if place == 0 else "written by the first rank")
    return GradientSpikeError(
        f"{record.kind} at step {record.step} in {blamed}: {record.reason}; report: {where}",
        step=record.step,
        kind=str(record.kind),
        layer=record.trigger_layer,
        norm=float(trigger["norm"]) if trigger else None,
        baseline=trigger.get("baseline"),
        ratio=record.ratio if trigger else None,
        report_path=report.path,
        ranks=record.bad_ranks,
    )
