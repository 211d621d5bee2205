"""Norms of the gradients, layer by layer, in a few fused operations and without waiting for the device."""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_

import torch
from torch import Tensor

from stabilityguard.detect.statistics import Finding
from stabilityguard.distributed.shards import local_part, partial_terms
from stabilityguard.measure.examination import Piece, examine, needed
from stabilityguard.measure.layers import LayerTable
from stabilityguard.measure.norms import ReadingPlan

Stamp = tuple[list[int], list[weakref.ref[Tensor]], list[int]]
"""Places without a gradient, and the gradients there are with their versions, held weakly: an address can be reused."""

_version = attrgetter("_version")
_is_sparse = attrgetter("is_sparse")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The gradients of one moment, still on the device."""

    squares: Tensor
    """float64, shape (L,): this rank's share in the squared L2 norm of every layer's gradient, Partial gradients left
    out; NaN or Inf where the float32 norm is."""

    raw: Tensor | None
    """float64, shape (E,): this rank's terms of Partial gradients; None where no rank has any."""

    present: Tensor
    """bool, shape (L,), on the host: layers with a gradient here."""

    stamp: Stamp
    """The gradients' identities and versions when they were read."""

    @property
    def has_gradients(self) -> bool:
        """Whether there was any gradient."""
        return bool(self.stamp[1])


@dataclass(frozen=True, kw_only=True)
class Glance:
    """The norms of the gradients of one moment, not yet brought together: cheap to take, to be read in need."""

    norms: Sequence[Tensor]
    """0-dim or 1-dim: of the gradients, true to 1e-3 at least."""

    layers: Sequence[int]
    """Of each norm, as they follow each other."""

    def of_layers(self, layers: Iterable[int]) -> dict[int, float]:
        """The L2 norms of these layers on this rank. Waits for the device."""
        of_layer: dict[int, list[float]] = {layer: [] for layer in layers}
        norms = [norm for part in self.norms for norm in part.reshape(-1).tolist()]
        for norm, layer in zip(norms, self.layers, strict=True):
            if layer in of_layer:
                of_layer[layer].append(norm)
        return {layer: math.hypot(*norms) for layer, norms in of_layer.items()}


