"""An exact second look at gradients whose norm is not finite: NaN, Inf, or finite elements beyond float32."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from stabilityguard.detect.statistics import DETAILED_LAYERS, Finding
from stabilityguard.measure.norms import norms_of

Piece = tuple[Tensor, float]
"""A dense real tensor of a layer's gradient, and one over the number of ranks that hold the same."""


def examine(
    layers: Sequence[int], squares: Sequence[float], pieces: Mapping[int, Sequence[Piece]]
) -> dict[int, Finding]:
    """See ``GradientReader.examine``; ``pieces`` are needed of the layers that ``needed`` names."""
    unclear, counted = _unclear(layers, squares), set(layers[:DETAILED_LAYERS])
    peaks = _peaks({layer: pieces[layer] for layer in unclear})
    findings = dict.fromkeys(layers, _NAN)
    for layer in unclear | counted:
        findings[layer] = _finding(pieces[layer], peaks.get(layer, math.nan), counted=layer in counted)
    return findings


def needed(layers: Sequence[int], squares: Sequence[float]) -> set[int]:
    """Those of ``layers`` whose elements have to be looked at."""
    return _unclear(layers, squares) | set(layers[:DETAILED_LAYERS])


def _unclear(layers: Sequence[int], squares: Sequence[float]) -> set[int]:
    return {layer for layer in layers if math.isinf(squares[layer])}


def _peaks(pieces: Mapping[int, Sequence[Piece]]) -> dict[int, float]:
    """The largest magnitude of every layer's elements; NaN if one of them is."""
    flat = [(layer, piece) for layer, of_layer in pieces.items() for piece, _ in of_layer if piece.numel()]
    peaks: dict[int, float] = {}
    if flat:
        for (layer, _), peak in zip(flat, norms_of([piece for _, piece in flat], torch.inf).tolist(), strict=True):
            known = peaks.get(layer, 0.0)
            peaks[layer] = peak if peak != peak or known < peak else known
    return peaks


_NAN = Finding(kind="nan", norm=math.nan)


def _finding(pieces: Sequence[Piece], peak: float, *, counted: bool) -> Finding:
    overflow = math.isfinite(peak)
    nan, inf = _count_faults(pieces) if counted else (None, None)
    return Finding(
        kind="overflow" if overflow else "nan" if math.isnan(peak) else "inf",
        norm=_exact_norm(pieces, peak) if overflow else peak,
        elements=sum(piece.numel() * weight for piece, weight in pieces) if counted else None,
        nan_elements=nan,
        inf_elements=inf,
    )


def _count_faults(pieces: Sequence[Piece]) -> tuple[float, float]:
    """The numbers of NaN and of infinite elements, each piece's by its weight."""
    nan = sum(int(piece.isnan().sum()) * weight for piece, weight in pieces)
    others = sum(piece.numel() * weight for piece, weight in pieces) - nan
    return nan, sum(int(piece.isinf().sum()) * weight for piece, weight in pieces) if others else 0


def _exact_norm(pieces: Sequence[Piece], peak: float) -> float:
    """The L2 norm in float64, scaled by the largest magnitude so that the squares cannot overflow."""
    scale = peak or 1.0
    return scale * math.sqrt(sum(weight * float((piece.double() / scale).square().sum()) for piece, weight in pieces))
