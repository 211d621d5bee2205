"""What is saved and restored together: parameters, buffers, optimizer, tracked objects, random generators."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer

from stabilityguard.config import Moments
from stabilityguard.distributed.layout import Place
from stabilityguard.distributed.shards import Shard, local_part
from stabilityguard.errors import ConfigurationError
from stabilityguard.recover.buffers import BufferSlot
from stabilityguard.recover.generators import read_generators, write_generators

DATA_LOADER = "dataloader"
"""Name in ``track`` of what stands for the position in the data."""


@runtime_checkable
class Stateful(Protocol):
    """Anything whose state can be read and put back."""

    def state_dict(self) -> Any:
        """The present state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Puts a state back."""


@dataclass(frozen=True, kw_only=True)
class SmallState:
    """A copy of all that is not bulk tensors."""

    groups: list[dict[str, Any]]
    """Hyperparameters of every parameter group."""

    optimizer: dict[Any, Any]
    """What the optimizer keeps besides tensors, by parameter (or whatever else it keys its state by)."""

    tracked: dict[str, Any]
    """State of every tracked object."""

    generators: dict[str, Any]
    """State of the random number generators."""


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """Where a run goes on."""

    step: int
    """Count of ``step()`` calls that the run had made; as many batches were used, skipped ones included."""

    tracked: Mapping[str, Any]
    """The states that were loaded into the tracked objects, by name."""


class TrainingState:
    """Reads and writes the live state; knows nothing of when, how often or where to copies are made."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        buffers: Mapping[str, BufferSlot],
        optimizer: Optimizer,
        tracked: Mapping[str, Stateful],
    ) -> None:
        self.parameters = parameters
        self._buffers = buffers
        self._optimizer = optimizer
        self.tracked = tracked

    def tensors(self) -> dict[Place, Tensor]:
        """The live bulk tensors on this rank, detached: parameters, buffers and the optimizer's tensors."""
        found: dict[Place, Tensor] = {}
        for i, parameter in enumerate(self.parameters):
            found["parameter", i, ""] = local_part(parameter.detach())
            for name, value in self._entries(parameter).items():
                if isinstance(value, Tensor):
                    found["optimizer", i, name] = local_part(value.detach())
        for name, slot in self._buffers.items():
            if (buffer := slot.tensor) is not None:
                found["buffer", name, ""] = buffer
        return found

    def versions(self) -> list[int]:
        """Counts of the parameters' in-place writes."""
        return [local_part(parameter)._version for parameter in self.parameters]

    def small(self) -> SmallState:
        """A copy of everything else."""
        return SmallState(
            groups=[self._copied({k: v for k, v in g.items() if k != "params"}) for g in self._optimizer.param_groups],
            optimizer={key: self._copied(self._without_bulk(key, e)) for key, e in self._entries_by_owner.items()},
            tracked={name: copy.deepcopy(stateful.state_dict()) for name, stateful in self.tracked.items()},
            generators=read_generators(),
        )

    @property
    def optimizer_name(self) -> str:
        """Name of the class that updates, which is not that of a wrapper."""
        return type(self._inner).__name__

    @property
    def owned(self) -> list[int]:
        """Indices of the parameters whose optimizer state is kept here: all, but under ZeroRedundancyOptimizer."""
        here = {parameter for group in self._inner.param_groups for parameter in group["params"]}
        return [i for i, parameter in enumerate(self.parameters) if parameter in here]

    @property
    def indices_by_group(self) -> list[list[int]]:
        """Indices of the parameters of every group."""
        index = {parameter: i for i, parameter in enumerate(self.parameters)}
        return [[index[parameter] for parameter in group["params"]] for group in self._optimizer.param_groups]

    def by_index(self, entries: Mapping[Any, Any]) -> tuple[dict[int, Any], dict[Any, Any]]:
        """What the optimizer keeps by parameter, with indices in their place; and what it keeps by anything else."""
        index: dict[Any, int] = {parameter: i for i, parameter in enumerate(self.parameters)}
        return (
            {index[key]: value for key, value in entries.items() if key in index},
            {key: value for key, value in entries.items() if key not in index},
        )

    def forget_moments(self, parameters: Iterable[Tensor]) -> None:
        """Drops what the optimizer keeps of these; it starts anew with them."""
        for parameter in parameters:
            self._entries_by_owner.pop(parameter, None)

    def restore(self, tensors: Mapping[Place, Tensor], small: SmallState, *, without: Collection[str] = ()) -> None:
        """Writes back a state that ``tensors()`` and ``small()`` gave. Live tensors keep their identity.

        Neither argument is adopted: both can be restored again. Tracked objects named in ``without`` are left alone.
        """
        self.restore_settings(small, without=without)
        self.restore_tensors(tensors, small)

    def restore_settings(self, small: SmallState, *, without: Collection[str] = ()) -> None:
        """The first part: hyperparameters and tracked objects, whose own code may raise."""
        for group, saved in zip(self._optimizer.param_groups, small.groups, strict=True):
            _restore_group(group, self._copied(saved))
        for name in self.tracked.keys() - set(without):
            self.tracked[name].load_state_dict(copy.deepcopy(small.tracked[name]))

    def restore_tensors(self, tensors: Mapping[Place, Tensor], small: SmallState) -> None:
        """The second part: parameters, buffers, the optimizer's state, and random generators."""
        self._restore_others(small.optimizer)
        self._forget_entries(tensors)
        pairs: list[tuple[Tensor, Tensor]] = []
        for (room, owner, name), saved in tensors.items():
            if room == "buffer":
                self._buffers[str(owner)].put(saved)
            elif room == "parameter":
                pairs.append((local_part(self.parameters[int(owner)].detach()), saved))
            else:
                pairs += self._entry_pair(self.parameters[int(owner)], name, saved)
        for target, source in pairs:
            target.copy_(source)
        write_generators(small.generators)

    @contextmanager
    def with_buffers_of(self, tensors: Mapping[Place, Tensor]) -> Iterator[None]:
        """Within it, buffers are as in ``tensors``; afterwards what they were."""
        now = {name: slot.tensor.clone() for name, slot in self._buffers.items() if slot.tensor is not None}
        try:
            for (room, owner, _), saved in tensors.items():
                if room == "buffer":
                    self._buffers[str(owner)].put(saved)
            yield
        finally:
            for name, tensor in now.items():
                self._buffers[name].put(tensor)

    def _restore_others(self, saved: Mapping[Any, Any]) -> None:
        state = self._entries_by_owner
        for key in [key for key in state if key not in saved]:
            del state[key]
        for key, others in saved.items():
            state[key] = _with_tensors_of(state.get(key), self._copied(others))

    def _copied(self, entries: Any) -> Any:
        """A deep copy in which parameters stay themselves; what cannot be copied stays, too."""
        memo = {id(parameter): parameter for parameter in self.parameters}
        if not isinstance(entries, dict):
            return copy.deepcopy(entries, memo)
        return {name: _copy_of(value, memo) for name, value in entries.items()}

    def _without_bulk(self, key: Any, entries: Any) -> Any:
        """The entries that ``tensors()`` does not give: all of them where the key is no parameter."""
        if not isinstance(entries, dict) or not any(key is parameter for parameter in self.parameters):
            return entries
        return {name: value for name, value in entries.items() if not isinstance(value, Tensor)}

    @property
    def _inner(self) -> Optimizer:
        """ZeroRedundancyOptimizer keeps the state of this rank's own parameters in one that it wraps."""
        inner = vars(self._optimizer).get("optim")
        return inner if isinstance(inner, Optimizer) else self._optimizer

    @property
    def _entries_by_owner(self) -> Any:
        return self._inner.state

    def _entries(self, parameter: nn.Parameter) -> dict[str, Any]:
        entries = self._entries_by_owner.get(parameter)
        return entries if isinstance(entries, dict) else {}

    def _entry_pair(self, parameter: nn.Parameter, name: str, saved: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The live tensor to write ``saved`` into; a missing or reshaped one is made anew, which leaves no pair."""
        entries = self._entries_by_owner[parameter]
        live = entries.get(name)
        if isinstance(live, Tensor):
            local = local_part(live.detach())
            if (local.shape, local.dtype) == (saved.shape, saved.dtype):
                return [(local, saved)]
        entries[name] = (
            _like_parameter(saved.to(parameter.device, copy=True), parameter) if saved.dim() else saved.clone()
        )
        return []

    def _forget_entries(self, tensors: Mapping[Place, Tensor]) -> None:
        """Removes optimizer tensors that the saved state does not have."""
        for i, parameter in enumerate(self.parameters):
            entries = self._entries(parameter)
            for name in [n for n, v in entries.items() if isinstance(v, Tensor) and ("optimizer", i, n) not in tensors]:
                del entries[name]


def check_moments(moments: Moments, shards: Iterable[Shard]) -> None:
    """Raises ConfigurationError where the optimizer's state of single layers could not be cleared."""
    if moments != "keep" and any(shard.span is not None for shard in shards):
        raise ConfigurationError(
            f"moments={moments!r} cannot tell the layers of a flat parameter apart; "
            "pass use_orig_params=True to FullyShardedDataParallel"
        )


def check_tracked(track: Mapping[str, Any] | None) -> dict[str, Stateful]:
    """``track`` as a dictionary.

    Raises:
        ConfigurationError: it is no mapping, or an object lacks ``state_dict`` or ``load_state_dict``.
    """
    if track is not None and not isinstance(track, Mapping):
        raise ConfigurationError(
            f"track must map names to objects, like {{'lr_scheduler': scheduler}}, but is {track!r}"
        )
    for name, stateful in (track or {}).items():
        if not isinstance(stateful, Stateful):
            raise ConfigurationError(
                f"track[{name!r}] is a {type(stateful).__name__}, which lacks state_dict() or load_state_dict(); "
                "track only objects that have both"
            )
    return dict(track or {})


def _copy_of(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, Tensor) and id(value) not in memo:
        return value.detach().clone()
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # a lock, a handle: no state that could be rewound
        return value


def _like_parameter(local: Tensor, parameter: Any) -> Tensor:
    """``local`` as a shard like that of ``parameter`` where that is one."""
    own = local_part(parameter)
    if own is parameter or own.shape != local.shape:
        return local
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 (loaded already, and only then)

    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def _with_tensors_of(live: Any, others: Any) -> Any:
    if not (isinstance(live, dict) and isinstance(others, dict)):
        return others
    return {**{name: value for name, value in live.items() if isinstance(value, Tensor)}, **others}


def _restore_group(group: dict[str, Any], saved: dict[str, Any]) -> None:
    for name in [name for name in group if name != "params" and name not in saved]:
        del group[name]
    for name, value in saved.items():
        live = group.get(name)
        if live is value:
            continue
        if isinstance(live, Tensor) and isinstance(value, Tensor):
            live.detach().copy_(value)  # a learning rate in a tensor is known by its identity to compiled code
        else:
            group[name] = value
