"""Norms of the gradients, layer by layer, in a few fused operations and without waiting for the device."""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter, is_

import torch
from torch import Tensor

from stabilityguard.detect.statistics import DETAILED_LAYERS, Finding
from stabilityguard.measure.layers import LayerTable

LARGE = 65_536
"""Elements above which a gradient on the CPU is summed row by row: a float32 sum of 20 M squares errs by 1e-3."""

LARGE_HALF = 16_384
"""The same for 16-bit gradients, whose coarse values make the rounding errors of a sum alike."""

ROW = 512
"""Elements summed in float32; the rows' sums are added in float64."""

Stamp = tuple[list[int], list[weakref.ref[Tensor]], list[int]]
"""Places without a gradient, and the gradients there are with their versions, held weakly: an address can be reused."""

_version = attrgetter("_version")
_is_sparse = attrgetter("is_sparse")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The gradients of one moment, still on the device."""

    squares: Tensor
    """float64, shape (L,): squared L2 norm of every layer's gradient; NaN or Inf where the float32 norm is."""

    present: Tensor
    """bool, shape (L,), on the host: layers with a gradient."""

    stamp: Stamp
    """The gradients' identities and versions when they were read."""

    @property
    def has_gradients(self) -> bool:
        """Whether there was any gradient."""
        return bool(self.stamp[1])


class GradientReader:
    """Reads the ``.grad`` of every parameter of a layer table."""

    def __init__(self, table: LayerTable) -> None:
        self.table = table
        self._complex = any(p.is_complex() for p in table.parameters)
        self._plan: tuple[list[int], _Plan] | None = None

    def read(self) -> Measurement:
        """Measures all layers. Neither a collective nor a wait for the device.

        Accumulates in float32 (float64 for float64 and complex128 gradients), on the CPU in rows of 512 elements where
        a gradient is large, and sums the squares in float64: relative error below 1e-6, and 2e-5 at worst (tens of
        thousands of equal elements).
        """
        gradients = self._gradients()
        present = _present(gradients)
        absent = _absent(gradients, present)
        sparse = any(map(_is_sparse, present))
        values = list(map(_real, present)) if sparse or self._complex else present
        plan = self._plan_for(absent, values, anew=sparse)
        norms = plan.norms(values)
        squares = torch.zeros(len(self.table.places), dtype=torch.float64, device=norms.device)
        squares.index_add_(0, plan.layer_of_norm.to(norms.device), norms.square_())
        stamp = absent, list(map(weakref.ref, present)), list(map(_version, present))
        return Measurement(squares=squares, present=plan.layers_present, stamp=stamp)

    def unchanged_since(self, measurement: Measurement) -> bool:
        """Whether every gradient is still the same tensor at the same version."""
        gradients = self._gradients()
        present = _present(gradients)
        absent, held, versions = measurement.stamp
        same = len(present) == len(held) and all(map(is_, [ref() for ref in held], present))
        return same and absent == _absent(gradients, present) and versions == list(map(_version, present))

    def examine(self, layers: Sequence[int], squares: Tensor) -> dict[int, Finding]:
        """Tells NaN, Inf and overflow apart in ``layers``, given nearest the loss first. Waits for the device.

        A NaN among the ``squares`` needs no second look: adding squares makes one only from one. An infinite square is
        an overflow where every element is finite.
        """
        known = squares.tolist()
        unclear = {layer for layer in layers if math.isinf(known[layer])}
        counted = set(layers[:DETAILED_LAYERS])
        pieces = self._pieces_of(unclear | counted)
        peaks = _peaks({layer: pieces[layer] for layer in unclear})
        findings = dict.fromkeys(layers, _NAN)
        for layer in pieces:
            findings[layer] = _finding(pieces[layer], peaks.get(layer, math.nan), counted=layer in counted)
        return findings

    def dtypes(self) -> set[torch.dtype]:
        """The types of the present gradients."""
        return {gradient.dtype for gradient in self._gradients() if gradient is not None}

    def zero_(self) -> None:
        """Sets every gradient to zero in place; absent ones stay absent."""
        present = _present(self._gradients())
        with torch.no_grad():
            torch._foreach_zero_([gradient._values() if gradient.is_sparse else gradient for gradient in present])

    def scale_(self, factor: Tensor | float) -> None:
        """Multiplies every gradient in place by ``factor``, a Python number or a 0-dim tensor."""
        for (device, _), values in self._values_by_kind().items():
            torch._foreach_mul_(values, factor.to(device) if isinstance(factor, Tensor) else factor)

    def clip_(self, limit: float, norm: float) -> None:
        """Scales the gradients, whose global L2 norm is ``norm``, to ``limit``, as torch's ``clip_grad_norm_`` does."""
        if norm > limit:
            self.scale_(limit / (norm + 1e-6))

    def _values_by_kind(self) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
        """The gradients' elements, without their graph, to be written to."""
        by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for gradient in _present(self._gradients()):
            values = gradient.detach()._values() if gradient.is_sparse else gradient.detach()
            by_kind[values.device, values.dtype].append(values)
        return by_kind

    def _gradients(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in self.table.parameters]

    def _pieces_of(self, layers: set[int]) -> dict[int, list[Tensor]]:
        pieces: dict[int, list[Tensor]] = {layer: [] for layer in layers}
        for layer, gradient in zip(self.table.layer_of, self._gradients(), strict=True):
            if layer in layers and gradient is not None:
                pieces[layer].append(_real(gradient))
        return pieces

    def _plan_for(self, absent: list[int], values: list[Tensor], *, anew: bool) -> _Plan:
        """How to read ``values``; made anew where the pattern of gradients changes, or their sizes may have."""
        if anew or self._plan is None or self._plan[0] != absent or not self._plan[1].fits(values):
            missing = set(absent)
            layers = [layer for i, layer in enumerate(self.table.layer_of) if i not in missing]
            self._plan = absent, _Plan(values, layers, len(self.table.places))
        return self._plan[1]


