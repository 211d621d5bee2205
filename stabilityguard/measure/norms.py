"""L2 norms of many tensors at once, true to float32 whatever their size, without waiting for the device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from stabilityguard.measure.layers import LayerTable

LARGE = 65_536
"""Elements above which a gradient on the CPU is summed row by row: a float32 sum of 20 M squares errs by 1e-3."""

LARGE_HALF = 16_384
"""The same for 16-bit gradients, whose coarse values make the rounding errors of a sum alike."""

ROW = 512
"""Elements summed in float32; the rows' sums are added in float64."""

SMALL = 1_024
"""Elements up to which gradients of one shape on the CPU are copied side by side and read in one call, not in many."""

MANY = 5
"""The least number of gradients of one shape for which that is done."""

_INDEX: Any = {"dtype": torch.int64, "device": "cpu"}

_dtype = attrgetter("dtype")


class ReadingPlan:
    """Which gradients are read one by one, which side by side, and which row by row.

    Args:
        values: the local gradients of the shards that have one.
        table: the layers.
        absent: indices of the other shards.
    """

    def __init__(self, values: list[Tensor], table: LayerTable, absent: list[int]) -> None:
        large = {i: v.numel() // ROW for i, v in enumerate(values) if v.device.type == "cpu" and _is_large(v)}
        self._absent = absent
        self._stacks = _stacks(values)
        stacked = [i for stack in self._stacks for i in stack]
        self._unstacked = sorted(set(range(len(values))) - set(stacked))
        self._whole = [i for i in self._unstacked if i not in large]
        self._grids = list(large.items())
        self._sizes = [(i, values[i].numel()) for i in [*large, *(stack[0] for stack in self._stacks)]]
        self._tails = [(i, rows * ROW) for i, rows in large.items() if values[i].numel() % ROW]
        there = sorted(set(range(len(table.shards))) - set(absent))
        pieces = torch.tensor([there[i] for i in (*self._whole, *(i for i, _ in self._tails), *stacked)], **_INDEX)
        counts = torch.tensor(list(large.values()), **_INDEX)
        rows = torch.tensor([there[i] for i in large], **_INDEX).repeat_interleave(counts)
        shard_of_norm = torch.cat([pieces, rows])
        self._layer_of_norm = torch.tensor(table.layer_of, **_INDEX)[shard_of_norm]
        is_alone = all(holders == 1 for holders in table.census.holders)
        self._weights = None if is_alone else table.weights[shard_of_norm]
        self.layers_at_a_glance = [table.layer_of[there[i]] for i in (*self._unstacked, *stacked)]
        """Of the norms at a glance, as they follow each other."""
        self.layers_present = torch.zeros(len(table.places), dtype=torch.bool, device="cpu")
        """bool, shape (L,): layers of which this rank holds elements, with a gradient."""
        for i in there:
            self.layers_present[table.layer_of[i]] |= table.shards[i].identity is not None

    def fits(self, values: list[Tensor], absent: list[int]) -> bool:
        """Whether the same gradients are absent, and large ones and those read side by side are as large as before."""
        return absent == self._absent and all(values[i].numel() == size for i, size in self._sizes)

    def squares(self, values: list[Tensor]) -> Tensor:
        """float64, shape (L,): the squared norms by layer, each shard's by its weight."""
        norms = self._norms(values)
        if self._layer_of_norm.device != norms.device:
            self._move_to(norms.device)
        squares = torch.zeros(len(self.layers_present), dtype=torch.float64, device=norms.device)
        of_norms = norms.square_()
        if self._weights is not None:
            of_norms *= self._weights
        return squares.index_add_(0, self._layer_of_norm, of_norms)

    def norms_at_a_glance(self, values: list[Tensor]) -> Sequence[Tensor]:
        """0-dim or 1-dim: the gradients' L2 norms, not brought together; large ones are only true to 1e-3."""
        return [*_list_of_norms([values[i] for i in self._unstacked]), *self._norms_of_stacks(values)]

    def _move_to(self, device: torch.device) -> None:
        """Once: a copy from the host in every step would wait for the device."""
        self._layer_of_norm = self._layer_of_norm.to(device)
        self._weights = None if self._weights is None else self._weights.to(device)

    def _norms(self, values: list[Tensor]) -> Tensor:
        """float64: the L2 norms of whole gradients, of what rows leave over, of stacks, and of rows, in this order."""
        if len(self._whole) == len(values):
            return norms_of(values)
        pieces = [values[i] for i in self._whole] + [_flat(values[i])[start:] for i, start in self._tails]
        norms = norms_of(pieces)
        rows = [_row_norms(values[i], count) for i, count in self._grids]
        others = [part.to(norms.device, torch.float64) for part in (*self._norms_of_stacks(values), *rows)]
        return torch.cat([norms, *others])

    def _norms_of_stacks(self, values: list[Tensor]) -> list[Tensor]:
        return [_norms_side_by_side([values[i] for i in stack]) for stack in self._stacks]


def _stacks(values: list[Tensor]) -> list[list[int]]:
    """Places of small gradients of one shape and type on the CPU."""
    places: dict[tuple[torch.Size, torch.dtype], list[int]] = defaultdict(list)
    for i, value in enumerate(values):
        if value.device.type == "cpu" and 0 < value.numel() <= SMALL:
            places[value.shape, value.dtype].append(i)
    return [stack for stack in places.values() if len(stack) >= MANY]


def _norms_side_by_side(values: list[Tensor]) -> Tensor:
    """The L2 norm of each; the shapes are those of one stack unless a gradient was replaced meanwhile."""
    try:
        stack = torch.stack(values).view(len(values), -1)
    except RuntimeError:
        return norms_of(values)
    norms: Tensor = torch.linalg.vector_norm(stack, dim=1, dtype=_accumulator(stack.dtype))
    return norms


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


def _list_of_norms(pieces: list[Tensor]) -> Sequence[Tensor]:
    """0-dim each: L2 norms, not brought together."""
    if not pieces:
        return []
    try:
        return _norms_of_one_kind(pieces, 2.0)
    except RuntimeError:  # mixed devices, or float64 beside others
        return norms_of(pieces).unbind()


def norms_of(pieces: list[Tensor], order: float = 2.0) -> Tensor:
    """float64, shape (len(pieces),): norms of the given order, on the device of the first piece."""
    if not pieces:
        return torch.zeros(0, dtype=torch.float64, device="cpu")
    try:
        return torch.stack(_norms_of_one_kind(pieces, order)).double()
    except RuntimeError:  # mixed devices, or float64 beside others: asking each piece beforehand would cost more
        return _norms_by_kind(pieces, order)


def _norms_by_kind(pieces: list[Tensor], order: float) -> Tensor:
    norms = torch.empty(len(pieces), dtype=torch.float64, device=pieces[0].device)
    places: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for i, piece in enumerate(pieces):
        places[piece.device, piece.dtype].append(i)
    for of_kind in places.values():
        of_pieces = _norms_of_one_kind([pieces[i] for i in of_kind], order)
        norms[of_kind] = torch.stack(of_pieces).to(norms.device, torch.float64)
    return norms


def _norms_of_one_kind(pieces: list[Tensor], order: float) -> tuple[Tensor, ...]:
    """Raises RuntimeError where devices are mixed, or float64 with others."""
    is_float32 = set(map(_dtype, pieces)) == {torch.float32}
    dtype = None if is_float32 else _accumulator(pieces[0].dtype)  # named, the same dtype would cost twice the time
    return torch._foreach_norm(pieces, order, dtype=dtype)


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
