"""From numbers to a name: what kind of fault a step has, and which layer is to blame."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from stabilityguard.detect.detector import Verdict
from stabilityguard.detect.statistics import Statistics


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Why a step must not simply be applied."""

    kind: str
    """``"spike"``, ``"nan"``, ``"inf"``, ``"overflow"``, ``"scaler_overflow"`` or ``"veto"``."""

    layer: int | None = None
    """Index of the trigger layer; None where no layer is to blame."""


def diagnose(statistics: Statistics, verdict: Verdict) -> Diagnosis | None:
    """The gravest fault of a step, None if it is healthy.

    Among non-finite layers the one nearest the loss is to blame: backward carried the fault on to the others. Among
    spikes it is the largest ratio. Non-finite gradients under a GradScaler, with a finite loss, are the overflow that
    the scaler looks for.
    """
    bad_loss = statistics.loss is not None and not math.isfinite(statistics.loss)
    first = next(iter(statistics.findings), None)
    kind = None if first is None else statistics.findings[first].kind
    if statistics.scaled and not bad_loss and (kind in ("nan", "inf") or (kind is None and statistics.overflowed)):
        return Diagnosis(kind="scaler_overflow", layer=first)
    if kind is not None:
        return Diagnosis(kind=kind, layer=first)
    if bad_loss:
        return Diagnosis(kind="nan" if statistics.loss != statistics.loss else "inf")
    if bool(verdict.spikes.any()):
        ratios = torch.where(verdict.spikes, verdict.ratios, 0.0)
        return Diagnosis(kind="spike", layer=int(ratios.argmax()))
    return Diagnosis(kind="veto") if statistics.vetoed else None