class GradientReader:
    """Reads the gradient of every shard of a layer table.

    Args:
        table: whose shards.
        find: where the gradients are, if it is not ``.grad``: one for every shard, or None.
    """

    def __init__(self, table: LayerTable, find: Callable[[], list[Tensor | None]] | None = None) -> None:
        self.table = table
        self._find = find
        self._holding = [shard.parameter for shard in table.shards]
        self._split = any(shard.local(shard.parameter) is not shard.parameter for shard in table.shards)
        self._partial = [(p.shard, p) for p in table.census.partial if p.shard is not None]
        self._may_be_partial = [
            p for p in table.parameters if any(placed.is_replicate() for placed in getattr(p, "placements", ()))
        ]
        self._complex = any(p.is_complex() for p in table.parameters)
        self.has_half = any(p.element_size() <= 2 for p in table.parameters)
        """Whether some parameters, and so their gradients, have 16 bits."""
        self._plan: ReadingPlan | None = None
        self._glance_plan: ReadingPlan | None = None

    def read(self) -> Measurement:
        """Measures all layers. Neither a collective nor a wait for the device.

        Accumulates in float32 (float64 for float64 and complex128 gradients), on the CPU in rows of 512 elements where
        a gradient is large, and sums the squares in float64: relative error below 1e-6, and 2e-5 at worst (tens of
        thousands of equal elements).
        """
        gradients = self._gradients()
        present = _present(gradients)
        absent = _absent(gradients, present)
        values = self._values(gradients, present)
        sparse = any(map(_is_sparse, values))
        if sparse or self._complex:
            values = list(map(_real, values))
        self._plan = plan = self._fitting(None if sparse else self._plan, absent, values)
        squares = plan.squares(values)
        stamp = absent, list(map(weakref.ref, present)), self._versions(present)
        raw = self._raw(gradients, squares.device)
        return Measurement(squares=squares, raw=raw, present=plan.layers_present, stamp=stamp)

    def glance(self) -> Glance:
        """Takes the norms of the dense gradients on this rank. Neither a collective nor a wait for the device."""
        gradients = self._gradients()
        present = _present(gradients)
        if any(map(_is_sparse, present)):
            gradients = [None if g is None or g.is_sparse else g for g in gradients]
            present = _present(gradients)
        values = self._values(gradients, present)
        if self._complex:
            values = list(map(_real, values))
        self._glance_plan = plan = self._fitting(self._glance_plan, _absent(gradients, present), values)
        return Glance(norms=plan.norms_at_a_glance(values), layers=plan.layers_at_a_glance)

    def nothing(self) -> Measurement:
        """What there is to be measured where no gradient is present."""
        layers, elements = len(self.table.places), self.table.census.partial_elements
        zeros = torch.zeros(layers + elements, dtype=torch.float64, device="cpu")
        absent = torch.zeros(layers, dtype=torch.bool, device="cpu")
        raw = zeros[layers:] if elements else None
        return Measurement(squares=zeros[:layers], raw=raw, present=absent, stamp=([], [], []))

    def finds_new_partial(self) -> bool:
        """Whether a gradient is Partial, or no longer so, other than the census knows."""
        if not self._may_be_partial:
            return False
        known = {id(self._holding[i]) for i, _ in self._partial}
        return any(
            p.grad is not None and (partial_terms(p.grad) is not None) != (id(p) in known) for p in self._may_be_partial
        )

    def unchanged_since(self, measurement: Measurement) -> bool:
        """Whether every gradient is still the same tensor at the same version."""
        gradients = self._gradients()
        present = _present(gradients)
        absent, held, versions = measurement.stamp
        same = len(present) == len(held) and all(map(is_, [ref() for ref in held], present))
        return same and absent == _absent(gradients, present) and versions == self._versions(present)

    def examine(self, layers: Sequence[int], squares: Tensor) -> dict[int, Finding]:
        """Tells NaN, Inf and overflow apart in ``layers``, given nearest the loss first. Waits for the device.

        A NaN among the ``squares`` needs no second look: adding squares makes one only from one. An infinite square is
        an overflow where every element is finite.
        """
        known = squares.tolist()
        return examine(layers, known, self._pieces_of(needed(layers, known)))

    def dtypes(self) -> set[torch.dtype]:
        """The types of the present gradients."""
        return {gradient.dtype for gradient in self._gradients() if gradient is not None}

    def zero_(self) -> None:
        """Sets every gradient to zero in place; absent ones stay absent."""
        present = _present([parameter.grad for parameter in self.table.parameters])
        values = list(map(local_part, present)) if self._split else present
        if values:
            with torch.no_grad():
                torch._foreach_zero_([value._values() if value.is_sparse else value for value in values])

    def scale_(self, factor: Tensor | float) -> None:
        """Multiplies every gradient in place by ``factor``, a Python number or a 0-dim tensor."""
        for (device, _), values in self._values_by_kind().items():
            torch._foreach_mul_(values, factor.to(device) if isinstance(factor, Tensor) else factor)

    def clip_(self, limit: float, norm: float) -> None:
        """Scales the gradients, whose global L2 norm is ``norm``, to ``limit``, as torch's ``clip_grad_norm_`` does."""
        if norm > limit:
            self.scale_(limit / (norm + 1e-6))

    def _values_by_kind(self) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
        """The gradients' elements on this rank, without their graph, to be written to."""
        by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for gradient in _present([parameter.grad for parameter in self.table.parameters]):
            local = local_part(gradient.detach()) if self._split else gradient.detach()
            values = local._values() if local.is_sparse else local
            by_kind[values.device, values.dtype].append(values)
        return by_kind

    def _gradients(self) -> list[Tensor | None]:
        """The tensor that holds each shard's gradient."""
        return [parameter.grad for parameter in self._holding] if self._find is None else self._find()

    def _values(self, gradients: list[Tensor | None], present: list[Tensor]) -> list[Tensor]:
        """The local gradients of the shards that have one; of Partial ones nothing, as their squares mean nothing."""
        if not self._split:
            return present
        values = [None if g is None else s.local(g) for s, g in zip(self.table.shards, gradients, strict=True)]
        for i, _ in self._partial:
            value = values[i]
            values[i] = None if value is None else value.reshape(-1)[:0]
        return _present(values)

    def _raw(self, gradients: list[Tensor | None], device: torch.device) -> Tensor | None:
        """The terms that this rank has of all Partial gradients, side by side."""
        elements = self.table.census.partial_elements
        if not elements:
            return None
        raw = torch.zeros(elements, dtype=torch.float64, device=device)
        for i, partial in self._partial:
            gradient = gradients[i]
            if gradient is not None:
                values = _real(self.table.shards[i].local(gradient)).reshape(-1)
                raw[partial.elements] = values.to(device, torch.float64) * partial.weight
        return raw

    def _versions(self, present: list[Tensor]) -> list[int]:
        return list(map(_version, map(local_part, present) if self._split else present))

    def _pieces_of(self, layers: set[int]) -> dict[int, list[Piece]]:
        """The local gradients of each layer, with one over the number of ranks that hold the same."""
        pieces: dict[int, list[Piece]] = {layer: [] for layer in layers}
        of_shards = zip(
            self.table.shards, self.table.layer_of, self.table.weights.tolist(), self._gradients(), strict=True
        )
        for shard, layer, weight, gradient in of_shards:
            if layer in layers and gradient is not None:
                pieces[layer].append((_real(shard.local(gradient)), weight))
        return pieces

    def _fitting(self, plan: ReadingPlan | None, absent: list[int], values: list[Tensor]) -> ReadingPlan:
        """The same plan, or a new one where other gradients are absent, or their sizes may have changed."""
        return plan if plan is not None and plan.fits(values, absent) else ReadingPlan(values, self.table, absent)


def _present(gradients: list[Tensor | None]) -> list[Tensor]:
    return [gradient for gradient in gradients if gradient is not None]


def _absent(gradients: list[Tensor | None], present: list[Tensor]) -> list[int]:
    return [] if len(present) == len(gradients) else [i for i, gradient in enumerate(gradients) if gradient is None]


def _real(gradient: Tensor) -> Tensor:
    """The elements of a sparse or complex gradient as a dense real tensor; any other as it is."""
    if gradient.is_sparse:
        gradient = gradient.coalesce()._values()
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient
