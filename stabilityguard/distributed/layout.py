"""Where the tensors of one rank lie within those of the unsharded model, so that other ranks can find their parts.

Every tensor on this rank is made of portions of whole tensors, each known by the whole tensor's name and cut into
boxes: parts with an offset and a size in every dimension.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stabilityguard.distributed.shards import Shard, ShardOf, local_part

Place = tuple[str, int | str, str]
"""Where a tensor belongs: ``("parameter", i, "")``, ``("optimizer", i, entry)`` or ``("buffer", name, "")``."""


@dataclass(frozen=True)
class Box:
    """A part of a whole tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    start: int = 0
    """Place of its first element in this rank's flattened tensor; the others follow in order."""

    @property
    def numel(self) -> int:
        """Number of its elements."""
        return math.prod(self.sizes)

    def within(self, local: Tensor) -> Tensor:
        """The view of the box in ``local``, a contiguous tensor."""
        return local.view(-1)[self.start : self.start + self.numel].view(self.sizes)


@dataclass(frozen=True)
class Portion:
    """What one tensor of this rank holds of a whole one."""

    name: str
    """Of the whole tensor, as in ``"model.blocks.0.mlp.up.weight"``; levels are separated by dots."""

    path: tuple[str, ...]
    """The same, level by level."""

    shape: tuple[int, ...]
    """Of the whole tensor."""

    boxes: tuple[Box, ...]
    """Empty where this rank holds no element of it."""

    place: Place


@dataclass(frozen=True)
class _Part:
    """What this rank holds of one whole parameter."""

    name: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


