"""An engine as a guard watches over it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from stabilityguard.config import CheckpointFormat
from stabilityguard.distributed.deepspeed.export import FORMAT, exports_of
from stabilityguard.distributed.deepspeed.partition import Partition
from stabilityguard.distributed.deepspeed.state import Books, EngineState
from stabilityguard.distributed.layout import Layout
from stabilityguard.distributed.shards import Shard, find_shards, tied_names
from stabilityguard.errors import StabilityGuardError
from stabilityguard.measure.gradients import GradientReader
from stabilityguard.recover.buffers import BufferSlot
from stabilityguard.recover.manifest import Exports
from stabilityguard.recover.state import Stateful, TrainingState


class EngineSubject:
    """What a DeepSpeed engine trains.

    Args:
        engine: the ``DeepSpeedEngine``.
        partition: how its optimizer splits the parameters.
        books: what it counts.
        take_step: the engine's own step on the model.
    """

    def __init__(self, engine: Any, partition: Partition, books: Books, take_step: Callable[[], None]) -> None:
        self.model: nn.Module = engine.module
        self.optimizer = partition.base
        self.find_gradients: Callable[[], list[Tensor | None]] | None = self._find_gradients
        self._engine, self._partition, self._books = engine, partition, books
        self._take_step = take_step
        self._order: list[Tensor] = []
        self._has_checked = False

    def parameters(self) -> list[nn.Parameter]:
        """Those that the engine's optimizer was given."""
        return list(self._partition.parameters)

    def has_only(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Always: an engine takes no parameters later on."""
        return True

    def shards(self) -> list[Shard]:
        """The fragments that this rank updates, and an empty one of every other parameter."""
        shards = [self._shard(shard) for shard in find_shards(self.model, self._partition.parameters, _expert)]
        self._order = [shard.parameter for shard in shards]
        return shards

    def _shard(self, shard: Shard) -> Shard:
        fragment = self._partition.fragments.get(shard.parameter)  # type: ignore[call-overload]
        whole = self._partition.shape(shard.parameter)
        if fragment is None:
            return replace(shard, whole=whole, identity=None, run=slice(0, 0))
        run = slice(fragment.start, fragment.start + fragment.numel)
        identity = (run.start, run.stop), _expert("", shard.parameter)
        return replace(shard, whole=whole, identity=identity, run=run)

    def layout(self, shards: Sequence[Shard], rank: int) -> Layout:
        """By fragments."""
        fragments = [self._partition.fragments.get(parameter) for parameter in self._partition.parameters]
        return Layout(
            self._partition.parameters,
            shards,
            _expert,
            rank,
            tied_names(self.model, shards),
            [torch.Size([0 if fragment is None else fragment.numel]) for fragment in fragments],
            has_whole_parameters=self._partition.has_whole_parameters,
        )

    def state(self, buffers: Mapping[str, BufferSlot], tracked: Mapping[str, Stateful]) -> TrainingState:
        """Of this rank's fragments."""
        return EngineState(self._partition, buffers, tracked)

    def exports(self, checkpoint_format: CheckpointFormat) -> Exports:
        """The engine's own files, if asked for."""
        return exports_of(self._engine) if checkpoint_format == FORMAT else {}

    def discard_gradients(self, reader: GradientReader, *, are_finite: bool) -> None:
        """Has the engine skip its step: with its loss scale, where the gradients are not finite, as for an overflow.

        After a rollback the engine's counts and loss scale stay those that were restored.
        """
        if self._books.was_restored:
            counts = self._books.read_counts()
            self._take_step_within(self._partition.skipping())
            self._books.write_counts(counts)
        else:
            self._take_step_within(self._partition.skipping() if are_finite else self._partition.overflowing())

    def _take_step_within(self, passing_over: AbstractContextManager[None]) -> None:
        with passing_over:
            self._take_step()

    def _find_gradients(self) -> list[Tensor | None]:
        gradients = self._partition.gradients()
        if not self._has_checked:
            self._check(gradients)
        return [gradients.get(parameter) for parameter in self._order]

    def _check(self, gradients: Mapping[Tensor, Tensor]) -> None:
        for parameter, gradient in gradients.items():
            fragment = self._partition.fragments.get(parameter)  # type: ignore[call-overload]
            if fragment is None or fragment.numel != gradient.numel():
                raise StabilityGuardError(
                    f"{type(self._engine.optimizer).__name__} keeps {gradient.numel()} elements of the gradient of "
                    f"{self._engine.param_names[parameter]}, where {0 if fragment is None else fragment.numel} are "
                    "expected; install deepspeed>=0.19,<0.20"
                )
        self._has_checked = True


def _expert(_: str, parameter: Tensor) -> Hashable:
    """Which of the experts of that name a parameter belongs to: every rank of an expert-parallel group has others."""
    if getattr(parameter, "allreduce", True):
        return None
    groups = import_module("deepspeed.utils.groups")  # loaded already, and only then
    return f"expert {groups._get_expert_parallel_rank(parameter.group_name)}"  # type: ignore[attr-defined]