class _Plan:
    """Which gradients are read as a whole, and which row by row.

    ``layer_of_norm`` (int64) is the layer of each norm, ``layers_present`` (bool, shape (L,)) says which have any.
    """

    def __init__(self, values: list[Tensor], layers: list[int], layer_count: int) -> None:
        large = {i: v.numel() // ROW for i, v in enumerate(values) if v.device.type == "cpu" and _is_large(v)}
        self._whole = [i for i, v in enumerate(values) if i not in large]
        self._grids = list(large.items())
        self._sizes = [(i, values[i].numel()) for i in large]
        self._tails = [(i, rows * ROW) for i, rows in large.items() if values[i].numel() % ROW]
        of_pieces = [layers[i] for i in self._whole] + [layers[i] for i, _ in self._tails]
        of_rows = torch.tensor([layers[i] for i in large], dtype=torch.int64, device="cpu")
        rows = of_rows.repeat_interleave(torch.tensor(list(large.values()), dtype=torch.int64, device="cpu"))
        self.layer_of_norm = torch.cat([torch.tensor(of_pieces, dtype=torch.int64, device="cpu"), rows])
        self.layers_present = torch.zeros(layer_count, dtype=torch.bool, device="cpu")
        self.layers_present[torch.tensor(layers, dtype=torch.int64, device="cpu")] = True

    def fits(self, values: list[Tensor]) -> bool:
        """Whether the large gradients are as large as they were."""
        return all(values[i].numel() == size for i, size in self._sizes)

    def norms(self, values: list[Tensor]) -> Tensor:
        """float64: the L2 norms of whole gradients, of what rows leave over, and of rows, in this order."""
        if not self._grids:
            return _norms(values)
        pieces = [values[i] for i in self._whole] + [_flat(values[i])[start:] for i, start in self._tails]
        rows = [_row_norms(values[i], count) for i, count in self._grids]
        norms = _norms(pieces)
        return torch.cat([norms, torch.cat(rows).to(norms.device, torch.float64)])


def _present(gradients: list[Tensor | None]) -> list[Tensor]:
    return [gradient for gradient in gradients if gradient is not None]


def _absent(gradients: list[Tensor | None], present: list[Tensor]) -> list[int]:
    return [] if len(present) == len(gradients) else [i for i, gradient in enumerate(gradients) if gradient is None]


def _real(gradient: Tensor) -> Tensor:
    """The elements of a sparse or complex gradient as a dense real tensor; any other as it is."""
    if gradient.is_sparse:
        gradient = gradient.coalesce()._values()
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def _is_large(gradient: Tensor) -> bool:
    return gradient.numel() > (LARGE_HALF if gradient.element_size() <= 2 else LARGE)


def _flat(gradient: Tensor) -> Tensor:
    return gradient.as_strided((gradient.numel(),), (1,)) if _is_dense(gradient) else gradient.reshape(-1)


def _is_dense(gradient: Tensor) -> bool:
    return gradient.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense(gradient))