class Layout:
    """Names the tensors of one rank's training state.

    Args:
        parameters: the optimizer's, in its order.
        shards: of these parameters on this rank.
        shard_of: what tells apart parts of parameters that were split by hand.
        rank: this rank's place among its peers, for what no other rank can use.
        aliases: further names of tied parameters, with the names under which they are kept.
        shapes: of what the optimizer keeps of each parameter on this rank; those of the parameters by default.
        has_whole_parameters: whether every rank has the parameters themselves whole, though it keeps the optimizer's
            tensors of ``shards`` alone.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        shards: Sequence[Shard],
        shard_of: ShardOf | None,
        rank: int,
        aliases: Mapping[str, str] | None = None,
        shapes: Sequence[torch.Size] | None = None,
        *,
        has_whole_parameters: bool = False,
    ) -> None:
        self._rank = rank
        self.aliases = {f"model.{alias}": f"model.{name}" for alias, name in (aliases or {}).items()}
        of_parameter: dict[Tensor, list[_Part]] = {parameter: [] for parameter in parameters}
        for shard in shards:
            of_parameter[shard.parameter].append(_part(shard, shard_of))
        self._parts = [of_parameter[parameter] for parameter in parameters]
        self._shapes = [local_part(parameter).shape for parameter in parameters] if shapes is None else shapes
        self._has_whole_parameters = has_whole_parameters

    def names(self, index: int) -> list[str]:
        """Names of the whole parameters of which parameter ``index`` holds parts: one, or all of a flat one."""
        return [part.name for part in self._parts[index]]

    def shape(self, index: int) -> torch.Size:
        """Shape of what the optimizer keeps of parameter ``index`` on this rank."""
        return self._shapes[index]

    def portions(self, place: Place, shape: torch.Size) -> list[Portion]:
        """What a tensor of this ``shape`` on this rank holds at ``place``."""
        room, owner, entry = place
        if room == "buffer":
            return [_portion(("model", str(owner)), shape, _all_of(shape), place)]
        parts, local = self._parts[int(owner)], self.shape(int(owner))
        if room == "parameter":
            return [_portion(("model", part.name), part.shape, self._of_parameter(part), place) for part in parts]
        if shape == local:
            return [_portion(_entry_path(part, entry), part.shape, part.boxes, place) for part in parts]
        if shape.numel() == 1 or self._is_whole(int(owner)):
            return [_portion(_entry_path(part, entry), shape, _all_of(shape), place) for part in parts]
        path = ("ranks", str(self._rank), *_entry_path(parts[0], entry))
        return [_portion(path, shape, _all_of(shape), place)]

    def find(
        self, index: int, whole: Mapping[str, torch.Size], *, own: bool
    ) -> Iterator[tuple[Place, torch.Size, list[Portion]]]:
        """The optimizer's tensors of parameter ``index`` among the ``whole`` ones, with their shapes on this rank.

        Those under this rank's ``own`` names, too, if told so.
        """
        part, local = self._parts[index][0], self.shape(index)
        room = f"ranks.{self._rank}.optimizer"
        found = {e: whole[f"{room}.state.{part.name}.{e}"] for e in _entries(part, whole, room)} if own else {}
        found |= {e: whole[".".join(_entry_path(part, e))] for e in _entries(part, whole, "optimizer")}
        for entry, shape in found.items():
            place: Place = ("optimizer", index, entry)
            on_rank = local if shape == part.shape else shape
            is_scalar = on_rank.numel() == 1 and on_rank != local
            yield place, on_rank, self.portions(place, on_rank)[: 1 if is_scalar else None]

    def _of_parameter(self, part: _Part) -> tuple[Box, ...]:
        return _all_of(part.shape) if self._has_whole_parameters else part.boxes

    def _is_whole(self, index: int) -> bool:
        return len(self._parts[index]) == 1 and self.shape(index) == self._parts[index][0].shape


def boxes_of_run(shape: Sequence[int], first: int, end: int, start: int = 0) -> Iterator[Box]:
    """Cuts the elements ``first`` to ``end`` of a flattened tensor of this ``shape`` into boxes, in order."""
    if first >= end:
        return
    if len(shape) <= 1:
        yield Box((first,) * len(shape), (end - first,) * len(shape), start)
        return
    inner = math.prod(shape[1:])
    if first % inner == 0 and end - first >= inner:
        rows = (end - first) // inner
        yield Box((first // inner, *(0 for _ in shape[1:])), (rows, *shape[1:]), start)
        yield from boxes_of_run(shape, first + rows * inner, end, start + rows * inner)
        return
    row = first // inner
    row_end = min(end, (row + 1) * inner)
    for box in boxes_of_run(shape[1:], first - row * inner, row_end - row * inner, start):
        yield Box((row, *box.offsets), (1, *box.sizes), box.start)
    yield from boxes_of_run(shape, row_end, end, start + row_end - first)


def _part(shard: Shard, shard_of: ShardOf | None) -> _Part:
    name = shard.qualified_name
    told: Hashable = None if shard_of is None else shard_of(name, shard.parameter)
    known_as = name if told is None else f"{name}[{told}]"
    return _Part(
        known_as, tuple(shard.whole), tuple(box for box in _boxes(shard) if box.numel or not shard.whole.numel())
    )


def _boxes(shard: Shard) -> Iterator[Box]:
    if shard.run is not None:
        start = 0 if shard.span is None else shard.span.start
        yield from boxes_of_run(shard.whole, shard.run.start, shard.run.stop, start)
    elif local_part(shard.parameter) is shard.parameter:
        yield from _all_of(shard.whole)
    elif shard.identity is not None:
        chunks = shard.parameter.__create_chunk_list__()  # type: ignore[attr-defined]
        yield from (Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks)


def _all_of(shape: Sequence[int]) -> tuple[Box, ...]:
    return (Box((0,) * len(shape), tuple(shape)),)


def _portion(path: tuple[str, ...], shape: Sequence[int], boxes: tuple[Box, ...], place: Place) -> Portion:
    return Portion(".".join(path), path, tuple(shape), boxes, place)


def _entry_path(part: _Part, entry: str) -> tuple[str, ...]:
    return "optimizer", "state", part.name, entry


def _entries(part: _Part, whole: Mapping[str, torch.Size], room: str) -> list[str]:
    prefix = f"{room}.state.{part.name}."
    return [name.removeprefix(prefix) for name in whole if name.startswith(prefix)]
