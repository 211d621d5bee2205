"""L2 norms of many tensors at once, true to float32 whatever their size, without waiting for the device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor

from stabilityguard.measure.layers import LayerTable

LARGE = 65_536
"""Elements above which a gradient on the CPU is summed row by row: a float32 sum of 20 M squares errs by 1e-3."""

LARGE_HALF = 16_384
"""The same for 16-bit gradients, whose coarse values make the rounding errors of a sum alike."""

ROW = 512
"""Elements summed in float32; the rows' sums are added in float64."""

_dtype = attrgetter("dtype")


class ReadingPlan:
    """Which gradients are read as a whole, and which row by row.

    Args:
        values: the local gradients of the shards that have one.
        table: the layers.
        there: indices of those shards.
    """

    def __init__(self, values: list[Tensor], table: LayerTable, there: list[int]) -> None:
        large = {i: v.numel() // ROW for i, v in enumerate(values) if v.device.type == "cpu" and _is_large(v)}
        self._whole = [i for i, v in enumerate(values) if i not in large]
        self._grids = list(large.items())
        self._sizes = [(i, values[i].numel()) for i in large]
        self._tails = [(i, rows * ROW) for i, rows in large.items() if values[i].numel() % ROW]
        pieces = [there[i] for i in self._whole] + [there[i] for i, _ in self._tails]
        of_rows = torch.tensor([there[i] for i in large], dtype=torch.int64, device="cpu")
        rows = of_rows.repeat_interleave(torch.tensor(list(large.values()), dtype=torch.int64, device="cpu"))
        shard_of_norm = torch.cat([torch.tensor(pieces, dtype=torch.int64, device="cpu"), rows])
        self._layer_of_norm = torch.tensor(table.layer_of, dtype=torch.int64, device="cpu")[shard_of_norm]
        is_alone = all(holders == 1 for holders in table.census.holders)
        self._weights = None if is_alone else table.weights[shard_of_norm]
        self.layers_present = torch.zeros(len(table.places), dtype=torch.bool, device="cpu")
        """bool, shape (L,): layers of which this rank holds elements, with a gradient."""
        for i in there:
            self.layers_present[table.layer_of[i]] |= table.shards[i].identity is not None

    def fits(self, values: list[Tensor]) -> bool:
        """Whether the large gradients are as large as they were."""
        return all(values[i].numel() == size for i, size in self._sizes)

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

    def _move_to(self, device: torch.device) -> None:
        """Once: a copy from the host in every step would wait for the device."""
        self._layer_of_norm = self._layer_of_norm.to(device)
        self._weights = None if self._weights is None else self._weights.to(device)

    def _norms(self, values: list[Tensor]) -> Tensor:
        """float64: the L2 norms of whole gradients, of what rows leave over, and of rows, in this order."""
        if not self._grids:
            return norms_of(values)
        pieces = [values[i] for i in self._whole] + [_flat(values[i])[start:] for i, start in self._tails]
        rows = [_row_norms(values[i], count) for i, count in self._grids]
        norms = norms_of(pieces)
        return torch.cat([norms, torch.cat(rows).to(norms.device, torch.float64)])


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


def list_of_norms(pieces: list[Tensor]) -> Sequence[Tensor]:
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
