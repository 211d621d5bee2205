"""One step as it was judged, and the record and the error that tell of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from stabilityguard.detect.detector import Verdict
from stabilityguard.detect.diagnosis import Diagnosis
from stabilityguard.detect.statistics import Statistics
from stabilityguard.errors import GradientSpikeError
from stabilityguard.recover.breaker import Decision
from stabilityguard.report.records import LayerReadings, SpikeReport, StepRecord


@dataclass(frozen=True, kw_only=True)
class Case:
    """All that led to the decision about one step."""

    step: int
    statistics: Statistics
    verdict: Verdict
    diagnosis: Diagnosis | None
    decision: Decision
    reason: str
    lr: float | None


def make_record(case: Case, places: Mapping[str, int], *, restored_step: int | None) -> StepRecord:
    """The record of a case that was acted on; ``places`` are the layers' indices by name."""
    diagnosis, statistics, verdict = case.diagnosis, case.statistics, case.verdict
    readings = LayerReadings(
        places=places,
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
        reason=case.reason if diagnosis else None,
        trigger_layer=None if blamed is None else readings.names[blamed],
        ratio=None if ratio is None or math.isnan(ratio) else ratio,
        global_norm=statistics.global_norm,
        loss=statistics.loss,
        rank_losses=(statistics.loss,),
        bad_ranks=(0,) if diagnosis else (),
        restored_step=restored_step,
        lr=case.lr,
        layers=readings,
    )


def make_error(report: SpikeReport) -> GradientSpikeError:
    """The error that ends a step whose action is to raise."""
    record, trigger = report.record, report.details["trigger"] or {}
    blamed = f"layer {record.trigger_layer}" if record.trigger_layer else "no layer"
    if record.loss is not None and not math.isfinite(record.loss):
        blamed = "the loss" if record.trigger_layer is None else f"{blamed} and in the loss"
    return GradientSpikeError(
        f"{record.kind} at step {record.step} in {blamed}: {record.reason}; report: {report.path or 'not written'}",
        step=record.step,
        kind=str(record.kind),
        layer=record.trigger_layer,
        norm=float(trigger["norm"]) if trigger else None,
        baseline=trigger.get("baseline"),
        ratio=record.ratio if trigger else None,
        report_path=report.path,
    )
