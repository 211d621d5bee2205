"""Between the live training state and the checkpoints on disk: what goes into one, and what comes out of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stabilityguard.distributed.checkpoint import Contents, own_portion, read, read_shapes, together
from stabilityguard.distributed.layout import Layout, Place, Portion
from stabilityguard.errors import CheckpointError
from stabilityguard.recover.archive import Archive
from stabilityguard.recover.catalogue import Entry
from stabilityguard.recover.generators import read_generators
from stabilityguard.recover.host import HostCopy
from stabilityguard.recover.manifest import Manifest
from stabilityguard.recover.state import DATA_LOADER, SmallState, TrainingState


@dataclass(kw_only=True)
class Draft:
    """A checkpoint whose tensors are copied, and which waits for the lines that follow the user's ``step()``."""

    step: int
    at_end: SmallState | Exception
    """As ``step()`` ended: a rollback goes back to this, and the user's next lines then run once more."""

    at_next: SmallState | Exception | None = None
    """As the next step began: a new run goes on from this, as those lines have run already."""

    guard: dict[str, Any]
    """What the guard knew."""

    stopped: bool


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What one checkpoint holds for this rank."""

    tensors: dict[Place, Tensor]
    at_end: SmallState
    at_next: SmallState
    guard: dict[str, Any]


class Disk:
    """Makes and reads this rank's contents of checkpoints.

    Args:
        archive: where they go.
        state: the live state.
        layout: names its tensors.
    """

    def __init__(self, archive: Archive, state: TrainingState, layout: Layout) -> None:
        self.archive = archive
        self._state, self._layout = state, layout
        self._copy = HostCopy()
        self._draft: Draft | None = None
        self._since = 0

    @property
    def is_stopping(self) -> bool:
        """Whether the run ends as soon as the draft is written."""
        return self._draft is not None and self._draft.stopped

    def preserve(self, step: int, guard: Callable[[], dict[str, Any]], *, applied: bool, stop: bool) -> None:
        """Copies what is due at the end of a step; ``stop`` makes it due, and waits for a checkpoint in the making."""
        self._since += applied
        if stop:
            self._finish_job()
        elif self._since < self.archive.policy.every:
            return
        elif self.archive.job is not None:
            self.archive.warn_late(step)
            self._since = 0
            return
        self._copy.take(self._state.tensors())
        self._draft = Draft(step=step, at_end=self._small(), guard=guard(), stopped=stop)
        self._since = 0

    def begin(self, step: int) -> None:
        """The user has put a state in place; what was copied of the former one is given up. See ``Archive.begin``."""
        self.archive.begin(step)
        if not self.is_stopping:
            self._draft = None

    def next_step_begins(self) -> None:
        """Takes note of what the user's lines after ``step()`` have changed."""
        if self._draft is not None and self._draft.at_next is None:
            self._draft.at_next = self._small()

    def _small(self) -> SmallState | Exception:
        """The small state, or what went wrong on this rank alone: the others have to be told when it is written."""
        try:
            return self._state.small()
        except Exception as error:
            return error

    def write(self) -> None:
        """Writes the draft, if there is one. Collective calls; a background job is only started."""
        self.next_step_begins()
        draft, self._draft = self._draft, None
        if draft is not None:
            self.archive.submit(draft.step, lambda: self._contents(draft), stopped=draft.stopped)

    def fence(self) -> None:
        """Makes the device's coming work come after the copies that are being made."""
        self._copy.fence()

    def abandon_newer_than(self, step: int) -> None:
        """Gives up what was made of a future that was given up."""
        if self._draft is not None and self._draft.step > step and not self._draft.stopped:
            self._draft = None
        self.archive.abandon_newer_than(step)
        self._since = 0

    def restore(self, entry: Entry, *, resuming: bool = False, without: Collection[str] = ()) -> Loaded | None:
        """Puts a checkpoint back, as its ``step()`` ended, or ``resuming`` as the next step began. Collective calls.

        None on all ranks, with the live state as it was, where that fails on one. ``without`` names tracked objects to
        leave alone.
        """
        loaded = self.archive.load(entry, self._read)
        if loaded is None:
            return None
        small, before = loaded.at_next if resuming else loaded.at_end, self._state.small()
        try:
            self._restore_settings(small, without)
        except CheckpointError as error:
            self._state.restore_settings(before)
            self.archive.give_up(entry, error)
            return None
        self._state.restore_tensors(loaded.tensors, small)
        return loaded

    def _restore_settings(self, small: SmallState, without: Collection[str]) -> None:
        restore = partial(self._state.restore_settings, small, without=without)
        together(self.archive.peers, "loading tracked objects", restore)

    def _finish_job(self) -> None:
        job = self.archive.job
        if job is not None:
            self.archive.wait()
            outcomes = self.archive.peers.gather(job.problem is None, "finishing a checkpoint")
            self.archive.settle(succeeded=all(outcomes))

    # Contents -----------------------------------------------------------------------------------------------------

    def _contents(self, draft: Draft) -> Contents:
        self._copy.wait()
        if self._copy.is_torn:
            raise CheckpointError("parameters were written to while they were copied")
        tensors, rank = self._copy.tensors, str(self.archive.peers.place)
        portions = [p for place, tensor in tensors.items() for p in self._layout.portions(place, tensor.shape)]
        told = {
            "at_end": self._by_name(draft.at_end),
            "at_next": self._by_name(draft.at_next),
            "guard": draft.guard,
            "optimizer": self._state.optimizer_name,
            "parameters": [self._layout.names(index)[0] for index in self._state.owned],
        }
        objects: dict[tuple[str, ...], Any] = {("ranks", rank, "objects"): told}
        return Contents(tensors=tensors, portions=portions, objects=objects, aliases=self._layout.aliases)

    def _read(self, path: Path, manifest: Manifest) -> Loaded:
        whole, same_ranks = read_shapes(path), manifest.world_size == len(self.archive.peers)
        tensors: dict[Place, Tensor] = {}
        portions: list[Portion] = []

        def want(place: Place, shape: torch.Size, dtype: torch.dtype, of_place: list[Portion]) -> None:
            tensors[place] = torch.zeros(shape, dtype=dtype)  # zero where a flat parameter is padded
            portions.extend(self._own(of_place, whole) if same_ranks else of_place)

        for place, tensor in self._state.tensors().items():
            if place[0] == "parameter":
                want(place, tensor.shape, tensor.dtype, self._layout.portions(place, tensor.shape))
            elif place[0] == "buffer":  # a forward may have put one of another shape in its place
                shape, dtype = whole.get(
                    self._layout.portions(place, tensor.shape)[0].name, (tensor.shape, tensor.dtype)
                )
                want(place, shape, dtype, self._layout.portions(place, shape))
        shapes = {name: shape for name, (shape, _) in whole.items()}
        names = [f"ranks.{rank}.objects" for rank in self._ranks_to_read(manifest.world_size)]
        objects = read(path, {}, [], names)
        told = objects[names[0]]
        unused = set(told["parameters"]) - told["at_end"]["optimizer"].keys() if same_ranks else set()
        for index in self._state.owned:
            if self._layout.names(index)[0] in unused:
                continue  # others have used this parameter, this rank has not
            for place, shape, of_place in self._layout.find(index, shapes, own=same_ranks):
                known_as = [of_place[0].name, own_portion(of_place[0], self.archive.peers.place).name]
                want(place, shape, next(whole[name][1] for name in known_as if name in whole), of_place)
        read(path, tensors, portions, ())
        return self._assemble(tensors, [objects[name] for name in names], same_ranks=same_ranks)

    def _own(self, portions: list[Portion], whole: Mapping[str, Any]) -> list[Portion]:
        """The portions under the names of this rank's own, where there are such."""
        own = [own_portion(portion, self.archive.peers.place) for portion in portions]
        return [mine if mine.name in whole else portion for mine, portion in zip(own, portions, strict=True)]

    def _ranks_to_read(self, count: int) -> list[int]:
        """The objects to read: one's own, and where there were other ranks, all, as each keeps some parameters'."""
        own = self.archive.peers.place if self.archive.peers.place < count else 0
        return [own] if count == len(self.archive.peers) else [own, *(rank for rank in range(count) if rank != own)]

    def _assemble(self, tensors: dict[Place, Tensor], objects: list[Any], *, same_ranks: bool) -> Loaded:
        if (optimizer := objects[0]["optimizer"]) != self._state.optimizer_name:
            raise CheckpointError(f"it was written with {optimizer}, but the optimizer is {self._state.optimizer_name}")
        states = {when: [self._by_parameter(told[when]) for told in objects] for when in ("at_end", "at_next")}
        merged = {when: replace(of[0], optimizer=self._merged(of)) for when, of in states.items()}
        if not same_ranks:  # nobody's random numbers go on
            merged = {when: replace(small, generators=read_generators()) for when, small in merged.items()}
        at_end = merged["at_end"]
        tracked = {**merged["at_next"].tracked, **{k: v for k, v in at_end.tracked.items() if k == DATA_LOADER}}
        at_next = replace(merged["at_next"], tracked=tracked, generators=at_end.generators)
        return Loaded(tensors=tensors, at_end=at_end, at_next=at_next, guard=objects[0]["guard"])

    def _merged(self, states: list[SmallState]) -> dict[Any, Any]:
        """What the optimizer keeps, by parameters in their order: the same on all ranks, as torch gathers by it."""
        found = {key: entries for small in reversed(states) for key, entries in small.optimizer.items()}
        first = [parameter for parameter in self._state.parameters if parameter in found]
        return {key: found[key] for key in dict.fromkeys([*first, *found])}

    # Small state, with names in place of parameters -----------------------------------------------------------------

    def _by_name(self, small: SmallState | Exception | None) -> dict[str, Any]:
        if not isinstance(small, SmallState):
            raise CheckpointError(f"a tracked object cannot be copied: {small}") from small
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


def _difference(saved: list[list[str]], names: list[list[str]]) -> str:
    if len(saved) != len(names):
        return f"{len(saved)} groups in the checkpoint, {len(names)} here"
    gone = sorted({n for of in saved for n in of} ^ {n for of in names for n in of})
    return f"{', '.join(gone[:3])} on one side only" if gone else "the same parameters in other groups"
