"""Between the live training state and what a checkpoint holds: names in place of parameters, boxes of whole tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stabilityguard.distributed.checkpoint import Contents, own_portion, read, read_shapes
from stabilityguard.distributed.layout import Layout, Place, Portion
from stabilityguard.distributed.peers import Peers
from stabilityguard.errors import CheckpointError
from stabilityguard.recover.generators import read_generators
from stabilityguard.recover.manifest import Manifest
from stabilityguard.recover.state import DATA_LOADER, SmallState, TrainingState

Whole = Mapping[str, tuple[torch.Size, torch.dtype]]
"""Shape and type of every tensor in a checkpoint, by name."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What one checkpoint holds for this rank."""

    tensors: dict[Place, Tensor]
    at_end: SmallState
    at_next: SmallState
    guard: dict[str, Any]


class StateCodec:
    """Encodes this rank's state for checkpoints, and decodes it.

    Args:
        state: the live state, for its shapes and names.
        layout: where its tensors lie within whole ones.
        peers: the ranks that write and read together.
    """

    def __init__(self, state: TrainingState, layout: Layout, peers: Peers) -> None:
        self._state, self._layout, self._peers = state, layout, peers

    def encode(
        self, tensors: dict[Place, Tensor], at_end: SmallState, at_next: SmallState, guard: dict[str, Any]
    ) -> Contents:
        """What this rank writes: ``tensors`` are copies of the live ones, the small states see ``Draft``."""
        portions = [p for place, tensor in tensors.items() for p in self._layout.portions(place, tensor.shape)]
        told = {
            "at_end": self._by_name(at_end),
            "at_next": self._by_name(at_next),
            "guard": guard,
            "optimizer": self._state.optimizer_name,
            "parameters": [self._layout.names(index)[0] for index in self._state.owned],
        }
        objects: dict[tuple[str, ...], Any] = {("ranks", str(self._peers.place), "objects"): told}
        return Contents(tensors=tensors, portions=portions, objects=objects, aliases=self._layout.aliases)

    def decode(self, path: Path, manifest: Manifest) -> Loaded:
        """What the checkpoint in ``path`` holds for this rank. Not a collective.

        Raises:
            CheckpointError: it is of another training, or cannot be read.
        """
        names = [f"ranks.{rank}.objects" for rank in self._ranks_to_read(manifest.world_size)]
        objects = read(path, {}, [], names)
        told, same_ranks = [objects[name] for name in names], manifest.world_size == len(self._peers)
        if (optimizer := told[0]["optimizer"]) != self._state.optimizer_name:
            raise CheckpointError(f"it was written with {optimizer}, but the optimizer is {self._state.optimizer_name}")
        wanted = _Wanted(self._layout, self._peers.place, read_shapes(path), same_ranks=same_ranks)
        for place, tensor in self._state.tensors().items():
            if place[0] != "optimizer":
                wanted.add_live(place, tensor)
        unused = set(told[0]["parameters"]) - told[0]["at_end"]["optimizer"].keys() if same_ranks else set()
        for index in self._state.owned:
            if self._layout.names(index)[0] not in unused:  # others have used those, this rank has not
                wanted.add_entries(index)
        read(path, wanted.tensors, wanted.portions, ())
        return self._assemble(wanted.tensors, told, same_ranks=same_ranks)

    def _ranks_to_read(self, count: int) -> list[int]:
        """The objects to read: one's own, and where there were other ranks, all, as each keeps some parameters'."""
        own = self._peers.place if self._peers.place < count else 0
        return [own] if count == len(self._peers) else [own, *(rank for rank in range(count) if rank != own)]

    def _assemble(self, tensors: dict[Place, Tensor], told: Sequence[Any], *, same_ranks: bool) -> Loaded:
        states = {when: [self._by_parameter(of_rank[when]) for of_rank in told] for when in ("at_end", "at_next")}
        merged = {when: replace(of[0], optimizer=self._merged(of)) for when, of in states.items()}
        if not same_ranks:  # nobody's random numbers go on
            merged = {when: replace(small, generators=read_generators()) for when, small in merged.items()}
        at_end = merged["at_end"]
        tracked = {**merged["at_next"].tracked, **{k: v for k, v in at_end.tracked.items() if k == DATA_LOADER}}
        at_next = replace(merged["at_next"], tracked=tracked, generators=at_end.generators)
        return Loaded(tensors=tensors, at_end=at_end, at_next=at_next, guard=told[0]["guard"])

    def _merged(self, states: list[SmallState]) -> dict[Any, Any]:
        """What the optimizer keeps, by parameters in their order: the same on all ranks, as torch gathers by it."""
        found = {key: entries for small in reversed(states) for key, entries in small.optimizer.items()}
        first = [parameter for parameter in self._state.parameters if parameter in found]
        return {key: found[key] for key in dict.fromkeys([*first, *found])}

    # Small state, with names in place of parameters -----------------------------------------------------------------

    def _by_name(self, small: SmallState) -> dict[str, Any]:
        of_index, others = self._state.by_index(small.optimizer)
        return {
            "groups": [
                {"names": self._names(indices), "settings": settings}
                for indices, settings in zip(self._state.indices_by_group, small.groups, strict=True)
            ],
            "optimizer": {self._layout.names(index)[0]: entries for index, entries in of_index.items()},
            "others": others,
            "tracked": small.tracked,
            "generators": small.generators,
        }

    def _by_parameter(self, told: Mapping[str, Any]) -> SmallState:
        names = [self._names(indices) for indices in self._state.indices_by_group]
        saved = [group["names"] for group in told["groups"]]
        if [set(of) for of in names] != [set(of) for of in saved]:
            raise CheckpointError(f"its parameter groups are others: {_difference(saved, names)}")
        if missing := sorted(self._state.tracked.keys() - told["tracked"].keys()):
            raise CheckpointError(f"it holds no state of {missing[0]!r}, which track names")
        known = {self._layout.names(index)[0]: self._state.parameters[index] for index in self._state.owned}
        saved_entries = told["optimizer"]
        optimizer = {known[name]: saved_entries[name] for name in known if name in saved_entries}
        return SmallState(
            groups=[group["settings"] for group in told["groups"]],
            optimizer={**optimizer, **told["others"]},
            tracked=told["tracked"],
            generators=told["generators"],
        )

    def _names(self, indices: list[int]) -> list[str]:
        return [name for index in indices for name in self._layout.names(index)]


