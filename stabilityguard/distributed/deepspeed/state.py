"""The training state of an engine: by parameter, though DeepSpeed keeps most of it in flat tensors of many."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stabilityguard.distributed.deepspeed.fragments import Fragment
from stabilityguard.distributed.deepspeed.partition import Partition
from stabilityguard.distributed.layout import Place
from stabilityguard.recover.buffers import BufferSlot
from stabilityguard.recover.generators import write_generators
from stabilityguard.recover.state import SmallState, Stateful, TrainingState

MASTER = "master"
"""Name under which the master weights of a parameter are kept beside the optimizer's tensors."""


class Books:
    """What an engine counts, with the state of its learning rate schedule and loss scale."""

    counts = ("global_steps", "global_samples", "skipped_steps")

    def __init__(self, engine: Any, partition: Partition) -> None:
        self._engine, self._partition = engine, partition
        self.was_restored = False
        """Whether a state was put back since this was last set to False."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values, and the scheduler's own state."""
        schedule, scaler = self._engine.lr_scheduler, self._partition.scaler
        return {
            "counts": self.read_counts(),
            "lr_scheduler": None if schedule is None else schedule.state_dict(),
            "loss_scale": None if scaler is None else dict(vars(scaler)),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts such a state back."""
        self.write_counts(state["counts"])
        if self._engine.lr_scheduler is not None and state["lr_scheduler"] is not None:
            self._engine.lr_scheduler.load_state_dict(state["lr_scheduler"])
        if self._partition.scaler is not None and state["loss_scale"] is not None:
            vars(self._partition.scaler).update(state["loss_scale"])
        self.was_restored = True

    def read_counts(self) -> dict[str, int]:
        """Optimizer steps and samples so far."""
        return {name: getattr(self._engine, name) for name in self.counts}

    def write_counts(self, counts: Mapping[str, int]) -> None:
        """Sets them."""
        for name, count in counts.items():
            setattr(self._engine, name, count)


class EngineState(TrainingState):
    """Reads and writes this rank's fragments of parameters, masters and optimizer state."""

    def __init__(
        self, partition: Partition, buffers: Mapping[str, BufferSlot], tracked: Mapping[str, Stateful]
    ) -> None:
        super().__init__(partition.parameters, buffers, partition.base, tracked)
        self._partition = partition
        indices = {parameter: i for i, parameter in enumerate(partition.parameters)}
        self._fragments = {indices[parameter]: fragment for parameter, fragment in partition.fragments.items()}

    def tensors(self) -> dict[Place, Tensor]:
        """The live tensors on this rank, detached: parameters as they are held, buffers, and of all fragments the
        master and the optimizer's tensors, shape (numel,) each.
        """
        found: dict[Place, Tensor] = {}
        for i, parameter in enumerate(self.parameters):
            found["parameter", i, ""] = self._partition.held(parameter)
        for i, fragment in self._fragments.items():
            found |= {("optimizer", i, name): tensor for name, tensor in self._kept(fragment)}
        for name, slot in self._buffers.items():
            if (buffer := slot.tensor) is not None:
                found["buffer", name, ""] = buffer
        return found

    def versions(self) -> list[int]:
        """Counts of the masters' in-place writes."""
        return [fragment.master._version for fragment in self._fragments.values()]

    def small(self) -> SmallState:
        """A copy of everything else."""
        settings = super().small()
        others = {
            fragment.parameter: {name: copy.deepcopy(value) for name, value in self._others(fragment)}
            for fragment in self._fragments.values()
        }
        return replace(settings, optimizer=others)

    @property
    def optimizer_name(self) -> str:
        """Name of the class that updates."""
        return type(self._partition.base).__name__

    @property
    def owned(self) -> list[int]:
        """Indices of the parameters of which this rank updates a fragment."""
        return list(self._fragments)

    @property
    def indices_by_group(self) -> list[list[int]]:
        """Indices of the parameters of every group."""
        index = {parameter: i for i, parameter in enumerate(self.parameters)}
        return [[index[parameter] for parameter in group] for group in self._partition.groups]

    def forget_moments(self, parameters: Iterable[Tensor]) -> None:
        """Sets to zero what the optimizer keeps of these; its count of steps, which others share, goes on."""
        for parameter in parameters:
            fragment = self._partition.fragments.get(parameter)  # type: ignore[call-overload]
            for name, tensor in [] if fragment is None else self._kept(fragment):
                if name != MASTER and tensor.numel() == fragment.numel:
                    tensor.zero_()

    def restore_tensors(self, tensors: Mapping[Place, Tensor], small: SmallState) -> None:
        """Parameters, masters, the optimizer's state, buffers, and random generators."""
        self._partition.before_writing()
        self._forget_unsaved(tensors, small)
        for i, parameter in enumerate(self.parameters):
            self._partition.held(parameter).copy_(tensors["parameter", i, ""])
        for i, fragment in self._fragments.items():
            self._restore_fragment(i, fragment, tensors, small.optimizer.get(fragment.parameter, {}))
        for (room, owner, _), saved in tensors.items():
            if room == "buffer":
                self._buffers[str(owner)].put(saved)
        self._partition.after_writing()
        write_generators(small.generators)

    def _restore_fragment(
        self, index: int, fragment: Fragment, tensors: Mapping[Place, Tensor], others: Mapping[str, Any]
    ) -> None:
        state = self._state_of(fragment)
        for (_, _, name), saved in ((p, t) for p, t in tensors.items() if p[:2] == ("optimizer", index)):
            if name != MASTER:
                _entry(state, name, saved, fragment).copy_(saved)
        state.update(copy.deepcopy(dict(others)))
        if fragment.has_master:
            saved = tensors.get(("optimizer", index, MASTER), tensors["parameter", index, ""])
            run = slice(fragment.start, fragment.start + fragment.numel)
            fragment.within(fragment.master).copy_(saved if saved.numel() == fragment.numel else saved.reshape(-1)[run])

    def _forget_unsaved(self, tensors: Mapping[Place, Tensor], small: SmallState) -> None:
        """Removes what the optimizer has begun to keep since."""
        saved: dict[Tensor, set[str]] = {}
        for i, fragment in self._fragments.items():
            names = saved.setdefault(fragment.master, set(small.optimizer.get(fragment.parameter, ())))
            names |= {name for room, owner, name in tensors if (room, owner) == ("optimizer", i)}
        for master, names in saved.items():
            state = self._partition.base.state.get(master, {})
            for name in [name for name in state if name not in names]:
                del state[name]

    def _state_of(self, fragment: Fragment) -> dict[str, Any]:
        state: dict[str, Any] = self._partition.base.state[fragment.master]
        return state

    def _kept(self, fragment: Fragment) -> Iterator[tuple[str, Tensor]]:
        if fragment.has_master:
            yield MASTER, fragment.within(fragment.master)
        for name, value in self._partition.base.state.get(fragment.master, {}).items():
            if isinstance(value, Tensor):
                yield name, _part(value, fragment)

    def _others(self, fragment: Fragment) -> Iterator[tuple[str, Any]]:
        for name, value in self._partition.base.state.get(fragment.master, {}).items():
            if not isinstance(value, Tensor):
                yield name, value


def _part(value: Tensor, fragment: Fragment) -> Tensor:
    """The fragment's part of a tensor that the optimizer keeps; all of one that is not laid out like the master."""
    return fragment.within(value) if value.numel() == fragment.master.numel() else value.detach()


def _entry(state: dict[str, Any], name: str, saved: Tensor, fragment: Fragment) -> Tensor:
    """The live tensor to write ``saved`` into; made where there is none yet."""
    if not isinstance(state.get(name), Tensor):
        is_part = saved.numel() == fragment.numel and saved.dim() > 0
        like_master = torch.zeros_like(fragment.master, dtype=saved.dtype, requires_grad=False)
        state[name] = like_master if is_part else saved.clone()
    return _part(state[name], fragment)
