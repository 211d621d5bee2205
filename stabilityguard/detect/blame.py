"""Which ranks a fault came from, as far as that can be told."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from stabilityguard.detect.statistics import Evidence

OUTLYING = 3.0
"""A rank's loss is an outlier above this multiple of the median; a spike is shared by the ranks within it of the
largest."""


def blame(
    kind: str, layer: int | None, losses: Sequence[float | None], evidence: Sequence[Evidence], *, replicated: bool
) -> tuple[int, ...]:
    """Places of the ranks on which the fault arose; empty where it cannot be told.

    What a rank's own batch shows comes first: its loss, its inputs, and its gradients from before they were reduced.
    Without any of that, it is the ranks that hold the bad elements. Gradients that were reduced are alike on all that
    hold a layer as a whole (``replicated``), and tell nothing.
    """
    if len(evidence) == 1:
        return (0,)
    if kind == "veto":
        return _where(lambda i: evidence[i].veto is not None, len(evidence))
    norms, is_own = _telling_norms(layer, evidence, replicated=replicated)
    if kind == "spike":
        by_norm = _near_the_largest(norms)
        return by_norm if is_own else _outliers(losses) or by_norm
    of_batch = _where(lambda i: evidence[i].bad_inputs or _is_bad(losses[i]), len(evidence))
    of_gradient = _where(lambda i: _is_bad(norms[i]), len(evidence))
    return tuple(sorted({*of_batch, *of_gradient})) if is_own else of_batch or of_gradient


def _telling_norms(
    layer: int | None, evidence: Sequence[Evidence], *, replicated: bool
) -> tuple[list[float | None], bool]:
    """One norm of the layer for each rank, None where it tells nothing; and whether each is of that rank's own data."""
    nothing: list[float | None] = [None] * len(evidence)
    if layer is None:
        return nothing, False
    shares = [e.shares.get(layer) for e in evidence]
    held = [share for share in shares if share is not None]
    if not replicated or len(held) < 2:
        return shares, False
    if _differ([share for share in held if share]):
        return shares, True
    own = [None if e.own is None else e.own.get(layer) for e in evidence]
    if all(e.own is not None for e in evidence) and (_differ(own) or all(e.is_unreduced for e in evidence)):
        return own, True
    return (shares, True) if _differ(held) else (nothing, False)


def _differ(values: Sequence[float | None]) -> bool:
    return len(set(map(repr, values))) > 1


def _near_the_largest(values: Sequence[float | None]) -> tuple[int, ...]:
    largest = max((value for value in values if value is not None), default=math.nan)
    return _where(lambda i: (values[i] or 0.0) * OUTLYING >= largest, len(values))


def _outliers(losses: Sequence[float | None]) -> tuple[int, ...]:
    known = sorted(abs(loss) for loss in losses if loss is not None)
    if len(known) < 2:
        return ()
    median = known[(len(known) - 1) // 2]
    return _where(lambda i: abs(losses[i] or 0.0) > OUTLYING * median, len(losses))


def _is_bad(value: float | None) -> bool:
    return value is not None and not math.isfinite(value)


def _where(holds: Callable[[int], bool], count: int) -> tuple[int, ...]:
    return tuple(i for i in range(count) if holds(i))