class _Wanted:
    """The tensors that one rank takes out of a checkpoint, empty at first, and the portions of whole ones they hold.

    On as many ranks as wrote it, a rank takes its own copy where it has one.
    """

    def __init__(self, layout: Layout, rank: int, whole: Whole, *, same_ranks: bool) -> None:
        self._layout, self._rank, self._whole, self._same_ranks = layout, rank, whole, same_ranks
        self.tensors: dict[Place, Tensor] = {}
        self.portions: list[Portion] = []

    def add_live(self, place: Place, tensor: Tensor) -> None:
        """A parameter as it is now, or a buffer, in whose place a forward may have put one of another shape."""
        shape, dtype = tensor.shape, tensor.dtype
        if place[0] == "buffer":
            shape, dtype = self._whole.get(self._known(self._layout.portions(place, shape)[0]).name, (shape, dtype))
        self._add(place, shape, dtype, self._layout.portions(place, shape))

    def add_entries(self, index: int) -> None:
        """What the optimizer kept of a parameter."""
        shapes = {name: shape for name, (shape, _) in self._whole.items()}
        for place, shape, portions in self._layout.find(index, shapes, own=self._same_ranks):
            known_as = [portions[0].name, own_portion(portions[0], self._rank).name]
            self._add(place, shape, next(self._whole[name][1] for name in known_as if name in self._whole), portions)

    def _add(self, place: Place, shape: torch.Size, dtype: torch.dtype, portions: Sequence[Portion]) -> None:
        self.tensors[place] = torch.zeros(shape, dtype=dtype)  # zero where a flat parameter is padded
        self.portions += map(self._known, portions)

    def _known(self, portion: Portion) -> Portion:
        """Under the name of this rank's own copy, where there is one."""
        own = own_portion(portion, self._rank)
        return own if self._same_ranks and own.name in self._whole else portion


def _difference(saved: list[list[str]], names: list[list[str]]) -> str:
    if len(saved) != len(names):
        return f"{len(saved)} groups in the checkpoint, {len(names)} here"
    gone = sorted({n for of in saved for n in of} ^ {n for of in names for n in of})
    return f"{', '.join(gone[:3])} on one side only" if gone else "the same parameters in other groups"
