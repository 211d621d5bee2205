"""Files of torch.distributed.checkpoint: each rank writes and reads its portions, in a directory all ranks share.

Uses the planners and the storage of DCP, so that its tools read these files, and speaks over the guard's own peers, so
that what goes wrong on one rank is known on all, as an ordinary error.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from stabilityguard.distributed.drift import checksum
from stabilityguard.distributed.layout import Box, Place, Portion
from stabilityguard.distributed.peers import Peers
from stabilityguard.errors import CheckpointError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What one rank has to say about a checkpoint."""

    tensors: Mapping[Place, Tensor]
    """Its tensors, contiguous and in host memory."""

    portions: Sequence[Portion]
    """What they hold of the whole ones."""

    objects: Mapping[tuple[str, ...], Any]
    """Everything else, by path; anything that pickles."""

    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further names of whole tensors, with those among the portions; the first rank's count."""


# Writing ----------------------------------------------------------------------------------------------------------


def write(directory: Path, contents: Contents, peers: Peers) -> list[str]:
    """Writes what all ranks hold, each element once, and reads it back. Returns the names of this rank's files.

    Collective calls over ``peers``.

    Raises:
        CheckpointError: on all ranks, if one could not write, or read other bits than it wrote.
    """
    planner, writer = _SavePlanner(contents), FileSystemWriter(directory)
    is_coordinator = peers.place == 0
    writer.set_up_storage_writer(is_coordinator)

    def make_plan() -> SavePlan:
        return writer.prepare_local_plan(planner.create_local_plan())

    def make_plans(plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        of_ranks, metadata = planner.create_global_plan(plans)
        return writer.prepare_global_plan(of_ranks), metadata

    def write_files(plan: SavePlan) -> list[Any]:
        results: list[Any] = writer.write_data(planner.finish_plan(plan), planner).wait()
        return results

    local_plans = together(peers, "planning a checkpoint", make_plan)
    planned = together(peers, "planning a checkpoint", lambda: make_plans(local_plans) if is_coordinator else None)
    assert planned[0] is not None
    of_ranks, metadata = planned[0]
    written = together(peers, "writing a checkpoint", lambda: write_files(of_ranks[peers.place]))
    if is_coordinator:
        _add_aliases(contents.aliases, metadata, written)
    together(peers, "writing a checkpoint", lambda: writer.finish(metadata, written) if is_coordinator else None)
    together(peers, "reading a checkpoint back", lambda: _compare(directory, contents, planner.plan))
    return sorted({result.storage_data.relative_path for result in written[peers.place]})


def _add_aliases(aliases: Mapping[str, str], metadata: Metadata, written: list[list[Any]]) -> None:
    """Lets further names lead to the same bytes."""
    for alias, name in aliases.items():
        if name in metadata.state_dict_metadata:
            metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[name]
            metadata.planner_data[alias] = ("model", alias.removeprefix("model."))
            same = [result for of_rank in written for result in of_rank if result.index.fqn == name]
            written.append([replace(result, index=replace(result.index, fqn=alias)) for result in same])


def together(peers: Peers, doing: str, work: Callable[[], T]) -> list[T]:
    """The results of ``work`` of all ranks. A collective call.

    Raises:
        CheckpointError: on all ranks, if ``work`` raised on one.
    """
    result: T | None = None
    problem: str | None = None
    try:
        result = work()
    except Exception as error:
        problem = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    answers = peers.gather((result, problem), doing)
    problems = [(rank, text) for rank, (_, text) in zip(peers.ranks, answers, strict=True) if text is not None]
    if problems:
        told = [text if len(peers) == 1 else f"rank {rank}: {text}" for rank, text in problems]
        raise CheckpointError(f"{doing}: {'; '.join(told)}")
    return [one for one, _ in answers]


def with_own_copies(contents: Contents, peers: Peers) -> Contents:
    """The same, with names of this rank's own for what it holds in common with others, but in another state.

    A collective call. Statistics of BatchNorm differ where DDP is told not to broadcast them, and parameters where each
    rank trains its own for a while.
    """
    sums = {p.name: {box.offsets: _checksum(box, p, contents) for box in p.boxes} for p in contents.portions}
    first: dict[tuple[str, tuple[int, ...]], int] = {}
    for of_rank in together(peers, "comparing what ranks have in common", lambda: sums):
        for name, of_boxes in of_rank.items():
            for offsets, value in of_boxes.items():
                first.setdefault((name, offsets), value)
    own = {name for name, of in sums.items() if any(first[name, offsets] != value for offsets, value in of.items())}
    return replace(contents, portions=[own_portion(p, peers.place) if p.name in own else p for p in contents.portions])


def _checksum(box: Box, portion: Portion, contents: Contents) -> int:
    return int(checksum([box.within(contents.tensors[portion.place])]))


def own_portion(portion: Portion, rank: int) -> Portion:
    """The same elements, side by side, under a name that no other rank has."""
    path = ("ranks", str(rank), *portion.path)
    ends = [0, *accumulate(box.numel for box in portion.boxes)]
    boxes = tuple(Box((end,), (b.numel,), b.start) for end, b in zip(ends, portion.boxes, strict=False))
    return replace(portion, name=".".join(path), path=path, shape=(ends[-1],), boxes=boxes)


class _SavePlanner(DefaultSavePlanner):
    def __init__(self, contents: Contents) -> None:
        super().__init__()
        self._objects = {".".join(path): value for path, value in contents.objects.items()}
        self._boxes = _located(contents)
        self.state_dict = {}
        self._paths = {portion.name: portion.path for portion in contents.portions}
        self._paths.update({".".join(path): path for path in contents.objects})

    def create_local_plan(self) -> SavePlan:
        items = [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO, tensor_data=None) for name in self._objects] + [
            WriteItem(
                MetadataIndex(portion.name, box.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    _chunk(box), TensorProperties.create_from_tensor(local), torch.Size(portion.shape)
                ),
            )
            for portion, box, local in self._boxes.values()
        ]
        self.plan = SavePlan(items, planner_data=self._paths)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        if index.fqn in self._objects:
            return self._objects[index.fqn]
        _, box, local = self._boxes[index.fqn, tuple(index.offset or ())]
        return box.within(local).clone()  # a view would be written with all that lies beside it


