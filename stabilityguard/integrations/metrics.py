"""The numbers that trackers get, by name; docs/trackers.md lists them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from stabilityguard.integrations.tally import Tally
from stabilityguard.report.records import LayerReadings, StepRecord

PREFIX = "sg/"
"""Begins every name."""

STEP = "sg/step"
"""The guard's own count of steps; the axis of all others where the tracker has none to be trusted."""

GRAD_NORM = "sg/grad_norm"
"""L2 norm over all layers, before clipping and unscaled."""

RATIO_MAX = "sg/ratio_max"
"""The largest finite ratio of a layer's norm to its baseline; missing while no layer has a baseline."""

TRIP = "sg/trip"
"""Trips: 0 or 1 in a step, their number where steps are brought together."""

SKIPPED_TOTAL = "sg/skipped_total"
"""Steps that were skipped so far, trips and others."""

ROLLBACKS_TOTAL = "sg/rollbacks_total"
"""Rollbacks so far."""

NONFINITE_LAYERS = "sg/nonfinite_layers"
"""Layers whose gradient holds a NaN or an Inf."""

LOSS_SPREAD = "sg/loss_spread"
"""Largest loss of a rank less the smallest; missing with one rank, or where fewer than two ranks know a loss."""

OVERHEAD_MS = "sg/overhead_ms"
"""Milliseconds that the guard took on the first rank; see ``StepRecord.overhead_ms``."""

LAYER = "sg/layer/"
"""Begins the name of a layer's L2 norm; the layer's qualified name follows."""

LATEST = frozenset({STEP, SKIPPED_TOTAL, ROLLBACKS_TOTAL})
"""Of several steps brought together, the last one's value stands for all."""

COUNTED = frozenset({TRIP})
"""Added up over steps brought together. Of all others the largest value stands for all."""


def numbers_of(record: StepRecord, tally: Tally, *, tripped: bool) -> dict[str, float]:
    """The metrics of one step, layers left out; NaN and Inf stay in. ``tally`` includes the step."""
    layers = record.layers
    numbers = {
        STEP: float(record.step),
        GRAD_NORM: record.global_norm,
        TRIP: float(tripped),
        SKIPPED_TOTAL: float(tally.skipped),
        ROLLBACKS_TOTAL: float(tally.rollbacks),
        NONFINITE_LAYERS: float(len(layers.nan) + len(layers.inf)),
    }
    optional = {RATIO_MAX: largest_finite_ratio(layers), LOSS_SPREAD: loss_spread(record)}
    optional[OVERHEAD_MS] = record.overhead_ms
    return numbers | {name: value for name, value in optional.items() if value is not None}


def layer_numbers(record: StepRecord, chosen: Collection[str]) -> dict[str, float]:
    """Norms of the worst layer, of the one that tripped, and of those in ``chosen`` that have a gradient."""
    worst = record.worst_layer
    wanted = dict.fromkeys([*chosen, worst[0] if worst else "", record.trigger_layer or ""])
    places = {name: record.layers.places[name] for name in wanted if name in record.layers.places}
    norms, present = record.layers.norms, record.layers.present
    return {LAYER + name: float(norms[i]) for name, i in places.items() if present[i]}


def largest_finite_ratio(layers: LayerReadings) -> float | None:
    """The largest ratio that is a number; None without any."""
    finite = layers.ratios[layers.ratios.isfinite()]
    return float(finite.max()) if finite.numel() else None


def loss_spread(record: StepRecord) -> float | None:
    """How far the ranks' losses lie apart; None where fewer than two are known."""
    losses = [loss for loss in record.rank_losses if loss is not None]
    if len(losses) < 2:
        return None
    return max(losses) - min(losses) if all(map(math.isfinite, losses)) else math.nan


def split(numbers: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
    """The finite ones, and the names of those that are NaN or Inf: trackers draw them wrongly or not at all."""
    finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
    return finite, [name for name in numbers if name not in finite]


def merge(earlier: Mapping[str, float], later: Mapping[str, float]) -> dict[str, float]:
    """Finite numbers of several steps as those of one: counts added up, totals the latest, of others the largest."""
    merged = {**earlier, **later}
    for name in earlier.keys() & later.keys() - LATEST:
        both = earlier[name], later[name]
        merged[name] = sum(both) if name in COUNTED else max(both)
    return merged
