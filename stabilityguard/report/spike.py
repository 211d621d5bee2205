"""The content of a trip's JSON report; docs/report.md and docs/report.schema.json describe it."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

import stabilityguard
from stabilityguard.detect.statistics import Finding
from stabilityguard.report.records import StepRecord

SCHEMA_VERSION = 1

TRAJECTORY = 64
"""Steps whose norms a report shows, the trip included."""

TRACED_LAYERS = 8
"""Layers whose norms a report shows over those steps, the trigger first."""


def layer_entries(record: StepRecord, findings: Mapping[int, Finding], spikes: Iterable[int]) -> list[dict[str, Any]]:
    """The layers that are worth a trip: non-finite ones nearest the loss first, then spikes by ratio."""
    ratios = record.layers.ratios
    spiking = sorted((i for i in spikes if i not in findings), key=lambda i: -float(ratios[i]))
    return [_layer_entry(record, i, findings.get(i)) for i in [*findings, *spiking]]


def describe_spike(
    record: StepRecord,
    *,
    layers: Sequence[dict[str, Any]],
    reason: str,
    history: Sequence[StepRecord],
    optimizer: Optimizer,
    context: Mapping[str, Any],
) -> dict[str, Any]:
    """All of a report but its path; the journal writes it as strict JSON.

    ``history`` holds the records of the steps before, oldest first; ``context`` what only the caller knows.
    """
    steps = [*history, record][-TRAJECTORY:]
    began = _streak(steps)
    trigger = next((entry for entry in layers if entry["layer"] == record.trigger_layer), None)
    return {
        "schema_version": SCHEMA_VERSION,
        "step": record.step,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "kind": record.kind,
        "action": record.action,
        "reason": reason,
        "restored_step": record.restored_step,
        "trigger": trigger,
        "layers": list(layers),
        "streak": {"began_at_step": began[0].step, "trips": len(began)},
        "loss": record.loss,
        "global_norm": record.global_norm,
        "trajectory": _trajectory(steps, [entry["layer"] for entry in layers[:TRACED_LAYERS]] or _worst(record)),
        "optimizer": {"class": type(optimizer).__name__, "param_groups": _hyperparameters(optimizer)},
        "environment": environment(),
        **context,
    }


def environment() -> dict[str, str]:
    """Versions of what the run stands on."""
    return {
        "stabilityguard": stabilityguard.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": sys.platform,
        "machine": platform.machine(),
    }


def _layer_entry(record: StepRecord, index: int, finding: Finding | None) -> dict[str, Any]:
    readings = record.layers
    baseline, ratio = float(readings.baselines[index]), float(readings.ratios[index])
    known = baseline == baseline
    return {
        "layer": readings.names[index],
        "kind": finding.kind if finding else "spike",
        "norm": float(readings.norms[index]),
        "baseline": baseline if known else None,
        "ratio": ratio if known else None,
        "elements": finding.elements if finding else None,
        "nan_elements": finding.nan_elements if finding else None,
        "inf_elements": finding.inf_elements if finding else None,
    }


def _streak(steps: Sequence[StepRecord]) -> list[StepRecord]:
    """The unbroken run of trips that ends with the last step."""
    start = len(steps) - 1
    while start > 0 and steps[start - 1].kind is not None:
        start -= 1
    return list(steps[start:])


def _worst(record: StepRecord) -> list[str]:
    return [record.worst_layer[0]] if record.worst_layer else []


def _trajectory(steps: Sequence[StepRecord], names: Sequence[str]) -> dict[str, Any]:
    return {
        "step": [record.step for record in steps],
        "action": [record.action for record in steps],
        "loss": [record.loss for record in steps],
        "lr": [record.lr for record in steps],
        "global_norm": [record.global_norm for record in steps],
        "layers": {name: [_norm(record, name) for record in steps] for name in names},
    }


def _norm(record: StepRecord, name: str) -> float | None:
    names = record.layers.names
    index = names.index(name) if name in names else None
    return float(record.layers.norms[index]) if index is not None and record.layers.present[index] else None


def _hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {**{k: v for k, v in group.items() if k != "params"}, "parameters": len(group["params"])}
        for group in optimizer.param_groups
    ]
