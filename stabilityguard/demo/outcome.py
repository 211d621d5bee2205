"""How the three runs went: the tables that compare them, and whether the guard saved the run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from stabilityguard.report.records import SpikeReport, StepRecord
from stabilityguard.testing import Fault

TOLERANCE = 0.05
"""How far above the clean run's held-out loss the guarded run may end, as a share of it."""


@dataclass(kw_only=True)
class Run:
    """How one training went."""

    name: str
    steps: int = 0
    applied: int = 0
    loss: float = math.nan
    """Held-out loss at the end, in nats per byte."""

    died_at: int | None = None
    """First step after which a weight was not finite."""

    reports: list[SpikeReport] = field(default_factory=list)


def was_saved(clean: Run, guarded: Run, planned: Sequence[Fault]) -> bool:
    """Whether every fault was caught under its true name, and the run ended close to the clean one."""
    named = len(guarded.reports) == len(planned) and all(map(names_fault, planned, guarded.reports))
    return named and guarded.died_at is None and guarded.loss <= clean.loss * (1 + TOLERANCE)


def names_fault(fault: Fault, report: SpikeReport) -> bool:
    """Whether ``report`` is of that fault; an infinite loss shows in the loss and in the layer next to it."""
    record = report.record
    if fault.layer is None:
        return record.step == fault.step and record.loss == math.inf and record.trigger_layer == "head"
    return (record.step, record.kind, record.trigger_layer) == (fault.step, fault.kind, fault.layer)


def trip_table(planned: Sequence[Fault], guarded: Run) -> list[str]:
    """A row for each fault: what was done, and what the guard said."""
    at, width = ("", 24) if all(fault.rank is None for fault in planned) else (" @ rank", 28)
    rows = [
        f"{'step':>5}  {'fault':<9} {f'injected in{at}':<{width}} {f'guard named{at}':<{width}} {'norm / baseline':>16}"
    ]
    by_step = {report.record.step: report.record for report in guarded.reports}
    for fault in planned:
        record = by_step.get(fault.step)
        ratio = "-" if record is None or record.ratio is None else f"{record.ratio:.0f}x"
        places = f"{_injected(fault):<{width}} {_named(record):<{width}}"
        rows.append(f"{fault.step:>5}  {fault.kind:<9} {places} {ratio:>16}")
    if any(f.rank is not None and f.step in by_step and by_step[f.step].bad_ranks != (f.rank,) for f in planned):
        rows.append(
            "Gradients were summed over the ranks before the guard saw them: it names those that hold bad elements."
        )
    return rows


def _injected(fault: Fault) -> str:
    return (fault.layer or "the loss") + ("" if fault.rank is None else f" @ {fault.rank}")


def _named(record: StepRecord | None) -> str:
    if record is None:
        return "nothing"
    ranks = ",".join(map(str, record.bad_ranks)) if len(record.rank_losses) > 1 else ""
    return (record.trigger_layer or "the loss") + (f" @ {ranks}" if ranks else "")


def run_table(runs: Sequence[Run], saved: bool) -> list[str]:
    """A row for each run; the first is the reference, the last the one to be saved."""
    rows = [f"{'run':<17} {'steps':>6} {'applied':>8} {'trips':>6} {'held-out loss':>14}  verdict"]
    for run in runs:
        verdict = "reference" if run is runs[0] else f"died at step {run.died_at}" if run.died_at else "survived"
        if run is runs[-1]:
            verdict = "SAVED" if saved else "NOT SAVED"
        counts = f"{run.steps:>6} {run.applied:>8} {len(run.reports):>6}"
        rows.append(f"{run.name:<17} {counts} {run.loss:>14.3f}  {verdict}")
    return rows