def _row_norms(gradient: Tensor, count: int) -> Tensor:
    flat = gradient if _is_dense(gradient) else gradient.reshape(-1)
    rows: Tensor = torch.linalg.vector_norm(
        flat.as_strided((count, ROW), (ROW, 1)), dim=1, dtype=_accumulator(gradient.dtype)
    )
    return rows


def _norms(pieces: list[Tensor], order: float = 2.0) -> Tensor:
    """float64, shape (len(pieces),): norms, on the device of the first piece."""
    if not pieces:
        return torch.zeros(0, dtype=torch.float64, device="cpu")
    try:
        return torch.stack(torch._foreach_norm(pieces, order, dtype=_accumulator(pieces[0].dtype))).double()
    except RuntimeError:  # mixed devices, or float64 beside others: asking each piece beforehand would cost more
        return _norms_by_kind(pieces, order)


def _norms_by_kind(pieces: list[Tensor], order: float) -> Tensor:
    norms = torch.empty(len(pieces), dtype=torch.float64, device=pieces[0].device)
    places: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for i, piece in enumerate(pieces):
        places[piece.device, piece.dtype].append(i)
    for (_, dtype), of_kind in places.items():
        of_pieces = torch._foreach_norm([pieces[i] for i in of_kind], order, dtype=_accumulator(dtype))
        norms[of_kind] = torch.stack(of_pieces).to(norms.device, torch.float64)
    return norms


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _peaks(pieces: dict[int, list[Tensor]]) -> dict[int, float]:
    """The largest magnitude of every layer's elements; NaN if one of them is."""
    flat = [(layer, piece) for layer, of_layer in pieces.items() for piece in of_layer if piece.numel()]
    peaks: dict[int, float] = {}
    if flat:
        for (layer, _), peak in zip(flat, _norms([piece for _, piece in flat], torch.inf).tolist(), strict=True):
            known = peaks.get(layer, 0.0)
            peaks[layer] = peak if peak != peak or known < peak else known
    return peaks


_NAN = Finding(kind="nan", norm=math.nan)


def _finding(pieces: list[Tensor], peak: float, *, counted: bool) -> Finding:
    overflow = math.isfinite(peak)
    nan, inf = _count_faults(pieces) if counted else (None, None)
    return Finding(
        kind="overflow" if overflow else "nan" if math.isnan(peak) else "inf",
        norm=_exact_norm(pieces, peak) if overflow else peak,
        elements=sum(piece.numel() for piece in pieces) if counted else None,
        nan_elements=nan,
        inf_elements=inf,
    )


def _count_faults(pieces: list[Tensor]) -> tuple[int, int]:
    """The numbers of NaN and of infinite elements."""
    nan = sum(int(piece.isnan().sum()) for piece in pieces)
    others = sum(piece.numel() for piece in pieces) - nan
    return nan, sum(int(piece.isinf().sum()) for piece in pieces) if others else 0


def _exact_norm(pieces: list[Tensor], peak: float) -> float:
    """The L2 norm in float64, scaled by the largest magnitude so that the squares cannot overflow."""
    scale = peak or 1.0
    return scale * math.sqrt(sum(float((piece.double() / scale).square().sum()) for piece in pieces))
