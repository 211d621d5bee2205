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
from stabilityguard.detect.statistics import DETAILED_LAYERS, Evidence, Finding, Statistics
from stabilityguard.report.records import StepRecord
from stabilityguard.report.strict_json import plain

SCHEMA_VERSION = 1

TRAJECTORY = 64
"""Steps whose norms a report shows, the trip included."""

KINDS = ("nan", "inf", "overflow", "spike")


def tripped_layers(record: StepRecord, findings: Mapping[int, Finding], spikes: Iterable[int]) -> dict[int, str]:
    """The kind of fault by layer: non-finite layers nearest the loss first, then spikes by ratio."""
    ratios = record.layers.ratios.tolist()
    spiking = sorted((i for i in spikes if i not in findings), key=lambda i: -ratios[i])
    return {**{i: finding.kind for i, finding in findings.items()}, **dict.fromkeys(spiking, "spike")}


def describe_spike(
    record: StepRecord,
    *,
    tripped: Mapping[int, str],
    findings: Mapping[int, Finding],
    history: Sequence[StepRecord],
    optimizer: Mapping[str, Any],
    context: Mapping[str, Any],
) -> dict[str, Any]:
    """All of a report but its path, as values that strict JSON has a form for.

    ``history`` holds the records of the steps before, oldest first; ``context`` what only the caller knows.
    """
    steps = [*history, record][-TRAJECTORY:]
    began = _streak(steps)
    names = record.layers.names
    detailed = _layer_entries(record, tripped, findings)
    return {
        "schema_version": SCHEMA_VERSION,
        "step": record.step,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "kind": record.kind,
        "action": record.action,
        "reason": record.reason,
        "restored_step": record.restored_step,
        "trigger": next((entry for entry in detailed if entry["layer"] == record.trigger_layer), None),
        "layers": detailed,
        "tripped": {kind: [names[i] for i, k in tripped.items() if k == kind] for kind in KINDS},
        "streak": {"began_at_step": began[0].step, "trips": len(began)},
        "loss": plain(record.loss),
        "global_norm": plain(record.global_norm),
        "trajectory": _trajectory(steps, [names[i] for i in tripped][:DETAILED_LAYERS] or _worst(record)),
        "optimizer": dict(optimizer),
        "environment": environment(),
        **context,
    }


def describe_ranks(
    ranks: Sequence[int], statistics: Statistics, record: StepRecord, tripped: Iterable[int]
) -> list[dict[str, Any]]:
    """Each rank's loss, inputs and norms, and the batches of the bad ones; nothing for one process."""
    if len(ranks) == 1:
        return []
    names, gravest = record.layers.names, list(tripped)[:DETAILED_LAYERS]
    return [
        {
            "rank": rank,
            "is_bad": rank in record.bad_ranks,
            "loss": plain(loss),
            "bad_inputs": evidence.bad_inputs,
            "norms": {names[i]: plain(norm) for i, norm in _norms_of_rank(evidence, gravest).items()},
            "batches": evidence.batches if rank in record.bad_ranks else [],
        }
        for rank, loss, evidence in zip(ranks, statistics.rank_losses, statistics.evidence or (), strict=True)
    ]


def _norms_of_rank(evidence: Evidence, layers: Iterable[int]) -> dict[int, float]:
    known = evidence.shares if evidence.own is None else evidence.own
    return {layer: known[layer] for layer in layers if layer in known}


def environment() -> dict[str, str]:
    """Versions of what the run stands on."""
    return {
        "stabilityguard": stabilityguard.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": sys.platform,
        "machine": platform.machine(),
    }


def _layer_entries(
    record: StepRecord, tripped: Mapping[int, str], findings: Mapping[int, Finding]
) -> list[dict[str, Any]]:
    readings = record.layers
    norms, baselines, ratios = (t.tolist() for t in (readings.norms, readings.baselines, readings.ratios))
    entries = []
    for i in list(tripped)[:DETAILED_LAYERS]:
        known, finding = baselines[i] == baselines[i], findings.get(i)
        entries.append(
            {
                "layer": readings.names[i],
                "kind": tripped[i],
                "norm": plain(norms[i]),
                "baseline": baselines[i] if known else None,
                "ratio": plain(ratios[i]) if known else None,
                "elements": finding.elements if finding else None,
                "nan_elements": finding.nan_elements if finding else None,
                "inf_elements": finding.inf_elements if finding else None,
            }
        )
    return entries


def _streak(steps: Sequence[StepRecord]) -> list[StepRecord]:
    """The trips, unbroken by an applied healthy step, that end with the last step; a veto is none."""
    start = len(steps) - 1
    while start > 0 and steps[start - 1].kind is not None:
        start -= 1
    return [step for step in steps[start:] if step.kind not in (None, "veto")]


def _worst(record: StepRecord) -> list[str]:
    return [record.worst_layer[0]] if record.worst_layer else []


def _trajectory(steps: Sequence[StepRecord], names: Sequence[str]) -> dict[str, Any]:
    return {
        "step": [record.step for record in steps],
        "action": [record.action for record in steps],
        "loss": [plain(record.loss) for record in steps],
        "lr": [record.lr for record in steps],
        "global_norm": [plain(record.global_norm) for record in steps],
        "layers": dict(zip(names, _norms(steps, names), strict=True)),
    }


def _norms(steps: Sequence[StepRecord], names: Sequence[str]) -> list[list[Any]]:
    """The norms of each layer over ``steps``; None where it had no gradient, or the layers were others then."""
    layers = [record.layers for record in steps if record.layers.places is steps[-1].layers.places]
    chosen = [layers[-1].places[name] for name in names]
    absent = -1.0
    norms = torch.stack([of_step.norms for of_step in layers])[:, chosen]
    present = torch.stack([of_step.present for of_step in layers])[:, chosen]
    unknown = [absent] * (len(steps) - len(layers))
    columns = torch.where(present, norms, absent).T.tolist()
    return [[None if norm == absent else plain(norm) for norm in [*unknown, *column]] for column in columns]


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Those of every parameter group, as values that strict JSON has a form for, and how many parameters it has."""
    return [
        {**{k: _presentable(v) for k, v in group.items() if k != "params"}, "parameters": len(group["params"])}
        for group in optimizer.param_groups
    ]


def _presentable(value: Any) -> Any:
    try:
        return plain(value)
    except Exception as error:  # optimizers keep anything in their groups, and a trip must be told of all the same
        return f"({type(error).__name__})"