def _located(contents: Contents) -> dict[tuple[str, tuple[int, ...]], tuple[Portion, Box, Tensor]]:
    """Every box by the whole tensor's name and its offsets."""
    return {
        (portion.name, box.offsets): (portion, box, contents.tensors[portion.place])
        for portion in contents.portions
        for box in portion.boxes
    }


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def _compare(directory: Path, contents: Contents, plan: SavePlan) -> None:
    """Reads what this rank has written, and raises CheckpointError where it is not what it was to write."""
    boxes = _located(contents)
    mine = [i.index for i in plan.items if i.type != WriteItemType.BYTE_IO]
    written = [boxes[index.fqn, tuple(index.offset or ())] for index in mine]
    copies = {(p.name, box.offsets): torch.empty(box.sizes, dtype=local.dtype) for p, box, local in written}
    places: dict[tuple[str, tuple[int, ...]], Place] = {key: ("", i, "") for i, key in enumerate(copies)}
    portions = [
        Portion(p.name, p.path, p.shape, (Box(b.offsets, b.sizes),), places[p.name, b.offsets]) for p, b, _ in written
    ]
    read(directory, {places[key]: copy for key, copy in copies.items()}, portions, ())
    for portion, box, local in written:
        if not _same_bits(copies[portion.name, box.offsets], box.within(local)):
            raise CheckpointError(f"{portion.name} in {directory} is not what was written")


def _same_bits(first: Tensor, second: Tensor) -> bool:
    return torch.equal(_bits(first), _bits(second))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


# Reading ----------------------------------------------------------------------------------------------------------


def read_shapes(directory: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shapes and types of the whole tensors in a checkpoint, by name."""
    entries = FileSystemReader(directory).read_metadata().state_dict_metadata
    return {n: (m.size, m.properties.dtype) for n, m in entries.items() if isinstance(m, TensorStorageMetadata)}


def read(
    directory: Path, tensors: Mapping[Place, Tensor], portions: Sequence[Portion], objects: Iterable[str]
) -> dict[str, Any]:
    """Fills ``tensors``, contiguous and in host memory, and returns the named ``objects``. Not a collective.

    Raises:
        CheckpointError: a portion is not in the checkpoint, or not all of it, or in another shape.
        Exception: whatever reading a damaged file raises.
    """
    planner = _LoadPlanner(Contents(tensors=tensors, portions=portions, objects={}), objects)
    reader = FileSystemReader(directory)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    planner.set_up_planner({}, metadata, is_coordinator=True)
    reader.read_data(planner.create_local_plan(), planner).wait()
    return planner.found


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self, contents: Contents, objects: Iterable[str]) -> None:
        super().__init__()
        self._portions, self._objects, self._boxes = contents.portions, list(objects), _located(contents)
        self.found: dict[str, Any] = {}

    def create_local_plan(self) -> LoadPlan:
        items = [_read_object(name) for name in self._objects]
        for portion in self._portions:
            items += self._read_portion(portion)
        return LoadPlan(items)

    def _read_portion(self, portion: Portion) -> list[ReadItem]:
        assert self.metadata is not None
        if not portion.boxes:
            return []
        saved = self.metadata.state_dict_metadata.get(portion.name)
        if not isinstance(saved, TensorStorageMetadata):
            raise CheckpointError(f"it holds no {portion.name}; the model or the optimizer is another one")
        if tuple(saved.size) != portion.shape:
            raise CheckpointError(f"{portion.name} has the shape {tuple(saved.size)}, but is {portion.shape} here")
        items = create_read_items_for_chunk_list(portion.name, saved, [_chunk(box) for box in portion.boxes])
        if sum(item.lengths.numel() for item in items) != sum(box.numel for box in portion.boxes):
            raise CheckpointError(f"parts of {portion.name} are missing")
        return items

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.found[read_item.dest_index.fqn] = torch.load(value, weights_only=False)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        _, box, local = self._boxes[index.fqn, tuple(index.offset or ())]
        return box.within(local)


def _read_object(name: str) -> ReadItem:
    nothing = torch.Size((0,))
    return ReadItem(LoadItemType.BYTE_IO, MetadataIndex(name), nothing, MetadataIndex(name), nothing, nothing)
