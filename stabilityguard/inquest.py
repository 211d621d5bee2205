"""From what the ranks agreed on to the statistics that are judged; where something is wrong, what each of them saw."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stabilityguard.detect.statistics import Evidence, Finding, Statistics
from stabilityguard.distributed.consensus import Agreement, Ballot
from stabilityguard.measure.gradients import Measurement
from stabilityguard.measure.window import GradientWindow, Sight


@dataclass(frozen=True, kw_only=True)
class Readings:
    """The layer norms of one step."""

    norms: Tensor
    """float64, shape (L,): what is judged."""

    norms_at_step: Tensor
    """float64, shape (L,): as ``step()`` finds them, or as backward left them where these are not finite."""

    suspects: tuple[int, ...]
    """Layers whose norm is not finite."""

    found: bool
    """Whether they are so only in what ``step()`` finds."""


@dataclass(frozen=True, kw_only=True)
class Testimony:
    """What one rank says when something is wrong. Pickles."""

    findings: Mapping[int, Finding]
    """Of the suspects that are not finite there."""

    finite: Mapping[int, Finding]
    """Of the suspects that are: norm and number of elements alone."""

    order: tuple[int, ...]
    """The suspects that its backward pass has reached, nearest the loss first."""

    evidence: Evidence


def read(agreement: Agreement) -> Readings:
    """The norms to judge: the larger of the two looks, but not what clipping by a non-finite norm has left.

    Layers whose replicas differ when backward ends and are alike at ``step()`` were reduced by hand in between; their
    gradients are the model's only then.
    """
    left, found = agreement.left.sqrt(), agreement.found.sqrt()
    suspects = _not_finite(left)
    if suspects:
        return Readings(norms=left, norms_at_step=left, suspects=suspects, found=False)
    norms = torch.where(agreement.reduced, found, torch.maximum(left, found))  # NaN wins
    return Readings(norms=norms, norms_at_step=found, suspects=_not_finite(found), found=True)


def _not_finite(norms: Tensor) -> tuple[int, ...]:
    if math.isfinite(float(norms.sum())):
        return ()
    return tuple(norms.isfinite().logical_not().nonzero().flatten().tolist())


def testify(
    window: GradientWindow,
    sight: Sight,
    layers: Sequence[int],
    ballot: Ballot,
    *,
    found: bool,
    evidence: Mapping[str, object],
) -> Testimony:
    """What this rank saw of ``layers``. Waits for the device."""
    look = sight.looks[-1] if found else sight.looks[0]
    scale = (ballot.scale_found if found and len(sight.looks) > 1 else ballot.scale_left) or 1.0
    findings = {layer: _unscaled(f, scale) for layer, f in window.examine(sight, layers, found=found).items()}
    present = look.measurement.present.tolist()
    held = [layer for layer in layers if layer in window.table.held and present[layer]]
    shares = {layer: norm / scale for layer, norm in _norms(look.measurement, held).items()}
    own = _norms_before_reduction(sight, layers)
    wanted = set(layers)
    return Testimony(
        findings=findings,
        finite={
            layer: Finding(kind="finite", norm=shares[layer], elements=window.table.elements[layer])
            for layer in held
            if layer not in findings
        },
        order=tuple(layer for layer in sight.fired if layer in wanted),
        evidence=Evidence(
            shares={**shares, **{layer: finding.norm for layer, finding in findings.items()}},
            own=None if own is None else {layer: norm / (ballot.scale_left or 1.0) for layer, norm in own.items()},
            is_unreduced=sight.own is not None,
            **evidence,  # type: ignore[arg-type]
        ),
    )


def _norms(measurement: Measurement, layers: Sequence[int]) -> dict[int, float]:
    squares = measurement.squares.tolist()
    return {layer: math.sqrt(squares[layer]) for layer in layers}


def _norms_before_reduction(sight: Sight, layers: Sequence[int]) -> dict[int, float] | None:
    if sight.own is not None:
        return sight.own.of_layers(layers)
    return _norms(sight.looks[0].measurement, layers) if len(sight.looks) > 1 else None


def _unscaled(finding: Finding, scale: float) -> Finding:
    return replace(finding, norm=finding.norm / scale) if finding.kind == "overflow" else finding


def settle(agreement: Agreement, readings: Readings, testimonies: Sequence[Testimony] | None) -> Statistics:
    """The statistics to judge by, from the same words on every rank; None where nobody had to be asked."""
    losses = tuple(ballot.loss for ballot in agreement.ballots)
    known = [loss for loss in losses if loss is not None]
    scales = [b.scale_left or b.scale_found for b in agreement.ballots if b.scale_left or b.scale_found]
    findings = {} if testimonies is None else _findings(readings.suspects, testimonies)
    norms = readings.norms.clone() if findings else readings.norms
    for layer, finding in findings.items():
        if finding.kind == "overflow":  # NaN and Inf are there already
            norms[layer] = finding.norm
    return Statistics(
        norms=norms,
        norms_at_step=readings.norms_at_step,
        present=agreement.present,
        findings=findings,
        loss=sum(known) / len(known) if known else None,
        rank_losses=losses,
        scaled=any(ballot.scaled for ballot in agreement.ballots),
        overflowed=any(ballot.overflowed for ballot in agreement.ballots),
        scale=scales[0] if scales else None,
        vetoed=any(ballot.vetoed for ballot in agreement.ballots),
        evidence=None if testimonies is None else tuple(testimony.evidence for testimony in testimonies),
    )


def _findings(suspects: Iterable[int], testimonies: Sequence[Testimony]) -> dict[int, Finding]:
    """What is wrong with each suspect, nearest the loss first: as one rank saw all of them, else by definition."""
    wanted = set(suspects)
    orders = [t.order for t in testimonies if wanted <= set(t.order)]
    position = {layer: i for i, layer in enumerate(orders[0])} if orders else {}
    return {layer: _merged(layer, testimonies) for layer in sorted(wanted, key=lambda i: position.get(i, -i))}


def _merged(layer: int, testimonies: Sequence[Testimony]) -> Finding:
    bad = [t.findings[layer] for t in testimonies if layer in t.findings]
    if len(testimonies) == len(bad) == 1 and bad[0].elements is None:
        return bad[0]
    parts = bad + [t.finite[layer] for t in testimonies if layer in t.finite]
    kind = next((kind for kind in ("nan", "inf") if any(f.kind == kind for f in bad)), "overflow")
    counted = all(f.elements is not None for f in parts) and bool(bad)
    return Finding(
        kind=kind,
        norm=math.hypot(*(f.norm for f in parts)) if kind == "overflow" else math.nan if kind == "nan" else math.inf,
        elements=round(sum(f.elements or 0.0 for f in parts)) if counted else None,
        nan_elements=round(sum(f.nan_elements or 0.0 for f in parts)) if counted else None,
        inf_elements=round(sum(f.inf_elements or 0.0 for f in parts)) if counted else None,
    )
