"""What a guard watches over: parameters, the optimizer that updates them, and where their gradients and state lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from stabilityguard.config import CheckpointFormat
from stabilityguard.distributed.layout import Layout
from stabilityguard.distributed.shards import Shard, ShardOf, find_shards, tied_names
from stabilityguard.errors import ConfigurationError
from stabilityguard.groups import are_parameters_of, parameters_of
from stabilityguard.measure.gradients import GradientReader
from stabilityguard.recover.buffers import BufferSlot
from stabilityguard.recover.manifest import Exports
from stabilityguard.recover.state import Stateful, TrainingState


class Subject(Protocol):
    """What the path of a step needs to know of those who train."""

    model: nn.Module
    """Its training forwards are watched for batch and loss."""

    optimizer: Optimizer
    """The one that updates, for its name and hyperparameters."""

    find_gradients: Callable[[], list[Tensor | None]] | None
    """This rank's gradient of every shard, just before the update; None if backward leaves them in ``.grad``."""

    def parameters(self) -> list[nn.Parameter]:
        """All that is trained."""

    def has_only(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether these are still all that is trained, in this order."""

    def shards(self) -> list[Shard]:
        """What this rank holds. Raises ConfigurationError where the model is not the one that is trained."""

    def layout(self, shards: Sequence[Shard], rank: int) -> Layout:
        """Where this rank's tensors lie within those of the unsharded model."""

    def state(self, buffers: Mapping[str, BufferSlot], tracked: Mapping[str, Stateful]) -> TrainingState:
        """Reads and writes what is saved and restored together."""

    def exports(self, checkpoint_format: CheckpointFormat) -> Exports:
        """What writes that format besides DCP's files. Raises ConfigurationError where nothing can."""

    def discard_gradients(self, reader: GradientReader, *, are_finite: bool) -> None:
        """Makes sure that no update will be made from the present gradients, of a skip or after a rollback."""


class OptimizerSubject:
    """A model and a torch optimizer, by itself or under any of torch's wrappers.

    Args:
        model: holds the optimizer's parameters.
        optimizer: updates them.
        shard_of: tells shards of plain tensors apart.
    """

    find_gradients: Callable[[], list[Tensor | None]] | None = None

    def __init__(self, model: nn.Module, optimizer: Optimizer, shard_of: ShardOf | None = None) -> None:
        self.model, self.optimizer = model, optimizer
        self._shard_of = shard_of

    def parameters(self) -> list[nn.Parameter]:
        """Those of all groups."""
        return parameters_of(self.optimizer)

    def has_only(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether the groups hold exactly these, in this order."""
        return are_parameters_of(self.optimizer, parameters)

    def shards(self) -> list[Shard]:
        """See ``find_shards``."""
        return find_shards(self.model, self.parameters(), self._shard_of)

    def layout(self, shards: Sequence[Shard], rank: int) -> Layout:
        """By what the shards say."""
        return Layout(self.parameters(), shards, self._shard_of, rank, tied_names(self.model, shards))

    def state(self, buffers: Mapping[str, BufferSlot], tracked: Mapping[str, Stateful]) -> TrainingState:
        """Of the optimizer and its parameters."""
        return TrainingState(self.parameters(), buffers, self.optimizer, tracked)

    def exports(self, checkpoint_format: CheckpointFormat) -> Exports:
        """Nothing does."""
        if checkpoint_format != "dcp":
            raise ConfigurationError(f"CheckpointPolicy.format={checkpoint_format!r} is for guard_engine alone")
        return {}

    def discard_gradients(self, reader: GradientReader, *, are_finite: bool) -> None:
        """Sets them to zero; not removed: code that reads ``.grad`` after ``step()`` goes on working."""
        reader.zero_()
